"""Where threads are best used: a member on all of them, or a member on each?

Feature-WGD steps of the same members, in turns, each way in a process of its own:

    sequential    all threads on one member after another
    threaded      members side by side, a thread each, in one process (what `featureflock train` chooses)
    processes     members in as many processes as there are threads, one thread each, which exchange nothing: the most
                  that sharding members over processes could reach

Times over those of sequential; all channels_last and compiled.

    python benchmarks/sharing_threads.py [--quick] [--full] [--json FILE]
"""

import argparse
import random
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from measuring import Worker, progress, ratios, row, table, write_json

from featureflock.memory import keeping_memory
from featureflock.methods import FeatureWGD
from featureflock.models import WRN
from featureflock.running import Run
from featureflock.training import Engine, Recipe
from featureflock.training.engine import set_up
from featureflock.training.state import fresh_state

SEED, BATCH = 0, 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the smallest network, one round, not compiled")
    parser.add_argument("--full", action="store_true", help="WRN-16-4 too")
    parser.add_argument("--json", type=Path, help="where to write the results")
    args = parser.parse_args()
    rows = measure("quick" if args.quick else "full" if args.full else "usual")
    print(table(rows))
    write_json(args.json, {"seeds": [SEED], "batch": BATCH, "threads": torch.get_num_threads(), "rows": rows})


def measure(scale: str) -> list[dict[str, Any]]:
    if scale == "quick":
        return _compare(WRN(10, 1), 1, 1, False)
    rows = _compare(WRN(10, 1), 2, 20 if scale == "full" else 6, True)
    return rows + _compare(WRN(16, 4), 2, 7, True) if scale == "full" else rows


def _compare(network: WRN, for_each: int, rounds: int, compile: bool) -> list[dict[str, Any]]:
    threads = torch.get_num_threads()
    members = for_each * threads
    progress(f"  WRN-{network.depth}-{network.width} × {members}")
    ways: dict[str, list[Worker]] = {
        "sequential": [Worker(_train, network, members, "sequential", threads, compile)],
        "threaded": [Worker(_train, network, members, "threaded", threads, compile)],
        "processes": [Worker(_train, network, for_each, "sequential", 1, compile) for _ in range(threads)],
    }
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for i in range(rounds):
        for way in random.Random(i).sample(list(ways), len(ways)):
            taken[way].append(_together(ways[way]))
    for workers in ways.values():
        for worker in workers:
            worker.close()
    name = f"WRN-{network.depth}-{network.width} × {members}"
    return [
        row(f"{name}: {way} over sequential, time", ratios(taken[way], taken["sequential"]), seconds=taken[way])
        for way in ("threaded", "processes")
    ]


def _together(workers: list[Worker]) -> float:
    """Until the last of them has done its piece."""
    start = time.perf_counter()
    asking = [Thread(target=worker.seconds) for worker in workers]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    return time.perf_counter() - start


def _train(turn: Callable[[], None], network: WRN, members: int, run: Run, threads: int, compile: bool) -> None:
    torch.set_num_threads(threads)
    method, made = FeatureWGD(), network.extractor((3, 32, 32))
    ens = method.build(
        lambda: network.extractor((3, 32, 32)), lambda: network.head(made, 10), members=members, seed=SEED
    )
    setup = set_up(Engine(run=run, compile="on" if compile else "off"), "float32", ens, lambda: 0.0)
    state = fresh_state(Recipe(method=method), setup.prepare(ens))
    torch.manual_seed(SEED)
    x, y = setup.inputs(torch.randn(BATCH, 3, 32, 32)), torch.randint(10, (BATCH,))
    with keeping_memory():
        while True:
            state.optimisers[0].zero_grad()
            method.loss(ens, x, y).backward()
            state.optimisers[0].step()
            turn()


if __name__ == "__main__":
    main()
