"""A run's predictions on all test sets, and the numbers derived from them: the argument of `Metric.compute`.

    run.clean.log_probs       (n, B, C) log-probabilities of the members; also .labels, .scores, .task
    run.corrupted["fog"]["3"] the same for a corrupted test set; also run.views["left"] and run.ood["noise"]
    run.details.diversity     what is computed on the clean test set only

For segmentation, B counts the pixels of all examples. For multi-label and regression tasks, `log_probs` are the
members' predictions that the task defines: logits (n, B, L), or means and log-variances (n, B, 2, …).

Each number is computed once. Predictions on corrupted and OOD sets are loaded when they are used and then released.

Shapes: n members, B examples, C classes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean

import torch
from torch import Tensor

from featureflock.evaluation import results as schema
from featureflock.evaluation import views as view_metrics
from featureflock.evaluation.calibration import Calibrated, calibrated, fit_temperature, tempered
from featureflock.evaluation.diversity import member_diversity
from featureflock.evaluation.grad_cam import cam_similarity, empty_fraction
from featureflock.evaluation.human_labels import HumanScores, calibrated_human_scores, human_scores
from featureflock.evaluation.metrics import classification as metrics
from featureflock.evaluation.metrics.classification import average, mean_scores
from featureflock.evaluation.metrics.segmentation import iou_of_classes, pixels
from featureflock.evaluation.ood import out_of_distribution
from featureflock.evaluation.results import ScoreDict, TestSetScores, ViewResults
from featureflock.evaluation.task_scores import cross_validated, fit_calibration, task_scores, unchanged
from featureflock.tasks import Classification, Task

SUBSETS_PER_SIZE, CURVE_POINTS = 5, 50
"""Sub-ensembles that are averaged for each size, and points of a risk-coverage curve."""


Calibration = Callable[[Tensor, Tensor, Sequence[int]], Calibrated]
"""From log-probabilities (n, B, C), labels (B,) and the members to average, to scores after temperature scaling."""


def cross_validation(log_probs: Tensor, labels: Tensor, members: Sequence[int]) -> Calibrated:
    """Test-time cross-validation: the temperatures are fitted on the halves of the test set."""
    return calibrated(average(log_probs[list(members)]), labels)


class HeldOutCalibration:
    """One temperature for all test sets, fitted on held-out examples; a sub-ensemble has its own."""

    def __init__(self, log_probs: Tensor, labels: Tensor) -> None:
        self.log_probs, self.labels = log_probs, labels
        self._fitted: dict[tuple[int, ...], float] = {}

    def __call__(self, log_probs: Tensor, labels: Tensor, members: Sequence[int]) -> Calibrated:
        temperature = self.temperature(members)
        scaled = tempered(average(log_probs[list(members)]), temperature)
        return Calibrated(metrics.scores(scaled, labels), (temperature,))

    def temperature(self, members: Sequence[int] | None = None) -> float:
        """The temperature of these members; by default of all."""
        chosen = tuple(range(len(self.log_probs)) if members is None else members)
        if chosen not in self._fitted:
            self._fitted[chosen] = fit_temperature(average(self.log_probs[list(chosen)]), self.labels)
        return self._fitted[chosen]


@dataclass(eq=False)
class SetPredictions:
    """Predictions on one test set."""

    read: Callable[[], tuple[Tensor, Tensor]]
    """Returns the members' predictions (n, B, …) and the targets (B, …)."""
    task: Task = Classification()
    """The task that they belong to."""
    calibration: Calibration = cross_validation

    def load(self) -> tuple[Tensor, Tensor]:
        """Log-probabilities (n, B, C) and labels (B,), of pixels for segmentation; other tasks as they are."""
        members, y = self.read()
        return pixels(self.task, members, y) if isinstance(self.task, Classification) else (members, y)

    @cached_property
    def mean_iou(self) -> float | None:
        """Mean intersection over union; None unless there is one class per pixel."""
        if self.read()[1].ndim < 2 or not isinstance(self.task, Classification):
            return None
        log_probs, labels = self.load()
        return iou_of_classes(average(log_probs).argmax(-1), labels, log_probs.shape[-1])

    @property
    def log_probs(self) -> Tensor:
        """(n, B, C)."""
        return self.load()[0]

    @property
    def labels(self) -> Tensor:
        """(B,)."""
        return self.load()[1]

    @cached_property
    def scores(self) -> TestSetScores:
        """Scores of the ensemble, raw and after temperature scaling."""
        log_probs, labels = self.load()
        if self.task.kind != Classification.kind:
            scaled_scores, fitted = cross_validated(self.task, log_probs, labels)
            of_all = task_scores(self.task, log_probs, labels)
            return TestSetScores(scaled_scores | unchanged(of_all), of_all, fitted, len(labels))
        scaled = self.calibration(log_probs, labels, range(len(log_probs)))
        raw, examples = metrics.scores(average(log_probs), labels), len(self.read()[1])
        return TestSetScores(scaled.scores._asdict(), raw._asdict(), list(scaled.temperatures), examples)


