"""The demo: five ways to train an ensemble on two-view digits, compared over several seeds.

For every seed, all methods see the same pictures in the same order and start from the same extractors. What drives a
member's prediction is measured by blanking halves: the share of the left one, and how much members differ in it by
picture, are those of evaluation/views.py.

Shapes: n members, B pictures, C classes.
"""

import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import combinations
from multiprocessing import active_children, get_context
from os import cpu_count
from typing import NamedTuple

import torch
from torch import Tensor, nn

from featureflock.core.priors import Cauchy, Uniform
from featureflock.data import TwoViewDigits, two_view_digits
from featureflock.ensemble.ensemble import Ensemble
from featureflock.evaluation import first_view_share, view_difference_by_input
from featureflock.methods import DeepEnsembles, FeatureMAP, FeatureWGD, Method, Single

METHODS: dict[str, Method] = {
    "Single": Single(),
    "Deep Ensembles": DeepEnsembles(),
    "shared head": FeatureMAP(Uniform()),
    "shared + prior": FeatureMAP(Cauchy(1e-3)),
    "feature-WGD": FeatureWGD(Cauchy(1e-3)),
}


@dataclass(frozen=True)
class Settings:
    """What the demo trains."""

    seeds: int = 5
    """How many seeds: each draws other pictures, other initial weights and another order."""
    members: int = 5
    """Members of each ensemble."""
    epochs: int = 60
    """Passes over the 1,200 training pictures."""

    def __post_init__(self) -> None:
        if self.seeds < 2 or self.members < 2 or self.epochs < 1:
            raise ValueError("The demo needs at least 2 seeds (for a deviation), 2 members and 1 epoch.")


class Outcome(NamedTuple):
    """What one method did on one seed."""

    method: str
    seed: int
    scores: dict[str, dict[str, float]]
    """For each test set: accuracy (%), nll (nats) and disagreement (% of pairs of members)."""
    view_difference: float
    """How much members differ in the half that drives their predictions; 0 for not at all, at most 1."""
    left_shares: list[list[float]]
    """(n, 10) left shares on the first clean test picture of each digit."""


def compare(settings: Settings, on_progress: Callable[[int, int], None]) -> list[Outcome]:
    """Train all methods on all seeds, with as many processes as there are cores."""
    jobs = [(name, seed) for seed in range(settings.seeds) for name in METHODS]
    with ProcessPoolExecutor(min(len(jobs), cpu_count() or 1), mp_context=get_context("spawn")) as pool:
        # Processes inherit what is ignored: a Ctrl-C is for this one alone, which then ends the others.
        interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
        futures = [pool.submit(run, name, seed, settings) for name, seed in jobs]
        signal.signal(signal.SIGINT, interrupt)
        try:
            for done, future in enumerate(as_completed(futures), 1):
                future.result()
                on_progress(done, len(jobs))
        except BaseException:
            for process in active_children():
                process.terminate()
            raise
    return [future.result() for future in futures]


def run(name: str, seed: int, settings: Settings) -> Outcome:
    """Train and test one method on one seed."""
    torch.set_num_threads(1)
    data = two_view_digits(seed)
    ens = train(METHODS[name], data, seed, 1 if name == "Single" else settings.members, settings.epochs)
    logits = {test: _logits(ens, x) for test, x in data.x_test.items()}
    share = left_share(logits)
    first = [int((data.y_test == digit).nonzero()[0]) for digit in range(10)]
    scores = {test: score(logits[test], data.y_test) for test in logits}
    return Outcome(name, seed, scores, view_difference_by_input(share), share[:, first].tolist())


def train(method: Method, data: TwoViewDigits, seed: int, members: int, epochs: int) -> Ensemble:
    """SGD with Nesterov momentum and a cosine schedule; a multilayer perceptron 128-64-32 as extractor."""
    ens = method.build(_extractor, lambda: nn.Linear(32, 10), members=members, seed=seed, train_size=len(data.y_train))
    optimiser = torch.optim.SGD(ens.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, epochs)
    order = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for batch in torch.randperm(len(data.y_train), generator=order).split(64):
            optimiser.zero_grad()
            method.loss(ens, data.x_train[batch], data.y_train[batch]).loss.backward()
            optimiser.step()
        schedule.step()
    return ens.eval()


def score(logits_nbc: Tensor, labels_b: Tensor) -> dict[str, float]:
    """Accuracy and NLL of the averaged probabilities, and how often two members predict different classes."""
    n = len(logits_nbc)
    log_p_bc = logits_nbc.log_softmax(-1).logsumexp(0) - torch.tensor(n).log()
    votes_nb = logits_nbc.argmax(-1)
    pairs = list(combinations(votes_nb, 2))
    return {
        "accuracy": 100 * float((log_p_bc.argmax(-1) == labels_b).double().mean()),
        "nll": float(nn.functional.nll_loss(log_p_bc, labels_b)),
        "disagreement": 100 * sum(float((a != b).double().mean()) for a, b in pairs) / max(1, len(pairs)),
    }


def left_share(logits: dict[str, Tensor]) -> Tensor:
    """(n, B): how much of each member's prediction on the clean picture the left half drives."""
    return first_view_share(*(logits[test].log_softmax(-1) for test in ("clean", "right blank", "left blank")))


def _extractor() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())


@torch.no_grad()
def _logits(ens: Ensemble, x: Tensor) -> Tensor:
    logits: Tensor = ens(x)
    return logits
