"""Inputs of the members: one positional argument, keyword arguments, and the attention mask among them."""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

NOTHING: Any = object()
"""Stands for no positional input."""


def takes_keywords(module: nn.Module, names: Iterable[str], positional: int = 0) -> bool:
    """Whether a module can be called with these keyword arguments, after some positional ones."""
    try:
        inspect.signature(module.forward).bind(*[None] * positional, **dict.fromkeys(names))
    except TypeError:
        return False
    return True


def token_mask(features: Tensor, x: Any, kwargs: Mapping[str, Any]) -> Tensor | None:
    """The attention mask (B, T) among the inputs, if the features of a member are (B, T, …)."""
    mask = {**(x if isinstance(x, Mapping) else {}), **kwargs}.get("attention_mask")
    return mask if isinstance(mask, Tensor) and features.ndim > 2 and features.shape[:2] == mask.shape else None


def mask_for(head: nn.Module, mask: Tensor | None) -> dict[str, Any]:
    """The keyword argument of a head that takes a mask."""
    return {} if mask is None or not takes_keywords(head, ("mask",), 1) else {"mask": mask}
