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
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from featureflock.ensemble.ensemble import Ensemble
from featureflock.evaluation.checks import checked_labels, checked_log_probs
from featureflock.evaluation.metrics.classification import SLICE, Scores, mean_log_probs, mean_scores, scores_of

BOUNDS = 0.01, 100.0
LEAST, MOST = -math.log(BOUNDS[1]), -math.log(BOUNDS[0])
"""Of u = log β."""


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
    return _temperature(*_best(likelihood, torch.ones_like(log_p[:, :1]), [0.0]))


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
    (u,) = _best(likelihood, torch.ones_like(log_p[:, :1]), [0.0])
    near_2b = likelihood.of_each(log_p.new_full((len(y),), math.exp(u)))  # where the halves' u are not far
    outcomes: list[Tensor] = []
    temperatures: list[float] = []
    for pair in halves(len(y), shuffles, seed):
        first, second = (half.to(y.device) for half in pair)
        half_bg = torch.zeros_like(log_p[:, :1].expand(-1, 2))
        half_bg[first, 0] = half_bg[second, 1] = 1
        start = [_newton(u, *derivatives) for derivatives in (near_2b @ half_bg).T.tolist()]
        start = [u if math.isnan(step) else _clamped(step) for step in start]
        fitted = [_temperature(best) for best in _best(likelihood, half_bg, start)]
        of_the_other_b = half_bg @ (1 / half_bg.new_tensor(fitted).flip(0))
        outcomes.append(likelihood.outcomes(of_the_other_b)[:, torch.cat([first, second])])
        temperatures += fitted
    first_5sb, second_5sb = torch.stack(outcomes, 1).tensor_split([len(y) // 2], -1)
    return Calibrated(mean_scores([*scores_of(first_5sb), *scores_of(second_5sb)]), tuple(temperatures))


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
        pair = isinstance(batch, tuple | list) and len(batch) == 2
        if not pair or not isinstance(batch[1], Tensor) or not batch[1].dim():  # of a Dataset, single examples come
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
        log_p_cb = log_p_bc.T.contiguous()
        top_b, self.class_b = log_p_cb.max(0)
        self.correct_b = (self.class_b == y_b).double()
        self.e_cb = (log_p_cb - top_b).clamp_min_(-1e30)  # finite, so that 0 · e² is 0
        self.e_y_b = z_y_b - top_b
        self.flat_b = self.e_cb.amin(0) == 0
        self.width = max(1, SLICE // len(self.e_cb))

    def of_each(self, beta_b: Tensor) -> Tensor:
        """What each example adds to L' and to L'', (2, B), at a temperature of its own."""
        parts = []
        for e_cb, e_y_b, b in self._slices(self.e_cb, self.e_y_b, beta_b):
            w_cb = (e_cb * b).exp_()
            norm_b = w_cb.sum(0)
            mean_b = w_cb.mul_(e_cb).sum(0) / norm_b
            variance_b = (w_cb.mul_(e_cb).sum(0) / norm_b - mean_b.square()).clamp_min(0)
            parts.append(torch.stack([mean_b - e_y_b, variance_b]))
        return torch.cat(parts, -1)

    def derivatives(self, beta_g: Tensor, half_bg: Tensor) -> Tensor:
        """Sums of L' and of L'' over the examples of each half, (2, g); `half_bg` is 1 where they belong, else 0."""
        return self.of_each(half_bg @ beta_g) @ half_bg

    def outcomes(self, beta_b: Tensor) -> Tensor:
        """What `scores_of` takes of each example, (5, B), at a temperature of its own."""
        parts = []
        for e_cb, e_y_b, b, class_b in self._slices(self.e_cb, self.e_y_b, beta_b, self.class_b):
            w_cb = (e_cb * b).exp_().scatter_(0, class_b[None], 0)  # of the top class it is 1
            others_b = w_cb.sum(0)
            norm_b = 1 + others_b
            log_p_y_b = b * e_y_b - norm_b.log()
            square_b = (1 + w_cb.square_().sum(0)) / norm_b.square()
            distance_b = square_b - 2 * log_p_y_b.exp() + 1
            parts.append(torch.stack([log_p_y_b, distance_b, 1 / norm_b, others_b / norm_b]))
        return torch.cat([self.correct_b[None], torch.cat(parts, -1)])

    def flat(self, half_bg: Tensor) -> Tensor:
        """Whether all predictions of a half are uniform, (g,)."""
        return (self.flat_b[:, None] | (half_bg == 0)).all(0)

    def _slices(self, *of_examples: Tensor) -> Iterator[tuple[Tensor, ...]]:
        return zip(*(x.split(self.width, -1) for x in of_examples), strict=True)


def _best(likelihood: _Likelihood, half_bg: Tensor, start: list[float]) -> list[float]:
    """u = log β of the least NLL for each half, searched for from `start`."""
    searches = [
        _Search(0.0 if flat else u, flat) for u, flat in zip(start, likelihood.flat(half_bg).tolist(), strict=True)
    ]
    for _ in range(200):
        if all(search.done for search in searches):
            break
        beta_g = half_bg.new_tensor([math.exp(search.u) for search in searches])
        for search, slope, curvature in zip(searches, *likelihood.derivatives(beta_g, half_bg).tolist(), strict=True):
            search.step(slope, curvature)
    return [search.u for search in searches]


class _Search:
    """Newton's method in a bracket, whose ends are infinite until they are seen."""

    def __init__(self, u: float, done: bool) -> None:
        self.u, self.done = u, done
        self.lo, self.hi = -math.inf, math.inf
        self.last = self.before = math.inf

    def step(self, slope: float, curvature: float) -> None:
        if self.done:
            return
        if slope <= 0:
            self.lo = self.u
        else:
            self.hi = self.u
        newton = _newton(self.u, slope, curvature)
        target = _clamped(newton)
        enough = 1e-7  # what is left is of the order of its square
        if not (self.lo <= newton <= self.hi and abs(target - self.u) <= self.before / 2):
            middle = (self.lo + self.hi) / 2
            target = MOST if self.hi == math.inf else LEAST if self.lo == -math.inf else middle
            enough = 1e-9
        self.before, self.last = self.last, abs(target - self.u)
        self.u = target
        self.done = self.last <= enough


def _newton(u: float, slope: float, curvature: float) -> float:
    """Newton's step in β, from u to another u; NaN where β would be negative."""
    scaled = math.exp(u) * curvature
    step = slope / scaled if scaled else math.inf
    return u + math.log1p(-step) if step < 1 else math.nan


def _clamped(u: float) -> float:
    return min(max(u, LEAST), MOST)


def _temperature(u: float) -> float:
    """exp(−u), its bounds exactly."""
    return BOUNDS[0] if u >= MOST else BOUNDS[1] if u <= LEAST else math.exp(-u)
