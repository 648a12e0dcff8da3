"""The built-in metrics. Each is one entry; tables show them in this order."""

from collections.abc import Callable
from statistics import fmean
from typing import TYPE_CHECKING, Literal

from featureflock.evaluation.metrics.registry import METRICS, Better, Group, Metric

if TYPE_CHECKING:
    from featureflock.evaluation.run_predictions import RunPredictions

Compute = Callable[["RunPredictions"], float | None]


def _clean(kind: Literal["calibrated", "raw"], name: str) -> Compute:
    return lambda run: getattr(run.clean.scores, kind)[name]


def _corrupted(kind: Literal["calibrated", "raw"], name: str) -> Compute:
    return lambda run: run.corrupted_mean.get(kind, {}).get(name)


def _at_severity(name: str) -> Callable[["RunPredictions", str], float]:
    return lambda run, severity: fmean(
        test_set.scores.calibrated[name]
        for by_severity in run.corrupted.values()
        for found, test_set in by_severity.items()
        if found == severity
    )


def _diversity(name: str) -> Compute:
    return lambda run: run.details.diversity.get(name)


def _map_similarity(kind: str) -> Compute:
    return lambda run: run.map_similarity[kind].similarity if kind in run.map_similarity else None


def _covered_views(run: "RunPredictions") -> float | None:
    return None if run.view_results is None else float(sum(run.view_results.covered))


def _first_view_fraction(run: "RunPredictions", view: str) -> float:
    assert run.view_results is not None
    assert run.view_results.member_share is not None
    return fmean(run.view_results.member_share)


def _two_views(run: "RunPredictions") -> list[str]:
    """The first view, of exactly two."""
    return list(run.views)[:1] if len(run.views) == 2 else []


def _view_accuracies(run: "RunPredictions", view: str) -> list[float]:
    assert run.view_results is not None
    return run.view_results.only[view].member_accuracy


def _view_accuracy(run: "RunPredictions", view: str) -> float:
    assert run.view_results is not None
    return run.view_results.only[view].raw["accuracy"]


def _view_difference(name: str) -> Compute:
    return lambda run: None if run.view_results is None else getattr(run.view_results, name)


SCORES: dict[str, tuple[str, str, Better, str, str]] = {
    "accuracy": ("Accuracy, %", "cA, %", "higher", "percent:2", "fraction of examples whose top class is correct"),
    "nll": ("NLL", "cNLL", "lower", "fixed:4", "mean negative log-likelihood of the labels, in nats"),
    "brier": ("Brier", "cBrier", "lower", "fixed:4", "squared distance of the probabilities from the one-hot label"),
    "ece": ("ECE", "cECE", "lower", "fixed:4", "expected calibration error, 15 bins"),
    "aurc": ("AURC", "cAURC", "lower", "fixed:4", "area under the risk-coverage curve"),
}
"""Scores of one test set: title, title of the mean over corrupted test sets, better, format, meaning."""
RAW = ("nll", "brier", "ece")
"""Those that are also shown without temperature scaling."""
MEAN = ", mean over the corrupted test sets"


def _add(*metrics: Metric) -> None:
    for metric in metrics:
        METRICS.add(metric.key, metric)


def _score(name: str, corrupted: bool, raw: bool) -> Metric:
    clean_title, corrupted_title, better, digits, meaning = SCORES[name]
    key = f"corrupted_{name}" if corrupted else name
    title = corrupted_title if corrupted else clean_title
    group: Group = "uncalibrated" if raw or name == "aurc" else "corrupted" if corrupted else "clean"
    compute = (_corrupted if corrupted else _clean)("raw" if raw else "calibrated", name)
    if raw:
        return Metric(f"raw_{key}", f"raw {title}", better, digits, compute, "without temperature scaling", group)
    calibrated_by = f"raw_{key}" if name in RAW else ""
    meaning += MEAN if corrupted else ""
    return Metric(key, title, better, digits, compute, meaning, group, uncalibrated=calibrated_by)


