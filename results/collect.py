"""Prepare a file for results/ from the JSON that the commands write.

    python results/collect.py study reproductions/laptop/rank.json results/laptop_rank.json --against "r = 5 of 10"
    python results/collect.py evaluation featureflock-report/results.json results/cifar10_eight.json
    python results/collect.py evaluation out/results.json results/two_views.json --against feature-MAP
    python results/collect.py tuning tuning/tune-digits.json results/tuning_digits.json

study        adds paired differences vs further baselines
evaluation   leaves out the scores of single corrupted test sets and the curves, which are most of the file; adds the
             differences of feature-WGD vs another row, such as an ablation
tuning       leaves out most metrics of the candidates of `featureflock tune`; --against adds some

Then add the table to TABLES in write_tables.py.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from render import upgrade

from featureflock.evaluation.statistics import paired_differences
from featureflock.methods import DeepEnsembles

RUN_FIELDS = ("name", "method", "seed", "members", "summary", "recipe", "environment", "views")
SEARCH_METRICS = ("accuracy", "nll", "brier", "ece", "member_accuracy", "disagreement")


def study(results: dict[str, Any], baselines: list[str]) -> dict[str, Any]:
    """The study with the differences of its rows vs each baseline; pairs that were compared before are left out."""
    values: dict[str, dict[int, dict[str, float]]] = {}
    keys = dict.fromkeys(key for row in results["rows"] for key in row["ours"])
    for run in results["runs"]:
        shown = {key: run["numbers"][key] for key in keys if key in run["numbers"]}
        values.setdefault(run["title"], {})[run["seed"]] = shown
    compared, against = [DeepEnsembles.title], {}
    for baseline in baselines:
        compared.append(baseline)
        others = {title: by_seed for title, by_seed in values.items() if title not in compared}
        against[baseline] = {title: _differences(own, values[baseline]) for title, own in others.items()}
    return {**results, "against": against}


def evaluation(results: dict[str, Any], baselines: list[str]) -> dict[str, Any]:
    """The evaluation without its largest parts, with the differences of feature-WGD vs a baseline."""
    results = upgrade(results)
    small = {**results, "runs": [{key: run[key] for key in RUN_FIELDS if key in run} for run in results["runs"]]}
    if not baselines:
        return small
    (baseline,) = baselines
    summaries = {run["name"]: (run["seed"], run["summary"]) for run in results["runs"]}
    by_seed = {group["title"]: dict(summaries[run] for run in group["runs"]) for group in results["groups"]}
    compared = [
        {**group, "baseline": baseline, "differences": _differences(by_seed[group["title"]], by_seed[baseline])}
        for group in results["groups"]
        if group["method"] == "feature-WGD"
    ]
    return {**small, "against_ablation": compared}


def tuning(results: dict[str, Any], metrics: list[str]) -> dict[str, Any]:
    """A search of `featureflock tune` with these metrics of each run only."""
    shown = [*metrics, *SEARCH_METRICS]
    for method in results["methods"]:
        for candidate in method["candidates"]:
            candidate["seeds"] = {
                seed: {key: numbers[key] for key in shown if key in numbers}
                for seed, numbers in candidate["seeds"].items()
            }
    return results


def _differences(ours: dict[int, dict[str, float]], theirs: dict[int, dict[str, float]]) -> dict[str, dict[str, Any]]:
    return {key: difference._asdict() for key, difference in paired_differences(ours, theirs).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("study", "evaluation", "tuning"), help="what wrote the files")
    parser.add_argument("source", type=Path, help="JSON file to read")
    parser.add_argument("target", type=Path, help="file to write")
    parser.add_argument(
        "--against", nargs="+", default=[], metavar="TITLE", help="rows to compare with; for tuning, more metrics"
    )
    args = parser.parse_args()
    collect = {"study": study, "evaluation": evaluation, "tuning": tuning}[args.kind]
    content = collect(json.loads(args.source.read_text()), args.against)
    args.target.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")


if __name__ == "__main__":
    main()
