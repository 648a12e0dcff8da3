"""The interface of tasks, and their registry.

    loss        −(1/(n·T)) Σ_i Σ_t log p(y_t | f_i(x_t))      the mean over n members and T likelihood terms
    p̄(y|x)   = (1/n) Σ_i p(y | f_i(x))                        the prediction: a mixture of the members' distributions

T is the number of entries of the targets: B classes, B·H·W pixels, B·L labels, B·D numbers. It is also the `count` of
the particle layer, so that prior and repulsion have the weight that they have in the posterior.

Members' *outputs* are what the network returns, (n, B, …). Members' *predictions* are the parameters of the predictive
distribution of each member, one tensor (n, B, …): log-probabilities, logits, or mean and log-variance. Prediction,
uncertainty, calibration and metrics are functions of the members' predictions alone.

Shapes: n members, B examples.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from featureflock.utils.registry import Registry

_GOLDEN = (math.sqrt(5) - 1) / 2


class Uncertainty(NamedTuple):
    """Total = aleatoric + epistemic, for each target. Entropies in nats; for regression, variances."""

    total: Tensor
    """Uncertainty of the prediction: H[p̄], or the variance of the mixture."""
    aleatoric: Tensor
    """Mean uncertainty of the members, which they agree on: (1/n) Σ_i H[p_i], or (1/n) Σ_i σ_i²."""
    epistemic: Tensor
    """Disagreement of the members: the mutual information of prediction and member, or the variance of their means."""


@dataclass(frozen=True)
class Task(ABC):
    """A likelihood p(y|f). Tasks are frozen dataclasses: values that ensembles and data sets hold."""

    kind: ClassVar[str]
    """Name of the task in the metric registry: a metric says to which kinds it applies."""
    calibration: ClassVar[str] = "temperature"
    """Name of the ensemble's buffer that `featureflock.calibrate` sets."""
    calibration_bounds: ClassVar[tuple[float, float]] = (1e-2, 1e2)
    """Range of the calibration."""
    score: ClassVar[str] = "accuracy"
    """Name of the score that the training loop reports beside the NLL."""

    @abstractmethod
    def losses(self, outputs: Tensor, y: Tensor, log_variance: Tensor | None = None) -> Tensor:
        """Mean loss of each member, (n,), from outputs (n, B, …) and targets y.

        `log_variance` is the learnt log-variance of `Regression`: one number, or one for each member.
        """

    def loss(self, outputs: Tensor, y: Tensor, log_variance: Tensor | None = None) -> Tensor:
        """Mean loss over members and likelihood terms: what an ordinary training loop back-propagates."""
        return self.losses(outputs, y, log_variance).mean()

    @abstractmethod
    def member_predictions(self, outputs: Tensor, log_variance: Tensor | None = None) -> Tensor:
        """Parameters of the predictive distribution of each member, (n, B, …), from outputs (n, B, …)."""

    @abstractmethod
    def predict(self, members: Tensor, calibration: float | Tensor = 1.0) -> Any:
        """The prediction of the ensemble, from the members' predictions."""

    @abstractmethod
    def uncertainty(self, members: Tensor, calibration: float | Tensor = 1.0) -> Uncertainty:
        """The decomposition of the uncertainty for each target, from the members' predictions."""

    @abstractmethod
    def nll(self, members: Tensor, y: Tensor) -> Tensor:
        """Negative log-likelihood of the averaged prediction for each target; 0 for targets that are ignored."""

    @abstractmethod
    def score_terms(self, members: Tensor, y: Tensor) -> Tensor:
        """For each target, 1 if the prediction is correct and else 0; for regression, its squared error."""

    @abstractmethod
    def calibrated(self, members: Tensor, calibration: float | Tensor) -> Tensor:
        """Members' predictions whose average is the calibrated prediction."""

    def fit_calibration(self, members: Tensor, y: Tensor) -> float:
        """The calibration from 1e-2 to 1e2, for variances 1e-4 to 1e4, that minimises the NLL on held-out targets."""
        low, high = self.calibration_bounds
        return minimise(lambda c: self.nll(self.calibrated(members, c), y).sum().item(), low, high)

    def score_from(self, mean: float) -> float:
        """The reported score from the mean of `score_terms`: accuracy in %, or the RMSE."""
        return 100 * mean

    def count(self, y: Tensor) -> int | Tensor:
        """Number of likelihood terms that the mean loss averages."""
        return y.numel()

    def targets(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Targets in the shape and type that the outputs (n, B, …) need; ValueError if they cannot belong to them.

        Values are not read from a GPU (core/value_checks.py): there, losses of targets that cannot be right are NaN.
        """
        self.check_outputs(outputs)
        self.check_targets(y)
        if len(y) != outputs.shape[1]:
            got = f"outputs {tuple(outputs.shape)} and targets {tuple(y.shape)}"
            swapped = len(y) == len(outputs)
            advice = "; stack the members along the first dimension, torch.stack(members, 0)" if swapped else ""
            raise ValueError(f"Outputs must have shape (members, examples, …); got {got}{advice}.")
        if y.device != outputs.device:
            raise ValueError(f"Outputs are on {outputs.device} and targets on {y.device}; move one to the other.")
        return self._targets(outputs, y)

    def check_targets(self, y: Tensor) -> None:
        """Raise ValueError if y cannot be targets of the task. Only shapes and types are read."""
        if not isinstance(y, Tensor):
            raise ValueError(f"{self.name} needs targets as a tensor; got {type(y).__name__}. Use torch.as_tensor.")
        if y.ndim == 0 or y.numel() == 0:
            raise ValueError(f"{self.name} needs targets (examples, …) of at least one; got shape {tuple(y.shape)}.")
        self._check_target_type(y)

    @abstractmethod
    def _check_target_type(self, y: Tensor) -> None: ...

    def undefined(self, members: Tensor) -> Tensor:
        """Where the members' predictions are no distribution; log-probabilities and logits may be infinite."""
        return members.isnan()

    @abstractmethod
    def check_outputs(self, outputs: Tensor) -> None:
        """Raise ValueError if outputs (n, B, …) cannot belong to the task. Only shapes and types are read."""

    @abstractmethod
    def _targets(self, outputs: Tensor, y: Tensor) -> Tensor: ...

    def initial_log_variance(self, members: int | None) -> Tensor | None:
        """Initial value of the learnt log-variance, one number or one for each of `members`; None if none is learnt."""
        return None

    def fitted(self, y: Tensor) -> Self:
        """The task adapted to the training targets y. Regression standardises them in the loss."""
        return self

    def outputs(self, classes: int) -> int:
        """Number of outputs of the network for this many classes, labels or target dimensions."""
        return classes

    @property
    def name(self) -> str:
        """Class name, for messages."""
        return type(self).__name__


TASKS: Registry[type[Task]] = Registry("task")
"""Tasks by name, as in saved ensembles."""


def check_float_outputs(outputs: Tensor, task: Task, dims: int, shape: str) -> None:
    """Raise ValueError unless outputs are floating point with at least `dims` dimensions, none of them empty."""
    if not isinstance(outputs, Tensor) or not outputs.is_floating_point():
        kind = outputs.dtype if isinstance(outputs, Tensor) else type(outputs).__name__
        raise ValueError(f"{task.name} needs floating-point outputs {shape}; got {kind}.")
    if outputs.ndim < dims or 0 in outputs.shape:
        raise ValueError(f"{task.name} needs outputs {shape}; got shape {tuple(outputs.shape)}.")


def minimise(function: Callable[[float], float], low: float, high: float) -> float:
    """The minimiser in [low, high], both positive: the best of 41 points in equal ratios, refined by golden section."""
    start, step = math.log(low), (math.log(high) - math.log(low)) / 40
    values = [function(math.exp(start + k * step)) for k in range(41)]
    best = min(range(41), key=values.__getitem__)
    a, b = start + max(best - 1, 0) * step, start + min(best + 1, 40) * step
    inner = [b - _GOLDEN * (b - a), a + _GOLDEN * (b - a)]
    at = [function(math.exp(u)) for u in inner]
    while b - a > 1e-7:
        if at[0] <= at[1]:
            b, inner, at = inner[1], [inner[1] - _GOLDEN * (inner[1] - a), inner[0]], [math.nan, at[0]]
            at[0] = function(math.exp(inner[0]))
        else:
            a, inner, at = inner[0], [inner[1], inner[0] + _GOLDEN * (b - inner[0])], [at[1], math.nan]
            at[1] = function(math.exp(inner[1]))
    return math.exp((a + b) / 2)


def high_precision(x: Tensor) -> Tensor:
    """At least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
