"""Inputs of the members: a positional argument, keyword arguments with an attention mask, a batch in parts."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NOTHING: Any = object()
"""Stands for no positional input."""


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


def takes_keywords(module: nn.Module, names: Iterable[str], positional: int = 0) -> bool:
    """Whether a module can be called with these keyword arguments, after some positional ones."""
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
