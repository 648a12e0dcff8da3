"""n feature extractors, own or shared heads, and the place where the particle layer sits.

    p̄(y|x) = (1/n) Σ_i p_i(y|x)                                       what `predict` returns,
    p_T    = softmax(log p̄ / T)                                       once the ensemble has a temperature
    H[p̄]  =  (1/n) Σ_i H[p_i]  +  (1/n) Σ_i KL(p_i ‖ p̄)               what `uncertainty` returns
    total     aleatoric            epistemic (mutual information)

Shapes: n members, B data points, H features, C classes.
"""

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from featureflock.core.layer import ParticleLayer
from featureflock.cpu_kernels.malloc import retain_memory
from featureflock.distributed.mesh import SINGLE_PROCESS, Mesh
from featureflock.ensemble.execution import Execution, State, check_alike, execute
from featureflock.ensemble.inference import can_compile, compiled_for_inference, folded

Place = Literal["features", "logits", "weights"]


class Uncertainty(NamedTuple):
    """Entropies in nats, (B,) each: total = aleatoric + epistemic."""

    total: Tensor
    """H[p̄], the entropy of the averaged prediction."""
    aleatoric: Tensor
    """(1/n) Σ_i H[p_i], the expected entropy of a member: what the members agree is unclear."""
    epistemic: Tensor
    """Their difference, the mutual information of prediction and member: what the members disagree about."""


