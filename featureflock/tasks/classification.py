"""Classification, of examples or of every pixel or token: one class for each target.

    p_i = softmax f_i,    p̄ = (1/n) Σ_i p_i,    p_T = softmax(log p̄ / T)           over the class dimension
    H[p̄]  =  (1/n) Σ_i H[p_i]  +  (1/n) Σ_i KL(p_i ‖ p̄)
    total     aleatoric            epistemic (mutual information)

Shapes: n members, B examples, C classes.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from featureflock.core.value_checks import readable, refuse_later
from featureflock.tasks.base import TASKS, Task, Uncertainty, check_float_outputs, high_precision

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@TASKS.register("classification")
@dataclass(frozen=True)
class Classification(Task):
    """One of C classes for each target: outputs (B, C), or (B, C, H, W) for one class per pixel.

    Targets are class indices, of the shape of the outputs without the class dimension: (B,) or (B, H, W). `predict`
    returns probabilities in the shape of the outputs, and `uncertainty` entropies in the shape of the targets.
    """

    dim: int = 1
    """Class dimension of one member's outputs: 1 for (B, C) and (B, C, H, W), −1 for token sequences (B, T, C)."""
    ignore_index: int | None = None
    """Class index of targets to leave out, such as 255 for unlabelled pixels."""

    kind: ClassVar[str] = "classification"

    def __post_init__(self) -> None:
        if not isinstance(self.dim, int) or self.dim == 0:
            raise ValueError(
                f"dim is the class dimension of outputs (B, C, …): 1 or above, or negative; got {self.dim}."
            )

    def losses(self, outputs: Tensor, y: Tensor, log_variance: Tensor | None = None) -> Tensor:
        y, wrong = self.targets(outputs, y), self._wrong(outputs, y)
        losses = torch.stack([self._cross_entropy(each, y) for each in self._classes_second(outputs)])
        return losses if wrong is None else torch.where(wrong.any(), math.nan, losses)

    def loss(self, outputs: Tensor, y: Tensor, log_variance: Tensor | None = None) -> Tensor:
        y, wrong = self.targets(outputs, y), self._wrong(outputs, y)
        rows = self._classes_second(outputs).flatten(0, 1)
        loss = self._cross_entropy(rows, y.repeat(len(outputs), *(1,) * (y.ndim - 1)))
        return loss if wrong is None else torch.where(wrong.any(), math.nan, loss)

    def member_predictions(self, outputs: Tensor, log_variance: Tensor | None = None) -> Tensor:
        """Log-probabilities, (n, B, C, …)."""
        self.check_outputs(outputs)
        return high_precision(outputs).log_softmax(self._dim(outputs))

    def predict(self, members: Tensor, calibration: float | Tensor = 1.0) -> Tensor:
        """Probabilities averaged over members, (B, C, …), at a temperature."""
        return self.calibrated(members, calibration)[0].exp()

    def calibrated(self, members: Tensor, calibration: float | Tensor) -> Tensor:
        log_p = members.logsumexp(0, keepdim=True) - math.log(len(members))
        return (log_p / calibration).log_softmax(self._dim(members))

    def uncertainty(self, members: Tensor, calibration: float | Tensor = 1.0) -> Uncertainty:
        """Entropies in nats. The temperature is not used: it applies to the averaged prediction, not to the members."""
        p, dim = members.double().exp(), self._dim(members)  # the difference of two entropies can be very small
        total = torch.special.entr(p.mean(0)).sum(dim - 1)
        aleatoric = torch.special.entr(p).sum(dim).mean(0)
        parts = total, aleatoric, (total - aleatoric).clamp_min(0)
        return Uncertainty(*(part.to(members.dtype) for part in parts))

    def nll(self, members: Tensor, y: Tensor) -> Tensor:
        y, wrong = self.targets(members, y), self._wrong(members, y)
        log_p = self._classes_second(members).logsumexp(0) - math.log(len(members))
        ignored = -100 if self.ignore_index is None else self.ignore_index
        nll = F.nll_loss(log_p, y, ignore_index=ignored, reduction="none")
        return nll if wrong is None else torch.where(wrong, math.nan, nll)

    def score_terms(self, members: Tensor, y: Tensor) -> Tensor:
        y, wrong = self.targets(members, y), self._wrong(members, y)
        terms = (self._classes_second(members).logsumexp(0).argmax(1) == y).to(members.dtype)
        return terms if wrong is None else torch.where(wrong, math.nan, terms)

    def count(self, y: Tensor) -> int | Tensor:
        return y.numel() if self.ignore_index is None else (y != self.ignore_index).sum().clamp_min(1)

    def check_outputs(self, outputs: Tensor) -> None:
        shape = "(members, examples, classes, …)"
        check_float_outputs(outputs, self, 3, shape)
        if not -outputs.ndim + 1 < self.dim < outputs.ndim - 1:
            got = tuple(outputs.shape)
            raise ValueError(f"Classification(dim={self.dim}) needs that dimension in outputs {shape}; got {got}.")
        if outputs.shape[self._dim(outputs)] == 1:
            advice = "use tasks.Regression() for numbers, or tasks.MultiLabel() for one yes or no"
            raise ValueError(
                f"Classification needs at least two classes, but there is one output per example; {advice}."
            )

    def _check_target_type(self, y: Tensor) -> None:
        if y.dtype not in _INTEGERS:
            advice = (
                "convert class indices with y.long(); use tasks.Regression() for numbers, tasks.MultiLabel() for sets"
            )
            raise ValueError(f"Classification needs integer class indices as targets, got {y.dtype}; {advice}.")

    def _targets(self, outputs: Tensor, y: Tensor) -> Tensor:
        shape, dim = list(outputs.shape[1:]), self._dim(outputs) - 1
        classes = shape.pop(dim)
        if list(y.shape) != shape:
            got = f"targets {tuple(y.shape)} for outputs {tuple(outputs.shape[1:])}"
            other = "; if classes are the last dimension, use Classification(dim=-1)" * (outputs.ndim > 3)
            raise ValueError(f"Classification(dim={self.dim}) needs targets of shape {tuple(shape)}; got {got}{other}.")
        valid = f"Class indices must be 0 to {classes - 1} for {classes} outputs"
        wrong = self._wrong(outputs, y)
        if wrong is not None:  # 0 is an index too; the loss is NaN
            refuse_later(wrong.any(), f"{valid}.")
            return y.long().masked_fill(wrong, 0)
        labels = y if self.ignore_index is None else y[y != self.ignore_index]
        if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
            first = int(labels.min()) if int(labels.min()) < 0 else int(labels.max())
            ignored = "; use Classification(ignore_index=-100) to leave out such targets" if first == -100 else ""
            raise ValueError(f"{valid}; got {first}{ignored}.")
        return y.long()

    def _wrong(self, outputs: Tensor, y: Tensor) -> Tensor | None:
        """Targets that are no class, where values cannot be read; None where `targets` has refused them."""
        if readable(y):
            return None
        y = y.long()
        wrong = (y < 0) | (y >= outputs.shape[self._dim(outputs)])
        return wrong if self.ignore_index is None else wrong & (y != self.ignore_index)

    def _dim(self, outputs: Tensor) -> int:
        """Class dimension of outputs with members."""
        return self.dim + 1 if self.dim > 0 else outputs.ndim + self.dim

    def _classes_second(self, outputs: Tensor) -> Tensor:
        """Outputs (n, B, C, …), as cross_entropy expects them."""
        return outputs.movedim(self._dim(outputs), 2)

    def _cross_entropy(self, outputs: Tensor, y: Tensor) -> Tensor:
        if self.ignore_index is None:
            return F.cross_entropy(outputs, y)
        total = F.cross_entropy(outputs, y, ignore_index=self.ignore_index, reduction="sum")
        return total / (y != self.ignore_index).sum().clamp_min(1)
