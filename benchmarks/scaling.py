"""Cost of the repulsion, and of a whole step per member, by the number of members n and by d.

    transport      time for n particles of dimension d relative to the smallest n and d, beside the growth of n² d
    step           feature-WGD with small convolutional networks: time of a step per member relative to n = 2, and
                   relative to Deep Ensembles of the same size, which have no repulsion: where both grow, the repulsion
                   is not the cause

All cases take turns within a round; medians over rounds. Processor time in one thread, which other programs disturb
least. Freed memory is retained as in training: otherwise each step allocates all activations anew, and the more there
are, the slower the system provides them.

    python benchmarks/bench.py --only scaling [--quick] [--full] [--json FILE]
"""

import random
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from harness import ratios, row

import featureflock as ff
from featureflock.cpu_kernels.malloc import reuse_freed_memory
from featureflock.methods import DeepEnsembles, FeatureWGD, Method
from featureflock.models import CNNConfig
from featureflock.training import ComputeConfig, Recipe
from featureflock.training.compute import resolve_compute
from featureflock.training.state import initial_state

SEED, BATCH = 0, 64


def measure(scale: str) -> list[dict[str, Any]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        reuse_freed_memory()
        if scale == "quick":
            return [*_transport((2, 4), (1000, 2000), 1), *_steps(CNNConfig(4), (2, 4), 1)]
        ns = (2, 8, 32, 128)
        if scale == "full":
            return [*_transport(ns, (8_192, 32_768, 131_072, 1_000_000), 15), *_steps(CNNConfig(32), ns, 7)]
        return [*_transport(ns, (8_192, 32_768, 131_072), 5), *_steps(CNNConfig(16), ns, 3)]
    finally:
        torch.set_num_threads(threads)


def _transport(ns: tuple[int, ...], ds: tuple[int, ...], rounds: int) -> list[dict[str, Any]]:
    torch.manual_seed(SEED)
    cases = [(n, ds[0]) for n in ns] + [(10, d) for d in ds]
    calls = {
        (n, d): partial(ff.transport, torch.randn(n, d), torch.randn(n, d), prior=ff.Cauchy(1e-3), rank=min(5, n))
        for n, d in cases
    }
    taken = _in_turns(calls, rounds)
    rows = []
    for first, group in (((ns[0], ds[0]), cases[: len(ns)]), ((10, ds[0]), cases[len(ns) :])):
        for n, d in group:
            grown = (n / first[0]) ** 2 * d / first[1]
            name = (
                f"transport, n = {n}, d = {d:,}: time relative to n = {first[0]}, d = {first[1]:,} (n² d: {grown:,.0f})"
            )
            rows.append(row(name, ratios(taken[n, d], taken[first]), seconds=taken[n, d]))
    return rows


def _steps(network: CNNConfig, ns: tuple[int, ...], rounds: int) -> list[dict[str, Any]]:
    ours, theirs = FeatureWGD(), DeepEnsembles()
    calls = {(m, n): partial(_repeat, _step(m, network, n), -(-ns[-1] // 8 // n)) for n in ns for m in (ours, theirs)}
    taken = _in_turns(calls, rounds)
    each = {(m, n): [s / n / calls[m, n].args[1] for s in taken[m, n]] for m, n in calls}
    grown = [
        row(
            f"step of {method.title}, n = {n}: time per member relative to n = {ns[0]}",
            ratios(each[method, n], each[method, ns[0]]),
            "≤ 1.1" if method is ours and n == ns[-1] else "",
            seconds_per_member=each[method, n],
        )
        for method in (ours, theirs)
        for n in ns[1:]
    ]
    compared = [
        row(f"step, n = {n}: time of feature-WGD relative to Deep Ensembles", ratios(each[ours, n], each[theirs, n]))
        for n in ns
    ]
    return grown + compared


def _repeat(call: Callable[[], object], times: int) -> None:
    """Repeat a short call, so that all cases take about as long."""
    for _ in range(times):
        call()


def _in_turns(calls: Mapping[Any, Callable[[], object]], rounds: int) -> dict[Any, list[float]]:
    taken: dict[Any, list[float]] = {key: [] for key in calls}
    for i in range(rounds + 1):
        for key in random.Random(i).sample(list(calls), len(calls)):
            start = time.process_time()
            calls[key]()
            if i:  # the first round is the warm-up
                taken[key].append(time.process_time() - start)
    return taken


def _step(method: Method, network: CNNConfig, members: int) -> Callable[[], None]:
    made = network.extractor((3, 32, 32))
    ens = method.build(
        lambda: network.extractor((3, 32, 32)), lambda: network.head(made, 10), members=members, seed=SEED
    )
    compute = resolve_compute(ComputeConfig(compile="off", execution="sequential"), "float32", ens, lambda: 0.0)
    state = initial_state(Recipe(method=method), compute.prepare(ens))
    torch.manual_seed(SEED)
    x, y = compute.inputs(torch.randn(BATCH, 3, 32, 32)), torch.randint(10, (BATCH,))

    def step() -> None:
        state.optimisers[0].zero_grad()
        method.loss(ens, x, y).loss.backward()
        state.optimisers[0].step()

    return step
