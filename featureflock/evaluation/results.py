"""Evaluation results: typed, versioned, and enough to write every table, figure and page again.

    results.json = EvaluationResults.to_json()

Accuracies, ECE and the like are fractions from 0 to 1, NLL is in nats. Calibrated scores are after temperature scaling
with test-time cross-validation. A value that could not be measured is None or missing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from featureflock.evaluation.calibration import BOUNDS
from featureflock.evaluation.statistics import PairedDifference, SeedMean
from featureflock.utils.json_files import check_json, read_json
from featureflock.utils.serialization import to_json

SCHEMA_VERSION = 2
_ADVICE = "evaluate the runs again"

ScoreDict = dict[str, float]
"""accuracy, nll, brier, ece, aurc; or the scores of another task."""


@dataclass(frozen=True)
class TestSetScores:
    """Scores of one run on one test set."""

    calibrated: ScoreDict
    raw: ScoreDict
    temperatures: list[float]
    """One for each half of each shuffle of the cross-validation; a single one if it was fitted on held-out examples.
    For regression, factors of the variance."""
    examples: int

    @property
    def temperature_at_bound(self) -> bool:
        """Whether a fitted temperature is at its bound, so that the calibrated NLL depends on the choice of bound."""
        return any(temperature in BOUNDS for temperature in self.temperatures)


@dataclass(frozen=True)
class ReliabilityCurve:
    """A reliability diagram: one entry per bin, None for empty bins."""

    edges: list[float]
    count: list[float]
    confidence: list[float | None]
    accuracy: list[float | None]


@dataclass(frozen=True)
class CleanDetails:
    """What is computed on the clean test set only. The temperature is fitted on all of it, or on held-out examples."""

    temperature: float
    member_accuracy: list[float]
    reliability: dict[str, ReliabilityCurve]
    """raw and calibrated."""
    risk_coverage: dict[str, list[float]]
    """coverage and risk."""
    by_size: dict[str, ScoreDict]
    """Calibrated scores of sub-ensembles of 1, 2, …, n members."""
    diversity: dict[str, float]
    """disagreement, mutual_information, predictive_variance, or those of the task; empty for one member."""
    member_scores: list[float] = field(default_factory=list)
    """Score of each member of a regression (RMSE) or multi-label task (label accuracy)."""


@dataclass(frozen=True)
class SingleViewScores:
    """Scores on inputs of which only one view is left."""

    scores: TestSetScores
    member_accuracy: list[float]


@dataclass(frozen=True)
class ViewResults:
    """Which view of the input drives the members; `member_share` is the fraction for the first of two views."""

    only: dict[str, SingleViewScores]
    chance: float
    covered: list[bool]
    member_share: list[float] | None = None
    difference_by_input: float | None = None
    difference_on_average: float | None = None


@dataclass(frozen=True)
class MapSimilarity:
    """Cosine similarity of the members' class activation maps, mean over pairs of members and images."""

    similarity: float
    empty: float
    """Fraction of maps that are zero everywhere."""
    images: int


@dataclass(frozen=True)
class RunResult:
    """Everything measured for one run."""

    name: str
    method: str
    seed: int
    members: int
    clean: TestSetScores
    details: CleanDetails
    summary: dict[str, float]
    """One number per metric of the registry that applies to the run."""
    views: ViewResults | None = None
    corrupted: dict[str, dict[str, TestSetScores]] = field(default_factory=dict)
    """By corruption, then by severity."""
    corrupted_mean: dict[str, ScoreDict] = field(default_factory=dict)
    """raw and calibrated, mean over all corrupted test sets."""
    ood: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    """By OOD set, then by uncertainty measure: auroc, aupr, fpr95."""
    maps: dict[str, MapSimilarity] = field(default_factory=dict)
    """Similarity of class activation maps, by kind of test set (clean, corrupted)."""
    training: dict[str, Any] = field(default_factory=dict)
    """result.json of the run."""
    curves: list[dict[str, Any]] = field(default_factory=list)
    recipe: dict[str, Any] = field(default_factory=dict)
    environment: list[dict[str, Any]] = field(default_factory=list)

    def temperature_at_bound(self, metric: str = "nll") -> bool:
        """Whether a temperature that the metric depends on is at its bound. Rely on `Metric.uncalibrated` then."""
        parts = [self.clean]
        if "corrupted" in metric or "severity" in metric:
            parts = [part for sets in self.corrupted.values() for part in sets.values()]
        elif metric.startswith("one_view") and self.views is not None:
            parts = [only.scores for only in self.views.only.values()]
        return any(part.temperature_at_bound for part in parts)


