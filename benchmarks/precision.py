"""Quality of training in bfloat16 against float32, on held-out images of CIFAR-10 with the same seeds.

    python benchmarks/precision.py runs/precision --json results/precision.json

Two members of each network, 20,000 training images, 4 epochs, not compiled. The test set is not used. Runs that are
finished in the folder are not trained again.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from featureflock.data import HeldOut
from featureflock.evaluation import EvaluationProtocol, evaluate_runs
from featureflock.evaluation.statistics import mean, paired_differences
from featureflock.models import WideResNetConfig
from featureflock.training import RECIPES, ComputeConfig, Recipe, train
from featureflock.training.recipe import Precision
from featureflock.utils.provenance import provenance

SEEDS = range(100, 105)
PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16")
KEYS = ("accuracy", "nll", "brier", "ece")
COMPUTE = ComputeConfig(compile="off")


_FAST = replace(RECIPES["cifar10-fast"].recipe, members=2, epochs=4, subset=20_000)
NETWORKS = {
    "fast CNN × 2": _FAST,  # features are maxima over pixels
    "WRN-10-1 × 2": replace(_FAST, model=WideResNetConfig(10, 1), learning_rate=0.1, weight_decay=5e-4),  # averages
}


def compare(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Metrics by precision, and the paired difference of bfloat16 and float32."""
    values: dict[str, dict[int, dict[str, float]]] = {precision: {} for precision in PRECISIONS}
    for seed in SEEDS:
        for precision in PRECISIONS:
            data = HeldOut(recipe.data, 5_000, seed)
            run = folder / f"{precision}-seed{seed}"
            train(replace(recipe, data=data, precision=precision, seed=seed), run, compute=COMPUTE, resume=True)
            protocol = EvaluationProtocol(corruptions=(), ood=(), maps=0)
            (result,) = evaluate_runs([run], protocol, data=data, compute=COMPUTE).results.runs
            values[precision][seed] = {key: result.summary[key] for key in KEYS}
            print(precision, seed, values[precision][seed], flush=True)
    float32, bfloat16 = (values[precision] for precision in PRECISIONS)
    return {
        "means": {
            precision: {key: mean([one[key] for one in runs.values()])._asdict() for key in KEYS}
            for precision, runs in values.items()
        },
        "differences": {key: d._asdict() for key, d in paired_differences(bfloat16, float32).items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder for the runs")
    parser.add_argument("--json", type=Path, help="JSON file to write the results to")
    args = parser.parse_args()
    results = {
        "what": "bfloat16 minus float32, 4 epochs of 20,000 images, 5,000 held-out images",
        "seeds": [*SEEDS],
        "networks": {name: compare(recipe, args.folder / name.split()[0]) for name, recipe in NETWORKS.items()},
        "provenance": provenance(),
    }
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
