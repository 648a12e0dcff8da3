"""What a method is, and what methods share.

A method is a frozen dataclass of hyper-parameters with two functions, `build` and `loss`. Every method starts from the
same members: member i of seed s is made right after torch.manual_seed(1000 s + i), first its extractor, then its head.
So it depends neither on the number of members nor on the method, and anybody can make it and train it alone. A shared
head is that of member 0. Networks that a method adds are made after torch.manual_seed(2³² + s).

What else a method may need of a training loop has a usual answer: `own_optimisers` for networks with a learning rate of
their own, and `order` for batches of a certain kind. Networks and numbers that it keeps, such as how far training is,
are submodules and buffers of the ensemble, and so are part of every checkpoint.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from featureflock.core.kernels import RBF, Kernel
from featureflock.core.layer import ParticleLayer
from featureflock.core.priors import Cauchy, Prior
from featureflock.core.rules import WGD, Rule
from featureflock.core.transport import Subspace
from featureflock.ensemble.ensemble import Ensemble
from featureflock.ensemble.execution import Execution

Factory = Callable[[], nn.Module]


class Method(ABC):
    """A method of your own says how to put members together, and what to back-propagate."""

    title: ClassVar[str] = "own method"
    """What it is called in tables."""
    default_members: ClassVar[int] = 10
    splits_over_batch: ClassVar[bool] = True
    """Whether the loss of a batch is the mean of those of its parts, weighted by their sizes, so that processes can
    have a part each; a particle layer's sums over the batch are taken over all parts."""

    def build(
        self,
        make_extractor: Factory,
        make_head: Factory,
        *,
        members: int | None = None,
        seed: int = 0,
        train_size: int | None = None,
        execution: Execution = "sequential",
    ) -> Ensemble:
        """A freshly initialised ensemble. PyTorch's global random numbers stay as they were.

        Args:
            make_extractor, make_head: make one of each, with weights drawn from PyTorch's random numbers.
            members: how many; None for the paper's number, 10, or 1 where the method is about one network.
            seed: of the initial weights.
            train_size: N, the number of training points; only weight-WGD needs it.
            execution: how members are computed, as in `Ensemble`.
        """
        members = self.default_members if members is None else members
        if not 1 <= members <= 1000 or not 0 <= seed < 4_000_000:
            raise ValueError(
                f"Use 1 to 1,000 members and a seed from 0 to 3,999,999; got members={members} and seed={seed}."
            )
        extractors, heads = [], []
        with torch.random.fork_rng():
            for i in range(members):
                torch.manual_seed(1000 * seed + i)
                extractors.append(make_extractor())
                heads.append(make_head())
            torch.manual_seed(2**32 + seed)
            ens = self.assemble(extractors, heads, train_size)
        ens.execution = execution
        return ens

    @abstractmethod
    def assemble(self, extractors: list[nn.Module], heads: list[nn.Module], train_size: int | None) -> Ensemble:
        """The ensemble of freshly made extractors and heads, for a data set of `train_size` points."""

    @abstractmethod
    def loss(self, ens: Ensemble, x: Tensor, y: Tensor) -> Tensor:
        """What to back-propagate for a batch of inputs x and labels y (B,). It calls `ens(x)` once."""

    def extra_optimisers(self, ens: Ensemble) -> list[torch.optim.Optimizer]:
        """Optimisers for some of the ensemble's parameters; all others are the training loop's to optimise.

        Each makes a step after the backward pass of each batch. Their learning rates are left alone.
        """
        return []

    def optimisers(
        self, ens: Ensemble, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    ) -> list[torch.optim.Optimizer]:
        """`make(parameters)` for all trained parameters but those that the method optimises itself; then its own."""
        own = self.extra_optimisers(ens)
        theirs = {p for optimiser in own for group in optimiser.param_groups for p in group["params"]}
        return [make([p for p in ens.parameters() if p.requires_grad and p not in theirs]), *own]

    def order(self, shuffled: Tensor, labels: Tensor) -> Tensor:
        """The order in which an epoch takes the N training examples, given a random one; batches are cut from it.

        Args:
            shuffled: positions 0 … N − 1 in random order.
            labels: (N,), by position.
        """
        return shuffled


@dataclass(frozen=True)
class TransportSettings:
    """Hyper-parameters of the methods whose members repel each other."""

    prior: Prior = Cauchy(1e-3)
    """Prior on each number of a particle, such as Cauchy(precision)."""
    kernel: Kernel = RBF()
    """Kernel between particles."""
    rank: int | None = 5
    """Directions in which members repel, or as many as there are members if that is fewer; None for no projection."""
    subspace: Subspace = "dominant"
    """The dominant directions, or the weakest, as in the authors' code."""
    rule: Rule = WGD()
    """Update rule of the particles."""

    def layer(self, members: int, count: int | None = None) -> ParticleLayer:
        rank = None if self.rank is None else min(self.rank, members)
        return ParticleLayer(self.prior, self.kernel, rank, self.subspace, self.rule, count=count)


def check_weight(name: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} must be a finite number of at least 0; got {value!r}.")


def mean_cross_entropy(ens: Ensemble, x: Tensor, y: Tensor) -> Tensor:
    """−(1/nB) Σ_i Σ_b log p_i(y_b | x_b): the loss that a particle layer expects."""
    logits = ens(x)
    return F.cross_entropy(logits.flatten(0, 1), y.repeat(len(logits)))
