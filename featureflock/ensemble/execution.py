"""Three ways to run n modules, with the same results: one after another, vectorised, in little memory.

Shapes: n members.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call, vmap
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

Execution = Literal["sequential", "vectorised", "low_memory"]
State = dict[str, Tensor]

# What every nn.Module holds besides attributes of its own: tensors, children, hooks, the compiled call; and what an RNN
# derives from them.
_BOOKKEEPING = frozenset(vars(nn.Module())) - {"training"} | {
    "_compiled_call_impl",
    "_flat_weights",
    "_flat_weight_refs",
}


def execute(
    modules: Sequence[nn.Module], states: Sequence[State] | None, inputs: Tensor | Sequence[Any], execution: Execution
) -> Tensor | list[Tensor]:
    """Outputs of module i on input i, for all i: a stacked tensor if vectorised, else a list.

    `states` holds weights to use instead of the modules' own; None for their own.
    """
    states = [{} for _ in modules] if states is None else states
    if execution == "vectorised":
        return _vectorised(modules, states, inputs)
    call = _recomputed if execution == "low_memory" and torch.is_grad_enabled() else _plain
    return [call(module, state, x) for module, state, x in zip(modules, states, inputs, strict=True)]


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """What a module's class has put on it, without tensors and children that PyTorch knows of."""
    return {name: value for name, value in vars(module).items() if name not in _BOOKKEEPING}


def check_alike(modules: Sequence[nn.Module]) -> None:
    """Refuse modules that cannot be stacked: they differ in more than the values of their tensors, or share some."""
    template = list(modules[0].named_modules())
    for i, module in enumerate(modules):
        parts = list(module.named_modules())
        alike = [(name, type(m)) for name, m in parts] == [(name, type(m)) for name, m in template]
        if not alike or not all(_alike(m, t) for (_, m), (_, t) in zip(parts, template, strict=True)):
            raise ValueError(
                f'execution="vectorised" needs members of one architecture; member {i} differs from member 0. '
                'Use execution="sequential".'
            )
    seen: dict[int, int] = {}
    for i, module in enumerate(modules):
        for tensor in (*module.parameters(), *module.buffers()):
            if seen.setdefault(id(tensor), i) != i:
                raise ValueError(
                    'execution="vectorised" needs members that share no weights or buffers; members '
                    f'{seen[id(tensor)]} and {i} do. Use execution="sequential".'
                )


def _alike(a: nn.Module, b: nn.Module) -> bool:
    def shapes(m: nn.Module) -> dict[str, Any]:
        tensors = m._parameters | m._buffers
        return {name: None if t is None else (t.shape, t.dtype) for name, t in tensors.items()}

    ours, theirs = own_attributes(a), own_attributes(b)
    if shapes(a) != shapes(b) or ours.keys() != theirs.keys():
        return False
    return all(_equal(ours[name], theirs[name]) for name in ours if name != "training")


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    if callable(a) and callable(b):  # a lambda is another object in each module
        return bool(getattr(a, "__code__", a) == getattr(b, "__code__", b))
    return bool(a == b)


def _plain(module: nn.Module, state: State, x: Any) -> Tensor:
    out: Tensor = functional_call(module, state, (x,)) if state else module(x)
    return out


def _recomputed(module: nn.Module, state: State, x: Any) -> Tensor:
    """As `_plain`, but nothing inside is kept for the backward pass, which computes it again.

    The second time, the module starts from copies of the buffers as they were before the first: running statistics
    move once, and whatever depends on buffers comes out the same. So do random numbers.
    """
    leaves, tree = tree_flatten((state, x))
    own = [p for name, p in module.named_parameters() if p.requires_grad and name not in state]
    again = _Again(module, leaves, tree, {name: b.detach().clone() for name, b in module.named_buffers()}, own)
    wanted = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    out: Tensor = _Recomputed.apply(again, *wanted, *own)  # type: ignore[no-untyped-call]
    return out


