"""Layer and shared head divided along a row of the mesh: each process computes them for a part of the examples.

The result is that of the whole batch wherever an example's logits depend on this example alone. That is known of the
modules in `PER_EXAMPLE`. With any other one, such as BatchNorm, dropout or a user's own, and in eval mode, each process
computes the layer and the head for all examples of its row.

Shapes: n members, B examples, H features, C outputs.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from featureflock.core.layer import ParticleLayer
from featureflock.distributed.exchange import exchange, exchange_back
from featureflock.distributed.mesh import Mesh

PER_EXAMPLE = {
    *(nn.Sequential, nn.Identity, nn.Flatten, nn.Linear, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm),
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d),
    *(nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Hardswish),
}
"""Modules whose output for an example depends on this example alone."""


def can_divide(mesh: Mesh, head: nn.Module, layer: nn.Module | None) -> bool:
    """Whether layer and head can be divided. `layer` is the layer on the features, or None.

    The answer depends on nothing in which processes of the mesh may differ, because all must take the same way.
    """
    if mesh.members.size == 1 or not torch.is_grad_enabled() or not head.training:
        return False
    if layer is not None and (type(layer) is not ParticleLayer or layer.rule.noise > 0 or layer.count == "tokens"):
        return False
    return all(type(m) in PER_EXAMPLE and getattr(m, "start_dim", 1) == 1 for m in head.modules())


def divided_logits(
    mesh: Mesh, features: Tensor, n: int, layer: nn.Module | None, head: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return the logits (n, B, C) of all members from the features (n_m, B, …) of those of this process."""
    B = features.shape[1]
    part = exchange(features, mesh.members, n)
    if isinstance(layer, ParticleLayer):
        assert mesh.world.group is not None
        with layer.divided(mesh.world.group, B):
            part = layer(part)
    return exchange_back(head, part, mesh.members, B)
