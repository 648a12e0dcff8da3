"""Redundancy of the members of trained runs: I(Z_i; Z_j | Y) of their features on the test set, mean over pairs.

The features are the inputs of the heads; for DICE's Gaussian features, the means. The discriminators learn from 70 % of
the test set, and the estimate misses what they do not learn: use it to compare methods, not as an absolute value.

    python benchmarks/redundancy.py RUN [RUN …] --json results/cifar10_eight_redundancy.json
"""

import argparse
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from harness import write_json

from featureflock.evaluation import conditional_redundancy
from featureflock.evaluation.runs import TrainedRun, read_run
from featureflock.methods import DICE

SEED = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of finished runs with more than one member")
    parser.add_argument("--json", type=Path, help="JSON file to write the results to")
    args = parser.parse_args()
    runs = [_measure(read_run(folder)) for folder in args.runs]
    rows = []
    for method in dict.fromkeys(run["method"] for run in runs):
        values = [run["redundancy"] for run in runs if run["method"] == method]
        deviation = stdev(values) if len(values) > 1 else 0.0
        rows.append({"method": method, "seeds": len(values), "mean": mean(values), "sd": deviation})
    print(table(rows))
    write_json(args.json, {"estimate_seed": SEED, "rows": rows, "runs": runs})


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown table of the results."""
    lines = ["| method | seeds | redundancy, nats |", "|---|---:|---:|"]
    return "\n".join(lines + [f"| {r['method']} | {r['seeds']} | {r['mean']:.2f} ± {r['sd']:.2f} |" for r in rows])


@torch.no_grad()
def _measure(run: TrainedRun) -> dict[str, Any]:
    test, ens = run.data().load().test, run.load_ensemble().eval()
    batches = list(test.batches(torch.arange(len(test)).split(500), torch.device("cpu")))
    features = torch.cat([ens.features(batch.x) for batch in batches], 1)
    if run.method == DICE.title:
        features = features[..., : features.shape[-1] // 2]
    i_nn = conditional_redundancy(features, torch.cat([batch.y for batch in batches]), seed=SEED)
    n = len(i_nn)
    redundancy = float(i_nn.sum() / (n * (n - 1)))
    print(f"{run}: {redundancy:.3f}", flush=True)
    return {"run": str(run), "method": run.method, "seed": run.seed, "redundancy": redundancy}


if __name__ == "__main__":
    main()
