"""Multi-label classification: any subset of L labels for each example, each with its own probability.

    p_il = σ(f_il),    p̄_l = (1/n) Σ_i p_il,    p_T = σ(logit(p̄_l) / T)
    loss = −(1/(n·B·L)) Σ_i Σ_b Σ_l [y log p_il + (1 − y) log(1 − p_il)]
    H[p̄_l] = (1/n) Σ_i H[p_il] + mutual information                     for each label; H of a yes-or-no variable

Shapes: n members, B examples, L labels.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from featureflock.core.value_checks import readable, refuse_later
from featureflock.tasks.base import TASKS, Task, Uncertainty, check_float_outputs, high_precision


@TASKS.register("multi-label")
@dataclass(frozen=True)
class MultiLabel(Task):
    """Any subset of L labels for each example: outputs and targets (B, L), or (B, L, H, W).

    Targets are 0 or 1 for each label. `predict` returns the probability of each label; they do not sum to 1.
    `uncertainty` returns entropies for each label, in the shape of the targets.
    """

    kind: ClassVar[str] = "multi-label"

    def losses(self, outputs: Tensor, y: Tensor, log_variance: Tensor | None = None) -> Tensor:
        y = self.targets(outputs, y)
        return torch.stack([F.binary_cross_entropy_with_logits(each, y.to(each.dtype)) for each in outputs])

    def member_predictions(self, outputs: Tensor, log_variance: Tensor | None = None) -> Tensor:
        """Logits of the labels, (n, B, L)."""
        self.check_outputs(outputs)
        return high_precision(outputs)

    def predict(self, members: Tensor, calibration: float | Tensor = 1.0) -> Tensor:
        """Probability of each label averaged over members, (B, L), at a temperature."""
        return self.calibrated(members, calibration)[0].sigmoid()

    def calibrated(self, members: Tensor, calibration: float | Tensor) -> Tensor:
        return mean_logit(members)[None] / calibration

    def uncertainty(self, members: Tensor, calibration: float | Tensor = 1.0) -> Uncertainty:
        """Entropies of each label in nats. The temperature is not used, as in `Classification`."""
        z = members.double()
        total, aleatoric = _entropy(mean_logit(z)), _entropy(z).mean(0)
        parts = total, aleatoric, (total - aleatoric).clamp_min(0)
        return Uncertainty(*(part.to(members.dtype) for part in parts))

    def nll(self, members: Tensor, y: Tensor) -> Tensor:
        y, logit = self.targets(members, y), mean_logit(members)
        return F.binary_cross_entropy_with_logits(logit, y.to(logit.dtype), reduction="none")

    def score_terms(self, members: Tensor, y: Tensor) -> Tensor:
        y = self.targets(members, y)
        return torch.where(y.isnan(), math.nan, ((mean_logit(members) > 0) == (y > 0.5)).to(members.dtype))

    def check_outputs(self, outputs: Tensor) -> None:
        check_float_outputs(outputs, self, 3, "(members, examples, labels)")

    def _check_target_type(self, y: Tensor) -> None:
        if y.is_complex():
            raise ValueError(f"MultiLabel needs targets of 0 and 1; got {y.dtype}.")

    def _targets(self, outputs: Tensor, y: Tensor) -> Tensor:
        shape = tuple(outputs.shape[1:])
        if tuple(y.shape) != shape:
            indices = y.ndim == 1 and not y.is_floating_point()
            advice = "class indices belong to tasks.Classification(); " if indices else ""
            what = f"MultiLabel needs a 0 or 1 for each label, targets of shape {shape}"
            raise ValueError(f"{what}; got {tuple(y.shape)}: {advice}F.one_hot converts indices.")
        message = "MultiLabel needs targets of 0 and 1, one for each label; some are outside of [0, 1]."
        if readable(y):
            if not 0 <= float(y.min()) <= float(y.max()) <= 1:
                raise ValueError(message)
            return y if y.is_floating_point() else y.float()
        y = y if y.is_floating_point() else y.float()
        valid = (y >= 0) & (y <= 1)
        refuse_later(~valid.all(), message)
        return torch.where(valid, y, math.nan)


def mean_logit(z: Tensor) -> Tensor:
    """logit p̄ (B, L) from the members' logits (n, B, L), without rounding p̄ to 0 or 1."""
    log_p, log_not_p = (F.logsigmoid(s * z).logsumexp(0) - math.log(len(z)) for s in (1, -1))
    return log_p - log_not_p


def _entropy(logit: Tensor) -> Tensor:
    entropy: Tensor = torch.special.entr(logit.sigmoid()) + torch.special.entr((-logit).sigmoid())
    return entropy