class Ensemble(nn.Module):
    """n extractors with one shared head, or with a head each.

    Args:
        extractors: the members' feature extractors; any modules.
        head: one module for all members, or a sequence (a ModuleList too) of one for each. A shared head may be any
            part of a network, down to an early block. Where it has BatchNorm in training, it sees the rows of all
            members at once, as one batch of n·B, so that it learns from the mixture that it will be used on.
        layer: the particle layer, or None. A module of a method's own on stacked features (n, B, …) will do, too, if it
            is the identity in eval mode.
        at: what the layer's particles are: the features (feature-WGD), the logits (function-WGD) or all the weights
            that are trained (weight-WGD; give the layer `count`, the size of the data set).
        execution: how members are computed. All three give the same results up to rounding:
            "sequential"   one after another.
            "vectorised"   all at once with torch.func. Members must be of one architecture; dropout draws other masks.
            "low_memory"   one after another, with only one member's activations alive at a time: the backward pass
                           computes them again, with the same dropout masks and the running statistics left alone.
                           A shared head with BatchNorm is the exception: it keeps its own for all.
    """

    def __init__(
        self,
        extractors: Iterable[nn.Module],
        head: nn.Module | Sequence[nn.Module],
        layer: nn.Module | None = None,
        *,
        at: Place = "features",
        execution: Execution = "sequential",
    ) -> None:
        super().__init__()
        extractors = list(extractors)
        shared = isinstance(head, nn.Module) and not isinstance(head, nn.ModuleList)
        heads: list[nn.Module] = [] if shared else list(head)  # type: ignore[arg-type]
        if not extractors:
            raise ValueError("An Ensemble needs at least one extractor.")
        for name, modules in (("extractor", extractors), ("head", heads)):
            if len({id(m) for m in modules}) < len(modules):
                raise ValueError(f"Every member needs {name} weights of its own; the same {name} was given twice.")
        if not shared and len(heads) != len(extractors):
            raise ValueError(
                f"{len(extractors)} extractors need as many heads, or one module for all; got {len(heads)} heads."
            )
        if layer is not None and not isinstance(layer, nn.Module):
            raise ValueError(
                "layer must be a ParticleLayer, such as ParticleLayer(rank=5), or a module like it, or None; "
                f"got {layer!r}."
            )
        if at not in ("features", "logits", "weights"):
            raise ValueError(f'at must be "features", "logits" or "weights"; got {at!r}.')
        if at == "weights" and layer is not None and getattr(layer, "count", None) is None:
            raise ValueError(
                "A layer on the weights needs ParticleLayer(count=N), N the size of the data set they are fitted to."
            )
        if at == "weights" and shared:
            raise ValueError("A layer on the weights needs a head for each member; got one shared head.")
        self.extractors = nn.ModuleList(extractors)
        self.head: nn.Module = head if shared else nn.ModuleList(heads)  # type: ignore[assignment]
        self.layer, self.at = layer, at
        self.execution = execution

    mesh: Mesh = SINGLE_PROCESS
    """The processes that it is divided among."""

    def __len__(self) -> int:
        return len(self.extractors)

    def shard(self, mesh: Mesh) -> "Ensemble":
        """Keep this process's members alone, and work together with the others of the mesh (distributed.py).

        From then on x is this process's part of a batch, and `ens(x)` has the logits of all n members for it in every
        process. Back-propagate the part's ordinary loss, then call `average_gradients`, then step.

            with ff.join_mesh(ff.MeshShape(members=2, data=2)) as mesh:        # torchrun --nproc-per-node=4 …
                ens.shard(mesh)
                optimiser = torch.optim.SGD(ens.parameters(), lr=0.1)
                method.loss(ens, x, y).loss.backward()
                ens.average_gradients()
                optimiser.step()
        """
        if mesh.world.size == 1:
            return self
        if len(self) < mesh.members.size:
            raise ValueError(
                f"{len(self)} members cannot be divided among {mesh.members.size} processes; use --mesh.members "
                f"{len(self)} or less, and --mesh.data for the others."
            )
        if isinstance(self.layer, ParticleLayer) and mesh.data.size > 1:
            if self.layer.rule.temperature > 0:
                raise ValueError("Langevin noise and parts of a batch do not go together; use --mesh.data 1.")
            self.layer.group = None if self.at == "weights" else mesh.data.group
        self.mesh = mesh
        for modules in self._of_members():
            for i in set(range(len(self))) - set(range(len(self))[mesh.members.local_slice(len(self))]):
                modules[i] = RemoteMember()
        return self

    def average_gradients(self) -> None:
        """Make of each process's gradients, those of its part of the batch, the gradient of the batch.

        BatchNorm's running statistics, which each process has of its own part, are averaged too.
        """
        if self.mesh.world.size == 1:
            return
        own = {p for modules in self._of_members() for p in modules.parameters()}
        grads = {p: p.grad for p in self.parameters() if p.grad is not None}
        statistics = [b for b in self.buffers() if b.is_floating_point()]
        self.mesh.average([grad for p, grad in grads.items() if p in own] + statistics)
        self.mesh.average([grad for p, grad in grads.items() if p not in own], over_members=True)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Without the other processes for a while, as it is saved or copied. Refused if they have some of the members;
        those that have other parts of a batch have the same weights."""
        if any(isinstance(m, RemoteMember) for m in self.extractors):
            raise ValueError("Other processes have some of the members; ff.load has all of them, once they are saved.")
        ties: list[tuple[nn.Module, str]] = [(self, "mesh")]
        if isinstance(self.layer, ParticleLayer):
            ties.append((self.layer, "group"))
        held = [(module, name, vars(module).pop(name)) for module, name in ties if name in vars(module)]
        try:
            yield
        finally:
            for module, name, value in held:
                setattr(module, name, value)

    def _run_here(self, modules: nn.Module, states: list[State] | None, x: Any) -> Tensor | list[Tensor]:
        here = self._here(modules)
        with self.mesh.member_rng():
            return execute(here, states, [x] * len(here), self.execution)

    def _of_members(self) -> list[nn.ModuleList]:
        return [self.extractors, self.head] if isinstance(self.head, nn.ModuleList) else [self.extractors]

    def _here(self, modules: nn.Module) -> list[nn.Module]:
        """Those of them that this process has."""
        assert isinstance(modules, nn.ModuleList)
        return list(modules)[self.mesh.members.local_slice(len(self))]

    def _all(self, parts: Tensor | Sequence[Tensor], name: str) -> Tensor:
        """What this process's members gave, and all others'."""
        return self.mesh.members.gather(_stack(parts, name), len(self))

    @property
    def execution(self) -> Execution:
        return self._execution

    @execution.setter
    def execution(self, execution: Execution) -> None:
        if execution not in get_args(Execution):
            raise ValueError(f"execution must be one of {', '.join(get_args(Execution))}; got {execution!r}.")
        if execution == "vectorised":
            for modules in self._of_members():
                check_alike(self._here(modules))
        self._execution = execution

    _temperature: float | None = None

    @property
    def temperature(self) -> float | None:
        """T of the predictions, which `featureflock.calibrate` finds; None (as good as 1) before. It is saved, too."""
        return self._temperature

    @temperature.setter
    def temperature(self, temperature: float | None) -> None:
        if temperature is not None and not 0 < temperature < math.inf:
            raise ValueError(f"A temperature must be positive and finite, or None; got {temperature}.")
        self._temperature = None if temperature is None else float(temperature)

    def forward(self, x: Any) -> Tensor:
        """Logits of each member, (n, B, C)."""
        extractor_states, head_states = self._transported_weights()
        features = self._run_here(self.extractors, extractor_states, x)
        in_between = self.layer is not None and self.at == "features"
        if not isinstance(self.head, nn.ModuleList):
            features = self._all(features, "features")
            logits = self._shared_head(self.layer(features) if self.layer is not None and in_between else features)
        else:
            if self.layer is not None and in_between:
                features = self.mesh.members.local_rows(self.layer(self._all(features, "features")))
            logits = self._all(execute(self._here(self.head), head_states, features, self.execution), "logits")
        return self.layer(logits) if self.layer is not None and self.at == "logits" else logits

    def features(self, x: Any) -> Tensor:
        """Features of each member, (n, B, …)."""
        return self._all(self._run_here(self.extractors, None, x), "features")

    def logits(self, features: Tensor) -> Tensor:
        """Logits (n, B, C) of features (n, B, …), by the head alone, without the particle layer."""
        if not isinstance(self.head, nn.ModuleList):
            return self._shared_head(features)
        here = self.mesh.members.local_rows(features)
        return self._all(execute(self._here(self.head), None, here, self.execution), "logits")

    def predict(self, x: Any) -> Tensor:
        """Probabilities averaged over members, (B, C), at the ensemble's temperature if it has one.

        In eval mode, whatever mode the ensemble is in.
        """
        log_p = self.member_log_probs(x).logsumexp(0).sub(math.log(len(self)))
        return log_p.exp() if self.temperature is None else log_p.div(self.temperature).softmax(-1)

    def for_inference(self, *, compile: bool | None = None) -> "Ensemble":
        """A copy that only predicts, as fast as it can: the same probabilities, up to rounding.

        It is in eval mode and has no gradients and no particle layer. BatchNorm is folded into convolutions
        (inference.py) and pixels are kept with all their channels (channels_last). On a CPU this process keeps memory
        that it releases from then on (memory.py). What the ensemble learns afterwards is not in the copy.

            fast = ens.for_inference()
            probs = fast.predict(x)

        Args:
            compile: compile the members with torch.compile at the first call for each shape of x, which takes seconds;
                None: if that can be had here.
        """
        with self.alone():
            ens = copy.deepcopy(self).eval().requires_grad_(False)
        device = next((p.device for p in self.parameters()), torch.device("cpu"))
        heads = ens.head if isinstance(ens.head, nn.ModuleList) else None
        fast = Ensemble(
            [folded(extractor) for extractor in ens.extractors],
            folded(ens.head) if heads is None else [folded(head) for head in heads],
        )
        fast.temperature = self.temperature
        fast.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if device.type == "cpu":
            retain_memory()
        if can_compile(device) if compile is None else compile:
            for extractor in fast.extractors:
                compiled_for_inference(extractor)
        return fast.eval()

    def uncertainty(self, x: Any) -> Uncertainty:
        """Total, aleatoric and epistemic uncertainty of each prediction in nats, (B,) each; in eval mode.

        Of the members as they are: a temperature, which belongs to their average, is left out.
        """
        log_p = self.member_log_probs(x)
        p = log_p.double().exp()  # the difference of two entropies may be far smaller than each
        total = torch.special.entr(p.mean(0)).sum(-1)
        aleatoric = torch.special.entr(p).sum(-1).mean(0)
        parts = total, aleatoric, (total - aleatoric).clamp_min(0)
        return Uncertainty(*(part.to(log_p.dtype) for part in parts))

    def _shared_head(self, features: Tensor) -> Tensor:
        joint = any(isinstance(m, _BatchNorm) and m.training for m in self.head.modules())
        if joint or self.execution == "vectorised":
            logits: Tensor = self.head(features.flatten(0, 1)).unflatten(0, (len(self), -1))
            return logits
        return _stack(execute([self.head] * len(self), None, features, self.execution), "logits")

    def member_log_probs(self, x: Any) -> Tensor:
        """Log-probabilities of each member, (n, B, C); in eval mode, without gradients."""
        with torch.no_grad(), eval_mode(self):
            logits: Tensor = self(x)
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)

    def _transported_weights(self) -> tuple[list[State] | None, list[State] | None]:
        """The weights of extractors and heads behind the layer, where it acts on weights; None for the modules' own."""
        layer = self.layer
        if layer is None or self.at != "weights" or not (layer.training and torch.is_grad_enabled()):
            return None, None
        assert isinstance(self.head, nn.ModuleList)
        members = [
            {(k, name): p for k, m in enumerate(pair) for name, p in m.named_parameters() if p.requires_grad}
            for pair in zip(self._here(self.extractors), self._here(self.head), strict=True)
        ]
        if not members[0]:
            return None, None
        vectors = [torch.cat([p.flatten() for p in member.values()]) for member in members]
        if any(v.shape != vectors[0].shape for v in vectors):
            sizes = ", ".join(str(v.numel()) for v in vectors)
            raise ValueError(f"A layer on the weights needs members of one size; they have {sizes} trained weights.")
        states: tuple[list[State], list[State]] = [], []
        transported = self.mesh.members.local_rows(layer(self._all(vectors, "weights")))
        for member, vector in zip(members, self.mesh.average_gradient(transported), strict=True):
            pair: tuple[State, State] = {}, {}
            pieces = vector.split([p.numel() for p in member.values()])
            for ((k, name), p), piece in zip(member.items(), pieces, strict=True):
                pair[k][name] = piece.view_as(p)
            states[0].append(pair[0])
            states[1].append(pair[1])
        return states


class RemoteMember(nn.Module):
    """In place of a member that another process has."""


def _stack(parts: Tensor | Sequence[Tensor], name: str) -> Tensor:
    if isinstance(parts, Tensor):
        return parts
    for i, part in enumerate(parts):
        if part.shape != parts[0].shape:
            raise ValueError(
                f"The members' {name} must have one shape; member 0 gives {tuple(parts[0].shape)}, member {i} "
                f"{tuple(part.shape)}."
            )
    return torch.stack(list(parts))


@contextmanager
def eval_mode(module: nn.Module) -> Iterator[None]:
    """Eval mode for a while; afterwards each submodule is in the mode it was in."""
    modes = [(m, m.training) for m in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for m, mode in modes:
            m.training = mode
