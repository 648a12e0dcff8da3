"""The environment variables of a launcher such as torchrun. Imports no PyTorch."""

import os


def is_rank_zero() -> bool:
    """True on global rank 0, which does the printing."""
    return os.environ.get("RANK", "0") == "0"


def launched_by_torchrun() -> bool:
    """True if torchrun, or a similar launcher, started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def restarted_by_torchrun() -> bool:
    """True if torchrun started this process to replace one that failed."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
