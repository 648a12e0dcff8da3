"""Members that share weights: one trunk for all members, rank-one members, LoRA members.

    ens = Ensemble(extractors, head, layer, trunk=backbone)              # the trunk is computed once
    ens = Ensemble(rank_one(network, 10), head, layer)                   # W_i = W ∘ (r_i s_iᵀ), computed in one call
    ens = Ensemble(lora(network, 10, rank=8, targets=["query"]), head)   # W_i = W + (α/ρ) B_i A_i, W frozen

A shared weight θ gets the mean over members of what it would get as n separate copies θ_1 … θ_n in the same loss:

    ∂L/∂θ ← (1/n) Σ_i ∂L/∂θ_i

In every method a member gets the full gradient of its own loss (Deep Ensembles sum the losses, the particle layer
passes −v_i/B to each member), so shared weights move by the mean over members, at the speed of one member. Without the
factor they would move n times as far.

Shapes: n members, k of them computed, B examples.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from featureflock.ensemble.execution import map_tensors
from featureflock.ensemble.member_layers import (
    BATCH_NORMS,
    CONVOLUTIONS,
    NORMS,
    TRANSPOSED,
    LoRA,
    MemberBatchNorm,
    MemberLayer,
    MemberNorm,
    RankOne,
)

_MATRICES = (nn.Linear, nn.Embedding, *CONVOLUTIONS)
_READ_THEIR_WEIGHTS = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
"""Modules that use the weights of their submodules without calling them."""


class SharedMembers(nn.Module):
    """n members in one network, made by `rank_one` or `lora`: maps inputs (B, …) to outputs (n, B, …).

    It takes the place of the list of extractors in an `Ensemble`. `members[i]` is member i as an ordinary network with
    its own copy of the weights, for inspection, explanation and export; training it does not change the members.
    """

    def __init__(self, network: nn.Module, members: int) -> None:
        super().__init__()
        self.network, self._members = network, members
        self.train(network.training)

    @property
    def input_module(self) -> nn.Module:
        """The module that gets the inputs."""
        return self.network

    def __len__(self) -> int:
        return self._members

    def __getitem__(self, i: int) -> nn.Module:
        return self.materialise(i)

    def __iter__(self) -> Iterator[nn.Module]:
        return map(self.materialise, range(len(self)))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Outputs (n, B, …). Tensors whose first dimension is the batch are repeated for each member."""
        first, last = next((m.part for m in self.modules() if isinstance(m, MemberLayer)), None) or (0, len(self))
        count = last - first
        images = [p for p in self.network.parameters() if p.ndim == 4]
        sizes: list[int] = []
        map_tensors(lambda t: sizes.append(t.shape[0]) if t.ndim else None, (args, kwargs))
        batch = sizes[0] if sizes else 0

        last_format = torch.channels_last
        in_last_format = any(p.is_contiguous(memory_format=last_format) and not p.is_contiguous() for p in images)

        def repeat(t: Tensor) -> Tensor:
            if not t.ndim or t.shape[0] != batch:
                return t
            rows = t.repeat(count, *[1] * (t.ndim - 1))
            if t.ndim == 4 and in_last_format:  # also the strides of a dimension of size 1, which kernels look at
                rows = torch.empty_like(rows, memory_format=last_format).copy_(rows)
            return rows

        def split(t: Tensor) -> Tensor:
            return t.unflatten(0, (count, batch)) if t.ndim and t.shape[0] == count * batch else t

        args, kwargs = map_tensors(repeat, (args, kwargs))
        layers = [m for m in self.modules() if isinstance(m, MemberLayer)]
        for m in layers:
            m.rows = count * batch if batch else None
        try:
            return map_tensors(split, self.network(*args, **kwargs))
        finally:
            for m in layers:
                m.rows = None

    def materialise(self, i: int) -> nn.Module:
        """Member i as an ordinary network, with the values and the train or eval mode of the members."""
        if not -len(self) <= i < len(self):
            raise IndexError(f"There are {len(self)} members; got member {i}.")
        network = copy.deepcopy(self.network)
        layers = [m for m in network.modules() if isinstance(m, MemberLayer)]
        return _replaced(network, {m: m.materialise(i % len(self)) for m in layers})

    def member_tensors(self) -> list[Tensor]:
        """Parameters and buffers (n, …) with one row per member."""
        layers = [m for m in self.modules() if isinstance(m, MemberLayer)]
        return [t for m in layers for t in (*m.parameters(recurse=False), *m.buffers(recurse=False))]

    def train(self, mode: bool = True) -> "SharedMembers":
        """Set the mode. BatchNorm of a frozen network, which has no statistics of each member, stays in eval mode."""
        super().train(mode)
        for m in self.modules():
            if type(m) in BATCH_NORMS and m.running_mean is not None:
                m.eval()
        return self

    @contextmanager
    def computing(self, part: slice, factor: float) -> Iterator[None]:
        """Compute only some members, and multiply the gradients of shared weights by a factor instead of 1/n."""
        layers = [m for m in self.modules() if isinstance(m, MemberLayer)]
        before = [(m, m.part, m.gradient_factor) for m in layers]
        for m in layers:
            m.part, m.gradient_factor = (part.start, part.stop), factor
        try:
            yield
        finally:
            for m, old_part, old_factor in before:
                m.part, m.gradient_factor = old_part, old_factor


