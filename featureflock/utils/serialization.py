"""Convert dataclasses to JSON and back, guided by their type hints.

    to_json(Cauchy(0.1))                                        # {"class": "Cauchy", "precision": 0.1}
    from_json(Cauchy, {"class": "Cauchy", "precision": 0.1})    # Cauchy(0.1)

If a type hint is a base class, `from_json` calls `find_class` with the class name in the JSON. It calls no other code
than the constructors of these classes.
"""

import contextlib
import dataclasses
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

FindClass = Callable[[str], type]


def to_json(value: Any, *, tag: bool = True, fallback: Callable[[Any], Any] | None = None) -> Any:
    """Convert dataclasses, NamedTuples and containers of them to plain JSON types.

    With `tag`, write the class name of each dataclass; call `fallback` for values that JSON has no type for.
    """
    convert = partial(to_json, tag=tag, fallback=fallback)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
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
    if fallback is None:
        raise TypeError(f"A {type(value).__name__} cannot be converted to JSON.")
    return fallback(value)


def from_json(hint: Any, value: Any, find_class: FindClass | None = None, where: str = "the JSON") -> Any:
    """Convert the result of `to_json` back to a value of type `hint`; ValueError if it does not match.

    `find_class` returns the class for a name, for type hints that are base classes; `where` is for error messages.
    """
    if hint is Any:
        return value
    container = get_origin(hint) or hint
    if container in (Union, types.UnionType):
        return _from_union(hint, value, find_class, where)
    if container is Literal:
        return _check(value in get_args(hint), value, hint, where)
    if container in (list, Sequence, tuple):
        _check(isinstance(value, list), value, hint, where)
        hints = get_args(hint) or (Any, ...)
        if container is not tuple or hints[-1] is Ellipsis:
            hints = hints[:1] * len(value)
        _check(len(hints) == len(value), value, hint, where)
        parts = [from_json(hints[k], part, find_class, f"{where}[{k}]") for k, part in enumerate(value)]
        return tuple(parts) if container is tuple else parts
    if container in (dict, Mapping):
        _check(isinstance(value, dict), value, hint, where)
        key_hint, item = get_args(hint) or (str, Any)
        key_type = int if key_hint is int else str
        _check(key_type is str or all(key.removeprefix("-").isdecimal() for key in value), value, hint, where)
        return {key_type(key): from_json(item, part, find_class, f"{where}.{key}") for key, part in value.items()}
    if hint is Path:
        return Path(_check(isinstance(value, str), value, hint, where))
    if hint is float:
        return float(_check(type(value) in (int, float), value, hint, where))
    if hint in (int, str, bool, type(None)):
        return _check(type(value) is hint, value, hint, where)
    return _from_object(hint, value, find_class, where)


def _from_union(hint: Any, value: Any, find_class: FindClass | None, where: str) -> Any:
    if value is None and type(None) in get_args(hint):
        return None
    *others, last = (choice for choice in get_args(hint) if choice is not type(None))
    for choice in others:
        with contextlib.suppress(ValueError):
            return from_json(choice, value, find_class, where)
    try:
        return from_json(last, value, find_class, where)
    except ValueError:
        _check(not others or isinstance(value, dict), value, hint, where)
        raise  # more precise


def _from_object(hint: Any, value: Any, find_class: FindClass | None, where: str) -> Any:
    _check(isinstance(value, dict), value, hint, where)
    if is_typeddict(hint):
        return _from_typed_dict(hint, value, find_class, where)
    fields, cls = dict(value), hint
    name = fields.pop("class", None)
    if name is not None and name != getattr(hint, "__name__", None):
        cls = hint if find_class is None else find_class(name)
        with contextlib.suppress(TypeError):  # the hint may be a Protocol that issubclass does not support
            if cls is hint or not issubclass(cls, hint):
                raise ValueError(f"{where} must be {_type_name(hint)}; got {name}.")
    if dataclasses.is_dataclass(cls):
        types_of = get_type_hints(cls)
        hints = {f.name: types_of[f.name] for f in dataclasses.fields(cls) if f.init}
    elif isinstance(cls, type) and issubclass(cls, tuple) and hasattr(cls, "_fields"):  # a NamedTuple
        hints = get_type_hints(cls)
    else:
        raise ValueError(f"{where} must name its class; {_type_name(cls)} cannot be built from JSON.")
    if unknown := [key for key in fields if key not in hints]:
        raise ValueError(f"{where} has an unknown field {unknown[0]!r}; {cls.__name__} has {', '.join(hints)}.")
    arguments = {key: from_json(hints[key], part, find_class, f"{where}.{key}") for key, part in fields.items()}
    if missing := [p.name for p in _required(cls) if p.name not in arguments]:
        raise ValueError(f"{where} has no {missing[0]!r}.")
    try:
        return cls(**arguments)
    except TypeError as error:
        raise ValueError(f"{where} cannot be converted to {cls.__name__}: {error}.") from error


def _from_typed_dict(hint: Any, value: dict[str, Any], find_class: FindClass | None, where: str) -> dict[str, Any]:
    """Check the keys of a TypedDict; others are allowed."""
    if missing := sorted(hint.__required_keys__ - value.keys()):
        raise ValueError(f"{where} has no {missing[0]!r}.")
    hints = get_type_hints(hint)
    return {key: from_json(hints.get(key, Any), part, find_class, f"{where}.{key}") for key, part in value.items()}


def _required(cls: Any) -> list[inspect.Parameter]:
    """Arguments of a dataclass or a NamedTuple that have no default."""
    return [p for p in inspect.signature(cls).parameters.values() if p.default is p.empty]


def _check(matches: bool, value: Any, hint: Any, where: str) -> Any:
    if not matches:
        raise ValueError(f"{where} must be {_type_name(hint)}; got {value!r:.60}.")
    return value


def _type_name(hint: Any) -> str:
    return str(hint).replace("typing.", "") if get_origin(hint) or not isinstance(hint, type) else hint.__name__
