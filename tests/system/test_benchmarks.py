"""Every benchmark runs and writes its results; the numbers themselves are not tested."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Tests run in parallel; more threads would slow them down.
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("script", ["compute_options", "methods", "flops_to_accuracy", "sharing", "tabular"])
def test_a_benchmark_runs_in_this_process(script, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr(sys, "argv", [script, "--quick", "--json", str(tmp_path / "out.json")])
    importlib.import_module(script).main()
    assert json.loads((tmp_path / "out.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("script", ["transport.py", "communication.py", "profile_step.py", "step_prediction.py"])
def test_a_benchmark_runs_as_a_command(script, tmp_path):
    command = [sys.executable, ROOT / "benchmarks" / script, "--quick", "--json", tmp_path / "out.json"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, env=ONE_THREAD)
    assert run.returncode == 0, run.stderr
    assert json.loads((tmp_path / "out.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    "parts", ["overhead scaling processes memory vectorised", "throughput prediction evaluation corruptions startup"]
)
def test_bench_writes_one_table(parts, tmp_path):
    command = [sys.executable, ROOT / "benchmarks" / "bench.py", "--quick", "--json", tmp_path / "out.json"]
    run = subprocess.run(
        [*command, "--only", *parts.split()], capture_output=True, text=True, timeout=300, env=ONE_THREAD
    )
    assert run.returncode == 0, run.stderr
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert {row["part"] for row in rows} == set(parts.split())
    assert all(row["name"] in run.stdout for row in rows)
