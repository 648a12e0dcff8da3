"""Predictions of the cost model compared with measured steps of 1, 2 and 4 processes (gloo, one thread each).

A round measures the constants of the equation in cost_model.py, then steps of feature-WGD on each mesh:

    member, after   from one process: whole steps, and steps on stored features, for three batch sizes
    κ               one process per core at once, without communication, relative to one process alone
    α, β            sums and gathers of 8 bytes and of 1 MB, among 2 and 4 processes

No step of several processes is used for a constant. The target is a prediction within 20 % of the measured step, of the
medians over rounds. Four processes on two cores take turns.

    python benchmarks/step_prediction.py [--quick] [--rounds N] [--json results/step_prediction.json]
"""

import argparse
import importlib
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from communication import together
from cost_model import GPU, Cost, Link, Machine, Sizes, projected, step_seconds
from harness import progress, row, write_json
from torch import Tensor, nn

from featureflock.cpu_kernels.malloc import reuse_freed_memory
from featureflock.distributed.mesh import MeshShape, join_mesh
from featureflock.methods import FeatureWGD
from featureflock.models import CNNConfig, WideResNetConfig
from featureflock.models.base import ModelConfig
from featureflock.training import ComputeConfig, Recipe
from featureflock.training.compute import resolve_compute
from featureflock.training.state import initial_state

