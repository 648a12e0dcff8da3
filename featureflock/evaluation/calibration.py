"""Temperature scaling of the averaged prediction, and calibrated scores by test-time cross-validation.

    p_T    = softmax(log p̄ / T)                         after averaging, one T for all examples
    L(β)   = (1/B) Σ_b [log Σ_c exp(β z_bc) − β z_{b, y_b}],    z = log p̄,  β = 1/T
    L'(β)  = (1/B) Σ_b (E_{p_T}[z_b] − z_{b, y_b}),    L''(β) = (1/B) Σ_b Var_{p_T}[z_b] ≥ 0

L is the NLL. It is convex in β, so L' is increasing, and its zero is found by Newton's method within a bracket. The
protocol is that of Ashukha et al. (2020).

Cross-validation: shuffle the test set, fit T on one half and score the other, both ways; repeat with 5 shuffles and
average the 10 scores. The first half has ⌊B/2⌋ examples. Halves depend on the seed and the size only, so methods are
compared on the same halves.

T is exactly at its bounds, 0.01 ≤ T ≤ 100, where the NLL decreases up to them: 0.01 if all examples are correct, 100 if
predictions are no better than chance. Uniform predictions get T = 1. If a half is all correct, an error in the other
half costs 100 times its margin: check `temperatures` before you trust the calibrated NLL of a small or easy test set.

Shapes: B examples, C classes, g halves.
"""

import math
from collections.abc import Iterator
from numbers import Real
from typing import NamedTuple

import torch
from torch import Tensor

from featureflock.evaluation.checks import checked_labels, checked_log_probs
from featureflock.evaluation.metrics.classification import SLICE, Scores, mean_scores, scores_of

BOUNDS = 0.01, 100.0
LEAST, MOST = -math.log(BOUNDS[1]), -math.log(BOUNDS[0])
"""Bounds of u = log β."""
_MAX_SHUFFLES = 1000


class Calibrated(NamedTuple):
    """Scores after temperature scaling."""

    scores: Scores
    """Mean over halves; each half is scored at the temperature fitted on the other."""
    temperatures: tuple[float, ...]
    """Fitted temperatures: first half, second half of each shuffle."""


def tempered(log_probs: Tensor, temperature: float) -> Tensor:
    """log p_T (B, C) in float64, from log p̄."""
    if not isinstance(temperature, Real) or not 0 < temperature < math.inf:
        got = temperature if isinstance(temperature, Real) else type(temperature).__name__
        raise ValueError(f"A temperature must be a positive, finite number; got {got}.")
    return (checked_log_probs(log_probs) / temperature).log_softmax(-1)


def fit_temperature(log_probs: Tensor, labels: Tensor) -> float:
    """The T from 0.01 to 100 that minimises the NLL of softmax(log p̄ / T)."""
    log_p = checked_log_probs(log_probs)
    likelihood = _Likelihood(log_p, checked_labels(labels, log_p))
    return _temperature(*_best(likelihood, torch.ones_like(log_p[:, :1]), [0.0]))


