"""The price of a method: a training step over a step of Deep Ensembles with as many members, in time and in products.

Batches of 128 pictures of 32×32, all threads, the memory format that the training loop chooses. The methods take turns,
in another order in each round, each with an ensemble and optimisers of its own. The median over the rounds is taken of
each one's time over that of Deep Ensembles in the same round; the least and the largest ratio show how much the machine
disturbs it. Products (of matrices and convolutions, forward and backward) are counted: they do not depend on a machine.

    python benchmarks/methods.py [--quick] [--json results/benchmark_methods.json]
"""

import argparse
import random
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from measuring import seconds, write_json
from torch.utils.flop_counter import FlopCounterMode

from featureflock.methods import ADP, DICE, DeepEnsembles, FeatureMAP, FeatureWGD, FunctionWGD, Method, WeightWGD
from featureflock.models import CifarResNetConfig, MLPConfig, ModelConfig, WideResNetConfig
from featureflock.training import Recipe, ResolvedCompute
from featureflock.training.state import fresh_state

SEED = 0
BATCH = 128
METHODS = (DeepEnsembles(), FeatureMAP(), FeatureWGD(), FunctionWGD(), WeightWGD(), ADP(), DICE())


class RunGroup(NamedTuple):
    name: str
    model: ModelConfig
    members: int
    classes: int
    steps: int = 1
    """How many are timed together."""


PERCEPTRON = RunGroup("128-64-32 × 5, 10 classes", MLPConfig(), 5, 10, 20)
SMALL = RunGroup("WRN-10-1 × 5, 10 classes", WideResNetConfig(10, 1), 5, 10)
TABLE_5 = RunGroup("ResNet-32 × 4, 100 classes", CifarResNetConfig(32), 4, 100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a step of the perceptron")
    parser.add_argument("--rounds", type=int, default=9, help="how often each time is taken")
    parser.add_argument("--json", type=Path, help="where to write the results")
    args = parser.parse_args()
    rounds = 1 if args.quick else args.rounds
    settings = (PERCEPTRON._replace(steps=1),) if args.quick else (PERCEPTRON, SMALL, TABLE_5)
    rows = [row for setting in settings for row in _compare(setting, rounds)]
    print(table(rows))
    about = {"seeds": [SEED], "batch": BATCH, "rounds": rounds, "threads": torch.get_num_threads()}
    write_json(args.json, about | {"rows": rows})


def table(rows: list[dict[str, Any]]) -> str:
    """The results in Markdown: a column for each setting."""
    settings = list(dict.fromkeys(row["setting"] for row in rows))
    heads = [f"{setting}: {what}" for setting in settings for what in ("time", "products")]
    lines = [f"| method | {' | '.join(heads)} |", f"|---|{'---:|' * len(heads)}"]
    for method in METHODS:
        cells = [method.title]
        for row in rows:
            if row["method"] == method.title:
                least, most = min(row["time_by_round"]), max(row["time_by_round"])
                cells += [f"{row['time']:.2f} ({least:.2f} to {most:.2f})", f"{row['products']:.3f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _compare(setting: RunGroup, rounds: int) -> list[dict[str, Any]]:
    steps = {method.title: _training(setting, method) for method in METHODS}
    products = {name: _products(step) for name, step in steps.items()}
    taken: dict[str, list[float]] = {name: [] for name in steps}
    chance = random.Random(SEED)
    for _ in range(rounds):
        for name in chance.sample(list(steps), len(steps)):
            taken[name].append(seconds(lambda step=steps[name]: [step() for _ in range(setting.steps)]))
    base = DeepEnsembles.title
    ratios = {name: [a / b for a, b in zip(taken[name], taken[base], strict=True)] for name in steps}
    return [
        {
            "setting": setting.name,
            "method": name,
            "seconds": median(taken[name]) / setting.steps,
            "time": median(ratios[name]),
            "time_by_round": ratios[name],
            "products": products[name] / products[base],
        }
        for name in steps
    ]


def _products(step: Callable[[], None]) -> int:
    with FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops()


def _training(setting: RunGroup, method: Method) -> Callable[[], None]:
    setup = ResolvedCompute("cpu", "float32", True, False, "sequential", torch.get_num_threads())
    ens = setup.prepare(
        method.build(
            lambda: setting.model.extractor((3, 32, 32)),
            lambda: setting.model.head(setting.model.extractor((3, 32, 32)), setting.classes),
            members=setting.members,
            seed=SEED,
            train_size=50_000,
        )
    )
    state = fresh_state(Recipe(method=method), ens)
    torch.manual_seed(SEED)
    x, y = setup.inputs(torch.randn(BATCH, 3, 32, 32)), torch.randint(setting.classes, (BATCH,))

    def step() -> None:
        for optimiser in state.optimisers:
            optimiser.zero_grad()
        method.loss(ens, x, y).loss.backward()
        for optimiser in state.optimisers:
            optimiser.step()

    return step


if __name__ == "__main__":
    main()
