"""Strategies for damage: to bytes, to JSON values, to tensors and other arguments."""

import copy
import math

import numpy as np
import torch
from hypothesis import strategies as st

BRACKETS = "[" * 50_000
_NUMBERS = (0, 1, -1, 2, 7, 255, -100, 10**6, 2**31, 2**63, -(2**63), 10**30, 0.5, -0.0, 1e-300, 1e308)
_TEXTS = ("", "x", "\x1b[2J", "../../etc", "é\u202e\x00", "a" * 3000, "0", "nan")
json_values = st.sampled_from([*_NUMBERS, *_TEXTS, None, True, False, [], {}, [[]], [None], [1, "a"], {"": {}}]) | (
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
        lambda parts: st.lists(parts, max_size=3) | st.dictionaries(st.text(max_size=5), parts, max_size=3),
        max_leaves=5,
    )
)


@st.composite
def damaged_bytes(draw, content: bytes) -> bytes:
    """Some changes of the kinds that disks, networks and people make."""
    data = bytearray(content)
    for _ in range(draw(st.integers(1, 3))):
        size = len(data)
        at = draw(st.integers(0, size)) if draw(st.booleans()) else draw(st.integers(0, min(size, 200)))
        kind = draw(st.sampled_from(["flip", "overwrite", "cut", "insert", "remove", "repeat", "digits", "replace"]))
        if kind == "flip" and size:
            data[at % size] ^= 1 << draw(st.integers(0, 7))
        elif kind == "overwrite":
            new = draw(
                st.sampled_from([b"\xff" * 4, b"\0" * 8, b"\xff" * 8, b"\x80", b"\n", b'"', b"{}", b"NaN", b"-1"])
            )
            data[at : at + len(new)] = new
        elif kind == "cut":
            del data[at:]
        elif kind == "insert":
            data[at:at] = draw(st.binary(min_size=1, max_size=20))
        elif kind == "remove":
            del data[at : at + draw(st.integers(1, 100))]
        elif kind == "repeat":
            data[at:at] = data[at : at + draw(st.integers(1, 100))]
        elif kind == "digits":
            places = [k for k, byte in enumerate(data[:2000]) if 48 <= byte <= 57]
            if places:
                k = draw(st.sampled_from(places))
                data[k : k + 1] = draw(st.sampled_from([b"9999999999999", b"-1", b"1e999", b"0", b"true", b"null"]))
        elif kind == "replace" and draw(st.integers(0, 9)) == 0:
            data[:] = draw(st.sampled_from([b"", b"\0" * 100, BRACKETS.encode(), b"null", b"[]", b"{}", b"\x80\x04."]))
    return bytes(data)


@st.composite
def damaged_json(draw, value):
    """A JSON value with some parts replaced, removed, renamed or added."""
    value = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, 2))):
        holder = {"": value}
        parent, key = holder, ""
        for _ in range(draw(st.integers(0, 6))):
            part = parent[key]
            keys = list(part) if isinstance(part, dict) else list(range(len(part))) if isinstance(part, list) else []
            if not keys:
                break
            parent, key = part, draw(st.sampled_from(keys))
        kind = draw(st.sampled_from(["replace", "replace", "remove", "add", "wrap"]))
        if kind == "remove" and parent is not holder:
            del parent[key]
        elif kind == "add" and isinstance(parent[key], dict):
            parent[key][draw(st.text(max_size=8))] = copy.deepcopy(draw(json_values))
        elif kind == "add" and isinstance(parent[key], list):
            parent[key].append(copy.deepcopy(draw(json_values)))
        elif kind == "wrap":
            parent[key] = [parent[key]]
        else:
            parent[key] = copy.deepcopy(draw(json_values))
        value = holder[""]
    return value


_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.int64, torch.uint8)
_DTYPES += (torch.bool, torch.complex64, torch.int32)
_ENTRIES = (math.nan, math.inf, -math.inf, -100.0, 255.0, 0.0, 1.0, -1.0, 1e4, 3.0, 0.5, -0.25)


@st.composite
def any_tensor(draw) -> torch.Tensor:
    """A tensor of any shape up to four dimensions, of any type."""
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    dtype = draw(st.sampled_from(_DTYPES))
    x = torch.randn(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))) * draw(
        st.sampled_from([1.0, 0.0, 100.0])
    )
    return _with_entry(draw, x).to(dtype)


def _with_entry(draw, x):
    if x.numel() and draw(st.booleans()):
        x = x.clone()
        entry = draw(st.sampled_from(_ENTRIES))
        if x.is_floating_point() or (math.isfinite(entry) and x.dtype not in (torch.bool, torch.uint8)):
            x.view(-1)[draw(st.integers(0, x.numel() - 1))] = entry
    return x


anything = (
    any_tensor()
    | any_tensor().filter(lambda t: t.dtype != torch.bfloat16).map(lambda t: t.numpy())
    | st.sampled_from([None, 3, 0.5, math.nan, "text", [], [1.0, 2.0], [[0.5, 0.5]], (), {}, object(), np.float32(1)])
)


@st.composite
def damaged_argument(draw, value):
    """A valid argument with one thing changed, or anything else."""
    if not isinstance(value, torch.Tensor):
        return draw(anything)
    kind = draw(st.sampled_from(["entry", "type", "empty", "shape", "order", "kind", "part", "any"]))
    if kind == "entry":
        return _with_entry(draw, value.contiguous())
    if kind == "type":
        return value.to(draw(st.sampled_from(_DTYPES)))
    if kind == "empty":
        return value.narrow(draw(st.integers(0, value.ndim - 1)), 0, 0) if value.ndim else value
    if kind == "shape":
        choices = [
            value[None],
            value[..., None],
            value.flatten(),
            value.sum(),
            value.unsqueeze(-1).expand(*value.shape, 2),
        ]
        return draw(st.sampled_from(choices))
    if kind == "order" and value.ndim > 1:
        return value.transpose(*draw(st.sampled_from([(0, 1), (0, -1), (-2, -1)])))
    if kind == "kind":
        return draw(st.sampled_from([value.tolist(), value.numpy(), list(value) if value.ndim else [value]]))
    if kind == "part" and value.ndim and len(value) > 1:
        return value[: draw(st.integers(1, len(value) - 1))]
    return draw(anything)
