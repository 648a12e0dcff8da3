"""Base class and registry of ensemble methods.

A method is a frozen dataclass of hyper-parameters with two functions: `build` returns the ensemble, and `loss` computes
what to back-propagate.

    method = FeatureWGD(Cauchy(1e-3))
    ens = method.build(make_extractor, make_head, members=5, seed=0)
    method.loss(ens, x, y).loss.backward()

Initial weights are the same for every method: member i of seed s is built after torch.manual_seed(1000 s + i), first
its extractor, then its head. So a member depends neither on the number of members nor on the method, and can be trained
alone. A shared head is the head of member 0. Members in one network share the extractor of member 0. Networks that a
method adds are built after torch.manual_seed(2³² + s), and a trunk after torch.manual_seed(2³³ + s). On a mesh, each
process builds its own members only, and receives the head of member 0.

`extra_optimisers` and `order` are optional: parameters with an optimiser of their own, and batches of a special
composition. Additional networks and counters are submodules and buffers of the ensemble, so checkpoints include them.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from featureflock.core.kernels import RBF, Kernel
from featureflock.core.layer import ParticleLayer
from featureflock.core.priors import Cauchy, Prior
from featureflock.core.rules import WGD, Rule
from featureflock.core.transport import Subspace, TransportConfig
from featureflock.distributed.mesh import SINGLE_PROCESS, Mesh
from featureflock.ensemble.ensemble import Ensemble, RemoteMember
from featureflock.ensemble.execution import Execution
from featureflock.ensemble.sharing import SharedMembers
from featureflock.tasks import Classification, Task
from featureflock.utils.registry import Registry

Factory = Callable[[], nn.Module]
SearchSpace = Mapping[str, tuple[float, ...]]


class LossOutput(NamedTuple):
    """Result of `Method.loss`."""

    loss: Tensor
    """Scalar to back-propagate."""
    outputs: Tensor
    """Outputs of the members, (n, B, …), such as logits (n, B, C), from which the training loop computes its scores."""


class Method:
    """Base class of methods. A subclass overrides `assemble`, `loss` or both."""

    title: ClassVar[str] = "custom method"
    """Name in tables."""
    default_members: ClassVar[int] = 10
    """Ensemble size if none is given."""
    needs_classes: ClassVar[bool] = False
    """Whether the method is defined for one class per example only: outputs (B, C)."""
    splits_over_batch: ClassVar[bool] = True
    """Whether the loss of a batch is the size-weighted mean of the losses of its parts, so that processes can compute
    one part each. The sums of a particle layer over the batch are taken over all parts."""
    search_space: ClassVar[SearchSpace] = {}
    """Values that `tune` tries by default, by field of the method. If it is empty, the learning rate and the weight
    decay are tuned."""

    def build(
        self,
        make_extractor: Factory,
        make_head: Factory,
        *,
        members: int | None = None,
        seed: int = 0,
        train_size: int | None = None,
        task: Task = Classification(),
        execution: Execution = "sequential",
        share: Callable[[nn.Module, int], SharedMembers | None] | None = None,
        trunk: Factory | None = None,
        mesh: Mesh = SINGLE_PROCESS,
    ) -> Ensemble:
        """Build a randomly initialised ensemble. PyTorch's global random state is unchanged.

        Args:
            make_extractor, make_head: return a new module, initialised with PyTorch's global random generator.
            members: ensemble size; None for `default_members`.
            seed: seed of the initial weights.
            train_size: N, the number of training points; needed by weight-WGD and DICE. For dense tasks, the number of
                targets, such as pixels.
            task: the likelihood, such as `tasks.Regression()`.
            execution: execution mode of the members, as in `Ensemble`.
            share: turns the extractor of member 0 and the number of members into members in one network, such as
                `rank_one`; None, also as its result, for separate extractors.
            trunk: returns a new trunk, as in `Ensemble`; None for no trunk.
            mesh: the processes to divide the ensemble among, as in `Ensemble.shard`; all of them must call this.
        """
        members = self.default_members if members is None else members
        if not 1 <= members <= 1000 or not 0 <= seed < 4_000_000:
            raise ValueError(f"Use 1 to 1,000 members and a seed from 0 to 3,999,999; got {members} and {seed}.")
        self.check_task(task)
        local = mesh.local_members(members)
        extractors: list[nn.Module] = [RemoteMember() for _ in range(members)]
        heads: list[nn.Module] = [RemoteMember() for _ in range(members)]

        def build_first() -> SharedMembers | None:
            torch.manual_seed(1000 * seed)
            extractors[0] = make_extractor()
            heads[0] = make_head()
            return None if share is None else share(extractors[0], members)

        with torch.random.fork_rng():
            shared = build_first() if 0 in local else None
            if mesh.members.size > 1 and any(mesh.members.all_gather_int(int(shared is not None))) and shared is None:
                shared = build_first()
            for i in local:
                if i > 0:
                    torch.manual_seed(1000 * seed + i)
                    extractors[i] = extractors[i] if shared is not None else make_extractor()
                    heads[i] = make_head()
            if isinstance(heads[0], RemoteMember):
                heads[0] = make_head()
            _broadcast(heads[0], mesh)
            torch.manual_seed(2**32 + seed)
            ens = self.assemble(extractors if shared is None else shared, heads, train_size)  # type: ignore[arg-type]
            if shared is not None and ens.extractors is not shared:
                raise ValueError(f"{self.title} needs separate extractors; its members cannot be in one network.")
            if trunk is not None:
                torch.manual_seed(2**33 + seed)
                ens.trunk = trunk()
                ens.train()  # keeps a frozen trunk in eval mode
            ens.shard(mesh)
        if ens.task != task:
            ens.set_task(task)
        ens.execution = execution
        return ens

    def check_task(self, task: Task, y: Tensor | None = None) -> None:
        """Raise ValueError if the method is not defined for this task, or for targets y of it."""
        if y is not None:
            task.check_targets(y)
        if not self.needs_classes:
            return
        what = None if task.kind == Classification.kind else task.name
        if y is not None and y.ndim > 1:
            what = what or f"targets of shape {tuple(y.shape)}"
        if isinstance(task, Classification) and task.ignore_index is not None:
            what = "targets that are ignored"
        if what is not None:
            advice = "use feature-WGD or Deep Ensembles"
            raise ValueError(f"{self.title} is defined for one class per example only, not for {what}; {advice}.")

    def assemble(self, extractors: list[nn.Module], heads: list[nn.Module], train_size: int | None) -> Ensemble:
        """Combine new extractors and heads into an ensemble for a data set of `train_size` points.

        By default, members share nothing and do not interact. On a mesh, members of other processes are `RemoteMember`,
        a placeholder; the head of member 0 always exists.
        """
        return Ensemble(extractors, heads)

    def loss(self, ens: Ensemble, x: Tensor, y: Tensor) -> LossOutput:
        """Loss and outputs for a batch of inputs x and targets y, such as labels (B,).

        The default is −(1/nT) Σ_i Σ_t log p_i(y_t | x_t), the mean loss of the ensemble's task over T likelihood terms,
        with the update of a particle layer, if there is one, as its gradient. The loss may be scaled and accumulated
        like any other (core/layer.py).
        """
        layer, task = ens.layer, ens.task
        task.check_targets(y)
        particles = isinstance(layer, ParticleLayer)
        with layer.loss_scale(task.count(y)) if particles else nullcontext(lambda loss: loss) as scalable:  # type: ignore[operator, union-attr]
            outputs = ens(x)
            return LossOutput(scalable(task.loss(outputs, y, mean_loss_variance(ens))), outputs)

    def extra_optimisers(self, ens: Ensemble) -> list[torch.optim.Optimizer]:
        """Optimisers for parameters that the training loop should not optimise itself.

        Each one steps after every backward pass. The schedule of the recipe does not change their learning rates.
        """
        return []

    def optimisers(
        self, ens: Ensemble, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    ) -> list[torch.optim.Optimizer]:
        """All optimisers: `make(parameters)` for the parameters without an extra optimiser, then the extra ones."""
        extra = self.extra_optimisers(ens)
        excluded = {p for optimiser in extra for group in optimiser.param_groups for p in group["params"]}
        return [make([p for p in ens.parameters() if p.requires_grad and p not in excluded]), *extra]

    def order(self, shuffled: Tensor, labels: Tensor) -> Tensor:
        """Order of the examples in an epoch, from which consecutive batches are taken.

        `shuffled` is a random permutation of 0 … N − 1, and `labels` (N, …) is indexed by position.
        """
        return shuffled


METHODS: Registry[type[Method]] = Registry("method")
"""Methods by their command-line name."""


@dataclass(frozen=True)
class TransportSettings:
    """Hyper-parameters of the methods whose members repel each other."""

    search_space: ClassVar[SearchSpace] = {
        "prior.precision": (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2),
        "repulsion": (1.0, 2.0, 5.0, 10.0, 20.0),
        "rank": (1, 2, 5, 10),
    }

    prior: Prior = Cauchy(1e-3)
    """Prior on each coordinate of a particle."""
    kernel: Kernel = RBF()
    """Kernel between particles."""
    rank: int | None = 5
    """Dimension of the subspace of the repulsion, at most the number of members; None for no projection."""
    subspace: Subspace = "dominant"
    """Subspace of the repulsion: the dominant directions, or the weakest ones as in the authors' code."""
    rule: Rule = WGD()
    """Update rule of the particles."""
    repulsion: float = 1.0
    """Strength of the repulsion, which is the temperature of the posterior; the paper uses 1."""
    reference_batch: int | None = None
    """Batch size that `repulsion` was tuned for; at others its strength per example is the same. None: no scaling."""

    def __post_init__(self) -> None:
        settings = self.prior, self.kernel, self.rank, self.subspace, self.rule, self.repulsion
        TransportConfig(*settings).check()

    def layer(self, members: int, count: int | None = None) -> ParticleLayer:
        """Particle layer with these hyper-parameters."""
        rank = None if self.rank is None else min(self.rank, members)
        return ParticleLayer(
            self.prior,
            self.kernel,
            rank,
            self.subspace,
            self.rule,
            self.repulsion,
            reference_batch=self.reference_batch,
            count=count,
        )