def rank_one(
    module: nn.Module, n: int, *, init: Literal["signs"] | float = "signs", seed: int | None = None
) -> SharedMembers:
    """Turn a network into n members that share every weight matrix: W_i = W ∘ (r_i s_iᵀ) (BatchEnsemble).

        members = ff.rank_one(network, 10)
        members(x)                                       # (10, B, …), in one call
        ens = ff.Ensemble(members, head, ff.ParticleLayer(rank=5))

    Each member has its own vectors r_i and s_i, biases, BatchNorm statistics and weights of normalisation layers, which
    start as copies of those of the network. Linear layers, convolutions (also grouped and transposed), embeddings,
    BatchNorm, LayerNorm, GroupNorm and RMSNorm are converted; modules without parameters are used as they are; other
    modules with parameters are refused. The network must treat the first dimension of its inputs as the batch. It is
    copied, not changed.

    Args:
        module: the network, new or pretrained.
        n: number of members.
        init: "signs" for random signs ±1 in r_i and s_i, or σ for normal values around 1, such as 0.1 for a pretrained
            network, whose function signs would destroy.
        seed: seed of r_i and s_i; None for PyTorch's global random generator.
    """
    _check_network("rank_one", module, n)
    if init != "signs" and not (isinstance(init, int | float) and 0 <= init < float("inf")):
        raise ValueError(f'init must be "signs" or a standard deviation of at least 0; got {init!r}.')
    generator = None if seed is None else torch.Generator().manual_seed(seed)

    def vectors(size: int, like: Tensor) -> Tensor:
        noise = torch.randn(n, size, generator=generator)
        values = noise.sign() + (noise == 0) if init == "signs" else 1 + float(init) * noise
        return values.to(like)

    def convert(path: str, m: nn.Module) -> nn.Module | None:
        if type(m) in (*_MATRICES, *TRANSPOSED):
            if isinstance(m, nn.Embedding) and (m.max_norm is not None or m.sparse):
                raise _refusal("rank_one", path, m, "max_norm and sparse gradients are not supported")
            r, s = _sizes(m)
            assert isinstance(m.weight, Tensor)
            return RankOne(m, vectors(r, m.weight), vectors(s, m.weight))
        if type(m) in BATCH_NORMS:
            return MemberBatchNorm(m, n)
        if type(m) in NORMS and m.weight is not None:
            return MemberNorm(m, n)
        if next(m.parameters(recurse=False), None) is not None or isinstance(m, nn.modules.batchnorm._NormBase):
            raise _refusal("rank_one", path, m, "only standard linear, convolution, embedding and norm layers are")
        if isinstance(m, _READ_THEIR_WEIGHTS):
            raise _refusal("rank_one", path, m, "it uses the weights of its parts without calling them")
        return None

    return SharedMembers(_converted(module, convert), n)


