"""What is kept of an evaluation in results/: all means and differences, and the numbers of each run.

python benchmarks/collect_evaluation.py featureflock-report/results.json results/cifar10_small_evaluation.json
"""

import json
import sys
from pathlib import Path
from typing import Any

from featureflock.report.formats import markdown
from featureflock.report.tables import comparison, differences

OF_A_RUN = ("folder", "method", "seed", "members", "summary", "recipe", "environment")


def kept(results: dict[str, Any]) -> dict[str, Any]:
    """Without the metrics of each corrupted set, temperatures and curves, which are most of the file."""
    runs = [{name: run[name] for name in OF_A_RUN} for run in results["runs"]]
    return {**results, "runs": runs}


def table(results: dict[str, Any]) -> str:
    """The comparison and the paired differences, in Markdown."""
    paired = differences(results)
    tables = [comparison(results), *([paired] if paired is not None else [])]
    return "\n".join(markdown(each) for each in tables).strip()


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    results = kept(json.loads(source.read_text()))
    target.write_text(json.dumps(results, indent=1, allow_nan=False) + "\n")
    print(table(results))
