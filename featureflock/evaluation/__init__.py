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
from featureflock.evaluation.evaluate_runs import Evaluation, cache_predictions, evaluate
from featureflock.evaluation.grad_cam import (
    Maps,
    cam_similarity,
    cam_similarity_matrix,
    class_activation_maps,
    empty_share,
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
from featureflock.evaluation.ood import Detection, OutOfDistribution, detection, out_of_distribution
from featureflock.evaluation.statistics import PairedDifference, SeedMean, mean, paired_difference
from featureflock.evaluation.test_sets import EvaluationProtocol, EvaluationSet
from featureflock.evaluation.views import (
    covered_views,
    first_view_share,
    view_difference_by_input,
    view_difference_on_average,
)

__all__ = [
    "Calibrated",
    "Detection",
    "Diversity",
    "Evaluation",
    "EvaluationProtocol",
    "EvaluationSet",
    "Maps",
    "OutOfDistribution",
    "PairedDifference",
    "Reliability",
    "RiskCoverage",
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
    "empty_share",
    "evaluate",
    "first_view_share",
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
