"""Evaluation: metrics as pure functions of probabilities and labels, and all of them for trained runs."""

from featureflock.evaluation import any_ensemble
from featureflock.evaluation.any_ensemble import evaluate_predictions
from featureflock.evaluation.calibrate import calibrate
from featureflock.evaluation.calibration import calibrated, fit_temperature, tempered
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
from featureflock.evaluation.metrics.multilabel import multilabel_scores
from featureflock.evaluation.metrics.registry import METRICS, Metric
from featureflock.evaluation.metrics.regression import (
    crps,
    interval_coverage,
    mixture_nll,
    regression_calibration_error,
    rmse,
)
from featureflock.evaluation.metrics.segmentation import mean_iou
from featureflock.evaluation.ood import detection, out_of_distribution
from featureflock.evaluation.prediction_files import evaluate_files
from featureflock.evaluation.results import EvaluationResults
from featureflock.evaluation.statistics import holm, paired_difference
from featureflock.evaluation.test_sets import EvaluationProtocol

evaluate = any_ensemble.evaluate  # after the imports, because a module has the same name

__all__ = ["METRICS", "Evaluation", "EvaluationProtocol", "EvaluationResults", "Metric", "evaluate_runs"]
__all__ += ["evaluate_files", "evaluate_predictions"]
__all__ += ["accuracy", "aurc", "average", "brier", "ece", "member_accuracy", "nll", "reliability", "risk_coverage"]
__all__ += [
    "calibrate",
    "calibrated",
    "deep_ensemble_equivalent",
    "fit_temperature",
    "holm",
    "paired_difference",
    "scores",
]
__all__ += ["conditional_redundancy", "disagreement", "member_diversity", "mutual_information", "predictive_variance"]
__all__ += ["cam_grid", "cam_similarity", "cam_similarity_matrix", "class_activation_maps", "detection"]
__all__ += ["out_of_distribution", "tempered"]
__all__ += ["crps", "evaluate", "interval_coverage", "mean_iou", "mixture_nll", "multilabel_scores"]
__all__ += ["regression_calibration_error", "rmse"]