@dataclass(eq=False)
class RunPredictions:
    """Predictions of one run."""

    clean: SetPredictions
    views: Mapping[str, SetPredictions] = field(default_factory=dict)
    """By the only view that is left."""
    corrupted: Mapping[str, Mapping[str, SetPredictions]] = field(default_factory=dict)
    """By corruption, then by severity."""
    ood: Mapping[str, SetPredictions] = field(default_factory=dict)
    """By OOD set; labels are not used."""
    maps: Mapping[str, Tensor] = field(default_factory=dict)
    """Class activation maps (n, B, h, w) of some images, by kind of test set: clean, corrupted."""
    human: Tensor | None = None
    """Distribution of human labels of each clean example, (B, C); None if not given."""

    @property
    def task(self) -> Task:
        return self.clean.task

    @property
    def severities(self) -> list[str]:
        return sorted({severity for by_severity in self.corrupted.values() for severity in by_severity}, key=int)

    @cached_property
    def corrupted_scores(self) -> dict[str, dict[str, TestSetScores]]:
        """By corruption, then by severity."""
        return {name: {s: part.scores for s, part in sets.items()} for name, sets in self.corrupted.items()}

    @cached_property
    def corrupted_mean(self) -> dict[str, ScoreDict]:
        """raw and calibrated, mean over all corrupted test sets; empty if there are none."""
        sets = [part for by_severity in self.corrupted_scores.values() for part in by_severity.values()]
        kinds = ("calibrated", "raw") if sets else ()
        return {k: mean_scores([metrics.Scores(**getattr(part, k)) for part in sets])._asdict() for k in kinds}

    @cached_property
    def details(self) -> schema.CleanDetails:
        """What is computed on the clean test set only."""
        if self.task.kind != Classification.kind:
            return _other_details(self.task, *self.clean.load(), self.clean.scores)
        log_probs, y = self.clean.load()
        log_p, probs = average(log_probs), log_probs.double().exp()
        held_out, curve = self.clean.calibration, metrics.risk_coverage(log_p.exp(), y)
        temperature = held_out.temperature() if isinstance(held_out, HeldOutCalibration) else fit_temperature(log_p, y)
        points = torch.linspace(0, len(y) - 1, min(CURVE_POINTS, len(y))).round().long()
        kinds = {"raw": log_p.exp(), "calibrated": tempered(log_p, temperature).exp()}
        return schema.CleanDetails(
            temperature=temperature,
            member_accuracy=metrics.member_accuracy(probs, y),
            reliability={kind: _curve(metrics.reliability(p, y)) for kind, p in kinds.items()},
            risk_coverage={"coverage": curve.coverage[points].tolist(), "risk": curve.risk[points].tolist()},
            by_size=_by_size(
                len(log_probs),
                lambda subset: self.clean.calibration(log_probs, y, subset).scores._asdict(),
                self.clean.scores,
            ),
            diversity=member_diversity(probs)._asdict() if len(probs) > 1 else {},
        )

    @cached_property
    def view_results(self) -> ViewResults | None:
        """Which view drives the members; None for data without views."""
        if not self.views:
            return None
        loaded = {name: part.load() for name, part in self.views.items()}
        only = {}
        for name, (log_probs, y) in loaded.items():
            accuracies = metrics.member_accuracy(log_probs.double().exp(), y)
            only[name] = schema.SingleViewScores(self.views[name].scores, accuracies)
        full, by_view = self.clean.log_probs, [part.member_accuracy for part in only.values()]
        covered = view_metrics.covered_views(self.details.member_accuracy, by_view, full.shape[-1])
        results = ViewResults(only, 1 / full.shape[-1], covered)
        if len(only) != 2:
            return results
        fraction_nb = view_metrics.first_view_fraction(full, *(log_probs for log_probs, _ in loaded.values()))
        differences = (view_metrics.view_difference_by_input, view_metrics.view_difference_on_average)
        by_input, on_average = (difference(fraction_nb) for difference in differences)
        return ViewResults(only, results.chance, covered, fraction_nb.mean(1).tolist(), by_input, on_average)

    @cached_property
    def ood_detection(self) -> dict[str, dict[str, dict[str, float]]]:
        """By OOD set, then by uncertainty measure: auroc, aupr, fpr95."""
        clean, results = self.clean.log_probs.double().exp(), {}
        for name, predictions in self.ood.items():
            detected = out_of_distribution(clean, predictions.log_probs.double().exp())
            results[name] = {measure: part._asdict() for measure, part in detected._asdict().items()}
        return results

    @cached_property
    def human_scores(self) -> dict[str, HumanScores]:
        """Closeness to human labels, calibrated and raw; empty without human labels."""
        if self.human is None:
            return {}
        log_p, temperatures = average(self.clean.log_probs), self.clean.scores.temperatures
        return {
            "calibrated": calibrated_human_scores(log_p, self.human, temperatures),
            "raw": human_scores(log_p, self.human),
        }

    @cached_property
    def map_similarity(self) -> dict[str, schema.MapSimilarity]:
        """By kind of test set; empty for one member."""
        several = {kind: maps for kind, maps in self.maps.items() if len(maps) > 1}
        measures = {kind: (cam_similarity(maps), empty_fraction(maps), maps.shape[1]) for kind, maps in several.items()}
        return {kind: schema.MapSimilarity(*values) for kind, values in measures.items()}


