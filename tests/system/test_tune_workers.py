"""Several `featureflock tune` commands that share a folder share the work."""

import json
import subprocess
import sys

ARGS = ["digits", "--members", "2", "--epochs", "2", "--subset", "200", "--held-out", "100", "--budget", "6"]
SPACE = ["--seeds", "2", "--space", "method.repulsion=1,3,9", "--out", "tuning"]


def test_two_commands_with_one_folder(tmp_path):
    """Both choose the same setting, and no run is trained twice: each waits for the runs of the other."""
    command = [sys.executable, "-m", "featureflock", "tune", *ARGS, *SPACE]
    processes = [subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    printed = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    best = [[line for line in text.splitlines() if "best by" in line] for text in printed]
    assert best[0] == best[1] != []
    starts = [json.loads(path.read_text()) for path in tmp_path.glob("tuning/*/environment.json")]
    assert [len(start) for start in starts] == [1] * 6
    (method,) = json.loads((tmp_path / "tuning" / "tune-digits.json").read_text())["methods"]
    assert [len(candidate["seeds"]) for candidate in method["candidates"]] == [2, 2, 2]
