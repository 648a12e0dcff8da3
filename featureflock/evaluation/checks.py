"""Validation of probabilities and labels. Invalid arguments raise ValueError; valid ones are returned in float64.

Tensors are accepted, and arrays of NumPy and of libraries that NumPy can read, such as JAX and pandas.

    p_c ≥ 0,    |Σ_c p_c − 1| ≤ 1e-3,    y ∈ {0, …, C − 1}

The tolerance allows for half precision: a probability may round above 1, and may be exactly 0 (log p = −∞). Inputs are
never normalised: logits passed as `log_probs` do not sum to 1 and are refused.

Shapes: n members, B examples, C classes.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

TOLERANCE = 1e-3
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def as_tensor(x: Any) -> Any:
    """An array of numbers as a tensor; anything else, such as a tensor, a list or an array of objects, as it is."""
    if isinstance(x, Tensor) or not hasattr(x, "__array__"):
        return x
    array = np.asarray(x)
    if array.dtype.kind not in "fiub":
        return array
    if array.dtype.kind == "u" and array.dtype.itemsize > 1 and (array <= np.iinfo(np.int64).max).all():
        array = array.astype(np.int64)
    elif array.dtype.kind == "f" and array.dtype.itemsize > 8:
        array = array.astype(np.float64)
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    return torch.from_numpy(np.require(native, requirements=["C", "W"]))


def checked_probs(probs: Any, *, members: bool = False) -> Tensor:
    """Probabilities (B, C), or with `members` (n, B, C), in float64."""
    probs, name = as_tensor(probs), "member_probs" if members else "probs"
    check_shape(probs, name, members)
    p: Tensor = probs.detach().to(torch.float64)
    if (p < 0).any():
        raise ValueError(f"{name} must not be negative; the smallest is {p.min().item():g}.")
    _check_sums(p.sum(-1), name)
    return p


def checked_log_probs(log_probs: Any, *, members: bool = False, first: int = 0) -> Tensor:
    """Log-probabilities (B, C), or with `members` (n, B, C), in float64; `first` is the index of the first example."""
    log_probs, name = as_tensor(log_probs), "member_log_probs" if members else "log_probs"
    check_shape(log_probs, name, members)
    log_p: Tensor = log_probs.detach().to(torch.float64)
    _check_sums(log_p.exp().sum(-1), name, first)
    return log_p


def checked_labels(labels: Any, probs: Tensor) -> Tensor:
    """Labels (B,) for probabilities or log-probabilities (…, B, C)."""
    labels = as_tensor(labels)
    if not isinstance(labels, Tensor) or labels.dtype not in INTEGERS:
        raise ValueError(f"labels must be a tensor or array of integers; got {kind_of(labels)}.")
    b, c = probs.shape[-2:]
    if labels.shape != (b,):
        raise ValueError(f"labels must have shape ({b},), one for each example; got {tuple(labels.shape)}.")
    y: Tensor = labels.to(probs.device, torch.int64)
    smallest, largest = (int(x) for x in y.aminmax())
    if smallest < 0 or largest >= c:
        wrong = smallest if smallest < 0 else largest
        raise ValueError(f"labels must be from 0 to {c - 1} for {c} classes; got {wrong}.")
    return y


def check_shape(x: Tensor, name: str, members: bool) -> None:
    """Raise ValueError unless the shape is (B, C), or with `members` (n, B, C)."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise ValueError(f"{name} must be a tensor or array of floating-point numbers; got {kind_of(x)}.")
    if x.dim() != 2 + members or 0 in x.shape:
        shape = "(members, examples, classes)" if members else "(examples, classes)"
        raise ValueError(f"{name} must have shape {shape} without empty dimensions; got {tuple(x.shape)}.")


def _check_sums(sums: Tensor, name: str, first: int = 0) -> None:
    bad = ~((sums - 1).abs() <= TOLERANCE)  # also true for NaN
    if bad.any():
        *member, example = bad.nonzero()[0].tolist()
        where = f"example {first + example}" + (f" of member {member[0]}" if member else "")
        what, total = f"exp({name})" if "log" in name else name, sums[bad][0].item()
        raise ValueError(f"{what} must sum to 1 over the classes; {where} sums to {total:.6g}.")


def kind_of(x: object) -> str:
    """The type of numbers of a tensor or array, or the type of anything else, for messages."""
    if isinstance(x, Tensor):
        return str(x.dtype)
    return f"an array of {x.dtype}" if isinstance(x, np.ndarray) else type(x).__name__
