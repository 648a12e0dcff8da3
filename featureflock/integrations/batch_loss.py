"""The loss of a batch that a training library divides into parts.

A training library divides a batch among processes (DistributedDataParallel) and into micro-batches that it accumulates.
Members interact through the whole batch, so the loss is computed for all of it: particle layers sum over processes,
processes are weighted by the sizes of their parts, and the micro-batches of a step are collected and computed together
(ensemble/micro_batches.py).

Shapes: B examples.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from featureflock.core.layer import ParticleLayer
from featureflock.core.rules import MAP
from featureflock.distributed.mesh import Axis, Mesh
from featureflock.ensemble.ensemble import Ensemble
from featureflock.ensemble.inputs import MicroBatches
from featureflock.methods import FeatureMAP, Method
from featureflock.methods.base import TransportSettings
from featureflock.tasks import Classification, Task


class StepLoss(NamedTuple):
    """Loss of one call of `BatchLoss`."""

    backward: Tensor
    """What to divide by the number of micro-batches and back-propagate."""
    mean: Tensor | None
    """Mean loss of all parts of this process; None before the last one."""


class BatchLoss:
    """The loss of an ensemble, for training libraries that accumulate gradients.

    The library calls it with each of k micro-batches, divides the result by k and back-propagates it. If the examples
    of a batch interact, all but the last call return zero, and the last one k times the loss of the whole batch.
    """

    def __init__(self, ens: Ensemble, method: Method) -> None:
        check_method(ens, method)
        self.ens, self.method = ens, method
        self._parts: list[tuple[Any, Tensor]] = []

    def __call__(self, x: Any, y: Tensor, *, last: bool) -> StepLoss:
        """Loss for inputs x and targets y, which are the last part of the batch or not."""
        self._parts.append((x, y))
        if not last and examples_interact(self.ens, self.method):
            return StepLoss(torch.zeros((), device=y.device, requires_grad=True), None)
        parts, self._parts = self._parts, []
        x = parts[0][0] if len(parts) == 1 else MicroBatches([x for x, _ in parts])
        y = join_targets([y for _, y in parts], self.ens.task)
        with data_parallel(self.ens, self.method):
            loss = self.method.loss(self.ens, x, y).loss
        return StepLoss(len(parts) * relative_size(self.ens.task, y).to(loss) * loss, loss.detach())

    def clear(self) -> None:
        """Forget the parts of a batch that was not completed."""
        self._parts = []


def examples_interact(ens: Ensemble, method: Method) -> bool:
    """Whether the loss of a batch is not the mean of the losses of its parts."""
    layer = ens.layer
    particles = isinstance(layer, ParticleLayer) and len(ens) > 1 and not isinstance(layer.rule, MAP)
    ignored = isinstance(ens.task, Classification) and ens.task.ignore_index is not None  # parts have unequal weights
    return particles or ignored or not method.splits_over_batch


def check_method(ens: Ensemble, method: Method) -> None:
    """Raise ValueError if an ensemble cannot be trained by a method."""
    if not isinstance(ens, Ensemble) or not isinstance(method, Method):
        got = f"got {type(ens).__name__} and {type(method).__name__}"
        raise TypeError(f"An Ensemble and a method such as FeatureWGD() are needed; {got}.")
    method.check_task(ens.task)
    if isinstance(method, TransportSettings | FeatureMAP) and ens.layer is None:
        how = f"build it with {type(method).__name__}().build, or with Ensemble(…, layer=ParticleLayer())"
        raise ValueError(f"The ensemble has no particle layer, which {method.title} trains; {how}.")
    if ens.mesh.world.size > 1:
        raise ValueError("The ensemble is divided among processes by Ensemble.shard; give it undivided.")


def check_data_parallel(ens: Ensemble, method: Method) -> None:
    """Raise ValueError if processes cannot have a part of each batch."""
    if not method.splits_over_batch:
        raise ValueError(f"The loss of {method.title} cannot be split over a batch; train it with one process.")
    if isinstance(ens.layer, ParticleLayer) and ens.layer.rule.noise > 0:
        raise ValueError("Langevin noise cannot be computed for parts of a batch; train with one process, or noise=0.")


@contextmanager
def data_parallel(ens: Ensemble, method: Method) -> Iterator[None]:
    """Let the particle layer sum over all processes of torch.distributed, each of which has a part of the batch.

    Gradients are averaged by DistributedDataParallel. Outside, the ensemble has no reference to the processes.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        yield
        return
    check_data_parallel(ens, method)
    world = Axis(dist.group.WORLD)
    owners: list[nn.Module] = [ens] if ens.layer is None else [ens, ens.layer]
    names = "mesh", "group", "sees_whole_batch"
    before = [(module, {name: vars(module)[name] for name in names if name in vars(module)}) for module in owners]
    ens.shard(Mesh(data=world, world=world))
    try:
        yield
    finally:
        for module, values in before:
            for name in names:
                vars(module).pop(name, None)
            vars(module).update(values)


def relative_size(task: Task, y: Tensor) -> Tensor:
    """Number of likelihood terms of this process in relation to the mean over processes.

    The mean over processes of losses with this factor is the mean loss of all terms, also if parts are not equal.
    """
    count = torch.as_tensor(task.count(y), dtype=torch.float32 if y.is_mps else torch.float64, device=y.device)
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return torch.ones_like(count)
    total = count.clone()
    dist.all_reduce(total)
    return dist.get_world_size() * count / total


def join_targets(targets: Sequence[Tensor], task: Task) -> Tensor:
    """The targets of all parts; those of tokens are padded with the index to ignore."""
    if any(y.shape[1:] != targets[0].shape[1:] for y in targets):
        ignored = task.ignore_index if isinstance(task, Classification) else None
        if ignored is None or {y.ndim for y in targets} != {2}:
            shapes = " and ".join(sorted({str(tuple(y.shape)) for y in targets}))
            raise ValueError(
                f"Micro-batches have targets of shapes {shapes}; pad them to one length, or use ignore_index."
            )
        length = max(y.shape[1] for y in targets)
        targets = [F.pad(y, (0, length - y.shape[1]), value=ignored) for y in targets]
    return torch.cat(list(targets))
