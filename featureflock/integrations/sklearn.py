"""scikit-learn estimators: ensembles for arrays and data frames, with `fit`, `predict` and `score`.

    from featureflock.integrations import FlockClassifier

    model = FlockClassifier(random_state=0).fit(X_train, y_train)
    model.predict_proba(X_test)
    total, aleatoric, epistemic = model.predict_uncertainty(X_test)

Inputs are standardised. Networks are trained in float32 by AdamW (tensor_training.py), and predict in float64.

Shapes: n members, N examples, D inputs.
"""

from collections.abc import Callable
from numbers import Integral, Real
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.preprocessing import StandardScaler
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

from featureflock.ensemble.ensemble import Ensemble
from featureflock.ensemble.execution import eval_mode
from featureflock.integrations.tensor_training import TensorTraining, fit, held_out_rows
from featureflock.methods import FeatureWGD, Method
from featureflock.models import MLP, linear_head
from featureflock.tasks import Classification, Regression, Task, Uncertainty

Array = NDArray[Any]
_CHUNK = 8192  # rows that are predicted at once


class _Flock(BaseEstimator):  # type: ignore[misc]
    """What both estimators share."""

    def __init__(
        self,
        method: Method | None = None,
        module: Callable[[int], nn.Module] | None = None,
        members: int | None = None,
        *,
        epochs: int = 200,
        batch: int = 64,
        learning_rate: float = 1e-3,
        weight_decay: float = 1e-2,
        validation_fraction: float = 0.1,
        patience: int | None = 20,
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.method = method
        self.module = module
        self.members = members
        self.epochs = epochs
        self.batch = batch
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.validation_fraction = validation_fraction
        self.patience = patience
        self.random_state = random_state

    ensemble_: Ensemble

    def predict_uncertainty(self, X: Any) -> Uncertainty:
        """Total, aleatoric (data) and epistemic (model) uncertainty of each prediction, as arrays.

        total = aleatoric + epistemic. For classes they are entropies in nats, (N,), without the temperature; for
        regression variances in the shape of the predictions.
        """
        members = self._member_predictions(X)
        parts = self.ensemble_.task.uncertainty(members, self.ensemble_.calibration)
        return Uncertainty(*(self._shaped(part) for part in parts))  # type: ignore[arg-type]

    def _fit(self, X: Array, y: Tensor, strata: Tensor, task: Task, outputs: int) -> Self:
        """Train on inputs (N, D) and targets y; `strata` (N,) are represented equally in the held-out share."""
        method = FeatureWGD() if self.method is None else self.method
        self._check_parameters(method)
        method.check_task(task, y)
        seed = int(check_random_state(self.random_state).randint(4_000_000))
        held_out = torch.zeros(len(y), dtype=torch.bool)
        held_out[held_out_rows(strata, float(self.validation_fraction), seed)] = True
        self.scaler_ = StandardScaler().fit(X[~held_out.numpy()])
        x = torch.from_numpy(self.scaler_.transform(X)).float()
        members = None if self.members is None else int(self.members)
        ens = _build(method, self.module or MLP, x[:2], outputs, members, seed, int(y[~held_out].numel()), task)
        sizes = int(self.epochs), int(self.batch), float(self.learning_rate), float(self.weight_decay)
        settings = TensorTraining(method, *sizes, None if self.patience is None else int(self.patience), seed)
        history = fit(ens, x[~held_out], y[~held_out], (x[held_out], y[held_out]), settings)
        self.loss_curve_, self.validation_nll_ = history.loss, history.validation_nll
        self.n_iter_ = len(history.loss)
        self.ensemble_ = ens.double().eval()
        return self

    def _member_predictions(self, X: Any) -> Tensor:
        check_is_fitted(self)
        x = torch.from_numpy(self.scaler_.transform(validate_data(self, X, order="C", reset=False))).double()
        return torch.cat([self.ensemble_.member_predictions(part) for part in x.split(_CHUNK)], 1)

    def _shaped(self, prediction: Tensor) -> Array:
        array: Array = prediction.numpy()
        return array

    def _check_parameters(self, method: Method) -> None:
        if not isinstance(method, Method):
            raise TypeError(f"method must be a featureflock method, such as FeatureWGD(), or None; got {method!r}.")
        if self.module is not None and (not callable(self.module) or isinstance(self.module, nn.Module)):
            what = "must be a function or class that builds a new extractor for a number of inputs, such as MLP"
            raise TypeError(f"module {what}; got {type(self.module).__name__}.")
        for name in ("members", "epochs", "batch", "patience"):
            value = getattr(self, name)
            if value is None and name in ("members", "patience"):
                continue
            if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1; got {value!r}.")
        limits = {
            "learning_rate": ("a finite number above 0", np.nextafter(0, 1), np.inf),
            "weight_decay": ("a finite number of at least 0", 0, np.inf),
            "validation_fraction": ("a number from 0 to below 1", 0, 1),
        }
        for name, (limit, low, below) in limits.items():
            value = getattr(self, name)
            if not isinstance(value, Real) or isinstance(value, bool) or not low <= value < below:
                raise ValueError(f"{name} must be {limit}; got {value!r}.")


class FlockClassifier(ClassifierMixin, _Flock):  # type: ignore[misc]
    """Ensemble of neural networks for classification.

        model = FlockClassifier(random_state=0).fit(X_train, y_train)
        model.predict_proba(X_test)

    Sample weights are not supported.

    Args:
        method: the ensemble method; None for FeatureWGD().
        module: builds a new feature extractor for a number of inputs D, (N, D) to (N, H): a class or function, such as
            functools.partial(models.MLP, widths=(64, 64)). None for `models.MLP`. A linear head is added.
        members: number of members; None for the method's default, which is 1 for Single() and 10 for the others.
        epochs: number of epochs, at most.
        batch: batch size.
        learning_rate, weight_decay: of AdamW.
        validation_fraction: share of the training data to hold out, on which training is stopped early and the
            predictions are calibrated; 0 to train on all data for all epochs without calibration.
        patience: number of epochs without a lower held-out NLL after which training stops; None for never. The weights
            of the epoch with the lowest one are used.
        random_state: seed of the initial weights, the order of the data and the held-out share. As in scikit-learn,
            None takes it from NumPy's global random state. PyTorch's is unchanged.

    Attributes:
        classes_: the class labels.
        ensemble_: the trained `Ensemble`, in float64, for standardised inputs.
        scaler_: the `StandardScaler` of the inputs.
        loss_curve_, validation_nll_: training loss and held-out NLL of each epoch, the latter before calibration.
        n_iter_: number of epochs trained.
        n_features_in_, feature_names_in_: number and names of the inputs.
    """

    def fit(self, X: Any, y: Any) -> Self:
        """Train on inputs (N, D) and class labels (N,) of any type."""
        X, y = validate_data(self, X, y, order="C")
        check_classification_targets(y)
        self.classes_, index = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError("FlockClassifier needs at least two classes in y; got 1 class.")
        target = torch.from_numpy(index).long()
        return self._fit(X, target, target, Classification(), len(self.classes_))

    def predict_log_proba(self, X: Any) -> Array:
        """Calibrated log-probabilities, (N, C), averaged over members as probabilities."""
        members = self._member_predictions(X)
        return self._shaped(self.ensemble_.task.calibrated(members, self.ensemble_.calibration)[0])

    def predict_proba(self, X: Any) -> Array:
        """Calibrated probabilities, (N, C), averaged over members; columns as in `classes_`."""
        probs: Array = np.exp(self.predict_log_proba(X))
        return probs

    def predict(self, X: Any) -> Array:
        """The most probable class of each row, (N,)."""
        index = self.predict_log_proba(X).argmax(1)
        labels: Array = self.classes_[index]
        return labels


class FlockRegressor(RegressorMixin, _Flock):  # type: ignore[misc]
    """Ensemble of neural networks for regression, with a predictive variance.

        model = FlockRegressor(random_state=0).fit(X_train, y_train)
        mean, std = model.predict(X_test, return_std=True)

    The likelihood is Gaussian with one learnt variance. Losses are those of standardised targets; predictions are in
    the unit of the targets, and in their shape: (N,), or (N, K) for K targets. Sample weights are not supported.
    Parameters and attributes are those of `FlockClassifier`, without `classes_`.
    """

    def fit(self, X: Any, y: Any) -> Self:
        """Train on inputs (N, D) and targets (N,) or (N, K)."""
        X, y = validate_data(self, X, y, order="C", multi_output=True, y_numeric=True)
        self._one_dimensional = y.ndim == 1
        scaler = StandardScaler()  # in float64; targets with a large mean would lose digits in float32
        target = torch.from_numpy(scaler.fit_transform(y.reshape(len(y), -1).astype(np.float64))).float()
        self._fit(X, target, torch.zeros(len(y)), Regression(), target.shape[1])
        units = tuple(scaler.mean_.tolist()), tuple(scaler.scale_.tolist())
        self.ensemble_.task = Regression(target_mean=units[0], target_std=units[1])
        return self

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """The predicted mean, or with `return_std` a tuple of mean and standard deviation, in the shape of the targets.

        The standard deviation includes the noise and the disagreement of the members.
        """
        members = self._member_predictions(X)
        prediction = self.ensemble_.task.predict(members, self.ensemble_.calibration)
        mean, std = self._shaped(prediction.mean), self._shaped(prediction.std)
        return (mean, std) if return_std else mean

    def _shaped(self, prediction: Tensor) -> Array:
        array = super()._shaped(prediction)
        return array[:, 0] if self._one_dimensional else array

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


def _build(
    method: Method,
    module: Callable[[int], nn.Module],
    x: Tensor,
    outputs: int,
    members: int | None,
    seed: int,
    train_size: int,
    task: Task,
) -> Ensemble:
    """A new ensemble for inputs like x (2, D)."""
    latest: list[nn.Module] = []

    def make_extractor() -> nn.Module:
        extractor = module(x.shape[1])
        if not isinstance(extractor, nn.Module):
            raise TypeError(f"module must return a torch.nn.Module; got {type(extractor).__name__}.")
        latest[:] = [extractor]
        return extractor

    def make_head() -> nn.Module:
        with torch.no_grad(), eval_mode(latest[0]):
            features = latest[0](x)
        if not isinstance(features, Tensor) or features.ndim != 2 or len(features) != len(x):
            got = f"a tensor {tuple(features.shape)}" if isinstance(features, Tensor) else type(features).__name__
            raise ValueError(f"module must build an extractor from (N, D) to features (N, H); it returned {got}.")
        return linear_head(features.shape[1], outputs)

    return method.build(make_extractor, make_head, members=members, seed=seed, train_size=train_size, task=task)
