"""Mixtures of n equally weighted Gaussians: moments, density, distribution function and CRPS, in closed form.

    p(y)  = (1/n) Σ_i N(y; μ_i, σ_i²)
    m     = (1/n) Σ_i μ_i,    V = (1/n) Σ_i σ_i² + (1/n) Σ_i (μ_i − m)²                law of total variance
    CRPS  = (1/n) Σ_i A(y − μ_i, σ_i²) − 1/(2n²) Σ_i Σ_j A(μ_i − μ_j, σ_i² + σ_j²)
    A(d, s²) = 2 s φ(d/s) + d (2 Φ(d/s) − 1)                                           E|d + s Z| of a standard normal Z

The CRPS is that of Grimit et al. (2006). Scaling the variance by c scales the mixture about its mean, so that V becomes
c V, and its aleatoric and epistemic part are scaled alike:

    μ_i ← m + √c (μ_i − m),    σ_i² ← c σ_i²

A mixture is one tensor (n, B, 2, …) of means and log-variances.
"""

import math

import torch
from torch import Tensor

_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


def means_and_log_variances(members: Tensor) -> tuple[Tensor, Tensor]:
    """μ and log σ², (n, B, …) each, from (n, B, 2, …)."""
    mean, log_variance = members.unbind(2)
    return mean, log_variance


def mixture(mean: Tensor, log_variance: Tensor) -> Tensor:
    """(n, B, 2, …), from means and log-variances (n, B, …)."""
    return torch.stack([mean, log_variance.expand_as(mean)], 2)


def scaled(members: Tensor, scale: float | Tensor) -> Tensor:
    """The mixture with its variance multiplied by `scale`."""
    mean, log_variance = means_and_log_variances(members)
    scale = torch.as_tensor(scale, dtype=members.dtype, device=members.device)
    centre = mean.mean(0)
    return mixture(centre + scale.sqrt() * (mean - centre), log_variance + scale.log())


def variances(members: Tensor) -> tuple[Tensor, Tensor]:
    """(1/n) Σ σ_i² and (1/n) Σ (μ_i − m)², (B, …) each."""
    mean, log_variance = means_and_log_variances(members)
    return log_variance.exp().mean(0), mean.var(0, correction=0)


def nll(members: Tensor, y: Tensor) -> Tensor:
    """−log p(y), (B, …)."""
    mean, log_variance = means_and_log_variances(members)
    log_density = -0.5 * (log_variance + (y - mean).square() * (-log_variance).exp()) - _HALF_LOG_2PI
    return math.log(len(members)) - log_density.logsumexp(0)


def cdf(members: Tensor, y: Tensor) -> Tensor:
    """P(Y ≤ y), (B, …): uniform on [0, 1] over examples if the predictions are calibrated."""
    mean, log_variance = means_and_log_variances(members)
    below: Tensor = torch.special.ndtr((y - mean) * (-0.5 * log_variance).exp())
    return below.mean(0)


def crps(members: Tensor, y: Tensor) -> Tensor:
    """Continuous ranked probability score, (B, …), in the unit of y."""
    mean, log_variance = means_and_log_variances(members)
    variance = log_variance.exp()
    spread = torch.zeros_like(mean[0])
    for mean_j, variance_j in zip(mean, variance, strict=True):  # in memory of n, not of n²
        spread += _mean_absolute(mean - mean_j, variance + variance_j).mean(0)
    return _mean_absolute(y - mean, variance).mean(0) - spread / (2 * len(mean))


def _mean_absolute(d: Tensor, variance: Tensor) -> Tensor:
    """E|d + s Z|."""
    s = variance.sqrt()
    u = d / s
    density = (-0.5 * u.square() - _HALF_LOG_2PI).exp()
    below: Tensor = torch.special.ndtr(u)
    return 2 * s * density + d * (2 * below - 1)
