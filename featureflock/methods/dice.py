"""DICE (Ramé and Cord, 2021): members whose features tell nothing of each other beyond the class.

    loss = Σ_i [ KL(e_i(z|x) ‖ b_i(z|y)) / β_ceb − E log c_i(y|z) ] + δ_cr/(n − 1) Σ_{i<j} max(0, I(Z_i; Z_j | Y))

Member i has Gaussian features e_i(z|x) with a mean and a deviation for each; c_i(y|z) classifies a sample of them, and
after training their mean. The bottleneck KL keeps them close to a learned Gaussian b_i(z|y) of each class. How
redundant members are, I, is estimated by discriminators (redundancy.py), which learn meanwhile by a loss of their own:

    loss of the discriminators = Σ_{i<j} discrimination

The members' loss takes the discriminators as they are, and the discriminators' loss takes the features as they are, so
that one backward pass of the sum gives each its own gradient. The discriminators have an optimiser of their own,
RMSprop, before which the gradient of each is cut to norm 1; those that a step uses have learnt from the batches before.
The Gaussians of the classes get nothing but KL/β_ceb, far too little for SGD to move them: theirs is Adam, to which the
factor does not matter.

δ_cr rises linearly from 0, and β_ceb in equal ratios from a strong bottleneck to a weak one, over the first epochs.

Shapes: n members, B data points, H features, C classes.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from featureflock.ensemble.ensemble import Ensemble, recorded
from featureflock.methods.base import Method, check_weight
from featureflock.methods.discriminators import TAU, Discriminators, judge

_LIMIT = 10.0
"""Log-variances are kept between ±10, smoothly."""
_FIRST_LOG_VARIANCE = -5.0


class Terms(NamedTuple):
    """The parts of the loss, each already with its weight."""

    cross_entropy: Tensor
    bottleneck: Tensor
    redundancy: Tensor
    discrimination: Tensor


@dataclass(frozen=True)
class DICE(Method):
    """Members with Gaussian features and heads of their own, whose conditional redundancy is penalised."""

    title = "DICE"
    splits_over_batch = False  # its negatives come from the whole batch

    delta: float = 0.2
    """δ_cr, the weight of the redundancy after the first epochs; DICE's paper has about 0.2."""
    beta: float = 10_000.0
    """β_ceb after the first epochs: the larger, the weaker the bottleneck."""
    first_beta: float = 100.0
    """β_ceb at the beginning."""
    ramp_epochs: float = 5.0
    """Epochs over which δ_cr and β_ceb rise to their values; 0 to have them from the beginning."""
    tau: float = TAU
    """τ, which the logits of the discriminators are kept below where members see them."""
    discriminator_rate: float = 1e-3
    """Learning rate of the discriminators, which is not decayed."""
    class_rate: float = 0.05
    """Learning rate of the classes' Gaussians, which is not decayed either."""
    paired_batches: bool = False
    """Take examples in pairs of one class, so that in batches of an even size each has a negative, however many classes
    there are. Without, a batch of 128 leaves out one in a million examples of 10 classes, and 28 % of 100 classes."""

    def __post_init__(self) -> None:
        check_weight("delta", self.delta)
        check_weight("ramp_epochs", self.ramp_epochs)
        for name in ("beta", "first_beta", "tau", "discriminator_rate", "class_rate"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a finite number above 0; got {getattr(self, name)!r}.")

    def assemble(self, extractors: list[nn.Module], heads: list[nn.Module], train_size: int | None) -> Ensemble:
        if train_size is None:
            raise ValueError("DICE needs train_size=N, the number of training points, to know how long an epoch is.")
        sizes = {(head.in_features, head.out_features) for head in heads if isinstance(head, nn.Linear)}
        features, classes = sizes.pop() if sizes else (0, 0)
        if sizes or features == 0 or not all(isinstance(head, nn.Linear) for head in heads):
            raise ValueError(f"DICE needs heads that are nn.Linear and all of one size; got {heads[0]}.")
        gaussian = [nn.Sequential(extractor, GaussianFeatures(features)) for extractor in extractors]
        of_means = [nn.Sequential(FirstColumns(features), head) for head in heads]
        return Ensemble(gaussian, of_means, Bottleneck(len(extractors), features, classes, train_size))

    def loss(self, ens: Ensemble, x: Tensor, y: Tensor) -> Tensor:
        return torch.stack(self.terms(ens, x, y)).sum()

    def terms(self, ens: Ensemble, x: Tensor, y: Tensor) -> Terms:
        """The parts of the loss for a batch, at the weights that this moment of training has."""
        layer = _bottleneck(ens)
        delta, beta = self.weights_after(layer.epochs)
        with recorded(layer) as calls:
            logits = ens(x)
        (gaussian,), z = calls[-1]
        z = z[..., : layer.features]
        layer.advance(len(y))
        frozen = {name: p.detach() for name, p in layer.discriminators.named_parameters()}
        verdicts = judge(lambda *inputs: functional_call(layer.discriminators, frozen, inputs), z, y)
        return Terms(
            torch.stack([F.cross_entropy(each, y) for each in logits]).sum(),
            layer.divergence(gaussian, y).mean(1).sum() / beta,
            delta / max(1, len(ens) - 1) * verdicts.information(self.tau).clamp_min(0).sum(),
            judge(layer.discriminators, z.detach(), y).discrimination().sum(),
        )

    def weights_after(self, epochs: Tensor) -> tuple[Tensor, Tensor]:
        """δ_cr and β_ceb when so many epochs of training are done."""
        share = (epochs / self.ramp_epochs).clamp(max=1.0) if self.ramp_epochs else torch.ones_like(epochs)
        return self.delta * share, self.first_beta * (self.beta / self.first_beta) ** share

    def extra_optimisers(self, ens: Ensemble) -> list[torch.optim.Optimizer]:
        layer = _bottleneck(ens)
        of_discriminators = torch.optim.RMSprop(layer.discriminators.parameters(), lr=self.discriminator_rate)
        of_discriminators.register_step_pre_hook(_cut_gradients)
        return [of_discriminators, torch.optim.Adam([layer.of_classes], lr=self.class_rate)]

    def order(self, shuffled: Tensor, labels: Tensor) -> Tensor:
        return in_pairs(shuffled, labels) if self.paired_batches else shuffled


class GaussianFeatures(nn.Module):
    """Features (B, H) to the means and log-variances (B, 2H) of Gaussian ones.

    At first the means are the features, and the deviations are small.
    """

    def __init__(self, features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, 2 * features)
        with torch.no_grad():
            self.linear.weight.copy_(torch.eye(2 * features, features))
            self.linear.bias.zero_()
            self.linear.bias[features:] = _FIRST_LOG_VARIANCE

    def forward(self, h: Tensor) -> Tensor:
        if h.ndim != 2 or h.shape[1] != self.linear.in_features:
            raise ValueError(
                f"DICE needs features (examples, {self.linear.in_features}), as many as the head takes; an extractor "
                f"gives {tuple(h.shape)}."
            )
        gaussian: Tensor = self.linear(h)
        return gaussian


class FirstColumns(nn.Module):
    """The means of (B, 2H) means and log-variances, and all of a sample (B, H)."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.features = features

    def forward(self, gaussian: Tensor) -> Tensor:
        return gaussian[..., : self.features]


class Bottleneck(nn.Module):
    """In training, members' Gaussian features (n, B, 2H) to a sample z (n, B, H) of each; else the identity.

    It holds what DICE needs besides the members: the classes' Gaussians, the discriminators, and how far training is.
    """

    def __init__(self, members: int, features: int, classes: int, train_size: int) -> None:
        super().__init__()
        self.features, self.train_size = features, train_size
        self.of_classes = nn.Parameter(torch.zeros(members, classes, 2 * features))
        self.discriminators = Discriminators(members, features, classes)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    seen: Tensor

    def forward(self, gaussian_nb2h: Tensor) -> Tensor:
        if not self.training:
            return gaussian_nb2h
        mean, log_variance = moments(gaussian_nb2h)
        z = mean + (log_variance / 2).exp() * torch.randn_like(mean)
        return z.to(gaussian_nb2h.dtype)

    @property
    def epochs(self) -> Tensor:
        """How many of the training set's epochs have been counted."""
        return self.seen / self.train_size

    def advance(self, examples: int) -> None:
        """Count examples that were trained on."""
        if self.training and torch.is_grad_enabled():
            self.seen += examples

    def divergence(self, gaussian_nb2h: Tensor, y_b: Tensor) -> Tensor:
        """KL(e_i(z|x) ‖ b_i(z|y)) in nats, (n, B)."""
        return kl(*moments(gaussian_nb2h), *moments(self.of_classes[:, y_b]))


def moments(gaussian: Tensor) -> tuple[Tensor, Tensor]:
    """Means and log-variances of Gaussian features (…, 2H), (…, H) each."""
    mean, raw = gaussian.to(torch.promote_types(gaussian.dtype, torch.float32)).chunk(2, -1)
    return mean, _LIMIT * torch.tanh(raw / _LIMIT)


def kl(mean_e: Tensor, log_variance_e: Tensor, mean_b: Tensor, log_variance_b: Tensor) -> Tensor:
    """KL(e ‖ b) of Gaussians with independent components: ½ Σ_h [log σ_b²/σ_e² + (σ_e² + (μ_e − μ_b)²)/σ_b² − 1]."""
    log_ratio = log_variance_e - log_variance_b
    distance = (mean_e - mean_b).square() * (-log_variance_b).exp()
    return (log_ratio.exp() + distance - 1 - log_ratio).sum(-1) / 2


def in_pairs(shuffled: Tensor, labels: Tensor) -> Tensor:
    """The same order with examples of one class in pairs; those that are left over, one of a class, come last.

    The second of a pair moves up to the first. In batches of an even size no pair is torn, up to the last batch.
    """
    by_class = labels[shuffled].argsort(stable=True)
    sizes = torch.bincount(labels)
    rank = torch.arange(len(labels)) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    first = by_class[torch.arange(len(labels)) - rank % 2]
    alone = (rank % 2 == 0) & (rank + 1 == sizes.repeat_interleave(sizes))
    return shuffled[by_class[(first + alone * len(labels)).argsort(stable=True)]]


def _bottleneck(ens: Ensemble) -> Bottleneck:
    if not isinstance(ens.layer, Bottleneck):
        raise ValueError("DICE needs an ensemble that its own build has made.")
    return ens.layer


@torch.no_grad()
def _cut_gradients(optimiser: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Each discriminator's gradient to norm 1 at most; the first dimension of all parameters counts discriminators."""
    gradients = [p.grad for group in optimiser.param_groups for p in group["params"] if p.grad is not None]
    if gradients:
        norm_p = torch.stack([g.flatten(1).square().sum(1) for g in gradients]).sum(0).sqrt()
        for g in gradients:
            g /= norm_p.clamp_min(1).view(-1, *(1,) * (g.ndim - 1))
