"""ADP, adaptive diversity promotion (Pang et al., 2019): members share the right answer and differ in the wrong ones.

    loss = Σ_i CE_i − α H(p̄) − β log det(M̃ M̃ᵀ + ε I)        the mean over the batch; ε = 1e-6

p̄ is the members' mean prediction, H its Shannon entropy, and row i of M̃ what member i says of the wrong classes, at
unit length. The determinant is the squared volume that the rows span, largest for members that err in other classes:

    members in agreement:   log det = log(n + ε) + (n − 1) log ε
    orthogonal rows:        log det = n log(1 + ε)

A row is the softmax over the wrong classes alone, at unit length: what the right class has cancels. So a member that is
certain, whose other probabilities are all rounded to zero, has a row and a gradient like any other.

Shapes: n members, B data points, C classes.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from featureflock.ensemble.ensemble import Ensemble
from featureflock.methods.base import Method, check_weight

_EPSILON = 1e-6


@dataclass(frozen=True)
class ADP(Method):
    """Members that share nothing, rewarded for differing in the wrong classes."""

    title = "ADP"

    alpha: float = 2.0
    """α, the weight of the entropy of the mean prediction; the authors' 2."""
    beta: float = 0.5
    """β, the weight of the log-determinant; the authors' 0.5."""

    def __post_init__(self) -> None:
        check_weight("alpha", self.alpha)
        check_weight("beta", self.beta)

    def assemble(self, extractors: list[nn.Module], heads: list[nn.Module], train_size: int | None) -> Ensemble:
        return Ensemble(extractors, heads)

    def loss(self, ens: Ensemble, x: Tensor, y: Tensor) -> Tensor:
        logits = ens(x)
        cross_entropy = torch.stack([F.cross_entropy(each, y) for each in logits]).sum()
        diversity = self.alpha * mean_entropy(logits).mean() + self.beta * log_volume(logits, y).mean()
        return cross_entropy - diversity.to(cross_entropy.dtype)


def mean_entropy(logits_nbc: Tensor) -> Tensor:
    """H(p̄) in nats, (B,)."""
    # Below −700, p log p and its gradient are 0 in float64, too; so a logit of −∞ does no harm.
    log_p_nbc = _exact(logits_nbc).log_softmax(-1).clamp_min(-700)
    log_p_bc = log_p_nbc.logsumexp(0) - math.log(len(logits_nbc))
    return -(log_p_bc.exp() * log_p_bc).sum(-1)


def log_volume(logits_nbc: Tensor, y_b: Tensor) -> Tensor:
    """log det(M̃ M̃ᵀ + ε I), (B,)."""
    right_b1 = y_b[:, None]
    classes = torch.arange(logits_nbc.shape[-1], device=y_b.device)
    wrong_bc = classes[:-1] + (classes[:-1] >= right_b1)  # the classes but the right one, in order
    wrong_nbc = _exact(logits_nbc).gather(-1, wrong_bc.expand(len(logits_nbc), -1, -1))
    rows_bnc = F.normalize(wrong_nbc.softmax(-1), dim=-1).transpose(0, 1)
    gram_bnn = rows_bnc @ rows_bnc.mT + _EPSILON * torch.eye(len(logits_nbc), device=y_b.device, dtype=rows_bnc.dtype)
    factor_bnn, _ = torch.linalg.cholesky_ex(gram_bnn)
    log_diagonal_bn: Tensor = factor_bnn.diagonal(dim1=-2, dim2=-1).log()
    return 2 * log_diagonal_bn.sum(-1)


def _exact(logits: Tensor) -> Tensor:
    """In float64, where ε still counts beside n; in float32 on devices that have no more."""
    return logits.float() if logits.device.type == "mps" else logits.double()