def _by_size(members: int, score: Callable[[list[int]], ScoreDict], all_members: TestSetScores) -> dict[str, ScoreDict]:
    """Calibrated scores of sub-ensembles of neighbouring members in a circle, mean over up to 5 starting points."""
    starts = sorted({k * members // min(members, SUBSETS_PER_SIZE) for k in range(min(members, SUBSETS_PER_SIZE))})
    sizes = {}
    for size in range(1, members):
        each = [score([(start + i) % members for i in range(size)]) for start in starts]
        sizes[str(size)] = {key: fmean(scores[key] for scores in each) for key in each[0]}
    return {**sizes, str(members): all_members.calibrated}


def _other_details(task: Task, members: Tensor, y: Tensor, all_members: TestSetScores) -> schema.CleanDetails:
    """Details of a multi-label or regression task: scores of members, by size, and the diversity of the members."""
    single = [task_scores(task, member, y) for member in members.double().split(1)]
    n, diversity = len(members), {}
    if n > 1:
        total, _, epistemic = task.uncertainty(members.double())
        share = (epistemic.mean() / total.mean()).item()
        diversity = {"epistemic_share": share} | (
            {} if task.score == "rmse" else {"mutual_information": epistemic.mean().item()}
        )
    name = "rmse" if task.score == "rmse" else "label_accuracy"
    return schema.CleanDetails(
        temperature=fit_calibration(task, members, y),
        member_accuracy=[],
        reliability={},
        risk_coverage={},
        by_size=_by_size(n, lambda subset: cross_validated(task, members[subset], y, shuffles=1)[0], all_members),
        diversity=diversity,
        member_scores=[scores[name] for scores in single],
    )


def _curve(r: metrics.Reliability) -> schema.ReliabilityCurve:
    """As lists; NaN, for empty bins, becomes None, because JSON has no NaN."""
    confidence, accuracy = ([None if x != x else x for x in part.tolist()] for part in (r.confidence, r.accuracy))
    return schema.ReliabilityCurve(r.edges.tolist(), r.count.double().tolist(), confidence, accuracy)
