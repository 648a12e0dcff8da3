"""ADP, adaptive diversity promotion (Pang et al., 2019): members agree on the true class and differ in the others.

    loss = Σ_i CE_i − α H(p̄) − β log det(M̃ M̃ᵀ + ε I)        the mean over the batch; ε = 1e-6

p̄ is the mean prediction, H its Shannon entropy, and row i of M̃ the prediction of member i for the wrong classes, scaled
to unit length. The determinant is the squared volume spanned by the rows; it is largest for orthogonal rows:

    identical rows:     log det = log(n + ε) + (n − 1) log ε
    orthogonal rows:    log det = n log(1 + ε)

A row is computed as the softmax over the wrong classes only, scaled to unit length: the probability of the true class
cancels. So the row and its gradient stay accurate when all other probabilities of a confident member underflow.

Shapes: n members, B data points, C classes.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from featureflock.ensemble.ensemble import Ensemble
from featureflock.methods.base import METHODS, LossOutput, Method, SearchSpace, check_numbers

_EPSILON = 1e-6


@METHODS.register("adp")
@dataclass(frozen=True)
class ADP(Method):
    """Independent members, rewarded for differing in the wrong classes."""

    title = "ADP"
    needs_classes = True
    search_space: ClassVar[SearchSpace] = {
        "alpha": (0.1, 0.3, 1.0, 2.0, 4.0),
        "beta": (0.05, 0.15, 0.5, 1.5, 5.0),
    }

    alpha: float = 2.0
    """α, weight of the entropy of the mean prediction. The authors use 2."""
    beta: float = 0.5
    """β, weight of the log-determinant. The authors use 0.5."""

    def __post_init__(self) -> None:
        check_numbers(self, "alpha", "beta")

    def loss(self, ens: Ensemble, x: Tensor, y: Tensor) -> LossOutput:
        self.check_task(ens.task, y)
        logits = ens(x)
        cross_entropy = ens.task.losses(logits, y).sum()
        diversity = self.alpha * mean_entropy(logits).mean() + self.beta * log_volume(logits, y).mean()
        return LossOutput(cross_entropy - diversity.to(cross_entropy.dtype), logits)


def mean_entropy(logits_nbc: Tensor) -> Tensor:
    """H(p̄) in nats, (B,)."""
    # Below −700, p log p and its gradient underflow to 0 in float64, so the clamp only affects logits of −∞.
    log_p_nbc = _high_precision(logits_nbc).log_softmax(-1).clamp_min(-700)
    log_p_bc = log_p_nbc.logsumexp(0) - math.log(len(logits_nbc))
    return -(log_p_bc.exp() * log_p_bc).sum(-1)


def log_volume(logits_nbc: Tensor, y_b: Tensor) -> Tensor:
    """log det(M̃ M̃ᵀ + ε I), (B,)."""
    true_b1 = y_b[:, None]
    classes = torch.arange(logits_nbc.shape[-1], device=y_b.device)
    wrong_bc = classes[:-1] + (classes[:-1] >= true_b1)  # all classes but the true one, in order
    wrong_nbc = _high_precision(logits_nbc).gather(-1, wrong_bc.expand(len(logits_nbc), -1, -1))
    rows_bnc = F.normalize(wrong_nbc.softmax(-1), dim=-1).transpose(0, 1)
    gram_bnn = rows_bnc @ rows_bnc.mT + _EPSILON * torch.eye(len(logits_nbc), device=y_b.device, dtype=rows_bnc.dtype)
    factor_bnn, _ = torch.linalg.cholesky_ex(gram_bnn)
    log_diagonal_bn: Tensor = factor_bnn.diagonal(dim1=-2, dim2=-1).log()
    return 2 * log_diagonal_bn.sum(-1)


def _high_precision(logits: Tensor) -> Tensor:
    """float64, in which n + ε is not rounded to n; float32 on devices without float64."""
    return logits.float() if logits.device.type == "mps" else logits.double()
