"""Several searches of `featureflock tune --reference` in one table: where feature-WGD is ahead on held-out examples.

featureflock tune cifar10-laptop --batch 64 --learning-rate 0.1 --precisions 1e-2 3e-2 --reference --out batch-64
python benchmarks/collect_searches.py */tune-cifar10-laptop.json results/laptop_search.json
"""

import json
import sys
from pathlib import Path
from typing import Any

from featureflock.evaluation.statistics import mean
from featureflock.report.paper_comparison import columns_of
from featureflock.report.tables import difference_cell
from featureflock.utils.provenance import provenance

SHOWN = ("accuracy", "nll", "brier", "ece", "member_accuracy", "disagreement")


def rows(searches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each search what all runs have in common, then Deep Ensembles and the candidates' differences from them."""
    found = []
    for results in searches:
        recipe = results["runs"][0]["recipe"]
        fitted: dict[str, list[float]] = {}
        for run in results["runs"]:
            if "train_accuracy" in run:  # searches of an earlier version did not keep it
                fitted.setdefault(run["title"], []).append(run["train_accuracy"])
        found += [
            {
                "pictures": recipe["subset"],
                "epochs": recipe["epochs"],
                "batch": recipe["batch"],
                "title": row["title"],
                "seeds": row["ours"]["nll"]["seeds"],
                "train_accuracy": mean(fitted[row["title"]]).mean if fitted else None,
                "ours": {key: row["ours"][key] for key in SHOWN},
                "differences": {key: row["differences"][key] for key in SHOWN} if row.get("differences") else None,
            }
            for row in sorted(results["rows"], key=lambda row: row.get("differences") is not None)
        ]
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """Deep Ensembles with their numbers, then the differences of the candidates from them, in Markdown."""
    columns = columns_of(SHOWN)
    names = ("pictures", "epochs", "batch", "", "seeds", "fitted, %", *(column.title for column in columns))
    lines = [f"| {' | '.join(names)} |", "|" + "---:|" * len(names)]
    for row in rows:
        if row["differences"] is None:
            study_runs = [column.text(row["ours"][column.key]["mean"]) for column in columns]
        else:
            study_runs = [difference_cell(column, row["differences"][column.key]).plain for column in columns]
        setting = (f"{row['pictures']:,}", row["epochs"], row["batch"], row["title"], row["seeds"])
        fitted = "" if row["train_accuracy"] is None else f"{100 * row['train_accuracy']:.1f}"
        lines.append("| " + " | ".join(map(str, (*setting, fitted, *study_runs))) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    *sources, target = map(Path, sys.argv[1:])
    found = rows([json.loads(source.read_text()) for source in sources])
    target.write_text(json.dumps({"rows": found, "provenance": provenance()}, indent=1, allow_nan=False) + "\n")
    print(table(found))
