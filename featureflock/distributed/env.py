"""The environment variables of a launcher such as torchrun. Imports no PyTorch."""

import os

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
    """True if torchrun started this process to replace one that failed."""
    return launch_number("TORCHELASTIC_RESTART_COUNT", 0, 10**9, default=0) > 0
