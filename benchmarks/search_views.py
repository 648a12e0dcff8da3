"""Does prior, subspace or length of training change which view of dominoes members rely on? Asked of pairs that are
held out of the training pairs, never of the test set; one seed. Also what a network learns that is given one view only.

python benchmarks/search_views.py search results/dominoes_search.json
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from featureflock.core.kernels import RBF
from featureflock.core.priors import Cauchy, Uniform
from featureflock.data import CustomData, Splits, TensorExamples, only_view
from featureflock.evaluation.metrics.classification import average, scores
from featureflock.evaluation.predictions import Predictor
from featureflock.evaluation.run_metrics import views_of
from featureflock.evaluation.runs import read_run
from featureflock.methods import DeepEnsembles, FeatureMAP, FeatureWGD, Single
from featureflock.studies import STUDIES
from featureflock.training import Recipe, train
from featureflock.utils.provenance import provenance

HELD_OUT = 1_000
OFFICIAL = RBF(bandwidth="official")


def settings() -> dict[str, Recipe]:
    """All with seed 100, which the study does not have."""
    study = STUDIES["dominoes"]
    base = replace(study.laptop(study.rows[1].recipe), seed=100, validation=HELD_OUT)
    methods = {
        "Deep Ensembles": DeepEnsembles(),
        "feature-MAP, 1e-3": FeatureMAP(Cauchy(1e-3)),
        "feature-WGD, uniform prior": FeatureWGD(Uniform()),
        "feature-WGD, 1e-3": FeatureWGD(Cauchy(1e-3)),
        "feature-WGD, 1e-1": FeatureWGD(Cauchy(1e-1)),
        "feature-WGD, 1e-3, authors' code": FeatureWGD(Cauchy(1e-3), OFFICIAL, subspace="weakest"),
    }
    found = {name: replace(base, method=method) for name, method in methods.items()}
    found["feature-WGD, 1e-3, 45 epochs"] = replace(base, method=FeatureWGD(Cauchy(1e-3)), epochs=45)
    return found


def measure(recipe: Recipe, splits: Splits, folder: Path) -> dict[str, Any]:
    """Of a run, which is trained if it is not there, on the held-out pairs."""
    if not (folder / "result.json").is_file():
        train(recipe, folder, resume=True)
    run, held_out = read_run(folder), splits.validation
    assert isinstance(held_out, TensorExamples)
    predictor = Predictor(run)
    whole = predictor.log_probs(held_out)
    views = {view.name: predictor.log_probs(only_view(held_out, view)) for view in splits.views}
    return {
        "accuracy": scores(average(whole.log_probs), whole.labels).accuracy,
        "train_accuracy": run.curves[-1]["accuracy"] / 100,
        "train_cross_entropy": run.curves[-1]["cross_entropy"],
        **views_of(whole, views),
    }


def trained_alone(recipe: Recipe, splits: Splits, folder: Path) -> dict[str, float]:
    """By view: how much of the held-out pairs one network gets right that sees nothing else in training either."""
    found = {}
    for view in splits.views:
        assert isinstance(splits.train, TensorExamples)
        assert isinstance(splits.validation, TensorExamples)
        data = CustomData(only_view(splits.train, view), only_view(splits.validation, view))
        own = replace(recipe, data=data, method=Single(), members=1, subset=None, validation=0)
        found[view.name] = train(own, folder / view.name, resume=True)["test"]["accuracy"] / 100
    return found


def table(rows: list[dict[str, Any]]) -> str:
    first, second = rows[0]["only"]
    heads = [
        "setting",
        "fitted, %",
        "accuracy, %",
        f"only {first}, %",
        f"only {second}, %",
        f"members, only {second}, %",
        f"members' share of the {first}",
        "difference by input",
        "on average",
    ]
    lines = ["| " + " | ".join(heads) + " |", "|---" + "|---:" * (len(heads) - 1) + "|"]
    for row in rows:
        alone = [100 * row["only"][view]["raw"]["accuracy"] for view in (first, second)]
        members, shares = row["only"][second]["member_accuracy"], row["member_share"]
        numbers = [f"{100 * row['train_accuracy']:.1f}", f"{100 * row['accuracy']:.1f}", *(f"{a:.1f}" for a in alone)]
        numbers += [f"{100 * min(members):.0f} to {100 * max(members):.0f}", f"{min(shares):.2f} to {max(shares):.2f}"]
        numbers += [f"{row['difference_by_input']:.3f}", f"{row['difference_on_average']:.3f}"]
        lines.append("| " + " | ".join([row["setting"], *numbers]) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    torch.set_num_threads(1)
    runs, target = map(Path, sys.argv[1:])
    rows = []
    splits = next(iter(settings().values())).splits()
    for place, (name, recipe) in enumerate(settings().items()):
        rows.append({"setting": name, **measure(recipe, splits, runs / f"{place}")})
        print(table(rows[-1:]).splitlines()[-1], flush=True)
    content = {
        "held_out": HELD_OUT,
        "seed": recipe.seed,
        "trained_alone": trained_alone(settings()["Deep Ensembles"], splits, runs),
        "rows": rows,
        "provenance": provenance(),
    }
    target.write_text(json.dumps(content, indent=1) + "\n")
    print(table(rows), content["trained_alone"])
