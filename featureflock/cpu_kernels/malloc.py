"""Make glibc's malloc reuse freed memory.

By default, glibc returns large blocks to the system, which provides them for the next batch as new pages of zeros. This
costs a tenth of the time of a training step on a CPU, and more of a prediction (docs/notes/speed.md). The setting
affects the whole process and cannot be undone, so library calls never change it: only the `featureflock` commands do.
"""

import ctypes

_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8
"""Parameters of mallopt(3)."""


def reuse_freed_memory() -> None:
    """Keep freed memory in this process for later use. Does nothing if the C library is not glibc."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    mallopt(_ARENA_MAX, 1)
    mallopt(_MMAP_MAX, 0)
    mallopt(_TRIM_THRESHOLD, 2**31 - 1)
