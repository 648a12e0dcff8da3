"""Evaluation: metrics as pure functions of probabilities and labels, and all of them for trained runs."""

from featureflock.evaluation.calibration import Calibrated, calibrate, calibrated, fit_temperature, tempered
from featureflock.evaluation.cam_figure import cam_grid
from featureflock.evaluation.conditional_redundancy import conditional_redundancy
from featureflock.evaluation.dee import deep_ensemble_equivalent
from featureflock.evaluation.diversity import (
    Diversity,
    disagreement,
    member_diversity,
    mutual_information,
    predictive_variance,
)
from featureflock.evaluation.evaluate import Evaluation, cache_predictions, evaluate_runs
from featureflock.evaluation.grad_cam import (
    Maps,
    cam_similarity,
    cam_similarity_matrix,
    class_activation_maps,
    empty_fraction,
)
from featureflock.evaluation.metrics.classification import (
    Reliability,
    RiskCoverage,
    Scores,
    accuracy,
    aurc,
    average,
    brier,
    ece,
    mean_scores,
    member_accuracy,
    nll,
    reliability,
    risk_coverage,
    scores,
)
from featureflock.evaluation.metrics.registry import METRICS, Metric, find_metric
from featureflock.evaluation.ood import Detection, OutOfDistribution, detection, out_of_distribution
from featureflock.evaluation.results import EvaluationResults, GroupResult, RunResult
from featureflock.evaluation.statistics import PairedDifference, SeedMean, mean, paired_difference
from featureflock.evaluation.test_sets import EvaluationProtocol, EvaluationSet
from featureflock.evaluation.views import (
    covered_views,
    first_view_fraction,
    view_difference_by_input,
    view_difference_on_average,
)

__all__ = [
    "METRICS",
    "Calibrated",
    "Detection",
    "Diversity",
    "Evaluation",
    "EvaluationProtocol",
    "EvaluationResults",
    "EvaluationSet",
    "GroupResult",
    "Maps",
    "Metric",
    "OutOfDistribution",
    "PairedDifference",
    "Reliability",
    "RiskCoverage",
    "RunResult",
    "Scores",
    "SeedMean",
    "accuracy",
    "aurc",
    "average",
    "brier",
    "cache_predictions",
    "calibrate",
    "calibrated",
    "cam_grid",
    "cam_similarity",
    "cam_similarity_matrix",
    "class_activation_maps",
    "conditional_redundancy",
    "covered_views",
    "deep_ensemble_equivalent",
    "detection",
    "disagreement",
    "ece",
    "empty_fraction",
    "evaluate_runs",
    "find_metric",
    "first_view_fraction",
    "fit_temperature",
    "mean",
    "mean_scores",
    "member_accuracy",
    "member_diversity",
    "mutual_information",
    "nll",
    "out_of_distribution",
    "paired_difference",
    "predictive_variance",
    "reliability",
    "risk_coverage",
    "scores",
    "tempered",
    "view_difference_by_input",
    "view_difference_on_average",
]
