"""Read JSON: the only reader of the package. It returns a value of the expected type or raises one clear sentence.

    read_json(path, dict[str, float], "evaluate the runs again")

The type may be a dataclass, a TypedDict, or anything else that `serialization.from_json` knows. NaN, infinite and huge
numbers, deep nesting and special files, such as pipes and devices, are refused.
"""

import json
import math
from pathlib import Path
from typing import Any, NoReturn

from featureflock.utils.files import MAX_BYTES, read_regular
from featureflock.utils.serialization import FindClass, from_json

_MAX_DEPTH = 200
"""Far below Python's recursion limit, so that functions that walk through a value may be recursive."""
_MAX_INT = 2**64


class _NumberError(ValueError):
    """A number that JSON does not allow, or that no file of ours contains."""


def read_json(
    path: Path,
    hint: Any = Any,
    advice: str = "",
    *,
    find_class: FindClass | None = None,
    max_bytes: int = MAX_BYTES,
    max_depth: int = _MAX_DEPTH,
) -> Any:
    """Return the content of a JSON file as a value of type `hint`.

    A file that is missing or cannot be read raises an OSError, and one with other content a ValueError. Both messages
    name the file; `advice` says what to do if it is missing or damaged.
    """
    text = read_regular(path, advice, max_bytes)
    return parse_json(text, str(path), hint, advice, find_class=find_class, max_depth=max_depth)


def parse_json(
    text: bytes | str,
    name: str,
    hint: Any = Any,
    advice: str = "",
    *,
    find_class: FindClass | None = None,
    max_depth: int = _MAX_DEPTH,
) -> Any:
    """Return the value of JSON text as `hint`. `name` is that of the text in error messages."""
    then = f"; {advice}." if advice else "."
    try:
        value = json.loads(text, parse_constant=_refuse, parse_float=_finite, parse_int=_moderate)
        if _depth_exceeds(value, max_depth):
            raise RecursionError
    except RecursionError:
        raise ValueError(f"{name} is damaged: its JSON is nested too deeply{then}") from None
    except _NumberError as error:
        raise ValueError(f"{name} is damaged: {error}{then}") from None
    except ValueError as error:
        raise ValueError(f"{name} is damaged: it is not valid JSON{then}") from error
    return check_json(value, name, hint, advice, find_class=find_class)


def check_json(value: Any, name: str, hint: Any, advice: str = "", *, find_class: FindClass | None = None) -> Any:
    """Return a parsed value as `hint`, as `parse_json` does."""
    then = f"; {advice}." if advice else "."
    try:
        return from_json(hint, value, find_class, "content")
    except ValueError as error:
        if type(error) is not ValueError:  # of `find_class`, such as an unregistered component
            raise
        raise ValueError(f"{name} is damaged or was modified ({str(error).rstrip('.')}){then}") from error


def _depth_exceeds(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit):
        if not level:
            return False
        containers = [part for part in level if isinstance(part, dict | list)]
        level = [part for each in containers for part in (each.values() if isinstance(each, dict) else each)]
    return bool(level)


def _refuse(constant: str) -> NoReturn:
    raise _NumberError(f"JSON has no {constant}")


def _finite(text: str) -> float:
    if math.isfinite(value := float(text)):
        return value
    raise _NumberError(f"the number {text:.20} is too large")


def _moderate(text: str) -> int:
    if len(text) <= 21 and abs(value := int(text)) < _MAX_INT:
        return value
    raise _NumberError(f"the number {text if len(text) <= 21 else f'{text[:20]}…'} is too large")
