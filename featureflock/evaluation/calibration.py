"""Temperature scaling of an averaged prediction, and scores after it by test-time cross-validation.

    p_T    = softmax(log p̄ / T)                         after averaging, one T for all examples
    L(β)   = (1/B) Σ_b [log Σ_c exp(β z_bc) − β z_{b, y_b}],    z = log p̄,  β = 1/T
    L'(β)  = (1/B) Σ_b (E_{p_T}[z_b] − z_{b, y_b}),    L''(β) = (1/B) Σ_b Var_{p_T}[z_b] ≥ 0

L is the NLL. It is convex in β, so its minimum is the zero of a rising function, which Newton's method in a bracket
finds. Ashukha et al. (2020) is the protocol.

Cross-validation: shuffle the test set, fit T on one half and score the other, both ways; 5 shuffles, the mean of the 10
scores. The first of the halves has ⌊B/2⌋ examples. Equal seeds and sizes give equal halves, so methods are compared on
the same.

T is exactly at its bounds, 0.01 ≤ T ≤ 100, where the NLL falls up to them: 0.01 if all examples are right, 100 if they
are no better than chance. Uniform predictions stay what they are at any temperature: T = 1. A half that is all right
says T = 0.01, at which an error in the other half costs 100 times its margin: see `temperatures` before you believe
the calibrated NLL of a small or easy test set.

Shapes: B examples, C classes, g halves.
"""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from featureflock.ensemble import Ensemble
from featureflock.evaluation.inputs import checked_labels, checked_log_probs
from featureflock.evaluation.metrics import Scores, mean_log_probs, mean_scores, scores

BOUNDS = 0.01, 100.0
SLICE = 2**17  # numbers at a time in a fit


class Calibrated(NamedTuple):
    """What cross-validation gives."""

    scores: Scores
    """The mean over halves of the scores of one at the temperature of the other."""
    temperatures: tuple[float, ...]
    """Those fitted, in the order first half, second half of each shuffle."""


def tempered(log_probs: Tensor, temperature: float) -> Tensor:
    """log p_T (B, C) in float64, from log p̄."""
    if not 0 < temperature < math.inf:
        raise ValueError(f"A temperature must be positive and finite; got {temperature}.")
    return (checked_log_probs(log_probs) / temperature).log_softmax(-1)


def fit_temperature(log_probs: Tensor, labels: Tensor) -> float:
    """The T from 0.01 to 100 that minimises the NLL of softmax(log p̄ / T)."""
    log_p = checked_log_probs(log_probs)
    likelihood = _Likelihood(log_p, checked_labels(labels, log_p))
    everything = torch.ones_like(log_p[:, :1])
    return _minimise(likelihood, everything, start=1.0)[0].item()


def calibrated(log_probs: Tensor, labels: Tensor, *, shuffles: int = 5, seed: int = 0) -> Calibrated:
    """All metrics after temperature scaling, by test-time cross-validation.

    Args:
        log_probs: log p̄ (B, C), the log of the averaged probabilities.
        labels: (B,).
        shuffles: how often the test set is divided into halves.
        seed: of the shuffles. Nothing else is random.
    """
    log_p = checked_log_probs(log_probs)
    y = checked_labels(labels, log_p)
    likelihood = _Likelihood(log_p, y)
    start = _minimise(likelihood, torch.ones_like(log_p[:, :1]), start=1.0)[0].item()
    parts: list[Scores] = []
    temperatures: list[float] = []
    for pair in halves(len(y), shuffles, seed):
        first, second = (half.to(y.device) for half in pair)
        half_bg = torch.zeros_like(log_p[:, :1].expand(-1, 2))
        half_bg[first, 0] = half_bg[second, 1] = 1
        fitted = _minimise(likelihood, half_bg, start).tolist()
        for half, temperature in zip((second, first), fitted, strict=True):
            parts.append(scores((log_p[half] / temperature).log_softmax(-1), y[half]))
        temperatures += fitted
    return Calibrated(mean_scores(parts), tuple(temperatures))


def calibrate(ens: Ensemble, loader: Iterable[tuple[Any, Tensor]]) -> float:
    """Find the temperature of your own ensemble, on data that it was not trained on, and give it that temperature.

    T minimises the NLL of softmax(log p̄ / T). From then on `ens.predict` uses it, and `save` keeps it.

    Args:
        ens: a trained ensemble.
        loader: batches (inputs, labels), such as a DataLoader of validation data. Training data will not do: there the
            members are surer than they are right to be.

    Returns:
        T: above 1 where the ensemble was too sure, below 1 where it was not sure enough.
    """
    if not isinstance(ens, Ensemble):
        raise TypeError(f"calibrate takes an Ensemble; got {type(ens).__name__}.")
    where = next((p.device for p in ens.parameters()), torch.device("cpu"))
    parts = []
    for batch in loader:
        if not isinstance(batch, tuple | list) or len(batch) != 2 or not isinstance(batch[1], Tensor):
            raise ValueError("calibrate needs batches (inputs, labels), labels a tensor of class numbers.")
        x, y = batch
        if not len(y):
            continue
        log_p = mean_log_probs(ens.member_log_probs(_on(x, where)).double())
        if not torch.isfinite(log_p).all():
            raise ValueError("The ensemble's predictions are not finite, so there is nothing to calibrate.")
        parts.append((log_p, checked_labels(y, log_p)))
    if not parts:
        raise ValueError("The loader gave no batch, so there is nothing to calibrate on.")
    log_probs, labels = (torch.cat(part) for part in zip(*parts, strict=True))
    ens.temperature = fit_temperature(log_probs, labels)
    return ens.temperature