_add(
    *(_score(name, corrupted=False, raw=False) for name in SCORES if name != "aurc"),
    *(_score(name, corrupted=True, raw=False) for name in SCORES if name != "aurc"),
    Metric(
        "temperature",
        "Temperature",
        "",
        "fixed:3",
        lambda run: run.details.temperature,
        "fitted on the whole test set; above 1 means overconfident",
        "uncalibrated",
    ),
    *(_score(name, corrupted=False, raw=True) for name in RAW),
    *(_score(name, corrupted=True, raw=True) for name in RAW),
    *(_score("aurc", corrupted=corrupted, raw=False) for corrupted in (False, True)),
    *(
        Metric(
            f"{name}_at_severity_{{}}",
            title,
            SCORES[name][2],
            SCORES[name][3],
            _at_severity(name),
            f"{text}, mean over the corruptions of severity {{}}",
            "severity",
            lambda run: run.severities,
        )
        for name, title, text in (("accuracy", "A at {}, %", "accuracy"), ("nll", "NLL at {}", "NLL"))
    ),
    Metric(
        "member_accuracy",
        "Member accuracy, %",
        "higher",
        "percent:2",
        lambda run: fmean(run.details.member_accuracy),
        "mean accuracy of the single members",
        "members",
    ),
    Metric(
        "disagreement",
        "Disagreement, %",
        "",
        "percent:2",
        _diversity("disagreement"),
        "fraction of pairs of members that predict different classes",
        "members",
    ),
    Metric(
        "mutual_information",
        "Mutual information",
        "",
        "fixed:4",
        _diversity("mutual_information"),
        "between prediction and member, in nats: epistemic uncertainty",
        "members",
    ),
    Metric(
        "predictive_variance",
        "Predictive variance",
        "",
        "fixed:4",
        _diversity("predictive_variance"),
        "variance of the members' probabilities, summed over classes",
        "members",
    ),
    Metric(
        "map_similarity",
        "Map similarity",
        "",
        "fixed:3",
        _map_similarity("clean"),
        "cosine similarity of two members' class activation maps",
        "members",
    ),
    Metric(
        "corrupted_map_similarity",
        "Map similarity, corrupted",
        "",
        "fixed:3",
        _map_similarity("corrupted"),
        "cosine similarity of two members' class activation maps on corrupted images",
        "members",
    ),
    Metric(
        "only_{}_accuracy",
        "only {}, %",
        "higher",
        "percent:1",
        _view_accuracy,
        "accuracy of the ensemble where everything but this view is blank",
        "views",
        lambda run: run.views,
    ),
    Metric(
        "only_{}_member_accuracy",
        "members, only {}, %",
        "higher",
        "percent:1",
        lambda run, view: fmean(_view_accuracies(run, view)),
        "mean accuracy of the single members where everything but this view is blank",
        "views",
        lambda run: run.views,
    ),
    Metric(
        "only_{}_best_member_accuracy",
        "best member, only {}, %",
        "higher",
        "percent:1",
        lambda run, view: max(_view_accuracies(run, view)),
        "accuracy of the best member where everything but this view is blank",
        "views",
        lambda run: run.views,
    ),
    Metric(
        "covered_views",
        "views covered",
        "",
        "fixed:1",
        _covered_views,
        "number of views that some member can classify by alone",
        "views",
    ),
    Metric(
        "{}_share",
        "fraction {}",
        "",
        "fixed:3",
        _first_view_fraction,
        "fraction of the members' predictions that the {} view drives",
        "views",
        _two_views,
    ),
    Metric(
        "view_difference_by_input",
        "difference by input",
        "",
        "fixed:3",
        _view_difference("difference_by_input"),
        "difference between two members in the fraction that the first view drives, input by input",
        "views",
    ),
    Metric(
        "view_difference_on_average",
        "difference on average",
        "",
        "fixed:3",
        _view_difference("difference_on_average"),
        "difference between two members in the mean fraction that the first view drives",
        "views",
    ),
    Metric(
        "auroc_{}",
        "AUROC {}, %",
        "higher",
        "percent:1",
        lambda run, name: run.ood_detection[name]["entropy"]["auroc"],
        "OOD detection of {} by the entropy of the mean prediction",
        "ood",
        lambda run: run.ood,
    ),
)