def calibrated(log_probs: Tensor, labels: Tensor, *, shuffles: int = 5, seed: int = 0) -> Calibrated:
    """All metrics after temperature scaling, by test-time cross-validation.

    Args:
        log_probs: log p̄ (B, C), the log of the averaged probabilities.
        labels: (B,).
        shuffles: number of random divisions into halves.
        seed: seed of the shuffles. Nothing else is random.
    """
    log_p = checked_log_probs(log_probs)
    y = checked_labels(labels, log_p)
    likelihood = _Likelihood(log_p, y)
    (u,) = _best(likelihood, torch.ones_like(log_p[:, :1]), [0.0])
    near_2b = likelihood.per_example(log_p.new_full((len(y),), math.exp(u)))  # the halves' u are close to u
    outcomes, temperatures = list[Tensor](), list[float]()
    for pair in halves(len(y), shuffles, seed):
        first, second = (half.to(y.device) for half in pair)
        half_bg = torch.zeros_like(log_p[:, :1].expand(-1, 2))
        half_bg[first, 0] = half_bg[second, 1] = 1
        steps = [_newton(u, *derivatives) for derivatives in (near_2b @ half_bg).T.tolist()]
        start = [u if math.isnan(step) else min(max(step, LEAST), MOST) for step in steps]
        fitted = [_temperature(best) for best in _best(likelihood, half_bg, start)]
        other_beta_b = half_bg @ (1 / half_bg.new_tensor(fitted).flip(0))
        outcomes.append(likelihood.outcomes(other_beta_b)[:, torch.cat([first, second])])
        temperatures += fitted
    first_5sb, second_5sb = torch.stack(outcomes, 1).tensor_split([len(y) // 2], -1)
    return Calibrated(mean_scores([*scores_of(first_5sb), *scores_of(second_5sb)]), tuple(temperatures))


def halves(count: int, shuffles: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Indices of the two halves of `count` examples for each shuffle: torch.randperm, cut at ⌊count / 2⌋."""
    if count < 2 or shuffles < 1:
        raise ValueError(f"Cross-validation needs at least two examples and one shuffle; got {count} and {shuffles}.")
    if shuffles > _MAX_SHUFFLES:
        raise ValueError(f"shuffles must be at most {_MAX_SHUFFLES:,}; got {shuffles}.")
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(count, generator=generator) for _ in range(shuffles)]
    return [(order[: count // 2], order[count // 2 :]) for order in orders]


class _Likelihood:
    """L' and L'' for subsets of a test set. Classes come first, so that sums over them run over long rows."""

    def __init__(self, log_p_bc: Tensor, y_b: Tensor) -> None:
        z_y_b = log_p_bc.gather(-1, y_b[:, None])[:, 0]
        if z_y_b.isinf().any():
            what = f"The label of example {int(z_y_b.isinf().nonzero()[0])} has probability 0, so the NLL is infinite"
            raise ValueError(f"{what}; take the log_softmax of logits instead of the log of rounded probabilities.")
        log_p_cb = log_p_bc.T.contiguous()
        top_b, self.class_b = log_p_cb.max(0)
        self.correct_b = (self.class_b == y_b).double()
        self.e_cb = (log_p_cb - top_b).clamp_min_(-1e30)  # finite, so that 0 · e² is 0
        self.e_y_b = z_y_b - top_b
        self.flat_b = self.e_cb.amin(0) == 0
        self.width = max(1, SLICE // len(self.e_cb))

    def per_example(self, beta_b: Tensor) -> Tensor:
        """Contribution of each example to L' and L'', (2, B), at its own β."""
        parts = []
        for e_cb, e_y_b, b in self._slices(self.e_cb, self.e_y_b, beta_b):
            w_cb = (e_cb * b).exp_()
            norm_b = w_cb.sum(0)
            mean_b = w_cb.mul_(e_cb).sum(0) / norm_b
            variance_b = (w_cb.mul_(e_cb).sum(0) / norm_b - mean_b.square()).clamp_min(0)
            parts.append(torch.stack([mean_b - e_y_b, variance_b]))
        return torch.cat(parts, -1)

    def derivatives(self, beta_g: Tensor, half_bg: Tensor) -> Tensor:
        """Sums of L' and L'' over the examples of each half, (2, g); `half_bg` is the membership, 0 or 1."""
        return self.per_example(half_bg @ beta_g) @ half_bg

    def outcomes(self, beta_b: Tensor) -> Tensor:
        """Arguments of `scores_of` for each example, (5, B), at its own β."""
        parts = []
        for e_cb, e_y_b, b, class_b in self._slices(self.e_cb, self.e_y_b, beta_b, self.class_b):
            w_cb = (e_cb * b).exp_().scatter_(0, class_b[None], 0)  # the top class has weight 1
            others_b = w_cb.sum(0)
            norm_b = 1 + others_b
            log_p_y_b = b * e_y_b - norm_b.log()
            square_b = (1 + w_cb.square_().sum(0)) / norm_b.square()
            distance_b = square_b - 2 * log_p_y_b.exp() + 1
            parts.append(torch.stack([log_p_y_b, distance_b, 1 / norm_b, others_b / norm_b]))
        return torch.cat([self.correct_b[None], torch.cat(parts, -1)])

    def _slices(self, *per_example: Tensor) -> Iterator[tuple[Tensor, ...]]:
        return zip(*(x.split(self.width, -1) for x in per_example), strict=True)


def _best(likelihood: _Likelihood, half_bg: Tensor, start: list[float]) -> list[float]:
    """u = log β that minimises the NLL of each half, searched from `start`; 0 if all predictions are uniform."""
    uniform_g = (likelihood.flat_b[:, None] | (half_bg == 0)).all(0).tolist()
    searches = [_Search(0.0 if uniform else u, uniform) for u, uniform in zip(start, uniform_g, strict=True)]
    for _ in range(200):
        if all(search.done for search in searches):
            break
        beta_g = half_bg.new_tensor([math.exp(search.u) for search in searches])
        for search, slope, curvature in zip(searches, *likelihood.derivatives(beta_g, half_bg).tolist(), strict=True):
            search.step(slope, curvature)
    return [search.u for search in searches]


class _Search:
    """Newton's method within a bracket whose ends are infinite until a sign is known."""

    def __init__(self, u: float, done: bool) -> None:
        self.u, self.done, self.lo, self.hi = u, done, -math.inf, math.inf
        self.last = self.before = math.inf

    def step(self, slope: float, curvature: float) -> None:
        if self.done:
            return
        self.lo, self.hi = (self.u, self.hi) if slope <= 0 else (self.lo, self.u)
        newton = _newton(self.u, slope, curvature)
        target, enough = min(max(newton, LEAST), MOST), 1e-7  # the remaining error is of the order of its square
        if not (self.lo <= newton <= self.hi and abs(target - self.u) <= self.before / 2):
            middle = (self.lo + self.hi) / 2
            target, enough = MOST if self.hi == math.inf else LEAST if self.lo == -math.inf else middle, 1e-9
        self.before, self.last, self.u = self.last, abs(target - self.u), target
        self.done = self.last <= enough


def _newton(u: float, slope: float, curvature: float) -> float:
    """Newton's step in β, expressed in u; NaN if β would become negative."""
    scaled = math.exp(u) * curvature
    step = slope / scaled if scaled else math.inf
    return u + math.log1p(-step) if step < 1 else math.nan


def _temperature(u: float) -> float:
    """T = exp(−u), with exact bounds."""
    return BOUNDS[0] if u >= MOST else BOUNDS[1] if u <= LEAST else math.exp(-u)
