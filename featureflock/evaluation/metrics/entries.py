"""The built-in metrics. Each is one entry; tables show them in this order."""

from collections.abc import Callable
from statistics import fmean
from typing import Any, Literal

from featureflock.evaluation.metrics.registry import METRICS, Better, Group, Metric

SCORES: dict[str, tuple[Any, ...]] = {
    "accuracy": ("Accuracy, %", "cA, %", "higher", "percent:2", "fraction of examples whose top class is correct"),
    "nll": ("NLL", "cNLL", "lower", "fixed:4", "mean negative log-likelihood of the labels, in nats"),
    "brier": ("Brier", "cBrier", "lower", "fixed:4", "squared distance of the probabilities from the one-hot label"),
    "ece": ("ECE", "cECE", "lower", "fixed:4", "expected calibration error, 15 bins"),
    "aurc": ("AURC", "cAURC", "lower", "fixed:4", "area under the risk-coverage curve"),
}
"""Scores of one test set: title, title of the mean over corrupted test sets, better, format, meaning."""
_ALL_TASKS = ("classification", "multi-label", "regression")
_OTHER_SCORES: dict[str, tuple[Any, ...]] = {
    "mean_average_precision": ("mAP, %", "higher", "percent:2", "mean average precision of the labels", "multi-label"),
    "macro_f1": (
        "Macro F1, %",
        "higher",
        "percent:2",
        "mean F1 score of the labels at a probability of ½",
        "multi-label",
    ),
    "exact_match": ("Exact match, %", "higher", "percent:2", "examples whose labels are all correct", "multi-label"),
    "label_accuracy": ("Label accuracy, %", "higher", "percent:2", "correct pairs of example and label", "multi-label"),
    "label_brier": ("Brier", "lower", "fixed:4", "mean squared error of the probabilities of labels", "multi-label"),
    "label_ece": (
        "ECE",
        "lower",
        "fixed:4",
        "expected calibration error of the probabilities of labels",
        "multi-label",
    ),
    "rmse": ("RMSE", "lower", "fixed:4", "root mean squared error, in the unit of the target", "regression"),
    "crps": (
        "CRPS",
        "lower",
        "fixed:4",
        "continuous ranked probability score, in the unit of the target",
        "regression",
    ),
    "coverage": ("Coverage of 90 %, %", "", "percent:1", "targets within the 90 % prediction interval", "regression"),
    "calibration_error": (
        *("Calibration error", "lower", "fixed:4"),
        *("mean difference of nominal and observed frequencies, over 19 quantiles", "regression"),
    ),
}
"""Scores of other tasks: title, better, format, meaning, task."""
_UNCHANGED = ("rmse", "exact_match", "label_accuracy", "macro_f1", "mean_average_precision")
"""Scores that calibration does not change."""
RAW = ("nll", "brier", "ece", "aurc")
"""Scores that are also shown without temperature scaling."""
_MEAN, _BEST = "mean accuracy of the single members", "accuracy of the best member"


def _score(name: str, corrupted: bool = False, raw: bool = False) -> Metric:
    clean_title, corrupted_title, better, digits, meaning = SCORES[name]
    key, kind = f"corrupted_{name}" if corrupted else name, "raw" if raw else "calibrated"
    title = corrupted_title if corrupted else clean_title
    group: Group = "uncalibrated" if raw or name == "aurc" else "corrupted" if corrupted else "clean"

    def compute(run: Any) -> float | None:
        scores = run.corrupted_mean.get(kind) if corrupted else getattr(run.clean.scores, kind)
        return None if scores is None else scores[name]

    tasks = _ALL_TASKS if name == "nll" and not corrupted else ("classification",)
    if raw:
        meaning = "without calibration"
        return Metric(f"raw_{key}", f"raw {title}", better, digits, compute, meaning, group, tasks=tasks)
    meaning += ", mean over the corrupted test sets" if corrupted else ""
    uncalibrated = f"raw_{key}" if name in RAW else ""
    return Metric(key, title, better, digits, compute, meaning, group, uncalibrated=uncalibrated, tasks=tasks)


