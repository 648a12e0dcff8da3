"""Training on tensors in memory: AdamW, early stopping on held-out rows, calibration on the same rows.

Everything is a function of the seed; PyTorch's global random state is unchanged.

Shapes: n members, N examples, C classes.
"""

import copy
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from featureflock.core.transport import NonFiniteError
from featureflock.data.rng import Stream, permutation
from featureflock.ensemble.ensemble import Ensemble
from featureflock.methods import Method
from featureflock.tasks import Task
from featureflock.tasks.base import minimise
from featureflock.training.validation import DivergenceError

_VARIANCE_RATE = 10.0
"""Learning rate of a learnt log-variance, in units of the others'. Adam moves this one number by the rate per step."""


@dataclass(frozen=True)
class TensorTraining:
    """Settings of `fit`."""

    method: Method
    epochs: int
    batch: int
    learning_rate: float
    weight_decay: float
    patience: int | None
    seed: int


@dataclass
class FitHistory:
    """What happened in each epoch."""

    loss: list[float] = field(default_factory=list)
    """Mean training loss."""
    validation_nll: list[float] = field(default_factory=list)
    """NLL of the ensemble on the held-out rows, before calibration; empty without held-out rows."""


def held_out_rows(strata: Tensor, fraction: float, seed: int) -> Tensor:
    """Random rows to hold out, the same share of each stratum up to rounding, in ascending order.

    One random row of each stratum is never held out, so that every class is trained on.
    """
    order = permutation(len(strata), seed, Stream.VALIDATION)
    rows = order[strata[order].argsort(stable=True)]
    candidates = rows[1:][strata[rows].diff() == 0]
    count = min(round(fraction * len(strata)), len(candidates))
    positions = (torch.arange(count) + 0.5) * len(candidates) / max(count, 1)
    return candidates[positions.long()].sort().values


def fit(ens: Ensemble, x: Tensor, y: Tensor, held_out: tuple[Tensor, Tensor], settings: TensorTraining) -> FitHistory:
    """Train an ensemble in place. With held-out rows, keep the weights of the best epoch, then calibrate."""
    history, best, best_weights = FitHistory(), math.inf, None
    method = settings.method
    optimisers = method.optimisers(ens, lambda parameters: _adamw(ens, parameters, settings))
    with torch.random.fork_rng():
        torch.manual_seed(settings.seed)
        for epoch in range(settings.epochs):
            order = method.order(permutation(len(x), settings.seed, Stream.EPOCH_ORDER, epoch), y)
            history.loss.append(_epoch(ens, x, y, order.split(settings.batch), method, optimisers, epoch))
            if not len(held_out[0]):
                continue
            try:
                nll = float(ens.task.nll(ens.member_predictions(held_out[0]), held_out[1]).mean())
            except NonFiniteError as error:
                raise _divergence(epoch) from error
            if not math.isfinite(nll):
                raise _divergence(epoch)
            history.validation_nll.append(nll)
            if nll < best:
                best, best_weights = nll, copy.deepcopy(ens.state_dict())
            since_best = epoch - history.validation_nll.index(best)
            if settings.patience is not None and since_best >= settings.patience:
                break
    if best_weights is not None:
        ens.load_state_dict(best_weights)
        calibration = calibration_on_few(ens.task, ens.member_predictions(held_out[0]), held_out[1])
        setattr(ens, ens.task.calibration, calibration)
    if not all(bool(torch.isfinite(p).all()) for p in ens.parameters()):
        raise _divergence(len(history.loss) - 1)
    return history


def calibration_on_few(task: Task, members: Tensor, y: Tensor) -> float:
    """The temperature, or scale of the variance, c that minimises Σ NLL + ½ (log c)² on held-out targets.

    The second term is a standard normal prior on log c. It hardly matters for many targets. Without it, a few that are
    all predicted correctly would have the temperature 0.
    """
    members = members.double()

    def objective(c: float) -> float:
        return float(task.nll(task.calibrated(members, c), y).sum()) + math.log(c) ** 2 / 2

    return minimise(objective, *task.calibration_bounds)


def _epoch(
    ens: Ensemble,
    x: Tensor,
    y: Tensor,
    batches: tuple[Tensor, ...],
    method: Method,
    optimisers: list[torch.optim.Optimizer],
    epoch: int,
) -> float:
    """Train for one epoch and return the mean loss."""
    ens.train()
    total, count = 0.0, 0
    for rows in batches:
        if len(rows) == 1 and len(batches[0]) > 1:  # BatchNorm cannot train on a single example, the remainder
            continue
        for optimiser in optimisers:
            optimiser.zero_grad()
        try:
            loss = method.loss(ens, x[rows], y[rows]).loss
        except NonFiniteError as error:
            raise _divergence(epoch) from error
        loss.backward()
        for optimiser in optimisers:
            optimiser.step()
        total, count = total + len(rows) * loss.item(), count + len(rows)
    if not math.isfinite(total):
        raise _divergence(epoch)
    return total / count


def _adamw(ens: Ensemble, parameters: list[nn.Parameter], settings: TensorTraining) -> torch.optim.Optimizer:
    rate, noise = settings.learning_rate, ens.log_variance
    groups: list[dict[str, object]] = [{"params": [p for p in parameters if p is not noise]}]
    if any(p is noise for p in parameters):  # weight decay would pull the variance towards 1
        groups.append({"params": [noise], "weight_decay": 0.0, "lr": _VARIANCE_RATE * rate})
    return torch.optim.AdamW(groups, rate, weight_decay=settings.weight_decay, fused=True)


def _divergence(epoch: int) -> DivergenceError:
    return DivergenceError(f"The loss or a weight is not finite in epoch {epoch + 1}; use a smaller learning_rate.")
