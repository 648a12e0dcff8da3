"""Evaluation: pure functions of probabilities and labels, and where in a picture members look."""

from featureflock.evaluation.calibration import Calibrated, calibrated, fit_temperature, tempered
from featureflock.evaluation.cam_picture import cam_grid
from featureflock.evaluation.dee import deep_ensemble_equivalent
from featureflock.evaluation.diversity import (
    Diversity,
    disagreement,
    member_diversity,
    mutual_information,
    predictive_variance,
)
from featureflock.evaluation.grad_cam import (
    Maps,
    cam_similarity,
    cam_similarity_matrix,
    class_activation_maps,
    empty_share,
)
from featureflock.evaluation.metrics import (
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
from featureflock.evaluation.ood import Detection, OutOfDistribution, detection, out_of_distribution

__all__ = [
    "Calibrated",
    "Detection",
    "Diversity",
    "Maps",
    "OutOfDistribution",
    "Reliability",
    "RiskCoverage",
    "Scores",
    "accuracy",
    "aurc",
    "average",
    "brier",
    "calibrated",
    "cam_grid",
    "cam_similarity",
    "cam_similarity_matrix",
    "class_activation_maps",
    "deep_ensemble_equivalent",
    "detection",
    "disagreement",
    "ece",
    "empty_share",
    "fit_temperature",
    "mean_scores",
    "member_accuracy",
    "member_diversity",
    "mutual_information",
    "nll",
    "out_of_distribution",
    "predictive_variance",
    "reliability",
    "risk_coverage",
    "scores",
    "tempered",
]
