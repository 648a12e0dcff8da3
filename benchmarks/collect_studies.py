"""What is kept of studies in results/: means, paired differences, and the numbers of each run.

featureflock reproduce cifar10 text-or-code --scale laptop
python benchmarks/collect_studies.py reproductions/laptop/cifar10.json results/laptop_cifar10.json
python benchmarks/collect_studies.py reproductions/laptop/text-or-code.json results/text_or_code.json "no repulsion"

A title at the end adds the differences of all rows from that row, as if it were the baseline.
"""

import json
import sys
from pathlib import Path
from typing import Any

from featureflock.evaluation.comparing import paired_differences
from featureflock.report.beside_paper import beside_paper
from featureflock.report.formats import markdown


def kept(results: dict[str, Any], baselines: list[str]) -> dict[str, Any]:
    """All of it, and for each of the baselines the rows anew, with their differences from it."""
    return {**results, "against": [_against(results, title) for title in baselines]}


def table(results: dict[str, Any]) -> str:
    """Our numbers beside the paper's, and then the rows again for each further baseline, in Markdown."""
    parts = [beside_paper(results), *(beside_paper({**results, "rows": rows}) for rows in results["against"])]
    return "\n".join(map(markdown, parts)).strip()


def _against(results: dict[str, Any], baseline: str) -> list[dict[str, Any]]:
    """The other rows, each with its differences from this one, paired by seed."""
    numbers: dict[str, dict[int, dict[str, float]]] = {}
    for run in results["runs"]:
        numbers.setdefault(run["title"], {})[run["seed"]] = run["numbers"]
    found = []
    for row in results["rows"]:
        if row["title"] != baseline:
            differences = paired_differences(numbers[row["title"]], numbers[baseline])
            shown = {key: value for key, value in differences.items() if key in row["ours"]}
            found.append({**row, "paper": {}, "against": baseline, "differences": shown})
    return found


if __name__ == "__main__":
    source, target, *baselines = sys.argv[1:]
    results = kept(json.loads(Path(source).read_text()), baselines)
    Path(target).write_text(json.dumps(results, indent=1, allow_nan=False) + "\n")
    print(table(results))
