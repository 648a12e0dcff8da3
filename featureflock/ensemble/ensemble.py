"""The ensemble: a shared trunk, n feature extractors, a shared head or one head per member, and the particle layer.

    ens = Ensemble(extractors, head=nn.Linear(H, C), layer=ParticleLayer(rank=5))
    ens(x)                   # outputs of each member, (n, B, C)

    p̄(y|x) = (1/n) Σ_i p(y|f_i(x))                                    returned by `predict`

The task (featureflock.tasks) is the likelihood p(y|f): it defines the loss, the prediction and its uncertainty.

Shapes: n members, B data points, H features, C classes.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor, nn

from featureflock.core.layer import ParticleLayer
from featureflock.core.transport import check_members
from featureflock.core.value_checks import readable
from featureflock.distributed.gradients import GradientReducer
from featureflock.distributed.mesh import SINGLE_PROCESS, Mesh
from featureflock.ensemble.divided_head import can_divide, divided_logits
from featureflock.ensemble.execution import (
    BATCH_NORMS,
    Execution,
    ModuleState,
    check_same_architecture,
    eval_mode,
    execute,
    stacked,
)
from featureflock.ensemble.inference import optimised
from featureflock.ensemble.inputs import (
    NOTHING,
    MicroBatches,
    check_inputs,
    explained_errors,
    mask_for,
    nan_if,
    takes_keywords,
    token_mask,
)
from featureflock.ensemble.micro_batches import micro_batch_features
from featureflock.ensemble.shared_execution import execute_shared, gather_rows, is_frozen, run_trunk, unmodified
from featureflock.ensemble.sharing import SharedMembers
from featureflock.ensemble.task_state import TaskState
from featureflock.ensemble.weight_particles import transported_weights
from featureflock.tasks import Classification, Task, Uncertainty

Place = Literal["features", "logits", "weights"]


class Ensemble(TaskState):
    """n feature extractors with one shared head, or with one head per member.

    The trunk, or without one each extractor, gets x of `ens(x)` or the keyword arguments of `ens(**batch)`. A mapping
    `ens(batch)` is passed as keyword arguments if that module takes them. If features are (n, B, T, …), the keyword
    `attention_mask` (B, T) also reaches the particle layer, and a head whose `forward` has a parameter `mask`.

    Args:
        extractors: the feature extractors, any modules; or n members in one network (`rank_one`, `lora`).
        head: one module for all members, or a sequence (such as a ModuleList) of one per member. A shared head can be
            any part of a network, from an early block on. If it has BatchNorm, it is trained on the rows of all members
            as one batch of n·B, so that its statistics describe the mixture that it is used on.
        layer: the particle layer, another module on features (n, B, …) that is the identity in eval mode, or None.
        at: the particles of the layer: the features (feature-WGD), the logits (function-WGD) or all trained weights
            (weight-WGD; the layer then needs `count`, the size of the data set).
        task: the likelihood, such as `tasks.Regression()`.
        execution: how members are computed. All three modes give the same results up to rounding:
            "sequential"   one after another.
            "vectorised"   all at once with torch.func. Members must have the same architecture; dropout masks differ
                           from those of the other modes.
            "low_memory"   one after another, with the activations of one member in memory at a time: the backward pass
                           uses those of the last member and recomputes those of the others, with the same dropout
                           masks and without updating running statistics. A
                           shared head with BatchNorm is the exception: its activations are stored for all members.
            Members in one network are computed in one call in the first two modes.
        trunk: a module that all members share, computed once before the extractors, which get its output; or None. Its
            parameters get the mean over members of the gradients that separate trunks would get (sharing.py). A frozen
            trunk, all of whose parameters have requires_grad=False, stays in eval mode.
    """

    def __init__(
        self,
        extractors: Iterable[nn.Module] | SharedMembers,
        head: nn.Module | Sequence[nn.Module],
        layer: nn.Module | None = None,
        *,
        at: Place = "features",
        task: Task = Classification(),
        execution: Execution = "sequential",
        trunk: nn.Module | None = None,
    ) -> None:
        super().__init__()
        extractors = extractors if isinstance(extractors, SharedMembers) else nn.ModuleList(extractors)
        shared = isinstance(head, nn.Module) and not isinstance(head, nn.ModuleList)
        heads: list[nn.Module] = [] if shared else list(head)  # type: ignore[arg-type]
        if not len(extractors):
            raise ValueError("An Ensemble needs at least one extractor.")
        for name, modules in (("extractor", extractors), ("head", heads)):
            if not isinstance(modules, SharedMembers) and len({id(m) for m in modules}) < len(modules):
                raise ValueError(f"Every member needs a separate {name}; the same {name} was given twice.")
        if not shared and len(heads) != len(extractors):
            raise ValueError(f"{len(extractors)} extractors need as many heads, or one shared head; got {len(heads)}.")
        if layer is not None and not isinstance(layer, nn.Module):
            raise ValueError(f"layer must be a module, such as ParticleLayer(rank=5), or None; got {layer!r}.")
        if at not in get_args(Place):
            raise ValueError(f"at must be one of {', '.join(get_args(Place))}; got {at!r}.")
        if at == "weights" and layer is not None and getattr(layer, "count", None) is None:
            raise ValueError("A layer on the weights needs ParticleLayer(count=N) for a training set of N examples.")
        if at == "weights" and isinstance(extractors, SharedMembers):
            raise ValueError('A layer on the weights needs members with weights of their own; use at="features".')
        if trunk is not None and not isinstance(trunk, nn.Module):
            raise ValueError(f"trunk must be a module or None; got {trunk!r}.")
        if at == "weights" and shared:
            raise ValueError("A layer on the weights needs one head per member; got one shared head.")
        self.trunk, self.extractors = trunk, extractors
        self.head: nn.Module = head if shared else nn.ModuleList(heads)  # type: ignore[assignment]
        self.layer, self.at = layer, at
        self.set_task(task)
        self.execution = execution
        if trunk is not None and is_frozen(trunk):
            trunk.eval()

    @classmethod
    def from_models(cls, models: Iterable[nn.Module], *, task: Task = Classification()) -> Self:
        """Return an ensemble of n networks that were trained elsewhere, as they are.

            ens = ff.Ensemble.from_models(models)
            probs = ens.predict(x)

        The networks are not copied. Each maps a batch to the outputs of the task; `features` returns these outputs.
        """
        models = list(models)
        return cls(models, [nn.Identity() for _ in models], task=task)

    mesh: Mesh = SINGLE_PROCESS
    """The processes that the ensemble is divided among; see `shard`."""
    _reducer: GradientReducer | None = None
    """Sums gradients during the backward pass, after the first call of `average_gradients`."""

    def __len__(self) -> int:
        return len(self.extractors)

    def train(self, mode: bool = True) -> "Ensemble":
        """Set train or eval mode; a frozen trunk stays in eval mode."""
        super().train(mode)
        if self.trunk is not None and is_frozen(self.trunk):
            self.trunk.eval()
        return self

    def member(self, i: int) -> nn.Sequential:
        """Member i as one network from input to logits, with submodules `trunk`, if there is one, `extractor`, `head`.

        It shares its weights with the ensemble, unless members are in one network; then the extractor is a copy.
        """
        head = self.head[i] if isinstance(self.head, nn.ModuleList) else self.head
        parts = {"trunk": self.trunk, "extractor": self.extractors[i], "head": head}
        return nn.Sequential(OrderedDict((name, part) for name, part in parts.items() if part is not None))

    def shard(self, mesh: Mesh) -> "Ensemble":
        """Divide the ensemble among the processes of a mesh (distributed/mesh.py), and return it.

        This process stores only its own members (`Method.build` builds no others); a trunk and members in one network
        (`rank_one`, `lora`) are stored by every process, which computes its own members. `ens(x)` takes this process's
        part of a batch and returns the logits of all n members for it. Back-propagate the mean loss of that part, call
        `average_gradients`, then step.

            with ff.join_mesh(ff.MeshShape(members=2, data=2)) as mesh:        # torchrun --nproc-per-node=4 …
                ens.shard(mesh)
                optimiser = torch.optim.SGD(ens.parameters(), lr=0.1)
                method.loss(ens, x, y).loss.backward()
                ens.average_gradients()
                optimiser.step()
        """
        if mesh.world.size == 1:
            return self
        local = mesh.local_members(len(self))
        if isinstance(self.layer, ParticleLayer):
            self.layer.sees_whole_batch = mesh.data.size == 1 or self.at == "weights"
        if isinstance(self.layer, ParticleLayer) and mesh.data.size > 1:
            if self.layer.rule.noise > 0:
                raise ValueError("Langevin noise cannot be computed for parts of a batch; use --mesh.data 1.")
            self.layer.group = None if self.at == "weights" else mesh.data.group
        self.mesh = mesh
        for modules in self._member_modules():
            for i in {*range(len(self))} - {*local}:
                modules[i] = RemoteMember()
        return self

    def first_local_extractor(self) -> nn.Module:
        """The first member of this process, or the network of all members."""
        return self.extractors if isinstance(self.extractors, SharedMembers) else self._local(self.extractors)[0]

    def average_gradients(self) -> None:
        """Replace the gradients of this process's part of the batch by the gradients of the whole batch.

        From the second call on, their sums over processes start during the backward pass (distributed/gradients.py),
        and this waits for them. The running statistics of BatchNorm, which each process computes for its part, are
        averaged too.
        """
        if self.mesh.world.size == 1:
            return
        rows = self.extractors.member_tensors() if isinstance(self.extractors, SharedMembers) else []
        of_members = {p for modules in self._member_modules() for p in modules.parameters()} | {*rows}
        trained = [(p, p not in of_members) for p in self.parameters() if p.requires_grad]
        if self._reducer is None or not self._reducer.reduces(self.mesh, trained):
            if self._reducer is not None:
                self._reducer.close()
            self._reducer = GradientReducer(self.mesh, trained)
        self._reducer.finish()
        self.mesh.average([b for b in self.buffers() if b.is_floating_point() and b is not self.calibration])
        gather_rows(rows, self.mesh.members, len(self))

    @contextmanager
    def detached_from_mesh(self, all_members: bool = True) -> Iterator[None]:
        """Remove references to process groups temporarily, to save or copy; `all_members` must be in this process."""
        if all_members and any(isinstance(m, RemoteMember) for modules in self._member_modules() for m in modules):
            raise ValueError("Some members are on other processes; save the ensemble, then ff.load has all members.")
        of_layer = ("group", "sees_whole_batch") if isinstance(self.layer, ParticleLayer) else ()
        references = [(self, "mesh"), (self, "_reducer"), *((self.layer, name) for name in of_layer)]
        removed = [(module, name, vars(module).pop(name)) for module, name in references if name in vars(module)]
        try:
            yield
        finally:
            for module, name, value in removed:
                setattr(module, name, value)

    def _local_features(
        self, states: list[ModuleState] | None, x: Any, kwargs: dict[str, Any]
    ) -> Tensor | list[Tensor]:
        """Return the features of the members of this process."""
        if isinstance(x, MicroBatches):
            modules = {"trunk": self.trunk, "extractors": self.extractors}
            start = self.mesh.members.local_slice(len(self)).start
            return micro_batch_features(
                modules, lambda s, part: stacked(self._local_features(s, part, kwargs), "features"), states, start, x
            )
        first = self.trunk if self.trunk is not None else self.first_local_extractor()
        if isinstance(x, Mapping) and takes_keywords(first, x):
            x, kwargs = NOTHING, {**x, **kwargs}
        # Each process has the gradients of its own members, and `average_gradients` takes the mean over processes.
        factor = self.mesh.members.size / len(self)
        if self.trunk is not None:
            # Behind a layer on the weights, trunks get the gradient of the mean loss, which is a mean over members.
            with explained_errors("The trunk", x, kwargs):
                x, kwargs = run_trunk(self.trunk, x, kwargs, factor if states is None else self.mesh.members.size), {}
        part = self.mesh.members.local_slice(len(self))
        modified = unmodified(x if self.trunk is not None else None)
        with self.mesh.member_rng(), modified, explained_errors("The extractor", x, kwargs):
            if isinstance(self.extractors, SharedMembers):
                return execute_shared(self.extractors, part, factor, x, self.execution, kwargs)
            return execute(list(self.extractors)[part], states, [x] * (part.stop - part.start), self.execution, kwargs)

    def _member_modules(self) -> list[nn.ModuleList]:
        return [m for m in (self.extractors, self.head) if isinstance(m, nn.ModuleList)]

    def _local(self, modules: nn.Module) -> list[nn.Module]:
        """Return the modules of the members of this process."""
        assert isinstance(modules, nn.ModuleList)
        return list(modules)[self.mesh.members.local_slice(len(self))]

    def _gather(self, outputs: Tensor | Sequence[Tensor], name: str) -> Tensor:
        """Stack the outputs of the members of all processes."""
        return self.mesh.members.gather(stacked(outputs, name), len(self))

    @property
    def execution(self) -> Execution:
        return self._execution

    @execution.setter
    def execution(self, execution: Execution) -> None:
        if execution not in get_args(Execution):
            raise ValueError(f"execution must be one of {', '.join(get_args(Execution))}; got {execution!r}.")
        if execution == "vectorised":
            for modules in self._member_modules():
                check_same_architecture(self._local(modules))
        self._execution = execution

    def forward(self, x: Any = NOTHING, /, **inputs: Any) -> Tensor:
        """Return the outputs of each member, (n, B, …): for classification the logits (n, B, C)."""
        refused = check_inputs(x, inputs)
        extractor_states, head_states = self._transported_weights()
        features = self._local_features(extractor_states, x, inputs)
        mask = token_mask(features[0], x, inputs)
        if mask is None and can_divide(self.mesh, self.head, layer := self.layer if self.at == "features" else None):
            logits = divided_logits(self.mesh, stacked(features, "features"), len(self), layer, self._shared_head)
        elif not isinstance(self.head, nn.ModuleList):
            logits = self._shared_head(self._apply_layer("features", self._gather(features, "features"), mask), mask)
        else:
            if self.layer is not None and self.at == "features":
                gathered = self._apply_layer("features", self._gather(features, "features"), mask)
                features = self.mesh.members.local_rows(gathered)
            logits = self._separate_heads(features, mask, head_states)
        return nan_if(refused, self._apply_layer("logits", logits, token_mask(logits[0], x, inputs)))

    def features(self, x: Any = NOTHING, /, **inputs: Any) -> Tensor:
        """Return the features of each member, (n, B, …)."""
        refused = check_inputs(x, inputs)
        return nan_if(refused, self._gather(self._local_features(None, x, inputs), "features"))

    def logits(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        """Logits (n, B, C) of features (n, B, …), by the head alone, without the particle layer."""
        if not isinstance(features, Tensor) or features.ndim < 2 or len(features) != len(self):
            got = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
            expected = f"Features must have shape ({len(self)}, examples, …), members first"
            raise ValueError(f"{expected}; got {got}; stack the members along the first dimension.")
        if readable(features):
            check_members(torch.isfinite(features), "features")
        if not isinstance(self.head, nn.ModuleList):
            return self._shared_head(features, mask)
        return self._separate_heads(self.mesh.members.local_rows(features), mask, None)

    def member_predictions(self, x: Any = NOTHING, /, **inputs: Any) -> Tensor:
        """Return the parameters of each member's predictive distribution, (n, B, …); in eval mode, without gradients.

        For classification these are log-probabilities (n, B, C); for the other tasks see `tasks`.
        """
        with torch.no_grad(), eval_mode(self):
            members = self.task.member_predictions(self(x, **inputs), self.log_variance)
        if readable(members):
            check_members(~self.task.undefined(members), "predictions")
        return members

    def predict(self, x: Any = NOTHING, /, **inputs: Any) -> Any:
        """Return the prediction of the task, averaged over members and calibrated; in eval mode.

        Classification: probabilities (B, C). MultiLabel: the probability of each label, (B, L). Regression: a tuple
        (mean, variance).
        """
        return self.task.predict(self.member_predictions(x, **inputs), self.calibration)

    def for_inference(self, *, compile: bool | None = None) -> "Ensemble":
        """Return a copy optimised for prediction: the same probabilities up to rounding.

            fast = ens.for_inference()
            probs = fast.predict(x)

        The copy is in eval mode, without gradients and without the particle layer. BatchNorm is folded into
        convolutions (inference.py), and the memory format is channels_last. Later training does not change the copy.
        Members in one network stay in one network, with its memory, and their BatchNorm is not folded.

        Args:
            compile: use torch.compile, at the first call for each shape of x (seconds). None where it is faster: CUDA
                GPUs, and CPUs except for MLPs. If the compiler does not work, None warns and True raises ValueError.
        """
        return optimised(self, compile)

    def compiled_modules(self) -> list[nn.Module]:
        """The modules that torch.compile is applied to: the trunk, and each extractor or the network of all members."""
        members = [self.extractors.network] if isinstance(self.extractors, SharedMembers) else [*self.extractors]
        return members if self.trunk is None else [self.trunk, *members]

    def uncertainty(self, x: Any = NOTHING, /, **inputs: Any) -> Uncertainty:
        """Return the total, aleatoric and epistemic uncertainty of each prediction; in eval mode.

        Entropies in nats for classes and labels, without the temperature, which applies to the averaged prediction and
        not to the members. Variances for regression.
        """
        return self.task.uncertainty(self.member_predictions(x, **inputs), self.calibration)

    def _apply_layer(self, place: Place, particles: Tensor, mask: Tensor | None) -> Tensor:
        if self.layer is None or self.at != place:
            return particles
        out: Tensor = self.layer(particles, mask) if isinstance(self.layer, ParticleLayer) else self.layer(particles)
        return out

    def _shared_head(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        joint = any(isinstance(m, BATCH_NORMS) and m.training for m in self.head.modules())
        kwargs = mask_for(self.head, mask)
        with explained_errors("The head", features[0], kwargs):
            if joint or self.execution == "vectorised":
                kwargs = {name: value.repeat(len(self), *[1] * (value.ndim - 1)) for name, value in kwargs.items()}
                return torch.unflatten(self.head(features.flatten(0, 1), **kwargs), 0, features.shape[:2])
            return stacked(execute([self.head] * len(self), None, features, self.execution, kwargs), "logits")

    def _separate_heads(
        self, features: Tensor | list[Tensor], mask: Tensor | None, states: list[ModuleState] | None
    ) -> Tensor:
        heads = self._local(self.head)
        kwargs = mask_for(heads[0], mask)
        with explained_errors("The head", features[0], kwargs):
            logits = execute(heads, states, features, self.execution, kwargs)
        return self._gather(logits, "logits")

    def _transported_weights(self) -> tuple[list[ModuleState] | None, list[ModuleState] | None]:
        """Return the weights of extractors and heads after a layer on weights, or None if there is no such layer."""
        layer = self.layer
        if layer is None or self.at != "weights" or not (layer.training and torch.is_grad_enabled()):
            return None, None
        pairs = [*zip(self._local(self.extractors), self._local(self.head), strict=True)]
        return transported_weights(pairs, lambda vectors: layer(self._gather(vectors, "weights")), self.mesh)


class RemoteMember(nn.Module):
    """Placeholder for a member that another process has."""