SEED, CLASSES, SHAPE = 0, 10, (3, 32, 32)
MESHES = ((1, 1), (2, 1), (1, 2), (4, 1), (2, 2), (1, 4))
SMALL, LARGE = 8, 2**20
"""Bytes to measure latency and bandwidth with."""
REPEATS = 5
"""Timed repetitions in a round, of which the median counts; two more warm up."""
LIMIT = 0.2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small networks, few meshes, one round")
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds")
    parser.add_argument("--json", type=Path, help="JSON file to write the results to")
    args = parser.parse_args()
    importlib.import_module("torch._dynamo")  # once, before forking
    load, cores = os.getloadavg()[0], number_of_cores()
    if args.quick:
        rows = compare("CNN × 4", CNNConfig(2), 4, 16, 1, ((1, 1), (2, 1), (2, 2)))
    else:
        rows = compare("WRN-10-1 × 4", WideResNetConfig(10, 1), 4, 128, args.rounds, MESHES)
    print(table(rows))
    content = {"seeds": [SEED], "cores": cores, "load_before": load, "limit": LIMIT, "rows": rows}
    write_json(args.json, {**content, "assumed": GPU, "projected": projected()})


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown table: milliseconds of a step, medians over rounds, and the range of their ratio."""
    lines = [
        "| | predicted, ms | measured, ms | predicted / measured | range over rounds |",
        "|---|---:|---:|---:|---:|",
    ]
    for r in rows:
        predicted, measured = median(r["predicted"]), median(r["measured"])
        each = [p / m for p, m in zip(r["predicted"], r["measured"], strict=True)]
        spread = f"{min(each):.2f} to {max(each):.2f}" if len(each) > 1 else ""
        times = f"{1000 * predicted:.1f} | {1000 * measured:.1f} | {predicted / measured:.2f} | {spread}"
        lines.append(f"| {r['name'].split(':')[0]} | {times} |")
    return "\n".join(lines)


def number_of_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def compare(
    name: str, model: ModelConfig, n: int, B: int, rounds: int, meshes: tuple[tuple[int, int], ...]
) -> list[dict[str, Any]]:
    """A row for each mesh, with predicted and measured seconds of each round."""
    sizes = Sizes.of(FeatureWGD(), model, SHAPE, n, B, CLASSES)
    processes = sorted({M * D for M, D in meshes})
    found: dict[tuple[int, int], list[tuple[float, float]]] = {mesh: [] for mesh in meshes}
    constants = []
    for i in range(rounds):
        progress(f"  {name}, round {i + 1} of {rounds}")
        machines = calibrate(model, sizes, processes)
        constants.append({str(P): _as_json(machine) for P, machine in machines.items()})
        for M, D in meshes:
            measured = _slowest(together(M * D, _steps, model, n, B, MeshShape(M, D, timeout=120)))
            found[M, D].append((sum(step_seconds(machines[M * D], sizes, M, D).values()), measured))
    rows = []
    for (M, D), pairs in found.items():
        predicted, measured_ = [p for p, _ in pairs], [m for _, m in pairs]
        errors = [abs(p / m - 1) for p, m in pairs]
        title = f"{name}, {M} × {D}: error of the predicted step"
        # Of the medians: a round in which another program ran for a moment says nothing about the model.
        r = row(title, [abs(median(predicted) / median(measured_) - 1)], f"≤ {LIMIT}", unit="")
        rows.append({**r, "by_round": errors, "predicted": predicted, "measured": measured_})
    rows[0]["constants"] = constants
    return rows


def calibrate(model: ModelConfig, sizes: Sizes, processes: list[int]) -> dict[int, Machine]:
    """The constants of this machine, for each number of processes."""
    n, batches = sizes.n, sorted({max(2, sizes.B // k) for k in (1, 2, 4)})
    (alone,) = together(1, _alone, model, n, batches)
    cores = number_of_cores()
    at_once = together(cores, _alone, model, n, batches[-1:]) if cores > 1 else [alone]
    contention = max(1.0, max(r["step"][sizes.B] for r in at_once) / alone["step"][sizes.B])
    after = Cost.through(list(alone["after"].items()))
    member = Cost.through([(b, max(0.0, alone["step"][b] - alone["after"][b]) / n) for b in batches])
    machines = {}
    for P in processes:
        links = {} if P == 1 else _links(P)
        machines[P] = Machine(member, after, links, cores, contention)
    return machines


def _links(processes: int) -> dict[str, Link]:
    results = together(processes, _transfer, MeshShape(processes, timeout=120))
    links = {}
    for kind, factor in (("sum", 2 * (processes - 1) / processes), ("gather", processes - 1)):
        small, large = (_slowest([r[kind, b] for r in results]) for b in (SMALL, LARGE))
        links[kind] = Link(small, factor * LARGE / max(large - small, 1e-9))
    return links


def _slowest(by_process: list[list[float]]) -> float:
    """Median over repetitions of the time of the slowest process."""
    return median(max(times) for times in zip(*by_process, strict=True))


def _repeated(call: Callable[[], object], between: Callable[[], object] = lambda: None) -> list[float]:
    taken = []
    for _ in range(2 + REPEATS):
        between()
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return taken[2:]


class _Stored(nn.Module):
    """An extractor without computation, for the time of everything after the members."""

    def __init__(self, examples: int, features: int) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.randn(examples, features))
        self.feature_dim = features

    def forward(self, x: Tensor) -> Tensor:
        return self.values + 0


def _alone(model: ModelConfig, n: int, batches: list[int]) -> dict[str, dict[int, float]]:
    """Seconds of a step of one process and of what comes after its members, by batch size."""
    return {
        "step": {b: median(_steps(model, n, b, None)) for b in batches},
        "after": {b: _after(n, b, model.extractor(SHAPE).feature_dim) for b in batches},
    }


def _after(n: int, b: int, features: int) -> float:
    method = FeatureWGD()
    ens = method.build(lambda: _Stored(b, features), lambda: nn.Linear(features, CLASSES), members=n, seed=SEED)
    x, y = torch.zeros(b, 1), torch.arange(b) % CLASSES
    return median(_repeated(lambda: method.loss(ens, x, y).loss.backward()))


def _steps(model: ModelConfig, n: int, B: int, shape: MeshShape | None) -> list[float]:
    """Seconds of training steps; of a single process without a mesh if `shape` is None."""
    method, made = FeatureWGD(), model.extractor(SHAPE)
    ens = method.build(lambda: model.extractor(SHAPE), lambda: model.head(made, CLASSES), members=n, seed=SEED)
    compute = resolve_compute(ComputeConfig(compile="off"), "float32", ens, lambda: 0.0)
    torch.manual_seed(SEED)
    x, y = torch.randn(B, *SHAPE), torch.randint(CLASSES, (B,))
    reuse_freed_memory()
    if shape is None:
        optimiser = initial_state(Recipe(method=method), compute.prepare(ens)).optimisers[0]
        return _repeated(lambda: _step(method, ens, optimiser, compute.inputs(x), y))
    with join_mesh(shape) as mesh:
        part = mesh.data.local_slice(B)
        optimiser = initial_state(Recipe(method=method), compute.prepare(ens.shard(mesh))).optimisers[0]
        x, y = compute.inputs(x[part]), y[part]
        barrier = dist.monitored_barrier if mesh.world.size > 1 else lambda: None
        return _repeated(lambda: _step(method, ens, optimiser, x, y), barrier)


def _step(method: FeatureWGD, ens: Any, optimiser: Any, x: Tensor, y: Tensor) -> None:
    optimiser.zero_grad()
    method.loss(ens, x, y).loss.backward()
    ens.average_gradients()
    optimiser.step()


def _transfer(shape: MeshShape) -> dict[tuple[str, int], list[float]]:
    """Seconds of each collective for each size."""
    results = {}
    with join_mesh(shape) as mesh:
        for b in (SMALL, LARGE):
            x = torch.zeros(b // 4)
            received = [torch.zeros_like(x) for _ in range(mesh.world.size)]
            results["sum", b] = _repeated(partial(dist.all_reduce, x), dist.monitored_barrier)
            results["gather", b] = _repeated(partial(dist.all_gather, received, x), dist.monitored_barrier)
    return results


def _as_json(machine: Machine) -> dict[str, Any]:
    links = {kind: vars(link) for kind, link in machine.links.items()}
    return {**vars(machine), "member": vars(machine.member), "after": vars(machine.after), "links": links}


if __name__ == "__main__":
    main()
