"""DICE (Ramé and Cord, 2021): members whose features are not redundant given the class.

    loss = Σ_i [ KL(e_i(z|x) ‖ b_i(z|y)) / β_ceb − E log c_i(y|z) ] + δ_cr/(n − 1) Σ_{i<j} max(0, I(Z_i; Z_j | Y))

Member i has Gaussian features e_i(z|x). The classifier c_i(y|z) uses a sample of them in training, and their mean
afterwards. The bottleneck KL keeps them close to a learned Gaussian b_i(z|y) of each class. Discriminators
(discriminators.py), which are trained at the same time, estimate the conditional redundancy I:

    loss of the discriminators = Σ_{i<j} discrimination

The loss of the members treats the discriminators as constants, and the loss of the discriminators treats the features
as constants, so one backward pass of the sum computes both gradients. The discriminators are optimised by RMSprop, with
the gradient of each clipped to norm 1. The class Gaussians only receive the gradient of KL/β_ceb, which is too small
for SGD; they are optimised by Adam, which is invariant to the factor.

Over the first epochs δ_cr rises linearly from 0, and β_ceb geometrically from a strong bottleneck to a weak one.

Shapes: n members, B data points, H features, C classes.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from featureflock.ensemble.ensemble import Ensemble, RemoteMember
from featureflock.methods.base import METHODS, LossOutput, Method, SearchSpace, check_numbers
from featureflock.methods.discriminators import TAU, Discriminators, discriminate

_LIMIT, _INITIAL_LOG_VARIANCE = 10.0, -5.0  # log-variances are limited to ±10 by a scaled tanh


class Terms(NamedTuple):
    """Terms of the loss, including their weights."""

    cross_entropy: Tensor
    bottleneck: Tensor
    redundancy: Tensor
    discrimination: Tensor


@METHODS.register("dice")
@dataclass(frozen=True)
class DICE(Method):
    """Independent members with Gaussian features and a penalty on their conditional redundancy."""

    title = "DICE"
    needs_classes = True
    splits_over_batch = False  # negatives are drawn from the whole batch

    search_space: ClassVar[SearchSpace] = {
        "delta": (0.02, 0.05, 0.1, 0.2, 0.5),
        "beta": (1e2, 1e3, 1e4, 1e5),
        "ramp_epochs": (1.0, 5.0, 20.0),
    }

    delta: float = 0.2
    """δ_cr, weight of the redundancy after the first epochs. The authors use about 0.2."""
    beta: float = 10_000.0
    """β_ceb after the first epochs; larger values give a weaker bottleneck."""
    initial_beta: float = 100.0
    """β_ceb at the start of training."""
    ramp_epochs: float = 5.0
    """Number of epochs over which δ_cr and β_ceb rise; 0 to use the final values from the start."""
    tau: float = TAU
    """τ, bound on the absolute logits of the discriminators in the loss of the members."""
    discriminator_learning_rate: float = 1e-3
    """Learning rate of the discriminators; not decayed."""
    class_learning_rate: float = 0.05
    """Learning rate of the class Gaussians; not decayed."""
    paired_batches: bool = False
    """Order examples in pairs of one class, so that every example of an even-sized batch has a negative. Without it, a
    batch of 128 leaves one in a million examples without a negative for 10 classes, and 28 % for 100 classes."""

    def __post_init__(self) -> None:
        check_numbers(self, "delta", "ramp_epochs")
        rates = "discriminator_learning_rate", "class_learning_rate"
        check_numbers(self, "beta", "initial_beta", "tau", *rates, above_zero=True)

    def assemble(self, extractors: list[nn.Module], heads: list[nn.Module], train_size: int | None) -> Ensemble:
        if train_size is None:
            raise ValueError("DICE needs train_size=N, the number of training points in an epoch.")
        built = [head for head in heads if not isinstance(head, RemoteMember)]
        sizes = {(head.in_features, head.out_features) if isinstance(head, nn.Linear) else None for head in built}
        size = sizes.pop()
        if sizes or size is None or size[0] == 0:
            raise ValueError(f"DICE needs nn.Linear heads of equal size; got {heads[0]}.")
        features, classes = size
        gaussian = [_gaussian(extractor, features) for extractor in extractors]
        mean_heads = [nn.Sequential(FirstColumns(features), head) for head in heads]
        return Ensemble(gaussian, mean_heads, InformationBottleneck(len(extractors), features, classes, train_size))

    def loss(self, ens: Ensemble, x: Tensor, y: Tensor) -> LossOutput:
        terms, logits = self.terms(ens, x, y)
        return LossOutput(torch.stack(terms).sum(), logits)

    def terms(self, ens: Ensemble, x: Tensor, y: Tensor) -> tuple[Terms, Tensor]:
        """Terms of the loss at the current weights δ_cr and β_ceb, and the logits (n, B, C)."""
        self.check_task(ens.task, y)
        layer = _bottleneck(ens)
        delta, beta = self.weights_after(layer.epochs)
        gaussian = ens.features(x)
        z = layer(gaussian)
        logits = ens.logits(z)
        cross_entropy = ens.task.losses(logits, y).sum()  # refuses labels that are no class
        y = ens.task.targets(logits, y)
        z = z[..., : layer.features]
        if layer.training and torch.is_grad_enabled():
            layer.seen += len(y)
        frozen = {name: p.detach() for name, p in layer.discriminators.named_parameters()}
        estimate = discriminate(lambda *inputs: functional_call(layer.discriminators, frozen, inputs), z, y)
        terms = Terms(
            cross_entropy,
            layer.divergence(gaussian, y).mean(1).sum() / beta,
            delta / max(1, len(ens) - 1) * estimate.information(self.tau).clamp_min(0).sum(),
            discriminate(layer.discriminators, z.detach(), y).discrimination().sum(),
        )
        return terms, logits

    def weights_after(self, epochs: Tensor) -> tuple[Tensor, Tensor]:
        """δ_cr and β_ceb after a number of epochs."""
        fraction = (epochs / self.ramp_epochs).clamp(max=1.0) if self.ramp_epochs else torch.ones_like(epochs)
        return self.delta * fraction, self.initial_beta * (self.beta / self.initial_beta) ** fraction

    def extra_optimisers(self, ens: Ensemble) -> list[torch.optim.Optimizer]:
        layer = _bottleneck(ens)
        rmsprop = torch.optim.RMSprop(layer.discriminators.parameters(), lr=self.discriminator_learning_rate)
        rmsprop.register_step_pre_hook(_clip_gradients)
        return [rmsprop, torch.optim.Adam([layer.class_gaussians], lr=self.class_learning_rate)]

    def order(self, shuffled: Tensor, labels: Tensor) -> Tensor:
        return in_pairs(shuffled, labels) if self.paired_batches else shuffled


def _gaussian(extractor: nn.Module, features: int) -> nn.Module:
    layer = GaussianFeatures(features)  # also for a member of another process: the random numbers that follow are equal
    return extractor if isinstance(extractor, RemoteMember) else GaussianExtractor(extractor, layer)


class GaussianExtractor(nn.Sequential):
    """An extractor and its Gaussian features; takes the arguments of the extractor."""

    @property
    def input_module(self) -> nn.Module:
        """The module that gets the inputs."""
        return self[0]

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        gaussian: Tensor = self[1](self[0](*args, **kwargs))
        return gaussian


class GaussianFeatures(nn.Module):
    """Maps features to means, initially equal to them, and log-variances of Gaussian features: (B, H) -> (B, 2H)."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, 2 * features)
        with torch.no_grad():
            self.linear.weight.copy_(torch.eye(2 * features, features))
            self.linear.bias.zero_()
            self.linear.bias[features:] = _INITIAL_LOG_VARIANCE

    def forward(self, h: Tensor) -> Tensor:
        if h.ndim != 2 or h.shape[1] != self.linear.in_features:
            expected = f"(examples, {self.linear.in_features}), the input size of the head"
            raise ValueError(f"DICE needs extractors that return {expected}; got {tuple(h.shape)}.")
        gaussian: Tensor = self.linear(h)
        return gaussian


