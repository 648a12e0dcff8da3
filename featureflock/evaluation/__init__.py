"""Evaluation: pure functions of probabilities and labels."""

from featureflock.evaluation.calibration import Calibrated, calibrated, fit_temperature, tempered
from featureflock.evaluation.dee import deep_ensemble_equivalent
from featureflock.evaluation.diversity import (
    Diversity,
    disagreement,
    member_diversity,
    mutual_information,
    predictive_variance,
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
    "OutOfDistribution",
    "Reliability",
    "RiskCoverage",
    "Scores",
    "accuracy",
    "aurc",
    "average",
    "brier",
    "calibrated",
    "deep_ensemble_equivalent",
    "detection",
    "disagreement",
    "ece",
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
