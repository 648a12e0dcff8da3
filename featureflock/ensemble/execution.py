"""Execution modes of n modules with the same results: sequential, vectorised, low memory.

Shapes: n members.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call, vmap

Execution = Literal["sequential", "vectorised", "low_memory"]
State = dict[str, Tensor]

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

# Attributes of every nn.Module: tensors, children, hooks, the compiled call; and the flattened weights of an RNN. The
# names are not public, but torch.save stores them, so they are stable.
_INTERNAL = frozenset(vars(nn.Module())) - {"training"} | {"_compiled_call_impl", "_flat_weights", "_flat_weight_refs"}


def execute(
    modules: Sequence[nn.Module], states: Sequence[State] | None, inputs: Tensor | Sequence[Any], execution: Execution
) -> Tensor | list[Tensor]:
    """Return the output of module i for input i, for all i: a stacked tensor if vectorised, else a list.

    Args:
        modules: n modules.
        states: weights to use instead of those of the modules; None for those of the modules.
        inputs: one input per module.
        execution: see `Ensemble`.
    """
    states = [{} for _ in modules] if states is None else states
    if execution == "vectorised":
        return _vectorised(modules, states, inputs)
    call = _call_recomputing if execution == "low_memory" and torch.is_grad_enabled() else _call
    return [call(module, state, x) for module, state, x in zip(modules, states, inputs, strict=True)]


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes that a module's class defines, without parameters, buffers and submodules."""
    return {name: value for name, value in vars(module).items() if name not in _INTERNAL}


def check_same_architecture(modules: Sequence[nn.Module]) -> None:
    """Raise ValueError if modules cannot be stacked: if they differ beyond the values of tensors, or share tensors."""
    template = list(modules[0].named_modules())
    for i, module in enumerate(modules):
        parts = list(module.named_modules())
        same = [(name, type(m)) for name, m in parts] == [(name, type(m)) for name, m in template]
        if not same or not all(_same_settings(m, t) for (_, m), (_, t) in zip(parts, template, strict=True)):
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


def _same_settings(a: nn.Module, b: nn.Module) -> bool:
    def shapes(m: nn.Module) -> dict[str, Any]:
        tensors = m._parameters | m._buffers  # also those that are None
        return {name: None if t is None else (t.shape, t.dtype) for name, t in tensors.items()}

    of_a, of_b = own_attributes(a), own_attributes(b)
    if shapes(a) != shapes(b) or of_a.keys() != of_b.keys():
        return False
    return all(_equal(of_a[name], of_b[name]) for name in of_a if name != "training")


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    if callable(a) and callable(b):  # each module may have its own copy of a lambda
        return bool(getattr(a, "__code__", a) == getattr(b, "__code__", b))
    return bool(a == b)


def _call(module: nn.Module, state: State, x: Any) -> Tensor:
    out: Tensor = functional_call(module, state, (x,)) if state else module(x)
    return out


def _call_recomputing(module: nn.Module, state: State, x: Any) -> Tensor:
    """Call a module without storing its activations: the backward pass computes them again.

    The second call starts from copies of the buffers, as they were before the first call, and from the same random
    numbers. So running statistics are updated once, and both calls give the same result.
    """
    buffers = {name: b.detach().clone() for name, b in module.named_buffers()}
    parameters = [p for name, p in module.named_parameters() if p.requires_grad and name not in state]
    call = _RepeatableCall(module, state, x, buffers, parameters)
    inputs: list[Tensor] = []
    _map_tensors(lambda t: inputs.append(t) if t.requires_grad else None, (state, x))
    out: Tensor = _Recompute.apply(call, *inputs, *parameters)  # type: ignore[no-untyped-call]
    return out


def _map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Apply a function to every tensor in nested dicts, lists and tuples."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, dict):
        mapped = copy.copy(tree)
        mapped.update({key: _map_tensors(function, value) for key, value in tree.items()})
        return mapped
    if isinstance(tree, list | tuple):
        values = [_map_tensors(function, value) for value in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    return tree


@dataclass(frozen=True, eq=False)
class _RepeatableCall:
    """A call of a module, and everything needed to repeat it."""

    module: nn.Module
    state: State
    x: Any
    buffers: State
    parameters: list[nn.Parameter]

    def gradients(self, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Repeat the call and return the gradients of its inputs that require one, then of the parameters."""
        inputs: list[Tensor] = []

        def detach(t: Tensor) -> Tensor:
            if not t.requires_grad:
                return t
            inputs.append(t.detach().requires_grad_())
            return inputs[-1]

        state, x = _map_tensors(detach, (self.state, self.x))
        with torch.enable_grad():
            out = _call(self.module, state | {name: b.clone() for name, b in self.buffers.items()}, x)
        return torch.autograd.grad(out, [*inputs, *self.parameters], grad, allow_unused=True)


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _RepeatableCall, *inputs: Tensor) -> Tensor:
        devices: list[torch.device] = []
        _map_tensors(lambda t: devices.append(t.device), (inputs, call.state, call.x))
        device = devices[0] if devices else torch.device("cpu")
        ctx.call, ctx.gpus = call, [device] if device.type == "cuda" else []
        ctx.rng = torch.get_rng_state(), [torch.cuda.get_rng_state(gpu) for gpu in ctx.gpus]
        ctx.autocast = device.type, torch.get_autocast_dtype(device.type), torch.is_autocast_enabled(device.type)
        return _call(call.module, call.state, call.x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with torch.random.fork_rng(ctx.gpus), torch.autocast(*ctx.autocast):
            torch.set_rng_state(ctx.rng[0])
            for gpu, state in zip(ctx.gpus, ctx.rng[1], strict=True):
                torch.cuda.set_rng_state(state, gpu)
            return (None, *ctx.call.gradients(grad))


def _vectorised(modules: Sequence[nn.Module], states: Sequence[State], inputs: Tensor | Sequence[Any]) -> Tensor:
    """Call all modules at once, with torch.func.vmap over their stacked weights and buffers."""
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
        return out, {name: state[name] for name in buffers}  # functional_call writes updates to `state`

    in_dims, out_dims = (0, dims, None if one_input else 0), (0, dims)
    run = vmap(call, in_dims=in_dims, out_dims=out_dims, randomness="different")  # type: ignore[arg-type]
    try:
        out, buffers = run(weights, buffers, x)
    except RuntimeError as error:
        if not any(word in str(error) for word in ("vmap", "atching rule", "functorch")):
            raise
        raise ValueError(
            f'This module cannot be vectorised; use execution="sequential". torch.func: {error}'
        ) from error
    with torch.no_grad():
        for i, module in enumerate(modules):
            for name, b in module.named_buffers():
                b.copy_(buffers[name] if dims[name] is None else buffers[name][i])
    return out


def _counters(module: nn.Module) -> list[str]:
    """Return the buffers that BatchNorm(momentum=None) converts to a Python number, which vmap cannot do."""
    return [
        f"{name}.num_batches_tracked".removeprefix(".")
        for name, m in module.named_modules()
        if isinstance(m, BATCH_NORMS) and m.momentum is None and m.num_batches_tracked is not None
    ]


def _stacked(states: Sequence[State]) -> State:
    return {name: torch.stack([state[name] for state in states]) for name in states[0]}
