"""Inputs of the members: a positional argument, keyword arguments with an attention mask, a batch in parts.

Inputs that cannot be right are refused before any network sees them: lists of numbers, arrays, empty batches, NaN and
infinity. Tensors among keyword arguments may be infinite, as additive attention masks are.
"""

import inspect
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import NoneType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from featureflock.core.value_checks import readable, refuse_later

NOTHING: Any = object()
"""Stands for no positional input."""
LABELS = ("labels", "label")
"""Names of the targets in batches that are mappings."""


@dataclass(frozen=True)
class MicroBatches:
    """The parts of a batch, each a batch as in `ens(x)`: the result of the whole, with the memory of one part.

        method.loss(ens, MicroBatches(x.split(32)), y).loss.backward()        # x and y are the whole batch

    See micro_batches.py.
    """

    parts: Sequence[Any]

    def __post_init__(self) -> None:
        if not len(self.parts):
            raise ValueError("MicroBatches needs at least one part.")

    def mask(self) -> Tensor | None:
        """The attention masks of all parts, padded to the same number of tokens; None if a part has none."""
        masks = [
            part["attention_mask"] for part in self.parts if isinstance(part, Mapping) and "attention_mask" in part
        ]
        if len(masks) < len(self.parts) or not all(isinstance(mask, Tensor) and mask.ndim == 2 for mask in masks):
            return None
        length = max(mask.shape[1] for mask in masks)
        return torch.cat([F.pad(mask, (0, length - mask.shape[1])) for mask in masks])


_INPUT_ERRORS = (RuntimeError, TypeError, IndexError, NotImplementedError)
"""What PyTorch's layers raise for inputs of a wrong shape or type; not their subclasses, such as out of memory."""


def takes_keywords(module: nn.Module, names: Iterable[str], positional: int = 0) -> bool:
    """Whether a module can be called with these keyword arguments, after some positional ones."""
    module = getattr(module, "input_module", module)
    try:
        inspect.signature(module.forward).bind(*[None] * positional, **dict.fromkeys(names))
    except TypeError:
        return False
    return True


def token_mask(features: Tensor, x: Any, kwargs: Mapping[str, Any]) -> Tensor | None:
    """The attention mask (B, T) among the inputs, if the features of a member are (B, T, …)."""
    inputs = {**(x if isinstance(x, Mapping) else {}), **kwargs}
    mask = x.mask() if isinstance(x, MicroBatches) else inputs.get("attention_mask")
    return mask if isinstance(mask, Tensor) and features.ndim > 2 and features.shape[:2] == mask.shape else None


def mask_for(head: nn.Module, mask: Tensor | None) -> dict[str, Any]:
    """The keyword argument of a head that takes a mask."""
    return {} if mask is None or not takes_keywords(head, ("mask",), 1) else {"mask": mask}


def split_batch(batch: Any) -> tuple[Any, Tensor]:
    """Inputs and targets of a batch: a pair, or a mapping with the targets under "labels"."""
    x, y = inputs_of(batch), None
    if isinstance(batch, Mapping):
        y = next((batch[name] for name in LABELS if name in batch), None)
    elif isinstance(batch, tuple | list) and len(batch) == 2:
        y = batch[1]
    if not isinstance(y, Tensor):
        raise ValueError(
            'Batches must be pairs (inputs, targets), or mappings with the targets as a tensor under "labels"; '
            f"got {_describe(batch)}."
        )
    return x, y


def inputs_of(batch: Any) -> Any:
    """The inputs of a batch with or without targets."""
    if isinstance(batch, Mapping):
        return {name: value for name, value in batch.items() if name not in LABELS}
    if isinstance(batch, tuple | list) and len(batch) in (1, 2):
        return batch[0]
    return batch


def _describe(batch: Any) -> str:
    if isinstance(batch, Mapping):
        return f"a mapping of {', '.join(map(str, batch))}"
    return f"{len(batch)} items" if isinstance(batch, tuple | list) else f"a {type(batch).__name__}"


