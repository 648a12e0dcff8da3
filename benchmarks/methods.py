"""Cost of each method: a training step relative to Deep Ensembles with the same number of members, in time and FLOPs.

Batches of 128 images of 32×32, all threads, the memory format that training uses. The methods take turns, in a new
order each round, each with its own ensemble and optimisers. Reported is the median over rounds of the time relative to
Deep Ensembles in the same round, and the range, which shows how noisy the machine is. FLOPs (matrix products and
convolutions, forward and backward) are counted and do not depend on the machine.

    python benchmarks/methods.py [--quick] [--json results/benchmark_methods.json]
"""

import argparse
import random
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from harness import seconds, write_json
from torch.utils.flop_counter import FlopCounterMode

from featureflock.methods import ADP, DICE, DeepEnsembles, FeatureMAP, FeatureWGD, FunctionWGD, Method, WeightWGD
from featureflock.models import CifarResNetConfig, MLPConfig, ModelConfig, WideResNetConfig
from featureflock.training import Recipe
from featureflock.training.compute import ResolvedCompute
from featureflock.training.state import initial_state

SEED = 0
BATCH = 128
METHODS = (DeepEnsembles(), FeatureMAP(), FeatureWGD(), FunctionWGD(), WeightWGD(), ADP(), DICE())


class Configuration(NamedTuple):
    name: str
    model: ModelConfig
    members: int
    classes: int
    steps: int = 1
    """Steps timed together."""


PERCEPTRON = Configuration("128-64-32 × 5, 10 classes", MLPConfig(), 5, 10, 20)
SMALL = Configuration("WRN-10-1 × 5, 10 classes", WideResNetConfig(10, 1), 5, 10)
TABLE_4 = Configuration("ResNet-32 × 4, 100 classes", CifarResNetConfig(32), 4, 100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one step of the perceptron")
    parser.add_argument("--rounds", type=int, default=9, help="number of timed rounds")
    parser.add_argument("--json", type=Path, help="JSON file to write the results to")
    args = parser.parse_args()
    rounds = 1 if args.quick else args.rounds
    configurations = (PERCEPTRON._replace(steps=1),) if args.quick else (PERCEPTRON, SMALL, TABLE_4)
    rows = [row for configuration in configurations for row in _compare(configuration, rounds)]
    print(table(rows))
    about = {"seeds": [SEED], "batch": BATCH, "rounds": rounds, "threads": torch.get_num_threads()}
    write_json(args.json, about | {"rows": rows})


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown table with two columns for each configuration."""
    configurations = list(dict.fromkeys(row["configuration"] for row in rows))
    heads = [f"{configuration}: {what}" for configuration in configurations for what in ("time", "FLOPs")]
    lines = [f"| method | {' | '.join(heads)} |", f"|---|{'---:|' * len(heads)}"]
    for method in METHODS:
        cells = [method.title]
        for row in rows:
            if row["method"] == method.title:
                low, high = min(row["time_by_round"]), max(row["time_by_round"])
                cells += [f"{row['time']:.2f} ({low:.2f} to {high:.2f})", f"{row['flops']:.3f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _compare(configuration: Configuration, rounds: int) -> list[dict[str, Any]]:
    steps = {method.title: _training(configuration, method) for method in METHODS}
    flops = {name: _flops(step) for name, step in steps.items()}
    taken: dict[str, list[float]] = {name: [] for name in steps}
    order = random.Random(SEED)
    for _ in range(rounds):
        for name in order.sample(list(steps), len(steps)):
            taken[name].append(seconds(lambda step=steps[name]: [step() for _ in range(configuration.steps)]))
    base = DeepEnsembles.title
    ratios = {name: [a / b for a, b in zip(taken[name], taken[base], strict=True)] for name in steps}
    return [
        {
            "configuration": configuration.name,
            "method": name,
            "seconds": median(taken[name]) / configuration.steps,
            "time": median(ratios[name]),
            "time_by_round": ratios[name],
            "flops": flops[name] / flops[base],
        }
        for name in steps
    ]


def _flops(step: Callable[[], None]) -> int:
    with FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops()


def _training(configuration: Configuration, method: Method) -> Callable[[], None]:
    compute = ResolvedCompute("cpu", "float32", True, False, "sequential", torch.get_num_threads())
    ens = compute.prepare(
        method.build(
            lambda: configuration.model.extractor((3, 32, 32)),
            lambda: configuration.model.head(configuration.model.extractor((3, 32, 32)), configuration.classes),
            members=configuration.members,
            seed=SEED,
            train_size=50_000,
        )
    )
    state = initial_state(Recipe(method=method), ens)
    torch.manual_seed(SEED)
    x, y = compute.inputs(torch.randn(BATCH, 3, 32, 32)), torch.randint(configuration.classes, (BATCH,))

    def step() -> None:
        for optimiser in state.optimisers:
            optimiser.zero_grad()
        method.loss(ens, x, y).loss.backward()
        for optimiser in state.optimisers:
            optimiser.step()

    return step


if __name__ == "__main__":
    main()
