"""How redundant the members of trained runs are: I(Z_i; Z_j | Y) of their features on the test set, mean over pairs.

The features are those that the heads see; of DICE's Gaussian ones, the means. The estimate misses what discriminators
cannot learn from seven tenths of the test set: compare methods by it, rather than take it for the truth.

    python benchmarks/redundancy.py RUN [RUN …] --json results/cifar10_eight_redundancy.json
"""

import argparse
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from measuring import write_json

from featureflock.evaluation import conditional_redundancy
from featureflock.evaluation.runs import TrainedRun, read_run
from featureflock.methods import DICE

SEED = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of finished runs of several members")
    parser.add_argument("--json", type=Path, help="where to write the results")
    args = parser.parse_args()
    runs = [_measured(read_run(folder)) for folder in args.runs]
    rows = []
    for method in dict.fromkeys(run["method"] for run in runs):
        found = [run["redundancy"] for run in runs if run["method"] == method]
        deviation = stdev(found) if len(found) > 1 else 0.0
        rows.append({"method": method, "seeds": len(found), "mean": mean(found), "sd": deviation})
    print(table(rows))
    write_json(args.json, {"seed_of_the_estimate": SEED, "rows": rows, "runs": runs})


def table(rows: list[dict[str, Any]]) -> str:
    """The results in Markdown."""
    lines = ["| method | seeds | redundancy, nats |", "|---|---:|---:|"]
    return "\n".join(lines + [f"| {r['method']} | {r['seeds']} | {r['mean']:.2f} ± {r['sd']:.2f} |" for r in rows])


@torch.no_grad()
def _measured(run: TrainedRun) -> dict[str, Any]:
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
