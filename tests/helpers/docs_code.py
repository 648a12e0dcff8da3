"""Runs the code in the docs."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from featureflock.cli.main import main

ROOT = Path(__file__).parents[2]


def run_page(page: str, names: dict | None = None, shorter: dict[str, str] | None = None) -> dict:
    """Execute a page from top to bottom: its ```python blocks, and the commands in its ```bash blocks.

    Args:
        page: path of the Markdown file.
        names: what the reader of the page has already.
        shorter: replacements that make the page take less time.
    """
    text, names = (ROOT / page).read_text(), {} if names is None else names
    for old, new in (shorter or {}).items():
        assert old in text, f"{page} does not contain {old}"
        text = text.replace(old, new)
    blocks = re.findall(r"^```(python|bash)\n(.*?)^```", text, flags=re.S | re.M)
    assert blocks, f"{page} has no code"
    for language, block in blocks:
        if language == "python":
            exec(compile(block, page, "exec"), names)
        else:
            for line in re.sub(r"\\\n\s*", " ", block).splitlines():
                run_command(line)
    return names


def run_command(line: str) -> None:
    """A `featureflock` command line, in this process."""
    code = None
    program, *words = shlex.split(line, comments=True)
    assert program == "featureflock"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [program, *words])
        try:
            main()
        except SystemExit as end:
            code = end.code
    assert not code, f"{line}: {code}"
