"""The output of real processes: a shell that closes a pipe, encodings of the environment, and a launch that fails."""

import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.small_ensembles import train_small

from featureflock.methods import DeepEnsembles

FLOCK = Path(sys.executable).with_name("featureflock")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("pipe", ["2>&1 | true", ">&- 2>&-"])
def test_a_closed_output_loses_no_file(tmp_path, pipe):
    """With an encoding that lacks most signs of the tables, whether one would be printed or not."""
    (run,) = train_small(tmp_path, [DeepEnsembles()], [0], epochs=1)
    words = [FLOCK, "evaluate", run, "--corruptions", "--ood", "--maps", "0", "--out", tmp_path / "out"]
    script = f"set -o pipefail; {shlex.join(map(str, words))} {pipe}"
    result = subprocess.run(
        ["bash", "-c", script], env={**ENVIRONMENT, "PYTHONIOENCODING": "ascii"}, capture_output=True, text=True
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert {"results.json", "table.md", "table.tex"} <= {path.name for path in (tmp_path / "out").iterdir()}


def test_a_launch_with_a_port_in_use_prints_one_sentence(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        launch = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        words = [FLOCK, "train", "digits", "--epochs", "1", "--out", tmp_path / "run"]
        result = subprocess.run(words, env=ENVIRONMENT | launch, capture_output=True, text=True)
    assert result.returncode == 1
    assert (
        result.stderr
        == f"featureflock: The port {port} (MASTER_PORT) is used by another program; choose another one.\n"
    )
