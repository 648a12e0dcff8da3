"""The demo as a user starts and stops it."""

import os
import signal
import subprocess
import sys
import time
from functools import partial

import pytest


def test_ctrl_c_stops_all_processes(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-m", "featureflock", "demo"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # The test runner may ignore Ctrl-C, and child processes inherit that.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.default_int_handler),
    ) as process:
        for line in process.stdout:
            if "(1 of 25 runs done)" in line:
                break
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the command and its child processes
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert errors.strip() == "featureflock: stopped; the same command resumes the demo."
    assert not (tmp_path / "featureflock-demo" / "report.html").exists()
    for _ in range(100):
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    pytest.fail("the demo left processes behind")
