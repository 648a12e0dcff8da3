"""Bytes that processes of one ensemble send each other, by collective, and the fraction of a step that it takes.

Four tables:

    counted         steps of the training loop on meshes of real processes (gloo). Every collective is counted and
                    compared with the formula below; the benchmark fails if they differ. Neither members nor examples
                    divide evenly there, so rounding up is tested too
    configurations  the same formulas for the paper's ensembles
    projected       time of a step and memory of large ensembles on GPUs, from the equation and the assumed rates
                    of cost_model.py: nothing here is measured
    times           steps of feature-WGD: the fraction of a step spent in collectives, including waiting for slower
                    processes; the time of the same collectives alone, each after a barrier; a step in which layer and
                    head are divided along the members axis, relative to one in which every process computes them
                    whole; latency and bandwidth, and the traffic on the loopback interface meanwhile (of all
                    programs)

Bytes that each process passes to collectives in a step, on a mesh of M × D (members × data) processes:

    n × n sums    all        8 (2n² + 2)                feature-WGD; function-WGD along the data axis, if D > 1
    gather        members    4 ⌈n/M⌉ ⌈B/D⌉ H            features of own members, by an all-to-all, if M > 1
                             4 n ⌈B/(D M)⌉ H            their gradients, by another
                             4 n ⌈B/(D M)⌉ C            logits behind a shared head; 4 ⌈n/M⌉ ⌈B/D⌉ C of separate heads
                             2 · 4 ⌈n/M⌉ W              weight-WGD: weights, and their gradients on the way back
    gradients     data       4 ⌈n/M⌉ (W + S)            what any data-parallel training averages, if D > 1; weight-WGD
                                                        passes W twice
                  all        4 (H + 1) C                of the shared head
    bookkeeping   data, all  8 D + 8 (n + 5), 16        sizes of parts; losses and finiteness checks; signals

In a ring of P processes, a sum of b bytes sends 2 (P − 1)/P · b from each process, a gather (P − 1) b, an all-to-all
(P − 1)/P · b.

Shapes: n members, B examples in a batch, H features, C classes, W weights and S running statistics of a member.

    python benchmarks/communication.py [--quick] [--json FILE]
"""

import argparse
import importlib
import itertools
import os
import random
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Any, TypeVar
from unittest.mock import patch

import harness
import torch
import torch.distributed as dist
from collectives import Call, recorded
from cost_model import GPU, Sizes, projected
from harness import progress, ratios, row, write_json
from torch import Tensor

from featureflock.cpu_kernels.malloc import reuse_freed_memory
from featureflock.data import CustomData
from featureflock.distributed.mesh import join_mesh
from featureflock.distributed.shape import MeshShape
from featureflock.ensemble import ensemble
from featureflock.ensemble.ensemble import Ensemble
from featureflock.methods import DeepEnsembles, FeatureWGD, FunctionWGD, LossOutput, Method, WeightWGD
from featureflock.models import CNNConfig, WideResNetConfig
from featureflock.models.base import ModelConfig
from featureflock.training import RECIPES, ComputeConfig, Recipe, train
from featureflock.training.compute import resolve_compute
from featureflock.training.state import initial_state

SEED, BATCH, CLASSES = 0, 128, 10
METHODS: tuple[Method, ...] = (FeatureWGD(), FunctionWGD(), WeightWGD(), DeepEnsembles())
CONFIGURATIONS = {
    "CIFAR-10, WRN-16-4 × 10": ("cifar10-wrn16x4", (3, 32, 32), 10),
    "CIFAR-100, WRN-16-4 × 10": ("cifar100-wrn16x4", (3, 32, 32), 100),
    "CIFAR-100, ResNet-32 × 4": ("cifar100-resnet32", (3, 32, 32), 100),
    "CIFAR-100, WRN-28-2 × 3": ("cifar100-wrn28x2", (3, 32, 32), 100),
    "ImageNet, ResNet-50 × 5": ("imagenet-resnet50", (3, 224, 224), 1000),
}
"""The paper's ensembles: recipe, shape of an image, classes."""
SMALL, LARGE = 8, 2**24
"""Bytes to measure latency and bandwidth with."""
T = TypeVar("T")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small networks, few meshes, one round")
    parser.add_argument("--json", type=Path, help="JSON file to write the results to")
    args = parser.parse_args()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    content: dict[str, Any] = {"seeds": [SEED], "batch": BATCH, "cores": cores}
    content |= {"configurations": configurations(), "projected": projected(), "assumed": GPU}
    print(f"The paper's ensembles, in bytes\n\n{table(content['configurations'])}")
    print(f"\nProjected for GPUs\n\n{table(content['projected'])}", flush=True)
    importlib.import_module("torch._dynamo")  # once, before forking
    content |= count(args.quick)
    print(f"\nCounted: bytes that a process passes to collectives in a step\n\n{table(content['counted'])}", flush=True)
    content["times"] = times(args.quick)
    print(f"\nTimes, on {cores} core{'s' * (cores != 1)}\n\n{harness.table(content['times'])}")
    write_json(args.json, content)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown table of rows, with their keys as the header."""
    numbers = [str(value).replace(".", "").replace(",", "").isdigit() for value in rows[0].values()]
    lines = ["| " + " | ".join(rows[0]) + " |", "|" + "|".join("---:" if number else "---" for number in numbers) + "|"]
    for r in rows:
        lines.append("| " + " | ".join(f"{v:,}" if isinstance(v, int) else v for v in r.values()) + " |")
    return "\n".join(lines)


def configurations() -> list[dict[str, Any]]:
    """The paper's ensembles, with one process per member or per part of a batch; B is the batch of all processes."""
    rows = []
    for name, (recipe, shape, classes) in CONFIGURATIONS.items():
        r = RECIPES[recipe].recipe
        s = Sizes.of(r.method, r.model, shape, r.members or r.method.default_members, r.batch, classes)
        weights = Sizes.of(WeightWGD(), r.model, shape, s.n, s.B, classes)
        rows.append(
            {
                "configuration": name,
                "n": s.n,
                "B": s.B,
                "H": s.H,
                "weights per member": s.extractor + s.head,
                "data axis: n × n sums": s.bytes_passed(1, 2)["n × n sums"],
                "members axis: all features": 4 * s.n * s.B * s.H,
                "all gradients": 4 * (s.n * s.extractor + s.head),
                "weight-WGD: all gathers": 2 * 4 * weights.n * (s.extractor + s.head),
            }
        )
    return rows


