"""Time that a method adds to a training step of Deep Ensembles with the same members and batch.

Two measurements, of which the second is more precise. The members' forward and backward passes take nearly all of a
step and vary by several per cent from step to step, more than the overhead itself.

    whole step      a step of each method in its own process, in turns; the median of the ratios within a round
    method only     the same steps with members whose passes cost almost nothing (they have all the weights, and their
                    features depend on each): what remains is the layer, the heads, the loss and the optimiser. The
                    difference between a method and Deep Ensembles, relative to a whole step of Deep Ensembles

    python benchmarks/bench.py --only overhead [--quick] [--full] [--json FILE]
"""

import random
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from statistics import median
from typing import Any

import torch
from harness import Worker, progress, ratios, row, seconds
from torch import Tensor, nn

from featureflock.cpu_kernels.malloc import reuse_freed_memory
from featureflock.methods import DeepEnsembles, FeatureWGD, FunctionWGD, Method, WeightWGD
from featureflock.models import WideResNetConfig
from featureflock.training import ComputeConfig, Recipe
from featureflock.training.compute import resolve_compute
from featureflock.training.state import initial_state

SEED, BATCH, CLASSES = 0, 128, 10
LIMITS = {FeatureWGD: (0.01, 0.03), FunctionWGD: (0.01, 0.03), WeightWGD: (0.1, 0.1)}
"""Targets for WRN-16-4 × 10 and for WRN-10-1 × 5."""


def measure(scale: str) -> list[dict[str, Any]]:
    if scale == "quick":
        return _compare(WideResNetConfig(10, 1), 2, 1, 1, True, 1, ComputeConfig(compile="off"), [FeatureWGD])
    rounds = 15 if scale == "full" else 7
    small = _compare(WideResNetConfig(10, 1), 5, 1, rounds, True, rounds)
    return small + _compare(WideResNetConfig(16, 4), 10, 0, 3, scale == "full", rounds)


def _compare(
    network: WideResNetConfig,
    members: int,
    limit: int,
    rounds: int,
    whole: bool,
    light_rounds: int,
    compute: ComputeConfig = ComputeConfig(compile="on"),
    compared: Iterable[type[Method]] = LIMITS,
) -> list[dict[str, Any]]:
    name = f"WRN-{network.depth}-{network.width} × {members}"
    methods: list[Method] = [DeepEnsembles(), *(method() for method in compared)]
    rows = []
    few = members if whole else 2  # for Deep Ensembles alone, the time per member does not depend on their number
    workers = {}
    for method in methods if whole else methods[:1]:
        progress(f"  {name}: {method.title} starting")
        workers[method.title] = Worker(_train, method, network, few, compute)
    taken = _in_turns({title: worker.seconds for title, worker in workers.items()}, rounds)
    for worker in workers.values():
        worker.close()
    base = DeepEnsembles.title
    for method in methods[1:] if whole else []:
        added = [r - 1 for r in ratios(taken[method.title], taken[base])]
        rows.append(row(f"{name}: {method.title}, whole step", added, "", "of a step", seconds=taken[method.title]))
    of_a_step = median(taken[base]) * members / few
    progress(f"  {name}: method only")
    reuse_freed_memory()
    eager = ComputeConfig(compile="off", execution="sequential")
    light = {m.title: _step(m, network, members, eager, light=True) for m in methods}
    for step in light.values():
        step()
        step()
    light_times = _in_turns({title: partial(seconds, step) for title, step in light.items()}, light_rounds)
    for method in methods[1:]:
        added = [(a - b) / of_a_step for a, b in zip(light_times[method.title], light_times[base], strict=True)]
        target = f"≤ {LIMITS[type(method)][limit]}"  # type: ignore[index]
        rows.append(
            row(f"{name}: {method.title}, method only", added, target, "of a step", seconds_of_a_step=of_a_step)
        )
    return rows


def _in_turns(timed: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    taken: dict[str, list[float]] = {name: [] for name in timed}
    for i in range(rounds):
        for name in random.Random(i).sample(list(timed), len(timed)):
            taken[name].append(timed[name]())
    return taken


def _train(
    turn: Callable[[], None], method: Method, network: WideResNetConfig, members: int, compute: ComputeConfig
) -> None:
    step = _step(method, network, members, compute)
    reuse_freed_memory()
    while True:
        step()
        turn()


class _Light(nn.Module):
    """All the weights of a network, and features (B, H) that depend on every weight but cost one sum over them."""

    def __init__(self, network: nn.Module, features: int) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("base", torch.randn(BATCH, features).relu())
        self.feature_dim = features

    def forward(self, x: Tensor) -> Tensor:
        return self.base + 1e-6 * torch.stack([p.sum() for p in self.network.parameters()]).sum()


def _step(
    method: Method, network: WideResNetConfig, members: int, compute: ComputeConfig, light: bool = False
) -> Callable[[], None]:
    def extractor() -> nn.Module:
        full = network.extractor((3, 32, 32))
        return _Light(full, 64 * network.width) if light else full

    ens = method.build(
        extractor, lambda: nn.Linear(64 * network.width, CLASSES), members=members, seed=SEED, train_size=50_000
    )
    resolved = resolve_compute(compute, "float32", ens, lambda: 0.0)
    state = initial_state(Recipe(method=method), resolved.prepare(ens))
    torch.manual_seed(SEED)
    x, y = resolved.inputs(torch.randn(BATCH, 3, 32, 32)), torch.randint(CLASSES, (BATCH,))

    def step() -> None:
        for optimiser in state.optimisers:
            optimiser.zero_grad()
        method.loss(ens, x, y).loss.backward()
        for optimiser in state.optimisers:
            optimiser.step()

    return step
