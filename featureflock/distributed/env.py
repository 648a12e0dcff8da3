"""What a launcher such as torchrun tells each of the processes that it starts, by the environment."""

import os


def is_rank_zero() -> bool:
    """Whether this is the process, of all that were started together, that talks to people."""
    return os.environ.get("RANK", "0") == "0"


def launched_by_torchrun() -> bool:
    """Whether torchrun, or another launcher like it, has started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def restarted_by_torchrun() -> bool:
    """Whether torchrun has started this process in place of one that failed."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