class FirstColumns(nn.Module):
    """Selects the means of Gaussian features (…, 2H); a sample (…, H) is unchanged."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.features = features

    def forward(self, gaussian: Tensor) -> Tensor:
        return gaussian[..., : self.features]


class InformationBottleneck(nn.Module):
    """Samples z (n, B, H) from Gaussian features (n, B, 2H) in training; the identity in eval mode."""

    def __init__(self, members: int, features: int, classes: int, train_size: int) -> None:
        super().__init__()
        self.features, self.train_size = features, train_size
        self.class_gaussians = nn.Parameter(torch.zeros(members, classes, 2 * features))
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
        """Number of epochs trained so far."""
        return self.seen / self.train_size

    def divergence(self, gaussian_nb2h: Tensor, y_b: Tensor) -> Tensor:
        """KL(e_i(z|x) ‖ b_i(z|y)) in nats, (n, B)."""
        return kl(*moments(gaussian_nb2h), *moments(self.class_gaussians[:, y_b]))


def moments(gaussian: Tensor) -> tuple[Tensor, Tensor]:
    """Means and log-variances, (…, H) each, of Gaussian features (…, 2H)."""
    mean, raw = gaussian.to(torch.promote_types(gaussian.dtype, torch.float32)).chunk(2, -1)
    return mean, _LIMIT * torch.tanh(raw / _LIMIT)


def kl(mean_e: Tensor, log_variance_e: Tensor, mean_b: Tensor, log_variance_b: Tensor) -> Tensor:
    """KL(e ‖ b) of diagonal Gaussians: ½ Σ_h [log σ_b²/σ_e² + (σ_e² + (μ_e − μ_b)²)/σ_b² − 1]."""
    log_ratio = log_variance_e - log_variance_b
    distance = (mean_e - mean_b).square() * (-log_variance_b).exp()
    return (log_ratio.exp() + distance - 1 - log_ratio).sum(-1) / 2


def in_pairs(shuffled: Tensor, labels: Tensor) -> Tensor:
    """Reorder examples so that those of one class come in pairs; examples without a partner come last.

    The second of a pair is moved to directly after the first. Batches of an even size split no pair.
    """
    by_class = labels[shuffled].argsort(stable=True)
    sizes = torch.bincount(labels)
    rank = torch.arange(len(labels)) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    first = by_class[torch.arange(len(labels)) - rank % 2]
    unpaired = (rank % 2 == 0) & (rank + 1 == sizes.repeat_interleave(sizes))
    return shuffled[by_class[(first + unpaired * len(labels)).argsort(stable=True)]]


def _bottleneck(ens: Ensemble) -> InformationBottleneck:
    if not isinstance(ens.layer, InformationBottleneck):
        raise ValueError("DICE.loss needs an ensemble built by DICE.build.")
    return ens.layer


@torch.no_grad()
def _clip_gradients(optimiser: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Clip the gradient of each discriminator to norm 1. The first dimension of all parameters indexes them."""
    gradients = [p.grad for group in optimiser.param_groups for p in group["params"] if p.grad is not None]
    if gradients:
        norm_p = torch.stack([g.flatten(1).square().sum(1) for g in gradients]).sum(0).sqrt()
        for g in gradients:
            g /= norm_p.clamp_min(1).view(-1, *(1,) * (g.ndim - 1))
