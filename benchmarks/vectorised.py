"""Vectorised members compared with sequential ones, for tiny networks: CPU time of a training step, in one thread.

Vectorised, n members need the kernels of one, each for n times the values. That pays where starting a kernel takes
longer than computing it. It has a price: each step stacks the weights of all members, and torch.func has an overhead of
its own, so few members of few layers are faster one after another.

The two execution modes take turns on one ensemble, step by step.

    python benchmarks/bench.py --only vectorised [--quick] [--full] [--json FILE]
"""

from typing import Any

import torch
from harness import cpu_seconds, progress, ratios, row

from featureflock.cpu_kernels.malloc import reuse_freed_memory
from featureflock.ensemble.execution import Execution
from featureflock.methods import FeatureWGD
from featureflock.models import CNNConfig, MLPConfig
from featureflock.models.base import ModelConfig
from featureflock.training import Recipe
from featureflock.training.state import initial_state

SEED, CLASSES, BATCH = 0, 10, 16
CASES: tuple[tuple[str, ModelConfig, tuple[int, ...], int, str], ...] = (
    ("MLP 8-16 × 5", MLPConfig((16,)), (8,), 5, ""),
    ("MLP 8-16 × 20", MLPConfig((16,)), (8,), 20, "≤ 1"),
    ("MLP 8-16 × 100", MLPConfig((16,)), (8,), 100, "≤ 1"),
    ("MLP 64-64-32 × 20", MLPConfig((64, 32)), (64,), 20, "≤ 1"),
    ("CNN of 8 × 8 images × 20", CNNConfig(2), (3, 8, 8), 20, "≤ 1"),
)
"""Name, network, shape of an input, members, target."""


def measure(scale: str) -> list[dict[str, Any]]:
    rounds = {"quick": 1, "usual": 15, "full": 60}[scale]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    reuse_freed_memory()  # as in training
    try:
        return [_compare(*case, rounds) for case in (CASES[:1] if scale == "quick" else CASES)]
    finally:
        torch.set_num_threads(threads)


def _compare(name: str, model: ModelConfig, shape: tuple[int, ...], n: int, target: str, rounds: int) -> dict[str, Any]:
    progress(f"  {name}")
    method, made = FeatureWGD(), model.extractor(shape)
    ens = method.build(lambda: model.extractor(shape), lambda: model.head(made, CLASSES), members=n, seed=SEED)
    optimiser = initial_state(Recipe(method=method), ens).optimisers[0]
    torch.manual_seed(SEED)
    x, y = torch.randn(BATCH, *shape), torch.randint(CLASSES, (BATCH,))

    def step() -> None:
        optimiser.zero_grad()
        method.loss(ens, x, y).loss.backward()
        optimiser.step()

    executions: tuple[Execution, Execution] = "sequential", "vectorised"
    seconds: dict[str, list[float]] = {execution: [] for execution in executions}
    for _ in range(2 + rounds):
        for execution in executions:
            ens.execution = execution
            seconds[execution].append(cpu_seconds(step))
    by_round = ratios(seconds["vectorised"][2:], seconds["sequential"][2:])
    return row(f"{name}: time of a vectorised step relative to sequential", by_round, target)
