"""The help of the commands, printed by the commands themselves: `<!-- help: train digits -->` in a page."""

import contextlib
import io
import os
import re
import sys
from typing import Any

MARK = re.compile(r"^<!-- help: (.+) -->$", flags=re.M)
WIDTH = "100"


def on_page_markdown(markdown: str, **_: Any) -> str:
    return MARK.sub(lambda match: f"```text\n{help_text(match[1].split())}\n```", markdown)


def help_text(words: list[str]) -> str:
    """What `featureflock WORDS --help` prints."""
    from featureflock.cli.main import main

    saved, output = sys.argv, io.StringIO()
    columns = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = WIDTH
    sys.argv = ["featureflock", *words, "--help"]
    try:
        with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
            main()
    finally:
        sys.argv = saved
        os.environ.pop("COLUMNS") if columns is None else os.environ.update(COLUMNS=columns)
    return "\n".join(line.rstrip() for line in output.getvalue().strip().splitlines())
