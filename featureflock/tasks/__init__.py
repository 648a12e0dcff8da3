"""Tasks: the likelihood p(y|f) of an ensemble, and everything that follows from it.

    ens = ff.Ensemble(extractors, head, layer, task=ff.tasks.Regression())
    mean, variance = ens.predict(x)

A task turns the members' outputs into the training loss, the prediction, the uncertainty and its calibration. The
metrics of each task are in `featureflock.evaluation`.
"""

from featureflock.tasks.base import TASKS, Task, Uncertainty
from featureflock.tasks.classification import Classification
from featureflock.tasks.heteroscedastic import HeteroscedasticRegression
from featureflock.tasks.multilabel import MultiLabel
from featureflock.tasks.regression import Regression, RegressionPrediction
from featureflock.utils.registry import import_submodules

import_submodules(__name__, __path__)

__all__ = ["TASKS", "Task", "Uncertainty"]
__all__ += ["Classification", "HeteroscedasticRegression", "MultiLabel", "Regression", "RegressionPrediction"]
