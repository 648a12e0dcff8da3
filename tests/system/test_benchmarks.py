"""The benchmarks run, and write what they found; what they find is not for tests."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Threads of tests that run side by side would wait for each other.
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(
    "script",
    [
        "engine.py",
        "methods.py",
        "to_accuracy.py",
        pytest.param("transport.py", marks=pytest.mark.slow),
        pytest.param("communication.py", marks=pytest.mark.slow),
        pytest.param("profile_step.py", marks=pytest.mark.slow),
    ],
)
def test_benchmarks_run(script, tmp_path):
    command = [sys.executable, ROOT / "benchmarks" / script, "--quick", "--json", tmp_path / "out.json"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, env=ONE_THREAD)
    assert run.returncode == 0, run.stderr
    assert json.loads((tmp_path / "out.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    "parts", ["overhead scaling threads memory", "throughput prediction evaluation corruptions startup"]
)
def test_the_common_table_is_made(parts, tmp_path):
    command = [sys.executable, ROOT / "benchmarks" / "bench.py", "--quick", "--json", tmp_path / "out.json"]
    run = subprocess.run(
        [*command, "--only", *parts.split()], capture_output=True, text=True, timeout=300, env=ONE_THREAD
    )
    assert run.returncode == 0, run.stderr
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert {row["part"] for row in rows} == set(parts.split())
    assert all(row["what"] in run.stdout for row in rows)
