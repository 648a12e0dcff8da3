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