def count(quick: bool) -> dict[str, list[dict[str, Any]]]:
    """Bytes per step of the training loop: of the first process by purpose, and of all by collective."""
    model, n, B = CNNConfig(2) if quick else WideResNetConfig(10, 1), 5, 15
    counted, collectives = [], []
    methods = METHODS[:1] + METHODS[2:3] if quick else METHODS
    for (M, D), method in itertools.product(((2, 1), (1, 2), (2, 2)), methods):
        progress(f"  counting {method.title} on {M} × {D}")
        results = together(M * D, _count, method, model, n, B, MeshShape(M, D, timeout=120))
        sizes = Sizes.of(method, model, (3, 32, 32), n, B, CLASSES)
        for rank, calls in enumerate(results):
            formula = sizes.bytes_passed(M, D, rank % M, rank // M)
            given = {purpose: sum(c.passed for c in calls if c.purpose == purpose) for purpose in formula}
            if given != formula:
                raise AssertionError(f"{method.title}, {M} × {D}, rank {rank}: counted {given}, not {formula}.")
            if rank == 0:
                counted.append({"method": method.title, "members × data": f"{M} × {D}", **given})
            of_process = {"method": method.title, "mesh": f"{M} × {D}", "rank": rank}
            collectives += [{**of_process, **vars(c), "sent": c.sent} for c in calls]
    return {"counted": counted, "collectives": collectives}


def times(quick: bool) -> list[dict[str, Any]]:
    network: ModelConfig = CNNConfig(2) if quick else WideResNetConfig(10, 1)
    name = "CNN × 4" if quick else "WRN-10-1 × 4"
    rounds, rows = 1 if quick else 11, []
    for M, D in ((2, 1), (2, 2)) if quick else ((2, 1), (1, 2), (4, 1), (2, 2), (1, 4)):
        progress(f"  {name} on {M} × {D}")
        results = together(M * D, _time, network, 4, rounds, MeshShape(M, D, timeout=120))
        for label, key in (("in collectives, including waiting", "inside"), ("the same collectives alone", "alone")):
            each = [[r["divided"][i] for r in results] for i in range(rounds)]
            fractions = [mean(r[key] / r["step"] for r in ranks) for ranks in each]
            steps = [max(r["step"] for r in ranks) for ranks in each]
            rows.append(row(f"{name}, {M} × {D}: {label}", fractions, unit="of a step", seconds_of_a_step=steps))
        if M > 1:
            ways = [[max(r[way][i]["step"] for r in results) for i in range(rounds)] for way in ("divided", "whole")]
            rows.append(row(f"{name}, {M} × {D}: divided layer and head, time relative to whole", ratios(*ways)))
    for processes in (2,) if quick else (2, 4):
        progress(f"  latency and bandwidth of {processes} processes")
        results = together(processes, _transfer, rounds, MeshShape(processes, timeout=120))
        for collective in ("sum", "gather"):
            slowest = {b: [max(r[collective, b][i][0] for r in results) for i in range(rounds)] for b in (SMALL, LARGE)}
            factor = 2 * (processes - 1) / processes if collective == "sum" else processes - 1
            start = f"{collective} among {processes} processes"
            rows.append(row(f"{start}: {SMALL} bytes", [1e6 * t for t in slowest[SMALL]], unit="µs"))
            rates = [factor * LARGE / t / 1e9 for t in slowest[LARGE]]
            rows.append(row(f"{start}: {LARGE // 2**20} MB, sent by each", rates, unit="GB/s"))
            sent = [seen / (processes * factor * LARGE) for _, seen in results[0][collective, LARGE]]
            rows.append(row(f"{start}: bytes on the loopback interface relative to a ring", sent))
    return rows


def together(processes: int, work: Callable[..., T], *args: Any) -> list[T]:
    """Return `work(*args)` from each of several new processes, which can join a mesh."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with ProcessPoolExecutor(processes, get_context("fork" if sys.platform == "linux" else "spawn")) as pool:
        futures = [pool.submit(_placed, rank, processes, port, work, *args) for rank in range(processes)]
        return [future.result() for future in futures]


def _placed(rank: int, processes: int, port: int, work: Callable[..., T], *args: Any) -> T:
    torch.set_num_threads(1)
    place = {"RANK": rank, "WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    return work(*args)


def _count(method: Method, model: ModelConfig, n: int, B: int, shape: MeshShape) -> list[Call]:
    """The collectives of one step of the training loop, from the start of one loss to the next."""
    torch.manual_seed(SEED)
    x, y = torch.randn(3 * B, 3, 32, 32), torch.arange(3 * B) % CLASSES
    recipe = Recipe(CustomData((x, y), (x[:B], y[:B])), model, method, members=n, epochs=1, batch=B, decay_epochs=())
    with tempfile.TemporaryDirectory() as folder, _marked(type(method)) as steps:
        train(recipe, folder, compute=ComputeConfig(compile="off", mesh=shape))
    return steps[1]


@contextmanager
def _marked(method: type[Method]) -> Iterator[list[list[Call]]]:
    """The collectives between consecutive calls of the loss: those of one step."""
    original, steps = method.loss, []
    recording = ExitStack()

    def loss(self: Method, ens: Ensemble, x: Tensor, y: Tensor) -> LossOutput:
        recording.close()
        if len(steps) < 2:
            calls = recording.enter_context(recorded())
            steps.append([])
            recording.callback(lambda: steps[-1].extend(timed.call for timed in calls))
        return original(self, ens, x, y)

    method.loss = loss  # type: ignore[method-assign]
    try:
        yield steps
    finally:
        method.loss = original  # type: ignore[method-assign]
        recording.close()


def _time(model: ModelConfig, n: int, rounds: int, shape: MeshShape) -> dict[str, list[dict[str, float]]]:
    method, made = FeatureWGD(), model.extractor((3, 32, 32))
    ens = method.build(lambda: model.extractor((3, 32, 32)), lambda: model.head(made, CLASSES), members=n, seed=SEED)
    compute = resolve_compute(ComputeConfig(compile="off"), "float32", ens, lambda: 0.0)
    torch.manual_seed(SEED)
    x, y = torch.randn(BATCH, 3, 32, 32), torch.randint(CLASSES, (BATCH,))
    reuse_freed_memory()
    with join_mesh(shape) as mesh:
        state = initial_state(Recipe(method=method), compute.prepare(ens.shard(mesh)))
        x, y = compute.inputs(x[mesh.data.local_slice(BATCH)]), y[mesh.data.local_slice(BATCH)]
        ways = {"divided": nullcontext}
        if mesh.members.size > 1:
            ways["whole"] = partial(patch.object, ensemble, "can_divide", lambda *_: False)
        results: dict[str, list[dict[str, float]]] = {way: [] for way in ways}

        def step() -> None:
            state.optimisers[0].zero_grad()
            method.loss(ens, x, y).loss.backward()
            ens.average_gradients()
            state.optimisers[0].step()

        for i in range(-2, rounds):
            for way in random.Random(i).sample([*ways], len(ways)):
                with ways[way](), recorded() as calls:
                    dist.monitored_barrier()
                    start = time.perf_counter()
                    step()
                    took = time.perf_counter() - start
                alone = 0.0
                for timed in calls:
                    dist.monitored_barrier()
                    alone += harness.seconds(timed.again)
                if i >= 0:
                    results[way].append({"step": took, "inside": sum(t.seconds for t in calls), "alone": alone})
    return results


def _transfer(rounds: int, shape: MeshShape) -> dict[tuple[str, int], list[tuple[float, int]]]:
    """Seconds of each collective for each size, and bytes on the loopback interface meanwhile."""
    results: dict[tuple[str, int], list[tuple[float, int]]] = {}
    with join_mesh(shape) as mesh:
        for b in (SMALL, LARGE):
            x = torch.zeros(b, dtype=torch.uint8).view(torch.float32)
            received = [torch.zeros_like(x) for _ in range(mesh.world.size)]
            calls = {"sum": partial(dist.all_reduce, x), "gather": partial(dist.all_gather, received, x)}
            for i, (name, call) in itertools.product(range(-1, rounds), calls.items()):
                dist.monitored_barrier()
                before = _on_loopback()
                took = harness.seconds(call)
                dist.monitored_barrier()
                if i >= 0:
                    results.setdefault((name, b), []).append((took, _on_loopback() - before))
    return results


def _on_loopback() -> int:
    """Bytes that this machine has sent to itself; 0 if the system does not report it."""
    try:
        lines = Path("/proc/net/dev").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.strip().startswith("lo:")), 0)


if __name__ == "__main__":
    main()
