"""Regression whose variance depends on the input: the network returns a mean and a log-variance.

    p(y|f) = N(y; μ, exp(s)),    (μ, s) = f(x),    loss = (1/(n·T)) Σ_i Σ_t ½ [s + (y − μ)² e^{−s} + log 2π]

The log-variance is limited smoothly to ±20, s = 20 tanh(f / 20), so that one bad step cannot overflow the loss.

Shapes: n members, B examples, D target dimensions, T numbers in the targets.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from featureflock.tasks.base import TASKS, check_float_outputs, high_precision
from featureflock.tasks.regression import GaussianTask

_LIMIT = 20.0


@TASKS.register("heteroscedastic-regression")
@dataclass(frozen=True)
class HeteroscedasticRegression(GaussianTask):
    """Numbers with Gaussian noise that depends on the input: outputs (B, 2D), D means, then D log-variances.

    Targets are (B, D), or (B,) for D = 1. Images have outputs (B, 2D, H, W). `predict` returns the mean and variance
    of the prediction, (B, D).
    """

    def losses(self, outputs: Tensor, y: Tensor, log_variance: Tensor | None = None) -> Tensor:
        y, (mean, log_variance) = self.targets(outputs, y), _split(outputs)
        return self._standardised_nll(mean, log_variance, y).flatten(1).mean(1)

    def member_predictions(self, outputs: Tensor, log_variance: Tensor | None = None) -> Tensor:
        """Mean and log-variance, (n, B, 2, D), in the unit of the targets."""
        self.check_outputs(outputs)
        return self._in_target_units(*_split(outputs))

    def outputs(self, classes: int) -> int:
        return 2 * classes

    def check_outputs(self, outputs: Tensor) -> None:
        shape = "(members, examples, 2·D): D means, then D log-variances"
        check_float_outputs(outputs, self, 3, shape)
        if outputs.shape[2] % 2:
            raise ValueError(f"{self.name} needs outputs {shape}; got shape {tuple(outputs.shape)}.")

    def _targets(self, outputs: Tensor, y: Tensor) -> Tensor:
        return self._like(_split(outputs)[0], y)


def _split(outputs: Tensor) -> tuple[Tensor, Tensor]:
    mean, raw = high_precision(outputs).chunk(2, 2)
    return mean, _LIMIT * torch.tanh(raw / _LIMIT)
