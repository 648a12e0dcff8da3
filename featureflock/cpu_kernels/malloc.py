"""Memory that a step gives back is kept for the next one.

The C library of Linux (glibc) returns every large block to the system when it is released. The next batch asks for the
same blocks again, and the system hands them out page by page, cleared: a tenth of the time of a training step on a CPU,
and more of a prediction (docs/speed.md). It also keeps memory apart for each thread, and then needs more of it.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -3, -4, -8
"""Parameters of mallopt(3)."""


@contextmanager
def retained_memory() -> Iterator[None]:
    """Keep released memory in this process meanwhile; give it back in the end.

    Afterwards all is as in a program that has run for a while: blocks below 32 MB are kept, larger ones returned. The C
    library comes to that by itself, but no longer once it was told anything: it would then return all above 128 kB.
    """
    retain_memory()
    try:
        yield
    finally:
        _mallopt(_MMAP_THRESHOLD, 2**25)
        _mallopt(_MMAP_MAX, 65_536)
        _mallopt(_TRIM_THRESHOLD, 2**26)
        _function("malloc_trim")(0)


def retain_memory() -> None:
    """Keep released memory in this process from now on. Where the C library is not glibc, nothing happens."""
    _mallopt(_ARENA_MAX, 1)
    _mallopt(_MMAP_MAX, 0)
    _mallopt(_TRIM_THRESHOLD, 2**31 - 1)


def _mallopt(parameter: int, value: int) -> None:
    _function("mallopt")(parameter, value)


def _function(name: str) -> Callable[..., object]:
    """Of the C library, or one that does nothing."""
    try:
        found: Callable[..., object] = getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError, TypeError):
        return lambda *_: None
    return found
