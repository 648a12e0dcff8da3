"""The rule, the registry of targets, and the counts.

A call may return a result without NaN, or raise a ValueError or OSError whose message is one sentence. Anything else is
a fault: other exceptions, messages of several lines or of Python's own readers, NaN without a word, and no answer.
"""

import json
import re
import signal
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

Target = Callable[[Any], None]
TARGETS: dict[str, Target] = {}
"""What is fuzzed, by title."""
COUNTS: dict[str, Counter[str]] = {}
"""For each target, the number of results and of refusals."""

SECONDS = 30
"""Time limit of a call; even the slowest take less than a second."""

_OWN_WORDS = re.compile(r"object is not|has no attribute|unexpected keyword|positional argument|list indices")
_current = "other"


def target(title: str) -> Callable[[Target], Target]:
    """Register a target: a function of hypothesis' data, from which it draws a case."""

    def register(function: Target) -> Target:
        TARGETS[title] = function
        COUNTS[title] = Counter()
        return function

    return register


def attempt(function: Callable[[], Any], *, nan_allowed: bool = False) -> Any:
    """Call a function, apply the rule and count. Returns the result, or None if it was refused."""
    with warnings.catch_warnings(), _time_limit():
        warnings.simplefilter("ignore")
        try:
            result = function()
        except (ValueError, OSError) as error:
            check_sentence(error)
            COUNTS.setdefault(_current, Counter())["refused"] += 1
            return None
    COUNTS.setdefault(_current, Counter())["results"] += 1
    assert nan_allowed or not has_nan(result), f"NaN without a word: {result}"
    return result


@contextmanager
def _time_limit() -> Iterator[None]:
    """Raise AssertionError in a call that takes too long, where the platform has timers."""

    def stop(*_: Any) -> NoReturn:
        raise AssertionError(f"No answer within {SECONDS} seconds.")

    if not hasattr(signal, "setitimer"):
        yield
        return
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def check_sentence(error: Exception) -> None:
    """Raise AssertionError unless the message of an error is written for people."""
    text = str(error)
    assert not isinstance(error, UnicodeError | json.JSONDecodeError | np.exceptions.AxisError), repr(error)
    assert "\n" not in text.strip(), f"Several lines: {text}"
    assert len(text.split()) >= 3, f"No sentence: {error!r}"
    assert not _OWN_WORDS.search(text), f"The words of Python: {error!r}"


def has_nan(value: Any) -> bool:
    """Whether NaN is in a tensor, array, number, or in a container of them."""
    if isinstance(value, torch.Tensor):
        return value.is_floating_point() and bool(value.isnan().any())
    if isinstance(value, float | np.ndarray | np.generic):
        return bool(np.isnan(value).any()) if np.issubdtype(np.asarray(value).dtype, np.floating) else False
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return any(map(has_nan, parts))


def fuzz(title: str, examples: int, number: int | None = None) -> None:
    """Try random cases of a target: the same ones each time, or with a number those that belong to it."""
    global _current
    _current = title
    profile = settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=number is None,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    run = profile(given(st.data())(TARGETS[title]))
    (run if number is None else seed(number)(run))()


def fuzz_for(title: str, seconds: float, examples: int = 100) -> None:
    """Try random cases of a target for some time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        fuzz(title, examples, time.time_ns())
