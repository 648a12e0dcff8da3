"""Regression metrics of a mixture of Gaussians, one from each member: error, likelihood, CRPS, calibration.

    RMSE       = √((1/B) Σ_b (m_b − y_b)²),                  m the mean of the mixture
    NLL        = −(1/B) Σ_b log (1/n) Σ_i N(y_b; μ_ib, σ_ib²)
    CRPS       = (1/B) Σ_b ∫ (F_b(z) − 1[y_b ≤ z])² dz        in closed form (tasks/gaussian_mixtures.py)
    coverage   = fraction of targets in the central interval of level α:  (1 − α)/2 ≤ F_b(y_b) ≤ (1 + α)/2
    calibration error = (1/19) Σ_k |fraction of F_b(y_b) ≤ k/20 − k/20|,  k = 1 … 19

F_b is the distribution function of the prediction. F_b(y_b) is uniform for a calibrated model, so the calibration error
is 0 then, up to the noise of B examples. NLL, CRPS and RMSE are in the unit of the targets (the NLL of its logarithm).

All functions take means and variances of the members, (n, B, …), and targets (B, …), as tensors or NumPy arrays.

Shapes: n members, B examples.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from featureflock.evaluation.checks import as_tensor
from featureflock.tasks import gaussian_mixtures

INTERVAL, LEVELS = 0.9, 19
"""Level of the interval whose coverage is reported, and number of levels of the calibration error."""


class RegressionScores(NamedTuple):
    """Metrics of one test set. Coverage should equal 0.9; for all others, lower is better."""

    rmse: float
    nll: float
    crps: float
    coverage: float
    calibration_error: float


def rmse(means: Any, targets: Any) -> float:
    """Root mean squared error of the mean over members."""
    mean, _, y = _checked(means, None, targets)
    return (mean.mean(0) - y).square().mean().sqrt().item()


def mixture_nll(means: Any, variances: Any, targets: Any) -> float:
    """Mean negative log-likelihood of the mixture, in nats."""
    return gaussian_mixtures.nll(*checked_mixture(means, variances, targets)).mean().item()


def crps(means: Any, variances: Any, targets: Any) -> float:
    """Mean continuous ranked probability score, in the unit of the targets. For one sharp member, its mean error."""
    return gaussian_mixtures.crps(*checked_mixture(means, variances, targets)).mean().item()


def interval_coverage(means: Any, variances: Any, targets: Any, level: float = INTERVAL) -> float:
    """Fraction of targets within the central prediction interval of this level."""
    if not 0 < level < 1:
        raise ValueError(f"level must be between 0 and 1; got {level}.")
    return _coverage(gaussian_mixtures.cdf(*checked_mixture(means, variances, targets)), level)


def regression_calibration_error(means: Any, variances: Any, targets: Any) -> float:
    """Mean absolute difference between nominal and observed frequencies of F(y), over 19 levels."""
    return _calibration_error(gaussian_mixtures.cdf(*checked_mixture(means, variances, targets)))


def regression_scores(members: Tensor, y: Tensor) -> RegressionScores:
    """All metrics, from mixtures (n, B, 2, …) and targets (B, …)."""
    members, y = members.double(), y.double().reshape(members[0, :, 0].shape)
    pit = gaussian_mixtures.cdf(members, y)
    return RegressionScores(
        (members[:, :, 0].mean(0) - y).square().mean().sqrt().item(),
        gaussian_mixtures.nll(members, y).mean().item(),
        gaussian_mixtures.crps(members, y).mean().item(),
        _coverage(pit, INTERVAL),
        _calibration_error(pit),
    )


def _coverage(pit: Tensor, level: float) -> float:
    return ((pit - 0.5).abs() <= level / 2).double().mean().item()


def _calibration_error(pit: Tensor) -> float:
    levels = torch.arange(1, LEVELS + 1, dtype=torch.float64, device=pit.device) / (LEVELS + 1)
    observed = torch.searchsorted(pit.flatten().sort().values, levels, right=True) / pit.numel()
    return (observed - levels).abs().mean().item()


def checked_mixture(means: Any, variances: Any, targets: Any) -> tuple[Tensor, Tensor]:
    """Mixtures (n, B, 2, …) and targets in float64; ValueError if they do not belong together."""
    mean, variance, y = _checked(means, variances, targets)
    return gaussian_mixtures.mixture(mean, variance.log()), y


def _checked(means: Any, variances: Any, targets: Any) -> tuple[Tensor, Tensor, Tensor]:
    """All in float64 and of matching shapes; else ValueError."""
    mean, y = as_tensor(means), as_tensor(targets)
    variance = torch.ones_like(mean) if variances is None and isinstance(mean, Tensor) else as_tensor(variances)
    for name, x in (("means", mean), ("variances", variance), ("targets", y)):
        if not isinstance(x, Tensor) or x.is_complex() or x.dtype == torch.bool:
            raise ValueError(f"{name} must be a tensor or array of numbers; got {type(x).__name__}.")
        if not torch.isfinite(x).all():
            raise ValueError(f"{name} must be finite; some are NaN or infinite.")
    if mean.ndim < 2 or mean.shape != variance.shape or mean.shape[1:] != y.shape or not mean.numel():
        shapes = f"{tuple(mean.shape)}, {tuple(variance.shape)} and {tuple(y.shape)}"
        raise ValueError(
            f"Means and variances must have shape (members, examples, …) and targets (examples, …); got {shapes}."
        )
    if (variance <= 0).any():
        raise ValueError(f"variances must be positive; the smallest is {variance.min().item():g}.")
    return mean.double(), variance.double(), y.double()
