"""Dataclasses to JSON and back, guided by their type hints.

    to_json(Recipe(...))              {"class": "Recipe", "method": {"class": "FeatureWGD", ...}, ...}
    from_json(EvaluationResults, ...) the dataclass again

Where a hint names a base class, `from_json` asks `find_class` for the class that the JSON names. No code outside the
classes it is given is ever run.
"""

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

FindClass = Callable[[str], type]
Fallback = Callable[[Any], Any]


def to_json(value: Any, *, tag: bool = True, fallback: Fallback | None = None) -> Any:
    """A value as plain JSON types.

    Args:
        value: a dataclass, a NamedTuple, or containers of them.
        tag: write the class name of each dataclass, for hints that name a base class.
        fallback: called for values that JSON has no type for.
    """

    def convert(part: Any) -> Any:
        return to_json(part, tag=tag, fallback=fallback)

    if part_is_dataclass(value):
        fields = {f.name: convert(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"class": type(value).__name__, **fields} if tag else fields
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: convert(part) for name, part in value._asdict().items()}
    if isinstance(value, Mapping):
        return {str(key): convert(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [convert(part) for part in value]
    if isinstance(value, Path):
        return str(value)
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if fallback is not None:
        return fallback(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON.")


def from_json(hint: Any, value: Any, find_class: FindClass | None = None, where: str = "the JSON") -> Any:
    """A value of type `hint` from what `to_json` gave; a mismatch raises ValueError with its place.

    Args:
        hint: a type, such as a dataclass or `dict[str, float]`.
        value: parsed JSON.
        find_class: the class for a name, where the hint is a base class.
        where: how to call the value in errors.
    """
    origin = get_origin(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        return _from_union(hint, value, find_class, where)
    if origin is Literal:
        return _checked(value in get_args(hint), value, hint, where)
    if origin in (list, Sequence) or hint in (list, Sequence):
        (item,) = get_args(hint) or (Any,)
        _checked(isinstance(value, list), value, hint, where)
        return [from_json(item, part, find_class, f"{where}[{k}]") for k, part in enumerate(value)]
    if origin is tuple:
        items = get_args(hint)
        _checked(isinstance(value, list), value, hint, where)
        each = [items[0]] * len(value) if items[-1] is Ellipsis else list(items)
        _checked(len(each) == len(value), value, hint, where)
        return tuple(
            from_json(h, v, find_class, f"{where}[{k}]") for k, (h, v) in enumerate(zip(each, value, strict=True))
        )
    if origin in (dict, Mapping):
        _, item = get_args(hint)
        _checked(isinstance(value, dict), value, hint, where)
        return {key: from_json(item, part, find_class, f"{where}.{key}") for key, part in value.items()}
    if hint is Path:
        return Path(_checked(isinstance(value, str), value, hint, where))
    if hint is float:
        _checked(isinstance(value, int | float) and not isinstance(value, bool), value, hint, where)
        return float(value)
    if hint in (int, str, bool, type(None)):
        right = value is None if hint is type(None) else type(value) is hint
        return _checked(right, value, hint, where)
    return _from_object(hint, value, find_class, where)


def part_is_dataclass(value: Any) -> bool:
    """Whether a value is an instance of a dataclass."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _from_union(hint: Any, value: Any, find_class: FindClass | None, where: str) -> Any:
    choices = get_args(hint)
    if value is None and type(None) in choices:
        return None
    error: ValueError | None = None
    for choice in choices:
        try:
            return from_json(choice, value, find_class, where)
        except ValueError as found:
            error = error if error is not None and choice is type(None) else found
    assert error is not None
    raise error


def _from_object(hint: Any, value: Any, find_class: FindClass | None, where: str) -> Any:
    _checked(isinstance(value, dict), value, hint, where)
    fields = dict(value)
    name = fields.pop("class", None)
    cls: Any = hint
    if find_class is not None and name is not None and name != getattr(hint, "__name__", None):
        cls = find_class(name)
    hints = _field_hints(cls)
    if hints is None:
        raise ValueError(f"{where} names {name!r}, which cannot be built from JSON.")
    unknown = [key for key in fields if key not in hints]
    if unknown:
        raise ValueError(f"{where} has a field {unknown[0]!r} that {cls.__name__} does not know.")
    try:
        return cls(**{key: from_json(hints[key], part, find_class, f"{where}.{key}") for key, part in fields.items()})
    except TypeError as error:
        raise ValueError(f"{where} does not describe a {cls.__name__}: {error}.") from error


def _field_hints(cls: Any) -> dict[str, Any] | None:
    """Type hints of the fields of a dataclass or NamedTuple; None for other classes."""
    if dataclasses.is_dataclass(cls):
        hints = get_type_hints(cls)
        return {f.name: hints[f.name] for f in dataclasses.fields(cls) if f.init}
    if isinstance(cls, type) and issubclass(cls, tuple) and hasattr(cls, "_fields"):
        return typing.get_type_hints(cls)
    return None


def _checked(right: bool, value: Any, hint: Any, where: str) -> Any:
    if not right:
        name = getattr(hint, "__name__", str(hint))
        raise ValueError(f"{where} must be {name}; got {value!r:.60}.")
    return value
