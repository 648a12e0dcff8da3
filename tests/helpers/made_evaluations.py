"""Evaluation results with random scores, and images for them, for tests of reports."""

import io
import random

import numpy as np
from PIL import Image

from featureflock.evaluation.endpoints import ENDPOINTS
from featureflock.evaluation.results import (
    CamFigure,
    CleanDetails,
    DisputedExample,
    EvaluationResults,
    GroupResult,
    ReliabilityCurve,
    RunResult,
    SingleViewScores,
    TestSetInfo,
    TestSetScores,
    ViewResults,
)
from featureflock.evaluation.statistics import mean, paired_differences
from featureflock.utils.provenance import provenance

BASELINE = "Deep Ensembles"
DETECTION, MEASURES = ("auroc", "aupr", "fpr95"), ("entropy", "mutual_information", "top_probability")


def make_results(
    methods=(BASELINE, "feature-WGD"),
    *,
    seeds=(0, 1, 2),
    members=3,
    names=("cat", "dog", "owl", "ship"),
    corruptions=("fog", "shot_noise", "contrast"),
    severities=(1, 5),
    ood=("noise",),
    views=(),
    maps=True,
    images=True,
):
    """One group of runs per method. "Single" has one member; with no images, inputs are vectors."""
    rng = random.Random(0)
    sizes = {method: 1 if method == "Single" else members for method in methods}
    tested = [("clean", "clean"), *((view, "view") for view in views)]
    tested += [(f"{c}-{s}", "corrupted") for c in corruptions for s in severities] + [(o, "ood") for o in ood]
    runs = [
        _run(rng, method, seed, sizes[method], k, corruptions, severities, ood, views, maps)
        for k, method in enumerate(methods)
        for seed in seeds
    ]
    ensembles = [method for method in methods if sizes[method] > 1]
    count = 4 if ensembles else 0
    kinds = {"clean": ["clean"], "corrupted": [name for name, kind in tested if kind == "corrupted"], "ood": list(ood)}
    disputed = [
        _disputed(rng, k, ensembles, members, len(names) or 9, images, kind, sets[k % len(sets)])
        for kind, sets in kinds.items()
        for k in range(count if sets else 0)
    ]
    return EvaluationResults(
        data="Digits",
        classes=len(names) or 9,
        class_names=list(names),
        examples=60,
        test_examples=100,
        test_sets=[TestSetInfo(name, kind, 60) for name, kind in tested],
        notes=["Corruptions were generated with seed 0."] if corruptions else [],
        runs=runs,
        groups=[_group(method, runs) for method in methods],
        provenance=provenance(),
        disputed=disputed,
        cam_figure=CamFigure("maps.png", ensembles, [0, 1, 2], members, [seeds[0]] * len(ensembles))
        if maps and images and ensembles
        else None,
    )


def make_images(results):
    """PNG files by the names that the results use."""
    names = [example.image for example in results.disputed if example.image is not None]
    names += [results.cam_figure.image] if results.cam_figure is not None else []
    return {name: _png(k) for k, name in enumerate(names)}