def _on(x: Any, device: torch.device) -> Any:
    """Inputs on a device, also where they are several tensors."""
    if isinstance(x, Tensor):
        return x.to(device)
    if isinstance(x, dict):
        return {key: _on(part, device) for key, part in x.items()}
    return type(x)(_on(part, device) for part in x) if type(x) in (tuple, list) else x


def halves(count: int, shuffles: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Indices of the two halves of `count` examples for each shuffle: torch.randperm, cut at ⌊count / 2⌋."""
    if count < 2 or shuffles < 1:
        raise ValueError(f"Cross-validation needs at least two examples and one shuffle; got {count} and {shuffles}.")
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(count, generator=generator) for _ in range(shuffles)]
    return [(order[: count // 2], order[count // 2 :]) for order in orders]


class _Likelihood:
    """L' and L'' for parts of a test set. Classes come first, so that sums over them are sums of long rows."""

    def __init__(self, log_p_bc: Tensor, y_b: Tensor) -> None:
        z_y_b = log_p_bc.gather(-1, y_b[:, None])[:, 0]
        if z_y_b.isinf().any():
            raise ValueError(
                f"The label of example {int(z_y_b.isinf().nonzero()[0])} has probability 0, so the NLL is infinite at "
                "every temperature; take the log_softmax of logits instead of the log of rounded probabilities."
            )
        top_b = log_p_bc.amax(-1)
        self.e_cb = (log_p_bc - top_b[:, None]).clamp_min(-1e30).T.contiguous()  # finite, so that 0 · e² is 0
        self.e_y_b = z_y_b - top_b
        self.width = max(1, SLICE // len(self.e_cb))

    def derivatives(self, beta_g: Tensor, half_bg: Tensor) -> tuple[Tensor, Tensor]:
        """Sums of L' and L'' over the examples of each half, (g,) each; `half_bg` is 1 where they belong, else 0."""
        total_2g = beta_g.new_zeros(2, len(beta_g))
        slices = (x.split(self.width, -1) for x in (self.e_cb, self.e_y_b, half_bg.T))
        for e_cb, e_y_b, half_gb in zip(*slices, strict=True):
            w_cb = (e_cb * (beta_g @ half_gb)).exp_()
            norm_b = w_cb.sum(0)
            mean_b = w_cb.mul_(e_cb).sum(0) / norm_b
            variance_b = (w_cb.mul_(e_cb).sum(0) / norm_b - mean_b.square()).clamp_min(0)
            total_2g += torch.stack([mean_b - e_y_b, variance_b]) @ half_gb.T
        return total_2g[0], total_2g[1]

    def flat(self, half_bg: Tensor) -> Tensor:
        """Whether all predictions of a half are uniform, (g,)."""
        return (half_bg * self.e_cb.amin(0)[:, None] == 0).all(0)


def _minimise(likelihood: _Likelihood, half_bg: Tensor, start: float) -> Tensor:
    """T of the least NLL for each half, (g,), searched in u = log β. Bracket ends are infinite until they are seen."""
    least, most = -math.log(BOUNDS[1]), -math.log(BOUNDS[0])
    u = half_bg.new_full(half_bg.shape[1:], -math.log(start))
    lo, hi = torch.full_like(u, -math.inf), torch.full_like(u, math.inf)
    last, before = hi, hi
    done = likelihood.flat(half_bg)
    u = u.masked_fill(done, 0)
    for _ in range(200):
        slope, curvature = likelihood.derivatives(u.exp(), half_bg)
        lo, hi = torch.where(slope <= 0, u, lo), torch.where(slope > 0, u, hi)
        newton = u + torch.log1p(-slope / (u.exp() * curvature))  # NaN, so not accepted, where β would be negative
        accepted = (lo <= newton) & (newton <= hi) & ((newton.clamp(least, most) - u).abs() <= before / 2)
        middle = torch.where(hi.isinf(), most, torch.where(lo.isinf(), least, (lo + hi) / 2))
        target = torch.where(accepted, newton.clamp(least, most), middle)
        before, last = last, (target - u).abs()
        u = torch.where(done, u, target)
        done = done | (last <= 1e-9)
        if done.all():
            break
    return (-u).exp().masked_fill(u >= most, BOUNDS[0]).masked_fill(u <= least, BOUNDS[1])  # bounds exactly
