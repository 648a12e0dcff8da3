"""Particles that are the weights of members (weight-WGD): a layer between the weights and their use."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from featureflock.distributed.mesh import Mesh
from featureflock.ensemble.execution import ModuleState


def transported_weights(
    pairs: Sequence[tuple[nn.Module, nn.Module]], layer: Callable[[list[Tensor]], Tensor], mesh: Mesh
) -> tuple[list[ModuleState] | None, list[ModuleState] | None]:
    """Weights of the extractors and heads of this process after a layer; None if none is trained.

    `layer` maps the weights of each member of this process, as vectors, to those of all members, (n, d).
    """
    members = [
        {(k, name): p for k, m in enumerate(pair) for name, p in m.named_parameters() if p.requires_grad}
        for pair in pairs
    ]
    if not members[0]:
        return None, None
    vectors = [torch.cat([p.flatten() for p in member.values()]) for member in members]
    if any(v.shape != vectors[0].shape for v in vectors):
        sizes = ", ".join(str(v.numel()) for v in vectors)
        raise ValueError(f"A layer on the weights needs members of equal size; they have {sizes} trained weights.")
    states: tuple[list[ModuleState], list[ModuleState]] = [], []
    transported = mesh.members.local_rows(layer(vectors))
    for member, vector in zip(members, mesh.average_gradient(transported), strict=True):
        pieces = vector.split([p.numel() for p in member.values()])
        for k, part in enumerate(states):
            split = zip(member.items(), pieces, strict=True)
            part.append({name: piece.view_as(p) for ((j, name), p), piece in split if j == k})
    return states
