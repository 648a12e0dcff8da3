"""Runs the code in the docs."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_blocks(page: str, names: dict, count: int = 1) -> dict:
    """Execute the Python blocks of a page one after another, and return their names."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.S)
    assert len(blocks) == count
    for block in blocks:
        exec(block, names)
    return names