@dataclass(frozen=True)
class GroupResult:
    """Runs that differ in their seed alone: one row of a table."""

    title: str
    method: str
    members: int
    runs: list[str]
    seeds: list[int]
    metrics: dict[str, SeedMean]
    baseline: str | None = None
    """Title of the Deep Ensembles that the differences are from."""
    baseline_differs_in: list[str] = field(default_factory=list)
    """Recipe fields, besides the method, in which the baseline differs."""
    differences: dict[str, PairedDifference] = field(default_factory=dict)
    deep_ensemble_equivalent: float | str | None = None
    temperature_at_bound: bool = False
    """Whether a temperature on the clean test set is at its bound, so that the calibrated NLL is not reliable."""
    corrupted_temperature_at_bound: bool = False


@dataclass(frozen=True)
class TestSetInfo:
    """A test set of the evaluation."""

    name: str
    """clean; the view that is left, such as left; fog-3; or the OOD set, such as noise."""
    kind: str
    """clean, view, corrupted or ood."""
    examples: int
    source: str = ""
    """Note on its origin, if it needs one."""


@dataclass(frozen=True)
class DisputedExample:
    """An example that the members disagree about."""

    position: int
    label: int | None
    """None for OOD inputs."""
    mutual_information: float
    image: str | None
    """PNG file in images/ beside results.json; None for inputs that are not images."""
    predictions: dict[str, list[tuple[int, float]]]
    """By group title: each member's most probable class and its probability."""
    kind: str = "clean"
    """Kind of its test set: clean, corrupted or ood."""
    test_set: str = "clean"
    """Name of its test set, as in `TestSetInfo`."""


@dataclass(frozen=True)
class CamFigure:
    """Class activation maps of members on a few test images."""

    image: str
    """PNG file in images/ beside results.json."""
    groups: list[str]
    labels: list[int]
    members_shown: int
    """Of groups with more members, only the first ones are shown."""
    seeds: list[int] = field(default_factory=list)
    """Of the run shown of each group."""


@dataclass(frozen=True)
class EvaluationResults:
    """All that an evaluation measured. Tables, figures and the page are functions of it and of the cached images."""

    data: str
    classes: int
    class_names: list[str]
    examples: int
    test_examples: int
    """Size of the whole test set, of which `examples` were used."""
    test_sets: list[TestSetInfo]
    notes: list[str]
    runs: list[RunResult]
    groups: list[GroupResult]
    provenance: dict[str, Any]
    endpoints: list[str] = field(default_factory=list)
    """Metrics whose p-values are corrected for one another."""
    disputed: list[DisputedExample] = field(default_factory=list)
    cam_figure: CamFigure | None = None
    task: str = "classification"
    """classification, multi-label or regression."""
    dense: bool = False
    """Whether there is one class per pixel; the metrics of classification are those of pixels then."""
    schema_version: int = SCHEMA_VERSION

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types; `from_json` is the inverse."""
        return cast("dict[str, Any]", to_json(self, tag=False))

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "EvaluationResults":
        """Results from parsed JSON; another schema version is refused."""
        return cls._checked(dict(value), "The JSON")

    @classmethod
    def read(cls, path: Path) -> "EvaluationResults":
        """Results from a results.json file."""
        return cls._checked(read_json(path, dict[str, Any], _ADVICE), str(path))

    @classmethod
    def _checked(cls, value: dict[str, Any], name: str) -> "EvaluationResults":
        if (version := value.get("schema_version")) != SCHEMA_VERSION:
            raise ValueError(f"{name} has schema version {version!r}, not {SCHEMA_VERSION}; {_ADVICE}.")
        return cast("EvaluationResults", check_json(value, name, cls, _ADVICE))