def _broadcast(module: nn.Module, mesh: Mesh) -> None:
    """Take the weights and buffers of the process that has member 0."""
    for tensor in (*module.parameters(), *module.buffers()):
        if not isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer):
            mesh.members.broadcast(tensor.detach())


def mean_loss_variance(ens: Ensemble) -> Tensor | None:
    """The learnt log-variance for a mean loss over members.

    The mean loss has 1/n of the gradient of each member's loss. A particle layer corrects that for the networks. Here
    it is corrected for variances that belong to single members, so that they learn as fast as in separate training.
    """
    log_variance = ens.log_variance
    if log_variance is None or log_variance.ndim == 0:
        return log_variance
    return log_variance + (len(ens) - 1) * (log_variance - log_variance.detach())


def check_numbers(method: Method, *names: str, above_zero: bool = False) -> None:
    """Raise ValueError unless these fields are finite and at least 0, or above 0."""
    for name in names:
        value = getattr(method, name)
        if not 0 <= value < math.inf or (above_zero and value == 0):
            limit = "above 0" if above_zero else "of at least 0"
            raise ValueError(f"{name} must be a finite number {limit}; got {value!r}.")


def check_loss_output(output: object, method: Method, members: int, examples: int) -> LossOutput:
    """Raise ValueError unless `output` is a LossOutput of a scalar and outputs (n, B, …)."""
    got = type(output).__name__
    if isinstance(output, LossOutput):
        if output.loss.ndim == 0 and output.outputs.shape[:2] == (members, examples):
            return output
        got = f"shapes {tuple(output.loss.shape)} and {tuple(output.outputs.shape)}"
    expected = f"LossOutput(loss, outputs), a scalar and outputs ({members}, {examples}, …)"
    raise ValueError(f"{type(method).__name__}.loss must return {expected}; got {got}.")
