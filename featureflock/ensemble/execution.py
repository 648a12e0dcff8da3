"""Execution modes of n modules with the same results: sequential, vectorised, low memory."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call, vmap

from featureflock.ensemble.inputs import NOTHING

Execution = Literal["sequential", "vectorised", "low_memory"]
ModuleState = dict[str, Tensor]

_NEEDS, _USE = 'execution="vectorised" needs', 'Use execution="sequential".'
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

# Attributes of every nn.Module: tensors, children, hooks, the compiled call; and the flattened weights of an RNN. The
# names are not public, but torch.save stores them, so they are stable.
_INTERNAL = frozenset(vars(nn.Module())) - {"training"} | {"_compiled_call_impl", "_flat_weights", "_flat_weight_refs"}


def execute(
    modules: Sequence[nn.Module],
    states: Sequence[ModuleState] | None,
    inputs: Tensor | Sequence[Any],
    execution: Execution,
    kwargs: dict[str, Any] | None = None,
) -> Tensor | list[Tensor]:
    """Return the output of module i for input i, for all i: a stacked tensor if vectorised, else a list.

    `states` are weights to use instead of those of the modules; for `execution` see `Ensemble`. An input may be
    NOTHING. All modules get the same keyword arguments.
    """
    kwargs = kwargs or {}
    states = [{} for _ in modules] if states is None else states
    if execution == "vectorised":
        return _vectorised(modules, states, inputs, kwargs)
    last = len(modules) - 1
    # The backward pass starts with the module that was called last, so its activations do not add to those of another.
    stored = range(last, last + 1) if execution == "low_memory" and torch.is_grad_enabled() else range(len(modules))
    return [
        (call_module if i in stored else call_recomputing)(module, state, x, kwargs)
        for i, (module, state, x) in enumerate(zip(modules, states, inputs, strict=True))
    ]


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes that a module's class defines, without parameters, buffers and submodules."""
    return {name: value for name, value in vars(module).items() if name not in _INTERNAL}


def check_same_architecture(modules: Sequence[nn.Module]) -> None:
    """Raise ValueError if modules cannot be stacked: if they differ beyond the values of tensors, or share tensors."""
    template = list(modules[0].named_modules())
    seen: dict[int, int] = {}
    for i, module in enumerate(modules):
        parts = list(module.named_modules())
        same = [(name, type(m)) for name, m in parts] == [(name, type(m)) for name, m in template]
        if not same or not all(_same_settings(m, t) for (_, m), (_, t) in zip(parts, template, strict=True)):
            raise ValueError(f"{_NEEDS} members of one architecture; member {i} differs from member 0. {_USE}")
        for tensor in (*module.parameters(), *module.buffers()):
            if seen.setdefault(id(tensor), i) != i:
                sharing = f"members {seen[id(tensor)]} and {i} do"
                raise ValueError(f"{_NEEDS} members that share no weights or buffers; {sharing}. {_USE}")


def _same_settings(a: nn.Module, b: nn.Module) -> bool:
    def shapes(m: nn.Module) -> dict[str, Any]:
        tensors = m._parameters | m._buffers  # also those that are None
        return {name: None if t is None else (t.shape, t.dtype) for name, t in tensors.items()}

    of_a, of_b = own_attributes(a), own_attributes(b)
    same_keys = shapes(a) == shapes(b) and of_a.keys() == of_b.keys()
    return same_keys and all(_equal(of_a[name], of_b[name]) for name in of_a if name != "training")


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    if callable(a) and callable(b):  # each module may have its own copy of a lambda
        return bool(getattr(a, "__code__", a) == getattr(b, "__code__", b))
    return bool(a == b)


def call_module(module: nn.Module, state: ModuleState, x: Any, kwargs: dict[str, Any]) -> Tensor:
    args = () if x is NOTHING else (x,)
    out: Tensor = functional_call(module, state, args, kwargs) if state else module(*args, **kwargs)
    return out


def call_recomputing(module: nn.Module, state: ModuleState, x: Any, kwargs: dict[str, Any]) -> Tensor:
    """Call a module without storing its activations: the backward pass computes them again.

    The second call starts from copies of the buffers, as they were before the first call, and from the same random
    numbers. So running statistics are updated once, and both calls give the same result.
    """
    buffers = {name: b.detach().clone() for name, b in module.named_buffers()}
    parameters = [p for name, p in module.named_parameters() if p.requires_grad and name not in state]
    inputs: list[Tensor] = []
    devices = [p.device for p in parameters]
    map_tensors(lambda t: inputs.append(t) if t.requires_grad else None, (state, x, kwargs))
    map_tensors(lambda t: devices.append(t.device), (state, x, kwargs))

    def gradients(grad: Tensor) -> tuple[Tensor | None, ...]:
        """Repeat the call and return the gradients of its inputs that require one, then of the parameters."""
        leaves: list[Tensor] = []

        def detach(t: Tensor) -> Tensor:
            if not t.requires_grad:
                return t
            leaves.append(t.detach().requires_grad_())
            return leaves[-1]

        state_, x_, kwargs_ = map_tensors(detach, (state, x, kwargs))
        with torch.enable_grad():
            out = call_module(module, state_ | {name: b.clone() for name, b in buffers.items()}, x_, kwargs_)
        return torch.autograd.grad(out, [*leaves, *parameters], grad, allow_unused=True)

    device = devices[0] if devices else torch.device("cpu")
    call = partial(call_module, module, state, x, kwargs)
    out: Tensor = _Recompute.apply(call, gradients, device, *inputs, *parameters)  # type: ignore[no-untyped-call]
    return out


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Apply a function to every tensor in nested dicts, lists and tuples."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, dict):
        mapped = copy.copy(tree)
        for key, value in tree.items():  # not `update`, which the outputs of transformers do not have
            mapped[key] = map_tensors(function, value)
        return mapped
    if isinstance(tree, list | tuple):
        values = [map_tensors(function, value) for value in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    return tree


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Callable[[], Tensor], gradients: Any, device: torch.device, *inputs: Tensor) -> Tensor:
        ctx.gradients, ctx.gpus = gradients, [device] if device.type == "cuda" else []
        ctx.rng = torch.get_rng_state(), [torch.cuda.get_rng_state(gpu) for gpu in ctx.gpus]
        ctx.autocast = device.type, torch.get_autocast_dtype(device.type), torch.is_autocast_enabled(device.type)
        return call()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with torch.random.fork_rng(ctx.gpus), torch.autocast(*ctx.autocast):
            torch.set_rng_state(ctx.rng[0])
            for gpu, state in zip(ctx.gpus, ctx.rng[1], strict=True):
                torch.cuda.set_rng_state(state, gpu)
            return (None, None, None, *ctx.gradients(grad))


