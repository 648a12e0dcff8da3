"""Evaluation: metrics as pure functions of probabilities and labels, and all of them for trained runs."""

from featureflock.evaluation.calibration import calibrate, calibrated, fit_temperature, tempered
from featureflock.evaluation.cam_figure import cam_grid
from featureflock.evaluation.comparison import deep_ensemble_equivalent
from featureflock.evaluation.conditional_redundancy import conditional_redundancy
from featureflock.evaluation.diversity import disagreement, member_diversity, mutual_information, predictive_variance
from featureflock.evaluation.evaluate import Evaluation, evaluate_runs
from featureflock.evaluation.grad_cam import cam_similarity, cam_similarity_matrix, class_activation_maps
from featureflock.evaluation.metrics.classification import (
    accuracy,
    aurc,
    average,
    brier,
    ece,
    member_accuracy,
    nll,
    reliability,
    risk_coverage,
    scores,
)
from featureflock.evaluation.metrics.registry import METRICS, Metric
from featureflock.evaluation.ood import detection, out_of_distribution
from featureflock.evaluation.results import EvaluationResults
from featureflock.evaluation.statistics import paired_difference
from featureflock.evaluation.test_sets import EvaluationProtocol

__all__ = [
    "METRICS",
    "Evaluation",
    "EvaluationProtocol",
    "EvaluationResults",
    "Metric",
    "accuracy",
    "aurc",
    "average",
    "brier",
    "calibrate",
    "calibrated",
    "cam_grid",
    "cam_similarity",
    "cam_similarity_matrix",
    "class_activation_maps",
    "conditional_redundancy",
    "deep_ensemble_equivalent",
    "detection",
    "disagreement",
    "ece",
    "evaluate_runs",
    "fit_temperature",
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
]
