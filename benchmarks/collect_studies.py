"""What is kept of studies in results/: means, paired differences, and the numbers of each run.

featureflock reproduce cifar10 rank --scale laptop
python benchmarks/collect_studies.py reproductions/laptop/cifar10.json results/laptop_cifar10.json
python benchmarks/collect_studies.py reproductions/laptop/rank.json results/laptop_rank.json "r = 5 of 10"

Titles at the end add how the other rows differ from these, as if they were the baseline.
"""

import json
import sys
from pathlib import Path
from typing import Any

from featureflock.evaluation.statistics import paired_differences
from featureflock.methods import DeepEnsembles
from featureflock.report.formats import markdown
from featureflock.report.paper_comparison import beside_paper, columns_of
from featureflock.report.tables import ColumnHeader, StudyRun, Table, difference_cell, head_of


def kept(results: dict[str, Any], baselines: list[str]) -> dict[str, Any]:
    """All of it, and how rows differ from each of the baselines; those already compared are not compared again."""
    done = [DeepEnsembles.title]
    against = {}
    for title in baselines:
        done.append(title)
        against[title] = _differences(results, title, without=done)
    return {**results, "against": against}


def table(results: dict[str, Any]) -> str:
    """Our numbers beside the paper's, and a table of differences for each further baseline, in Markdown."""
    columns = columns_of(results["rows"][0]["ours"])
    parts = [beside_paper(results)]
    for baseline, found in results["against"].items():
        heads = (ColumnHeader(f"less {baseline}", numeric=False), *map(head_of, columns))
        lines = [
            (StudyRun(title), *(difference_cell(column, differences.get(column.key)) for column in columns))
            for title, differences in found.items()
        ]
        parts.append(Table("against", baseline, heads, tuple(lines)))
    return "\n\n".join(markdown(part).strip() for part in parts)


def _differences(results: dict[str, Any], baseline: str, without: list[str]) -> dict[str, dict[str, Any]]:
    """Of other rows from this one, paired by seed."""
    numbers: dict[str, dict[int, dict[str, float]]] = {}
    for run in results["runs"]:
        kept = {key: run["numbers"][key] for key in results["rows"][0]["ours"]}
        numbers.setdefault(run["title"], {})[run["seed"]] = kept
    others = {title: own for title, own in numbers.items() if title not in without}
    return {title: paired_differences(own, numbers[baseline]) for title, own in others.items()}


if __name__ == "__main__":
    source, target, *baselines = sys.argv[1:]
    results = kept(json.loads(Path(source).read_text()), baselines)
    Path(target).write_text(json.dumps(results, indent=1, allow_nan=False) + "\n")
    print(table(results))