def lora(
    module: nn.Module,
    n: int,
    rank: int = 8,
    targets: Sequence[str] | None = None,
    *,
    alpha: float | None = None,
    seed: int | None = None,
) -> SharedMembers:
    """Turn a network into n members with low-rank changes of the same frozen weights: W_i = W + (α/ρ) B_i A_i.

        members = ff.lora(bert, 5, rank=8, targets=["query", "value"])
        ens = ff.Ensemble(members, head, ff.ParticleLayer(rank=5))

    Only A_i and B_i are trained. A_i is normal with variance 1/inputs and B_i zero, so all members start as the network
    itself. Biases and normalisation layers are shared and frozen, and BatchNorm stays in eval mode. The network must
    treat the first dimension of its inputs as the batch. It is copied, not changed.

    Args:
        module: the pretrained network.
        n: number of members.
        rank: ρ, the rank of the changes.
        targets: names of the linear layers, convolutions and embeddings to change, such as "query" for every module
            whose path ends in it, or a whole path such as "encoder.layer.0.output"; None for every linear layer.
        alpha: α, the scale of the changes; None for ρ, the factor 1.
        seed: seed of A_i; None for PyTorch's global random generator.
    """
    _check_network("lora", module, n)
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise ValueError(f"rank must be an integer of at least 1; got {rank!r}.")
    alpha = float(rank) if alpha is None else alpha
    if isinstance(targets, str):
        raise ValueError(f'targets must be a list of names, such as ["{targets}"]; got a string.')
    found: set[str] = set()

    def convert(path: str, m: nn.Module) -> nn.Module | None:
        if isinstance(m, BATCH_NORMS) and m.running_mean is None:
            raise _refusal("lora", path, m, "without running statistics it would mix the members")
        matching = [t for t in targets or () if path == t or path.endswith(f".{t}")]
        if not matching and not (targets is None and type(m) is nn.Linear):
            return None
        found.update(matching)
        if type(m) not in _MATRICES or (isinstance(m, nn.Embedding) and m.max_norm is not None):
            raise _refusal("lora", path, m, "only standard linear layers, convolutions and embeddings are")
        parent = module.get_submodule(path.rpartition(".")[0])
        if isinstance(parent, _READ_THEIR_WEIGHTS):
            raise _refusal("lora", path, m, f"{type(parent).__name__} uses its weights without calling it")
        return LoRA(m, n, rank, alpha)

    with torch.random.fork_rng(enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        network = _converted(module, convert)
    if missing := [t for t in targets or () if t not in found]:
        raise ValueError(f"lora found no module named {missing[0]!r}; give names from named_modules().")
    layers = [m for m in network.modules() if isinstance(m, LoRA)]
    if not layers:
        raise ValueError("lora found no layer to change; give the names of some linear layers as targets.")
    own = {p for m in layers for p in m.parameters(recurse=False)}
    for p in network.parameters():
        p.requires_grad_(p in own)
    return SharedMembers(network, n)


def _sizes(m: nn.Module) -> tuple[int, int]:
    """Sizes of r and s."""
    if isinstance(m, nn.Linear):
        return m.out_features, m.in_features
    if isinstance(m, nn.Embedding):
        return m.embedding_dim, m.num_embeddings
    assert isinstance(m, (*CONVOLUTIONS, *TRANSPOSED))
    return m.out_channels, m.in_channels


def _check_network(function: str, module: Any, n: Any) -> None:
    if not isinstance(module, nn.Module):
        raise ValueError(f"{function} takes a module; got {type(module).__name__}.")
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise ValueError(f"{function} needs at least one member; got n={n!r}.")
    if any(isinstance(m, SharedMembers | MemberLayer) for m in module.modules()):
        raise ValueError(f"{function} takes an ordinary network; this one has been converted already.")
    for name, p in module.named_parameters():
        if isinstance(p, nn.UninitializedParameter):
            raise ValueError(f"{name} has no values yet; run the network once on data before {function}.")


def _refusal(function: str, path: str, m: nn.Module, because: str) -> ValueError:
    because = f"{because} supported" if because.endswith(" are") else because
    return ValueError(f"{function} cannot convert {path or 'the network'}, a {type(m).__name__}: {because}.")


def _converted(module: nn.Module, convert: Any) -> nn.Module:
    """A copy of a network in which `convert(path, module)` replaces modules, each once however often it is used."""
    made: dict[nn.Module, nn.Module] = {}
    network = copy.deepcopy(module)
    inside: set[nn.Module] = set()
    for path, m in network.named_modules():
        if m in inside or (new := convert(path, m)) is None:
            continue
        made[m] = new.train(m.training)
        inside.update(m.modules())
    return _replaced(network, made)


def _replaced(network: nn.Module, made: Mapping[nn.Module, nn.Module]) -> nn.Module:
    if network in made:
        return made[network]
    for parent in list(network.modules()):
        for name, child in list(parent._modules.items()):
            if child is not None and child in made:
                parent._modules[name] = made[child]
    return network
