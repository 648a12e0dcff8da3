"""An evaluation that is interrupted by Ctrl-C."""

import os
import signal
import subprocess
import sys
import time

from helpers.small_ensembles import train_small

from featureflock.methods import DeepEnsembles


def test_a_stopped_evaluation_resumes(tmp_path):
    """Ctrl-C in a real process: one sentence, exit code 130, complete files only."""
    (run,) = train_small(tmp_path / "runs", [DeepEnsembles()], [0], epochs=1)
    words = [sys.executable, "-m", "featureflock", "evaluate", str(run), "--ood", "--maps", "0"]
    process = subprocess.Popen(
        words,
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    deadline = time.monotonic() + 100
    while len(list(run.glob("predictions/*.safetensors"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=100)
    assert process.returncode == 130, error
    assert "tasks are cached, and the same command resumes from there." in error
    assert "Traceback" not in error
    names = [path.name for path in (run / "predictions").iterdir()]
    assert all(name.endswith(".safetensors") for name in names)
    assert 3 <= len(names) < 76
