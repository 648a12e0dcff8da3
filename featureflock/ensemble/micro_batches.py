"""A batch in parts: the result of the whole batch, with the activations of one part in memory at a time.

    loss = method.loss(ens, MicroBatches(x.split(32)), y).loss        # x and y are the whole batch
    loss.backward()

Gradient accumulation is the mean of the updates of its micro-batches. That is the update of the whole batch only if
examples do not interact. In a particle layer they do: each particle is the features of a whole batch, and k
micro-batches have k repulsions, each about k times as strong for an example as that of the whole batch. Here, trunk and
extractors are computed part by part; layer, head and loss see the whole batch. The backward pass computes the
activations of each part again, so a step takes one more forward pass.

BatchNorm in trunk and extractors has the statistics of each part, as with gradient accumulation.

Shapes: n members, B examples, T tokens.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from featureflock.ensemble.execution import ModuleState, call_module, call_recomputing
from featureflock.ensemble.inputs import MicroBatches


def micro_batch_features(
    modules: Mapping[str, nn.Module | None],
    compute: Callable[[list[ModuleState] | None, Any], Tensor],
    states: list[ModuleState] | None,
    start: int,
    batch: MicroBatches,
) -> Tensor:
    """Features (n, B, …) of all parts.

    Args:
        modules: the trunk and the extractors.
        compute: maps weights, as in `execute`, and a part to features (n, B, …).
        states: weights of the extractors from number `start` on, or None for their own.
        batch: the parts.
    """
    weights = {f"extractors.{start + i}.{k}": p for i, state in enumerate(states or []) for k, p in state.items()}

    def features(current: ModuleState, part: Any) -> Tensor:
        """Features of a part, with the current values of these weights: those of a repeated call are copies."""
        of_members = [{k: current[f"extractors.{start + i}.{k}"] for k in s} for i, s in enumerate(states or [])]
        return compute(None if states is None else of_members, part)

    run = call_recomputing if torch.is_grad_enabled() else call_module
    parts = [run(_Part(modules, features), weights, part, {}) for part in batch.parts]
    if any(part.shape[2:] != parts[0].shape[2:] for part in parts):
        lengths = [part.shape[2] for part in parts if part.ndim > 2]
        mask = batch.mask()
        if mask is None or mask.shape[1] != max(lengths, default=0) or len({p.shape[3:] for p in parts}) > 1:
            shapes = " and ".join(sorted({str(tuple(part.shape[2:])) for part in parts}))
            raise ValueError(
                f"The micro-batches give features of shapes {shapes}; pad inputs to one length, or pass a mask."
            )
        tail = [0, 0] * (parts[0].ndim - 3)
        parts = [F.pad(part, [*tail, 0, max(lengths) - part.shape[2]]) for part in parts]
    return torch.cat(parts, 1)


class _Part(nn.Module):
    """A function of weights and a part, as a module that has the modules with these weights as submodules."""

    def __init__(self, modules: Mapping[str, nn.Module | None], function: Callable[[ModuleState, Any], Tensor]) -> None:
        super().__init__()
        self.function = function
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: Any) -> Tensor:
        return self.function(dict(self.named_parameters()), x)