@dataclass(frozen=True, eq=False)
class _Again:
    """A call, and all that it takes to make it a second time."""

    module: nn.Module
    leaves: list[Any]
    tree: TreeSpec
    buffers: State
    own: list[nn.Parameter]

    def first(self) -> Tensor:
        return _plain(self.module, *tree_unflatten(self.leaves, self.tree))

    def gradients(self, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Of what the call gave, with respect to those inputs that want them, then to the module's own parameters."""
        inner, wanted = [], []
        for leaf in self.leaves:
            wants = isinstance(leaf, Tensor) and leaf.requires_grad
            inner.append(leaf.detach().requires_grad_() if wants else leaf)
            wanted += inner[-1:] * wants
        state, x = tree_unflatten(inner, self.tree)
        with torch.enable_grad():
            out = _plain(self.module, state | {name: b.clone() for name, b in self.buffers.items()}, x)
        return torch.autograd.grad(out, [*wanted, *self.own], grad, allow_unused=True)


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, again: _Again, *inputs: Tensor) -> Tensor:
        device = next((t.device for t in (*inputs, *again.leaves) if isinstance(t, Tensor)), torch.device("cpu"))
        ctx.again, ctx.gpus = again, [device] if device.type == "cuda" else []
        ctx.random = torch.get_rng_state(), [torch.cuda.get_rng_state(gpu) for gpu in ctx.gpus]
        ctx.autocast = device.type, torch.get_autocast_dtype(device.type), torch.is_autocast_enabled(device.type)
        return again.first()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with torch.random.fork_rng(ctx.gpus), torch.autocast(*ctx.autocast):
            torch.set_rng_state(ctx.random[0])
            for gpu, state in zip(ctx.gpus, ctx.random[1], strict=True):
                torch.cuda.set_rng_state(state, gpu)
            return (None, *ctx.again.gradients(grad))


def _vectorised(modules: Sequence[nn.Module], states: Sequence[State], inputs: Tensor | Sequence[Any]) -> Tensor:
    """All modules in one call of torch.func.vmap over their stacked weights and buffers."""
    template = modules[0]
    modes = [[m.training for m in module.modules()] for module in modules]
    if any(mode != modes[0] for mode in modes):
        raise ValueError(
            'execution="vectorised" needs all members in the same train or eval mode; use execution="sequential".'
        )
    weights = _stacked([dict(m.named_parameters()) | s for m, s in zip(modules, states, strict=True)])
    buffers = _stacked([dict(m.named_buffers()) for m in modules])
    dims: dict[str, int | None] = dict.fromkeys(buffers, 0)
    for name in _counters(template):
        if bool((buffers[name] == buffers[name][0]).all()):
            buffers[name], dims[name] = buffers[name][0].clone(), None
    one_input = not isinstance(inputs, Tensor) and all(x is inputs[0] for x in inputs)
    x = inputs if isinstance(inputs, Tensor) else inputs[0] if one_input else torch.stack(list(inputs))

    def call(weights: State, buffers: State, x: Any) -> tuple[Tensor, State]:
        state = weights | buffers
        out = functional_call(template, state, (x,))
        return out, {name: state[name] for name in buffers}  # functional_call put what changed into `state`

    in_dims, out_dims = (0, dims, None if one_input else 0), (0, dims)
    run = vmap(call, in_dims=in_dims, out_dims=out_dims, randomness="different")  # type: ignore[arg-type]
    try:
        out, buffers = run(weights, buffers, x)
    except RuntimeError as error:
        if not any(word in str(error) for word in ("vmap", "atching rule", "functorch")):
            raise
        raise ValueError(
            f'This module cannot be vectorised; use execution="sequential". torch.func says: {error}'
        ) from error
    with torch.no_grad():
        for i, module in enumerate(modules):
            for name, b in module.named_buffers():
                b.copy_(buffers[name] if dims[name] is None else buffers[name][i])
    return out


def _counters(module: nn.Module) -> list[str]:
    """Buffers that BatchNorm(momentum=None) turns into a Python number, which cannot be one of many."""
    return [
        f"{name}.num_batches_tracked".removeprefix(".")
        for name, m in module.named_modules()
        if isinstance(m, _BatchNorm) and m.momentum is None and m.num_batches_tracked is not None
    ]


def _stacked(states: Sequence[State]) -> State:
    return {name: torch.stack([state[name] for state in states]) for name in states[0]}
