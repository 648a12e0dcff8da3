"""Memory that a step gives back is kept for the next one.

The C library of Linux (glibc) returns every large block to the system when it is released. A step of training asks for
the same blocks again, and the system hands them out page by page, cleared: a tenth of the time of a step on a CPU
(docs/speed.md). It also keeps memory apart for each thread, which then is larger than it need be.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8
"""Parameters of mallopt(3)."""


@contextmanager
def keeping_memory() -> Iterator[None]:
    """Keep released memory in this process meanwhile; give it back in the end. Elsewhere than with glibc: nothing."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        yield
        return
    mallopt(_ARENA_MAX, 1)
    mallopt(_MMAP_MAX, 0)
    mallopt(_TRIM_THRESHOLD, 2**31 - 1)
    try:
        yield
    finally:
        mallopt(_MMAP_MAX, 65_536)
        mallopt(_TRIM_THRESHOLD, 2**26)
        trim(0)
