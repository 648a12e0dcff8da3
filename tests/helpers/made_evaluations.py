"""Evaluations of runs that were never trained: predictions are drawn, all else is as `evaluate` makes it."""

import torch

from featureflock.data import Splits, TensorExamples
from featureflock.evaluation.cam_cache import _file, _identity
from featureflock.evaluation.evaluate_runs import Evaluation
from featureflock.evaluation.predictions import keep
from featureflock.evaluation.run_metrics import compare, measure_run
from featureflock.evaluation.runs import TrainedRun, settings
from featureflock.evaluation.test_sets import EvaluationSet
from featureflock.training.run_folder import RunFolder
from featureflock.utils.provenance import provenance

TWO = ({"class": "DeepEnsembles"}, {"class": "FeatureWGD", "rank": 5})


def make_evaluation(
    folder,
    methods=TWO,
    *,
    seeds=(0, 1, 2),
    members=3,
    classes=4,
    names=("cat", "dog", "owl", "ship"),
    examples=60,
    corruptions=("fog", "shot_noise", "contrast"),
    severities=(1, 5),
    unfamiliar=("noise",),
    maps=True,
    pictures=True,
):
    """`members` are one number for all methods, except that Single has 1. The later a method, the better it is."""
    noise = torch.Generator().manual_seed(0)
    labels = torch.arange(examples) % classes
    shape = (3, 8, 8) if pictures else (6,)
    x = torch.randint(256, (examples, *shape), generator=noise).to(torch.uint8)
    test = TensorExamples(x if pictures else x.float(), labels)
    splits = Splits(test, test, classes, class_names=tuple(names))
    positions = torch.arange(examples)
    labelled = [
        "clean",
        *(f"{c}-{s}" for c in corruptions for s in severities),
        *(f"unfamiliar-{u}" for u in unfamiliar),
    ]
    conditions = [EvaluationSet(name, name, positions, test.select) for name in labelled]
    mapped = {"clean": conditions[:1], "corrupted": conditions[1:2]} if maps else {}
    runs = [_run(folder, method, seed, members) for method in methods for seed in seeds]
    for run in runs:
        n = run.recipe["members"]
        for condition in conditions:
            skill = 0.8 - 0.1 * int(condition.name[-1]) if condition.name[-1].isdigit() else 0.8
            skill = 0.0 if condition.is_unfamiliar else skill
            logits = torch.randn(n, examples, classes, generator=noise)
            logits[:, positions, labels] += skill * (1 + 0.1 * methods.index(run.recipe["method"]))
            tensors = {
                "log_probs": logits.log_softmax(-1),
                "labels": labels,
                "positions": positions,
                "asked": positions + 0,
            }
            keep(run, condition.name, condition.identity, tensors)
        for which, chosen in mapped.items():
            heat = torch.rand(n, examples, 4, 4, generator=noise)
            held = {"maps": heat, "classes": labels.expand(n, -1).contiguous(), "positions": positions}
            keep(run, _file(which), _identity(chosen), held)
    measured = {str(run): measure_run(run, run.folder.path.name, conditions, mapped) for run in runs}
    rows = settings(runs)
    results = {
        "data": "Digits",
        "classes": classes,
        "class_names": list(names),
        "examples": examples,
        "conditions": labelled,
        "runs": list(measured.values()),
        "settings": compare(rows, measured),
        "provenance": provenance(),
    }
    return Evaluation(results, rows, splits, conditions, mapped)


def _run(folder, method, seed, members):
    n = 1 if method["class"] == "Single" else members
    recipe = {"class": "Recipe", "data": {"class": "Digits"}, "method": method, "members": n, "seed": seed}
    words = "-".join(map(str, method.values())).replace("/", "")
    path = folder / f"{words}-{seed}"
    path.mkdir(parents=True)
    started = provenance() | {
        "command": f"featureflock train digits --seed {seed}",
        "compute": {"precision": "float32"},
    }
    lines = [
        {"epoch": k, "cross_entropy": 2 / k, "accuracy": 50 + k, "validation": {"accuracy": 45 + k, "nll": 1 / k}}
        for k in (1, 2, 3)
    ]
    return TrainedRun(RunFolder(path), recipe, [started], {"members": n, "seconds": 3.5}, lines, f"{words}{seed}")
