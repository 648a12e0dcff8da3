"""featureflock train in a pseudo-terminal."""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

FLOCK = Path(sys.executable).with_name("featureflock")


def test_a_terminal_shows_a_progress_bar(tmp_path):
    """In a pseudo-terminal: epoch, step, loss, accuracy, images per second and time left."""
    parent, child = pty.openpty()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm", "COLUMNS": "160", "LINES": "40"}
    words = [FLOCK, "train", "digits", "--epochs", "12", "--out", tmp_path / "run"]
    process = subprocess.Popen(words, stdout=child, stderr=child, env=environment, close_fds=True)
    os.close(child)
    seen = b""
    while True:
        try:
            piece = os.read(parent, 65536)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        seen += piece
    assert process.wait(100) == 0
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen.decode())
    assert re.search(
        r"epoch \d+/12 step \d+/19 .*loss \d\.\d+ accuracy \d+\.\d %.* [\d,]+ images/s \d+:\d\d:\d\d left", text
    )
    assert "epoch 12/12, learning rate" in text
