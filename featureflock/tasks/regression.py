"""Regression with a Gaussian likelihood of one variance for all inputs, learnt or fixed.

    p(y|f) = N(y; f, σ²),      loss = (1/(n·T)) Σ_i Σ_t ½ [log σ² + (y_t − f_i(x_t))²/σ² + log 2π]
    m = (1/n) Σ_i f_i,         V = σ² + (1/n) Σ_i (f_i − m)²                 mean and variance of the prediction
                               total = aleatoric + epistemic

A learnt variance belongs to the likelihood, as the head does: members with one shared head share one variance, and
members with heads of their own have one each.

Shapes: n members, B examples, T numbers in the targets.
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from featureflock.core.value_checks import readable, refuse_later
from featureflock.tasks import gaussian_mixtures
from featureflock.tasks.base import TASKS, Task, Uncertainty, check_float_outputs, high_precision

_LOG_2PI = math.log(2 * math.pi)


class RegressionPrediction(NamedTuple):
    """Mean and variance of the predictive distribution, in the shape of one member's mean: (B, D)."""

    mean: Tensor
    variance: Tensor
    """Total variance: noise and disagreement of the members."""

    @property
    def std(self) -> Tensor:
        """Standard deviation."""
        return self.variance.sqrt()


@dataclass(frozen=True, kw_only=True)
class GaussianTask(Task):
    """What both kinds of regression share. Outputs are in units of standardised targets, (y − mean) / std."""

    target_mean: tuple[float, ...] = ()
    """Mean of the training targets, one number or one for each target dimension; empty for 0. `fitted` sets it."""
    target_std: tuple[float, ...] = ()
    """Standard deviation of the training targets; empty for 1. Predictions are in the unit of the targets."""

    kind: ClassVar[str] = "regression"
    calibration: ClassVar[str] = "variance_scale"
    calibration_bounds: ClassVar[tuple[float, float]] = (1e-4, 1e4)
    score: ClassVar[str] = "rmse"

    def __post_init__(self) -> None:
        if len(self.target_mean) != len(self.target_std) or not all(0 < s < math.inf for s in self.target_std):
            raise ValueError(
                "target_mean and target_std need as many numbers as each other, and each std must be positive; "
                f"got {self.target_mean} and {self.target_std}."
            )

    def predict(self, members: Tensor, calibration: float | Tensor = 1.0) -> RegressionPrediction:
        """Mean and variance, (B, …) each; the variance is multiplied by the calibration."""
        aleatoric, epistemic = gaussian_mixtures.variances(members)
        return RegressionPrediction(members[:, :, 0].mean(0), calibration * (aleatoric + epistemic))

    def uncertainty(self, members: Tensor, calibration: float | Tensor = 1.0) -> Uncertainty:
        """Variances by the law of total variance, multiplied by the calibration."""
        aleatoric, epistemic = (calibration * part for part in gaussian_mixtures.variances(members))
        return Uncertainty(aleatoric + epistemic, aleatoric, epistemic)

    def calibrated(self, members: Tensor, calibration: float | Tensor) -> Tensor:
        return gaussian_mixtures.scaled(members, calibration)

    def nll(self, members: Tensor, y: Tensor) -> Tensor:
        return gaussian_mixtures.nll(members, self._like(members[:, :, 0], y))

    def score_terms(self, members: Tensor, y: Tensor) -> Tensor:
        mean = members[:, :, 0]
        return (mean.mean(0) - self._like(mean, y)).square()

    def score_from(self, mean: float) -> float:
        return math.sqrt(mean)

    def fitted(self, y: Tensor) -> Self:
        if self.target_std:
            return self
        columns = y.double().movedim(1, -1).flatten(0, -2) if y.ndim > 1 else y.double()[:, None]
        mean, std = columns.mean(0), columns.std(0, correction=0)
        if not torch.isfinite(mean).all() or not (std > 0).all():
            raise ValueError("Regression needs finite training targets that are not all equal.")
        return replace(self, target_mean=tuple(mean.tolist()), target_std=tuple(std.tolist()))

    def _like(self, mean: Tensor, y: Tensor) -> Tensor:
        """Targets in the shape and type of one member's mean (n, B, …)."""
        self.check_targets(y)
        shape = tuple(mean.shape[1:])
        if tuple(y.shape) != shape:
            if {tuple(y.shape), shape} != {(len(y),), (len(y), 1)}:
                raise ValueError(f"{self.name} needs targets of shape {shape}, as its means; got {tuple(y.shape)}.")
            y = y.reshape(shape)
        message = f"{self.name} needs finite targets; some are NaN or infinite. Remove those examples."
        y = y.to(mean.dtype)
        if not readable(y):
            finite = torch.isfinite(y)
            refuse_later(~finite.all(), message)
            return torch.where(finite, y, math.nan)
        if not torch.isfinite(y).all():
            raise ValueError(message)
        return y

    def _check_target_type(self, y: Tensor) -> None:
        if y.is_complex() or y.dtype == torch.bool:
            raise ValueError(f"{self.name} needs targets that are real numbers; got {y.dtype}.")

    def undefined(self, members: Tensor) -> Tensor:
        return ~torch.isfinite(members)

    def _standardised_nll(self, mean: Tensor, log_variance: Tensor, y: Tensor) -> Tensor:
        """½ [log σ² + r²/σ² + log 2π] of each member and standardised target, (n, B, …)."""
        shift, scale = self._units(mean)
        residual = (y - shift) / scale - mean
        return 0.5 * (log_variance + residual.square() * (-log_variance).exp() + _LOG_2PI)

    def _in_target_units(self, mean: Tensor, log_variance: Tensor) -> Tensor:
        """Members' predictions (n, B, 2, …) from outputs in standardised units."""
        shift, scale = self._units(mean)
        return gaussian_mixtures.mixture(shift + scale * mean, log_variance + 2 * scale.log())

    def _units(self, mean: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and std of the targets, to be broadcast with means (n, B, …): along dimension 2 if there are several."""
        shift, scale = (mean.new_tensor(part) for part in (self.target_mean or (0.0,), self.target_std or (1.0,)))
        if len(shift) == 1:
            return shift[0], scale[0]
        if mean.ndim < 3 or mean.shape[2] != len(shift):
            raise ValueError(f"{self.name} has {len(shift)} target dimensions; got means {tuple(mean.shape)}.")
        view = (-1, *(1,) * (mean.ndim - 3))
        return shift.view(view), scale.view(view)


@TASKS.register("regression")
@dataclass(frozen=True)
class Regression(GaussianTask):
    """Numbers with Gaussian noise of one variance: outputs (B, D), or any other shape that the targets have too.

    `predict` returns the mean and variance of the prediction in the shape of the outputs. Targets (B,) are also
    accepted for outputs (B, 1). Standardise the targets, or set `initial_variance` to the order of their variance.
    """

    variance: float | None = None
    """Fixed variance σ² of the noise; None to learn it."""
    initial_variance: float = 1.0
    """Initial value of a learnt variance."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in (("variance", self.variance), ("initial_variance", self.initial_variance)):
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be positive and finite; got {value}.")

    def losses(self, outputs: Tensor, y: Tensor, log_variance: Tensor | None = None) -> Tensor:
        mean, y = high_precision(outputs), self.targets(outputs, y)
        return self._standardised_nll(mean, self._log_variance(mean, log_variance), y).flatten(1).mean(1)

    def member_predictions(self, outputs: Tensor, log_variance: Tensor | None = None) -> Tensor:
        """Mean and log-variance, (n, B, 2, …), in the unit of the targets."""
        self.check_outputs(outputs)
        mean = high_precision(outputs)
        return self._in_target_units(mean, self._log_variance(mean, log_variance))

    def initial_log_variance(self, members: int | None) -> Tensor | None:
        if self.variance is not None:
            return None
        return torch.full(() if members is None else (members,), math.log(self.initial_variance))

    def check_outputs(self, outputs: Tensor) -> None:
        check_float_outputs(outputs, self, 2, "(members, examples, …)")

    def _targets(self, outputs: Tensor, y: Tensor) -> Tensor:
        return self._like(high_precision(outputs), y)

    def _log_variance(self, mean: Tensor, learnt: Tensor | None) -> Tensor:
        """log σ², to be broadcast with means (n, B, …)."""
        if self.variance is not None:
            return mean.new_tensor(math.log(self.variance))
        if learnt is None:
            raise ValueError(
                "Regression() learns its variance, which is a parameter of the ensemble: pass ens.log_variance, or fix "
                "the variance, Regression(variance=1.0)."
            )
        return learnt if learnt.ndim == 0 else learnt.view(-1, *(1,) * (mean.ndim - 1))
