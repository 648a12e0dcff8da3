"""Collect finished runs of `featureflock train` into one JSON: each run's recipe, curves and result, and mean ± sd.

python benchmarks/collect_runs.py RUN [RUN …] --json results/cifar10_small.json
"""

import argparse
import json
from pathlib import Path
from statistics import mean, stdev
from typing import Any

CURVE = ("epoch", "learning_rate", "cross_entropy", "accuracy")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of finished runs")
    parser.add_argument("--json", type=Path, required=True, help="where to write the results")
    args = parser.parse_args()
    runs = [_read(folder) for folder in args.runs]
    by_method: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        by_method.setdefault(run["recipe"]["method"]["class"], []).append(run)
    summary = {method: _summary(group) for method, group in by_method.items()}
    print(table(summary))
    args.json.write_text(json.dumps({"summary": summary, "runs": runs}, indent=1) + "\n")


def table(summary: dict[str, Any]) -> str:
    """The summary in Markdown."""
    lines = ["| method | seeds | test accuracy, % | members' mean, % | NLL |", "|---|---:|---:|---:|---:|"]
    for method, row in summary.items():
        accuracy, members, nll = row["accuracy"], row["member_accuracy"], row["nll"]
        cells = [
            method,
            str(len(row["seeds"])),
            *(f"{value['mean']:.2f} ± {value['sd']:.2f}" for value in (accuracy, members)),
            f"{nll['mean']:.4f} ± {nll['sd']:.4f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _read(folder: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    curves = {name: [line[name] for line in lines] for name in CURVE}
    for part in ("validation", "test"):
        if all(part in line for line in lines):
            curves |= {f"{part}_{name}": [line[part][name] for line in lines] for name in ("accuracy", "nll")}
    recipe, environment, result = (
        json.loads((folder / f"{name}.json").read_text()) for name in ("recipe", "environment", "result")
    )
    return {"recipe": recipe, "environment": environment, "curves": curves, "result": result}


def _summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    def spread(values: list[float]) -> dict[str, float]:
        return {"mean": mean(values), "sd": stdev(values) if len(values) > 1 else 0.0}

    members = [mean(run["result"]["test"]["member_accuracy"]) for run in runs]
    return {
        "seeds": [run["recipe"]["seed"] for run in runs],
        "accuracy": spread([run["result"]["test"]["accuracy"] for run in runs]),
        "nll": spread([run["result"]["test"]["nll"] for run in runs]),
        "member_accuracy": spread(members),
        "seconds": spread([run["result"]["seconds"] for run in runs]),
    }


if __name__ == "__main__":
    main()
