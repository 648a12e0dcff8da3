"""What is kept of a study of views in results/: all means, paired differences and each member's numbers.

featureflock reproduce two-views --scale laptop --seeds 5
python benchmarks/collect_views.py reproductions/laptop/two-views/results.json results/two_views.json
python benchmarks/collect_views.py --draw results/two_views.json docs/images/two_views.svg

What repulsion adds is the difference of feature-WGD from feature-MAP, which has the same shared head and prior.
"""

import json
import sys
from pathlib import Path
from typing import Any

import collect_evaluation

from featureflock.evaluation.statistics import paired_difference
from featureflock.report.formats import markdown
from featureflock.report.panels import alone
from featureflock.report.rows import ReportRow
from featureflock.report.views import view_figure, view_tables

ABLATION = "feature-MAP"


def kept(results: dict[str, Any]) -> dict[str, Any]:
    """As of any evaluation, with what is known of views, and the differences from the ablation."""
    small = collect_evaluation.kept(results)
    for run, whole in zip(small["runs"], results["runs"], strict=True):
        run["views"] = whole["views"]
    return {**small, "against_ablation": _against(results, ABLATION)}


def table(results: dict[str, Any]) -> str:
    """Means, differences from Deep Ensembles, and differences from the ablation, in Markdown."""
    parts = [markdown(part) for part in view_tables(results) if part is not None]
    *_, paired = view_tables({**results, "settings": results["against_ablation"]})
    assert paired is not None
    note = f"Differences from {ABLATION} on the same seeds, likewise: what the repulsion adds."
    return "\n".join([*parts, markdown(paired).partition("\n\n")[0], "", note])


def picture(results: dict[str, Any]) -> str:
    """Each member by what it can do with one view only, as SVG."""
    runs = {run["folder"]: run for run in results["runs"]}
    shown = [
        ReportRow(s["title"], k, s, [], [runs[run] for run in s["runs"]]) for k, s in enumerate(results["settings"])
    ]
    figure = view_figure(shown)
    assert figure is not None
    return alone(figure)


def _against(results: dict[str, Any], title: str) -> list[dict[str, Any]]:
    """Settings of feature-WGD, with their differences from another setting, paired by seed."""
    summaries = {run["folder"]: (run["seed"], run["summary"]) for run in results["runs"]}
    by_seed = {s["title"]: dict(summaries[run] for run in s["runs"]) for s in results["settings"]}
    found = []
    for s in results["settings"]:
        if s["method"] == "feature-WGD":
            differences = {
                key: paired_difference(
                    {seed: summary[key] for seed, summary in by_seed[s["title"]].items()},
                    {seed: summary[key] for seed, summary in by_seed[title].items()},
                )
                for key in s["metrics"]
            }
            pairs = {key: value._asdict() for key, value in differences.items() if value is not None}
            found.append({**s, "against": title, "differences": pairs})
    return found


if __name__ == "__main__":
    source, target = map(Path, sys.argv[-2:])
    content = json.loads(source.read_text())
    if "--draw" in sys.argv:
        target.write_text(picture(content))
    else:
        results = kept(content)
        target.write_text(json.dumps(results, indent=1, allow_nan=False) + "\n")
        print(table(results))
