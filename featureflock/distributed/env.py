"""The environment variables of a launcher such as torchrun. Imports no PyTorch."""

import hashlib
import os
import socket
from pathlib import Path

ADVICE = "start the processes with torchrun, which sets it"


def launch_number(name: str, least: int, most: int, default: int | None = None) -> int:
    """Return a number that a launcher sets; ValueError if it is missing, without a default, or wrong."""
    text = os.environ.get(name, "")
    if not text:
        if default is None:
            raise ValueError(f"{name} is not set; {ADVICE}.")
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 10 and least <= int(text) <= most):
        raise ValueError(f"{name} must be a number from {least} to {most}; got {text!r:.40}; {ADVICE}.")
    return int(text)


def world_size() -> int:
    """Number of processes that were started together."""
    return launch_number("WORLD_SIZE", 1, 1_000_000, default=1)


def is_rank_zero() -> bool:
    """True on global rank 0, which does the printing."""
    return os.environ.get("RANK", "0") == "0"


def launched_by_torchrun() -> bool:
    """True if torchrun, or a similar launcher, started this process as one of several."""
    return world_size() > 1


def restarted_by_torchrun() -> bool:
    """True if torchrun started this process to replace one that failed, but not if hosts have joined or left."""
    return launch_number("TORCHELASTIC_RESTART_COUNT", 0, 10**9, default=0) > 0


def launcher_id() -> int:
    """A number for the torchrun of this host, the same after each of its restarts; 0 without torchrun."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE", "")  # folder of this torchrun/attempt_0/local rank/error.json
    if not file:
        return 0
    name = f"{socket.gethostname()} {Path(file).absolute().parents[2]}"
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6]) + 1  # exact in any reader of JSON
