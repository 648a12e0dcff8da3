"""Prediction: `ens.for_inference()` compared with a plain loop over members in eval mode.

    plain       each member in turn, eager, default memory format, softmax, then the mean
    ours        ens.for_inference().predict(x)

Each runs in its own process, and they take turns batch by batch. Both have the same weights, with running statistics
other than the initial ones. The largest difference in probability is measured too.

    python benchmarks/bench.py --only prediction [--quick] [--full] [--json FILE]
"""

import random
from collections.abc import Callable
from typing import Any

import torch
from harness import Worker, progress, ratios, row
from torch import Tensor

import featureflock as ff
from featureflock.cpu_kernels.malloc import reuse_freed_memory
from featureflock.models import WideResNetConfig

SEED, BATCH = 0, 256


def measure(scale: str) -> list[dict[str, Any]]:
    if scale == "quick":
        return _compare(WideResNetConfig(10, 1), 2, 1, "", False)
    rounds, members = (20, 4) if scale == "full" else (4, 2)
    return _compare(WideResNetConfig(10, 2), 4, 2 * rounds, "≥ 2.0", True) + _compare(
        WideResNetConfig(16, 4), members, rounds, "≥ 2.0", True
    )


def _compare(network: WideResNetConfig, members: int, rounds: int, target: str, compile: bool) -> list[dict[str, Any]]:
    name = f"WRN-{network.depth}-{network.width} × {members}"
    progress(f"  {name}")
    workers = {"plain": Worker(_plain, network, members), "ours": Worker(_ours, network, members, compile)}
    taken: dict[str, list[float]] = {who: [] for who in workers}
    for i in range(rounds):
        for who in random.Random(i).sample(list(workers), len(workers)):
            taken[who].append(workers[who].seconds())
    for worker in workers.values():
        worker.close()
    ens, x = _ensemble(network, members)
    difference = float((ens.for_inference(compile=compile).predict(x) - _plain_prediction(ens, x)).abs().max())
    return [
        row(
            f"{name}: prediction, speed-up over a plain loop",
            ratios(taken["plain"], taken["ours"]),
            target,
            seconds=taken,
        ),
        row(f"{name}: largest difference in probability", [difference], "≤ 1e-5", ""),
    ]


def _ensemble(network: WideResNetConfig, members: int) -> tuple[ff.Ensemble, Tensor]:
    torch.manual_seed(SEED)
    extractors = [network.extractor((3, 32, 32)) for _ in range(members)]
    ens = ff.Ensemble(extractors, network.head(extractors[0], 10), ff.ParticleLayer())
    x = torch.randn(BATCH, 3, 32, 32)
    with torch.no_grad():
        ens(x[:32])
    return ens.eval(), x


@torch.no_grad()
def _plain_prediction(ens: ff.Ensemble, x: Tensor) -> Tensor:
    return torch.stack([ens.head(extractor(x)).softmax(-1) for extractor in ens.extractors]).mean(0)


def _plain(turn: Callable[[], None], network: WideResNetConfig, members: int) -> None:
    ens, x = _ensemble(network, members)
    while True:
        _plain_prediction(ens, x)
        turn()


def _ours(turn: Callable[[], None], network: WideResNetConfig, members: int, compile: bool) -> None:
    reuse_freed_memory()  # as `featureflock predict` does
    ens, x = _ensemble(network, members)
    fast = ens.for_inference(compile=compile)
    while True:
        fast.predict(x)
        turn()