def _run(rng, method, seed, n, rank, corruptions, severities, ood, views, maps):
    skill = 0.6 + 0.03 * rank
    clean = _test_set(rng, skill)
    corrupted = {c: {str(s): _test_set(rng, skill - 0.05 * s) for s in severities} for c in corruptions}
    sets = [part for by_severity in corrupted.values() for part in by_severity.values()]
    kinds = ("calibrated", "raw") if sets else ()
    corrupted_mean = {kind: _mean_scores([getattr(part, kind) for part in sets]) for kind in kinds}
    details = CleanDetails(
        temperature=1 + rng.random(),
        member_accuracy=[skill - 0.1 * rng.random() for _ in range(n)],
        reliability={kind: _reliability(rng) for kind in ("raw", "calibrated")},
        risk_coverage={"coverage": [0.1 * k for k in range(1, 11)], "risk": [0.04 * k for k in range(1, 11)]},
        by_size={str(k): clean.calibrated if k == n else _scores(rng, skill - 0.02) for k in range(1, n + 1)},
        diversity={"disagreement": rng.random(), "mutual_information": rng.random()} if n > 1 else {},
    )
    only = {v: SingleViewScores(_test_set(rng, 0.4), [rng.random() for _ in range(n)]) for v in views}
    view_results = ViewResults(only, 0.25, [True] * len(only)) if views else None
    summary = clean.calibrated | {f"raw_{key}": clean.raw[key] for key in ("nll", "brier", "ece")}
    summary |= {"temperature": details.temperature, "member_accuracy": sum(details.member_accuracy) / n}
    summary |= {f"corrupted_{key}": value for key, value in corrupted_mean.get("calibrated", {}).items()}
    summary |= {f"accuracy_at_severity_{s}": rng.random() for s in severities if corruptions}
    summary |= details.diversity | {f"only_{v}_accuracy": scores.scores.raw["accuracy"] for v, scores in only.items()}
    if maps and n > 1:
        summary |= {"map_similarity": rng.random(), "corrupted_map_similarity": rng.random()}
    detection = {o: {m: {d: rng.random() for d in DETECTION} for m in MEASURES} for o in ood}
    summary |= {f"auroc_{name}": found["entropy"]["auroc"] for name, found in detection.items()}
    curves = [
        {"epoch": k, "cross_entropy": 2 / k, "accuracy": 50 + k, "validation": {"accuracy": 45 + k, "nll": 1 / k}}
        for k in (1, 2, 3)
    ]
    started = provenance() | {"command": f"featureflock train digits --seed {seed}", "compute": {"device": "cpu"}}
    recipe = {"class": "Recipe", "data": {"class": "Digits"}, "method": {"class": method, "rank": rank}}
    return RunResult(
        name=f"{method}-{seed}",
        method=method,
        seed=seed,
        members=n,
        clean=clean,
        details=details,
        summary=summary,
        views=view_results,
        corrupted=corrupted,
        corrupted_mean=corrupted_mean,
        ood=detection,
        training={"members": n, "seconds": 3.5, "steps": 1200},
        curves=curves,
        recipe=recipe | {"members": n, "seed": seed},
        environment=[started],
    )


def _group(method, runs):
    own, base = ({run.seed: run.summary for run in runs if run.method == m} for m in (method, BASELINE))
    found = [run for run in runs if run.method == method]
    keys = list(found[0].summary)
    is_compared = base and method != BASELINE
    return GroupResult(
        title=method,
        method=method,
        members=found[0].members,
        runs=[run.name for run in found],
        seeds=list(own),
        metrics={key: mean([summary[key] for summary in own.values()]) for key in keys},
        baseline=BASELINE if is_compared else None,
        differences=paired_differences(own, base, ENDPOINTS["classification"]) if is_compared else {},
        deep_ensemble_equivalent=float(found[0].members) if method == BASELINE else f"more than {found[0].members}",
    )


def _test_set(rng, skill):
    return TestSetScores(_scores(rng, skill), _scores(rng, skill), [1.0, 1.1], 60)


def _scores(rng, skill):
    accuracy = skill + 0.02 * rng.random()
    return {
        "accuracy": accuracy,
        "nll": 2 * (1 - accuracy),
        "brier": 1 - accuracy,
        "ece": 0.1 * rng.random(),
        "aurc": 0.2 * rng.random(),
    }


def _mean_scores(many):
    return {key: sum(scores[key] for scores in many) / len(many) for key in many[0]}


def _reliability(rng):
    count = [0.0] * 7 + [float(rng.randint(1, 9)) for _ in range(8)]
    middle = [(k + 0.5) / 15 if n else None for k, n in enumerate(count)]
    return ReliabilityCurve([k / 15 for k in range(16)], count, middle, [m and m * rng.random() for m in middle])


def _disputed(rng, k, methods, members, classes, images, kind, test_set):
    votes = {method: [(rng.randrange(classes), rng.random()) for _ in range(members)] for method in methods}
    label, image = None if kind == "ood" else k % classes, f"disputed-{kind}-{k}.png" if images else None
    return DisputedExample(10 + k, label, 1 - 0.1 * k, image, votes, kind, test_set)


def _png(seed):
    pixels, data = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8), io.BytesIO()
    Image.fromarray(pixels).save(data, "PNG")
    return data.getvalue()