def check_inputs(x: Any, kwargs: Mapping[str, Any]) -> Tensor | None:
    """Raise ValueError for inputs that cannot be right.

    Returns None on a CPU. Values are not read from a GPU (core/value_checks.py); there, a boolean that is true for
    inputs to refuse. Nothing is checked under torch.compile.
    """
    if torch.compiler.is_compiling():
        return None
    if isinstance(x, MicroBatches):
        flags = [flag for part in x.parts if (flag := check_inputs(part, kwargs)) is not None]
        return torch.stack(flags).any() if flags else None
    keywords = {**x, **kwargs} if isinstance(x, Mapping) else kwargs
    positional = [] if x is NOTHING or isinstance(x, Mapping) else _leaves(x)
    if x is None or any(map(_is_number, positional)):
        raise ValueError(f"An ensemble takes tensors; got {_kind(x)}. Convert it with torch.as_tensor.")
    for name, value in keywords.items():
        if isinstance(value, np.ndarray) or (isinstance(value, list | tuple) and any(map(_is_number, _leaves(value)))):
            raise ValueError(f"An ensemble takes tensors; {name} is {_kind(value)}. Convert it with torch.as_tensor.")
    tensors = [t for t in positional if isinstance(t, Tensor)]
    named = [t for t in keywords.values() if isinstance(t, Tensor)]
    for t in (*tensors, *(t for t in named if t.ndim)):
        if t.ndim == 0 or t.numel() == 0:
            got = f"got a tensor of shape {tuple(t.shape)}"
            raise ValueError(f"An ensemble needs a batch (examples, …) of at least one example; {got}.")
    # The extremes are NaN if a value is; they are ten times as fast as isfinite of all values.
    bad = [~torch.isfinite(torch.stack(t.aminmax())).all() for t in tensors if t.is_floating_point()]
    bad += [t.isnan().any() for t in named if t.is_floating_point()]
    message = "The inputs contain NaN or infinity; remove those examples."
    if all(map(readable, bad)):
        if any(bad):
            raise ValueError(message)
        return None
    refused = torch.stack([each.to(bad[-1].device) for each in bad]).any()
    refuse_later(refused, message)
    return refused


def nan_if(refused: Tensor | None, outputs: Tensor) -> Tensor:
    """Outputs that are NaN if the inputs were refused on a GPU."""
    return outputs if refused is None else torch.where(refused.to(outputs.device), math.nan, outputs)


@contextmanager
def explained_errors(what: str, x: Any, kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Replace the errors of PyTorch's layers about their input by a ValueError that describes the input."""
    if torch.compiler.is_compiling():
        yield
        return
    try:
        yield
    except (*_INPUT_ERRORS, AttributeError) as error:
        # An AttributeError in a module that got a tensor is a mistake in that module.
        if type(error) not in _INPUT_ERRORS and (type(error) is not AttributeError or isinstance(x, Tensor)):
            raise
        text = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise ValueError(f"{what} cannot compute {_description(x, kwargs)}: {text}.") from error


def _description(x: Any, kwargs: Mapping[str, Any]) -> str:
    keywords = {**x, **kwargs} if isinstance(x, Mapping) else kwargs
    parts = [] if x is NOTHING or isinstance(x, Mapping) else [_kind(x)]
    return ", ".join([*parts, *(f"{name}: {_kind(value)}" for name, value in keywords.items())]) or "no input"


def _kind(x: Any) -> str:
    if isinstance(x, Tensor):
        return f"a {str(x.dtype).removeprefix('torch.')} tensor of shape {tuple(x.shape)} on {x.device}"
    if isinstance(x, list | tuple) and x and all(isinstance(part, Tensor) for part in x):
        return f"a {type(x).__name__} of {len(x)} tensors"
    return {np.ndarray: "a NumPy array", NoneType: "None"}.get(type(x), f"a {type(x).__name__}")


def _leaves(tree: Any) -> list[Any]:
    if not isinstance(tree, tuple | list):
        return [tree]
    return [leaf for part in tree for leaf in _leaves(part)]


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float | complex | np.generic | np.ndarray)