def _task_score(name: str, raw: bool = False) -> Metric:
    """A score of a multi-label or regression task."""
    title, better, digits, meaning, task = _OTHER_SCORES[name]
    kind = "raw" if raw else "calibrated"

    def compute(run: Any) -> float:
        value: float = getattr(run.clean.scores, kind)[name]
        return value

    if raw:
        meaning = "without calibration"
        return Metric(f"raw_{name}", f"raw {title}", better, digits, compute, meaning, "uncalibrated", tasks=(task,))
    uncalibrated = "" if name in _UNCHANGED else f"raw_{name}"
    return Metric(name, title, better, digits, compute, meaning, uncalibrated=uncalibrated, tasks=(task,))


def _at_severity(name: str, title: str) -> Metric:
    better, digits = SCORES[name][2:4]

    def compute(run: Any, severity: str) -> float:
        sets = [by_severity[severity] for by_severity in run.corrupted.values() if severity in by_severity]
        return fmean(test_set.scores.calibrated[name] for test_set in sets)

    meaning = f"{name if name == 'accuracy' else 'NLL'}, mean over the corruptions of severity {{}}"
    key, parts = f"{name}_at_severity_{{}}", lambda run: run.severities
    uncalibrated = f"raw_corrupted_{name}" if name in RAW else ""  # over all severities
    return Metric(key, title, better, digits, compute, meaning, "severity", parts, uncalibrated)


def _diversity(key: str, title: str, digits: str, meaning: str, tasks: tuple[str, ...] = ("classification",)) -> Metric:
    return Metric(key, title, "", digits, lambda run: run.details.diversity.get(key), meaning, "members", tasks=tasks)


def _member_score(key: str, title: str, better: Literal["higher", "lower"], digits: str, task: str) -> Metric:
    meaning = "mean over the single members"
    return Metric(
        key, title, better, digits, lambda r: fmean(r.details.member_scores), meaning, "members", tasks=(task,)
    )


def _map_similarity(key: str, title: str, kind: str) -> Metric:
    def compute(run: Any) -> float | None:
        return run.map_similarity[kind].similarity if kind in run.map_similarity else None

    meaning = f"cosine similarity of two members' class activation maps on {kind} images"
    return Metric(key, title, "", "fixed:3", compute, meaning, "members")


def _per_view(name: str, title: str, meaning: str, compute: Callable[[Any], float]) -> Metric:
    def of_run(run: Any, view: str) -> float:
        return compute(run.view_results.only[view])

    key, meaning = f"only_{{}}_{name}", f"{meaning} where everything but this view is blank"
    return Metric(key, title, "higher", "percent:1", of_run, meaning, "views", lambda run: run.views)


def _one_view(name: str, title: str, digits: str) -> Metric:
    kind, score = ("raw", name.removeprefix("raw_")) if name.startswith("raw_") else ("calibrated", name)

    def compute(run: Any) -> float | None:
        if run.view_results is None:
            return None
        return fmean(getattr(only.scores, kind)[score] for only in run.view_results.only.values())

    meaning = f"{'accuracy' if score == 'accuracy' else 'NLL'} where everything but one view is blank, mean over views"
    uncalibrated = f"one_view_raw_{name}" if name == "nll" else ""
    better: Better = "higher" if score == "accuracy" else "lower"
    return Metric(f"one_view_{name}", title, better, digits, compute, meaning, "views", uncalibrated=uncalibrated)


def _view_difference(name: str, meaning: str) -> Metric:
    title = "View difference" if name == "difference_by_input" else "View difference on average"
    key, meaning = f"view_{name}", f"difference between two members in the {meaning}"
    return Metric(key, title, "", "fixed:3", lambda run: getattr(run.view_results, name, None), meaning, "views")


def _human(name: str, title: str, better: Better, meaning: str, raw: bool = False) -> Metric:
    kind = "raw" if raw else "calibrated"

    def compute(run: Any) -> float | None:
        return getattr(run.human_scores[kind], name) if run.human_scores else None

    key = f"human_{name}"
    if raw:
        meaning = "without temperature scaling"
        return Metric(f"raw_{key}", f"raw {title}", better, "fixed:4", compute, meaning, "uncalibrated")
    return Metric(key, title, better, "fixed:4", compute, meaning, "human", uncalibrated=f"raw_{key}")


