"""Best use of CPU threads: all of them on one member after another, or one process per thread with some of the members.

Feature-WGD steps of the same members, in turns:

    one process     all threads on one member after another
    processes       as many processes as threads, one thread each, which divide the members among them: features are
                    gathered and the head's gradient is averaged

Time of the processes relative to one process; all channels_last and compiled.

    python benchmarks/bench.py --only processes [--quick] [--full] [--json FILE]
"""

import os
import random
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import torch
from harness import Worker, progress, ratios, row

from featureflock.cpu_kernels.malloc import reuse_freed_memory
from featureflock.distributed.mesh import join_mesh
from featureflock.methods import FeatureWGD
from featureflock.models import WideResNetConfig
from featureflock.training import ComputeConfig, Recipe
from featureflock.training.compute import resolve_compute
from featureflock.training.state import initial_state

SEED, BATCH = 0, 128
T = TypeVar("T")


def measure(scale: str) -> list[dict[str, Any]]:
    if scale == "quick":
        return _compare(WideResNetConfig(10, 1), 1, 1, False)
    rows = _compare(WideResNetConfig(10, 1), 2, 20 if scale == "full" else 6, True)
    return rows + _compare(WideResNetConfig(16, 4), 2, 7, True) if scale == "full" else rows


def _compare(network: WideResNetConfig, per_process: int, rounds: int, compile: bool) -> list[dict[str, Any]]:
    threads = torch.get_num_threads()
    processes = max(2, threads)
    members = per_process * processes
    progress(f"  WRN-{network.depth}-{network.width} × {members}")
    port = _free_port()
    ways = {
        "one process": [Worker(_train, network, members, threads, compile, 0, 1, port)],
        "processes": _at_once(
            [partial(Worker, _train, network, members, 1, compile, r, processes, port) for r in range(processes)]
        ),
    }
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for i in range(rounds):
        for way in random.Random(i).sample(list(ways), len(ways)):
            start = time.perf_counter()
            _at_once([worker.seconds for worker in ways[way]])
            taken[way].append(time.perf_counter() - start)
    for workers in ways.values():
        for worker in workers:
            worker.close()
    name = f"WRN-{network.depth}-{network.width} × {members}: time of {processes} processes relative to one"
    return [row(name, ratios(taken["processes"], taken["one process"]), seconds=taken)]


def _at_once(calls: Sequence[Callable[[], T]]) -> list[T]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _train(
    turn: Callable[[], None],
    network: WideResNetConfig,
    members: int,
    threads: int,
    compile: bool,
    rank: int,
    size: int,
    port: int,
) -> None:
    torch.set_num_threads(threads)
    place = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    method, made = FeatureWGD(), network.extractor((3, 32, 32))
    ens = method.build(
        lambda: network.extractor((3, 32, 32)), lambda: network.head(made, 10), members=members, seed=SEED
    )
    compute = resolve_compute(ComputeConfig(compile="on" if compile else "off"), "float32", ens, lambda: 0.0)
    torch.manual_seed(SEED)
    x, y = compute.inputs(torch.randn(BATCH, 3, 32, 32)), torch.randint(10, (BATCH,))
    reuse_freed_memory()
    with join_mesh() as mesh:
        state = initial_state(Recipe(method=method), compute.prepare(ens.shard(mesh)))
        while True:
            state.optimisers[0].zero_grad()
            method.loss(ens, x, y).loss.backward()
            ens.average_gradients()
            state.optimisers[0].step()
            turn()
