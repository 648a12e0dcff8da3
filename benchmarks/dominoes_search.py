"""Do the prior, the subspace or the length of training change which view of dominoes members rely on?

Measured on pairs held out of the training pairs, never on the test set; one seed. Also trains one network on each view
alone.

    python benchmarks/dominoes_search.py search results/dominoes_search.json
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
from featureflock.evaluation.predictions import Predictions, Predictor
from featureflock.evaluation.run_predictions import RunPredictions, SetPredictions
from featureflock.evaluation.runs import read_run
from featureflock.methods import DeepEnsembles, FeatureMAP, FeatureWGD, Single
from featureflock.studies import STUDIES
from featureflock.training import Recipe, train
from featureflock.utils.provenance import provenance
from featureflock.utils.serialization import to_json

HELD_OUT = 1_000
OFFICIAL = RBF(bandwidth="official")


def recipes() -> dict[str, Recipe]:
    """The recipes to compare, with a seed that the study does not use."""
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
    recipes = {name: replace(base, method=method) for name, method in methods.items()}
    recipes["feature-WGD, 1e-3, 45 epochs"] = replace(base, method=FeatureWGD(Cauchy(1e-3)), epochs=45)
    return recipes


def measure(recipe: Recipe, splits: Splits, folder: Path) -> dict[str, Any]:
    """Scores of a run on the held-out pairs; the run is trained if it does not exist."""
    if not (folder / "result.json").is_file():
        train(recipe, folder, resume=True)
    run, held_out = read_run(folder), splits.validation
    assert isinstance(held_out, TensorExamples)
    predictor = Predictor(run)
    full = predictor.log_probs(held_out)
    views = {view.name: _in_memory(predictor.log_probs(only_view(held_out, view))) for view in splits.views}
    return {
        "accuracy": scores(average(full.log_probs), full.labels).accuracy,
        "train_accuracy": run.curves[-1]["accuracy"] / 100,
        "train_cross_entropy": run.curves[-1]["cross_entropy"],
        **to_json(RunPredictions(_in_memory(full), views).view_results, tag=False),
    }


def _in_memory(predictions: Predictions) -> SetPredictions:
    return SetPredictions(lambda: (predictions.log_probs, predictions.labels))


def trained_alone(recipe: Recipe, splits: Splits, folder: Path) -> dict[str, float]:
    """Accuracy on the held-out pairs of one network trained on this view alone, by view."""
    accuracies = {}
    for view in splits.views:
        assert isinstance(splits.train, TensorExamples)
        assert isinstance(splits.validation, TensorExamples)
        data = CustomData(only_view(splits.train, view), only_view(splits.validation, view))
        single = replace(recipe, data=data, method=Single(), members=1, subset=None, validation=0)
        accuracies[view.name] = train(single, folder / view.name, resume=True)["test"]["accuracy"] / 100
    return accuracies


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown table of the results."""
    first, second = rows[0]["only"]
    heads = [
        "method",
        "training accuracy, %",
        "accuracy, %",
        f"only {first}, %",
        f"only {second}, %",
        f"members, only {second}, %",
        f"fraction {first}, members",
        "difference by input",
        "difference on average",
    ]
    lines = ["| " + " | ".join(heads) + " |", "|---" + "|---:" * (len(heads) - 1) + "|"]
    for row in rows:
        alone = [100 * row["only"][view]["raw"]["accuracy"] for view in (first, second)]
        members, shares = row["only"][second]["member_accuracy"], row["member_share"]
        numbers = [f"{100 * row['train_accuracy']:.1f}", f"{100 * row['accuracy']:.1f}", *(f"{a:.1f}" for a in alone)]
        numbers += [f"{100 * min(members):.0f} to {100 * max(members):.0f}", f"{min(shares):.2f} to {max(shares):.2f}"]
        numbers += [f"{row['difference_by_input']:.3f}", f"{row['difference_on_average']:.3f}"]
        lines.append("| " + " | ".join([row["configuration"], *numbers]) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    torch.set_num_threads(1)
    runs, target = map(Path, sys.argv[1:])
    rows = []
    splits = next(iter(recipes().values())).splits()
    for place, (name, recipe) in enumerate(recipes().items()):
        rows.append({"configuration": name, **measure(recipe, splits, runs / f"{place}")})
        print(table(rows[-1:]).splitlines()[-1], flush=True)
    content = {
        "held_out": HELD_OUT,
        "seed": recipe.seed,
        "trained_alone": trained_alone(recipes()["Deep Ensembles"], splits, runs),
        "rows": rows,
        "provenance": provenance(),
    }
    target.write_text(json.dumps(content, indent=1) + "\n")
    print(table(rows), content["trained_alone"])