_HUMAN: dict[str, tuple[str, Better, str]] = {
    "cross_entropy": ("Human CE", "lower", "cross-entropy to the distribution of human labels, in nats"),
    "entropy_correlation": (
        "Human ρ",
        "higher",
        "rank correlation of the entropy of the prediction and the entropy of human labels",
    ),
}

BUILT_IN = (
    *(_task_score(name) for name in _OTHER_SCORES),
    Metric(
        "mean_iou",
        "Mean IoU, %",
        "higher",
        "percent:2",
        lambda run: run.clean.mean_iou,
        "intersection over union of predicted and true pixels, mean over classes",
    ),
    *(_score(name) for name in SCORES if name != "aurc"),
    *(_human(name, *entry) for name, entry in _HUMAN.items()),
    *(_score(name, corrupted=True) for name in SCORES if name != "aurc"),
    Metric(
        "temperature",
        "Temperature",
        "",
        "fixed:3",
        lambda run: run.details.temperature,
        "fitted on the full test set or on held-out examples; above 1 means overconfident",
        "uncalibrated",
        tasks=("classification", "multi-label"),
    ),
    Metric(
        "variance_scale",
        "Scale of the variance",
        "",
        "fixed:3",
        lambda run: run.details.temperature,
        "fitted on the full test set; above 1 means overconfident",
        "uncalibrated",
        tasks=("regression",),
    ),
    *(_task_score(name, raw=True) for name in _OTHER_SCORES if name not in _UNCHANGED),
    *(_score(name, raw=True) for name in RAW),
    *(_human(name, *entry, raw=True) for name, entry in _HUMAN.items()),
    *(_score(name, corrupted=True, raw=True) for name in RAW),
    _score("aurc"),
    _score("aurc", corrupted=True),
    _at_severity("accuracy", "A at {}, %"),
    _at_severity("nll", "NLL at {}"),
    Metric(
        "member_accuracy",
        "Member accuracy, %",
        "higher",
        "percent:2",
        lambda run: fmean(run.details.member_accuracy),
        _MEAN,
        "members",
    ),
    _diversity("disagreement", "Disagreement, %", "percent:2", "fraction of pairs that predict different classes"),
    _member_score("member_rmse", "Member RMSE", "lower", "fixed:4", "regression"),
    _member_score("member_label_accuracy", "Member label accuracy, %", "higher", "percent:2", "multi-label"),
    _diversity(
        "epistemic_share",
        "Epistemic share, %",
        "percent:2",
        "epistemic uncertainty as a fraction of the total",
        ("multi-label", "regression"),
    ),
    _diversity(
        "mutual_information",
        "Mutual information",
        "fixed:4",
        "epistemic uncertainty, in nats",
        ("classification", "multi-label"),
    ),
    _diversity("predictive_variance", "Predictive variance", "fixed:4", "variance of the members' probabilities"),
    _map_similarity("map_similarity", "Map similarity", "clean"),
    _map_similarity("corrupted_map_similarity", "Map similarity, corrupted", "corrupted"),
    _one_view("accuracy", "Accuracy, one view, %", "percent:2"),
    _one_view("nll", "NLL, one view", "fixed:4"),
    _one_view("raw_nll", "raw NLL, one view", "fixed:4"),
    _per_view("accuracy", "only {}, %", "accuracy of the ensemble", lambda only: only.scores.raw["accuracy"]),
    _per_view("member_accuracy", "members, only {}, %", _MEAN, lambda only: fmean(only.member_accuracy)),
    _per_view("best_member_accuracy", "best member, only {}, %", _BEST, lambda only: max(only.member_accuracy)),
    Metric(
        "covered_views",
        "views covered",
        "",
        "fixed:1",
        lambda run: None if run.view_results is None else float(sum(run.view_results.covered)),
        "number of views from which alone some member can classify",
        "views",
    ),
    Metric(
        "{}_share",
        "fraction {}",
        "",
        "fixed:3",
        lambda run, view: fmean(run.view_results.member_share),
        "fraction of the members' predictions that the {} view drives",
        "views",
        lambda run: list(run.views)[:1] if len(run.views) == 2 else [],
    ),
    _view_difference("difference_by_input", "fraction that the first view drives, input by input"),
    _view_difference("difference_on_average", "mean fraction that the first view drives"),
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
for _metric in BUILT_IN:
    METRICS.add(_metric.key, _metric)