def _vectorised(
    modules: Sequence[nn.Module],
    states: Sequence[ModuleState],
    inputs: Tensor | Sequence[Any],
    kwargs: dict[str, Any],
) -> Tensor:
    """Call all modules at once, with torch.func.vmap over their stacked weights and buffers."""
    template, contents = modules[0], [_Contents(module) for module in modules]
    if any(content.modes != contents[0].modes for content in contents):
        raise ValueError(f"{_NEEDS} all members in the same train or eval mode. {_USE}")
    weights = _stacked([content.parameters | s for content, s in zip(contents, states, strict=True)])
    buffers = _stacked([content.buffers for content in contents])
    dims: dict[str, int | None] = dict.fromkeys(buffers, 0)
    for path, m in template.named_modules():
        name = f"{path}.num_batches_tracked".removeprefix(".")
        number_needed = isinstance(m, BATCH_NORMS) and m.momentum is None and name in buffers  # vmap cannot give it
        if number_needed and bool((buffers[name] == buffers[name][0]).all()):
            buffers[name], dims[name] = buffers[name][0].clone(), None
    one_input = not isinstance(inputs, Tensor) and all(x is inputs[0] for x in inputs)
    x = inputs if isinstance(inputs, Tensor) else inputs[0] if one_input else torch.stack(list(inputs))

    def call(weights: ModuleState, buffers: ModuleState, x: Any) -> tuple[Tensor, ModuleState]:
        state = weights | buffers
        out = functional_call(template, state, () if x is NOTHING else (x,), kwargs)
        return out, {name: state[name] for name in buffers}  # functional_call writes updates to `state`

    in_dims, out_dims = (0, dims, None if one_input else 0), (0, dims)
    run = vmap(call, in_dims=in_dims, out_dims=out_dims, randomness="different")  # type: ignore[arg-type]
    try:
        out, buffers = run(weights, buffers, x)
    except RuntimeError as error:
        if not any(word in str(error) for word in ("vmap", "atching rule", "functorch")):
            raise
        raise ValueError(f"This module cannot be vectorised. {_USE} torch.func: {error}") from error
    with torch.no_grad():
        for i, content in enumerate(contents if buffers else ()):
            for name, b in content.buffers.items():
                b.copy_(buffers[name] if dims[name] is None else buffers[name][i])
    return out


class _Contents:
    """Parameters and buffers of a module by name, and the modes of its parts.

    Found in one pass: for many tiny members, each pass over their modules takes as long as computing them.
    """

    def __init__(self, module: nn.Module) -> None:
        self.parameters: ModuleState = {}
        self.buffers: ModuleState = {}
        self.modes: list[bool] = []
        seen: set[int] = set()  # a tensor with two names has the first, as in named_parameters
        for path, m in module.named_modules():
            self.modes.append(m.training)
            for found, tensors in ((self.parameters, m._parameters), (self.buffers, m._buffers)):
                for name, tensor in tensors.items():
                    if tensor is not None and id(tensor) not in seen:
                        seen.add(id(tensor))
                        found[f"{path}.{name}" if path else name] = tensor


def _stacked(states: Sequence[ModuleState]) -> ModuleState:
    return {name: torch.stack([state[name] for state in states]) for name in states[0]}


def stacked(parts: Tensor | Sequence[Tensor], name: str) -> Tensor:
    """Outputs of members as one tensor (n, …); ValueError if their shapes differ."""
    if isinstance(parts, Tensor):
        return parts
    for i, part in enumerate(parts):
        if part.shape != parts[0].shape:
            shapes = f"member 0 gives {tuple(parts[0].shape)}, member {i} {tuple(part.shape)}"
            raise ValueError(f"The members' {name} must have the same shape; {shapes}.")
    return torch.stack(list(parts))


@contextmanager
def eval_mode(module: nn.Module) -> Iterator[None]:
    """Switch to eval mode temporarily; afterwards each submodule has its previous mode."""
    modes = [(m, m.training) for m in module.modules()]
    if not any(training for _, training in modes):
        yield
        return
    module.eval()
    try:
        yield
    finally:
        for m, mode in modes:
            m.training = mode
