"""Progress callbacks of long operations."""

from collections.abc import Callable

ProgressCallback = Callable[[int, int | None, str], None]
"""Called with the number of items (images or bytes) done, the total if it is known, and what is being done."""


def no_progress(done: int, total: int | None, name: str) -> None:
    """Report nothing."""
