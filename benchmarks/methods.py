"""The price of a method: the time of a training step over that of a step of Deep Ensembles with as many members.

Batches of 128 pictures of 32×32, all threads, the memory format that the training loop chooses. The methods take turns,
each with an ensemble and optimisers of its own, and the median over the rounds is taken of each one's time over that of
Deep Ensembles in the same round. The order of the methods is another one in each round.

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

from featureflock.methods import ADP, DICE, DeepEnsembles, FeatureMAP, FeatureWGD, FunctionWGD, Method, WeightWGD
from featureflock.models import WRN, Architecture, ResNetCIFAR
from featureflock.training import Recipe, Setup
from featureflock.training.state import fresh_state

SEED = 0
BATCH = 128
METHODS = (DeepEnsembles(), FeatureMAP(), FeatureWGD(), FunctionWGD(), WeightWGD(), ADP(), DICE())


class Setting(NamedTuple):
    name: str
    model: Architecture
    members: int
    classes: int


SMALL = Setting("WRN-10-1 × 5, 10 classes", WRN(10, 1), 5, 10)
TABLE_5 = Setting("ResNet-32 × 4, 100 classes", ResNetCIFAR(32), 4, 100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the small network, one round")
    parser.add_argument("--rounds", type=int, default=9, help="how often each time is taken")
    parser.add_argument("--json", type=Path, help="where to write the results")
    args = parser.parse_args()
    rounds = 1 if args.quick else args.rounds
    rows = [row for setting in ((SMALL,) if args.quick else (SMALL, TABLE_5)) for row in _compare(setting, rounds)]
    print(table(rows))
    about = {"seeds": [SEED], "batch": BATCH, "rounds": rounds, "threads": torch.get_num_threads()}
    write_json(args.json, about | {"rows": rows})


def table(rows: list[dict[str, Any]]) -> str:
    """The results in Markdown: a column for each setting."""
    settings = list(dict.fromkeys(row["setting"] for row in rows))
    lines = [f"| method | {' | '.join(settings)} |", f"|---|{'---:|' * len(settings)}"]
    for method in METHODS:
        cells = [method.title]
        for row in rows:
            if row["method"] == method.title:
                ratios = row["over_deep_ensembles_by_round"]
                cells.append(f"{row['over_deep_ensembles']:.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _compare(setting: Setting, rounds: int) -> list[dict[str, Any]]:
    steps = {method.title: _training(setting, method) for method in METHODS}
    for step in steps.values():
        seconds(step)  # the first allocates memory
    taken: dict[str, list[float]] = {name: [] for name in steps}
    chance = random.Random(SEED)
    for _ in range(rounds):
        for name in chance.sample(list(steps), len(steps)):
            taken[name].append(seconds(steps[name]))
    rows = []
    for name in steps:
        ratios = [a / b for a, b in zip(taken[name], taken[DeepEnsembles.title], strict=True)]
        rows.append(
            {
                "setting": setting.name,
                "method": name,
                "seconds": median(taken[name]),
                "over_deep_ensembles": median(ratios),
                "over_deep_ensembles_by_round": ratios,
            }
        )
    return rows


def _training(setting: Setting, method: Method) -> Callable[[], None]:
    setup = Setup("cpu", "float32", True, False, "sequential", torch.get_num_threads())
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
        method.loss(ens, x, y).backward()
        for optimiser in state.optimisers:
            optimiser.step()

    return step


if __name__ == "__main__":
    main()
