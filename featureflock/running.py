"""Three ways to run n modules, with the same results: one after another, vectorised, and in little memory.

Shapes: n members.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils.checkpoint import checkpoint

Run = Literal["sequential", "vectorised", "low_memory"]
State = dict[str, Tensor]


def run_modules(
    modules: Sequence[nn.Module], states: Sequence[State] | None, inputs: Tensor | Sequence[Any], run: Run
) -> Tensor | list[Tensor]:
    """Outputs of module i on input i, for all i: a stacked tensor if vectorised, else a list.

    `states` holds weights to use instead of the modules' own; None for their own.
    """
    states = [{} for _ in modules] if states is None else states
    if run == "vectorised":
        return _vectorised(modules, states, inputs)
    call = _recomputed if run == "low_memory" and torch.is_grad_enabled() else _plain
    return [call(module, state, x) for module, state, x in zip(modules, states, inputs, strict=True)]


def check_alike(modules: Sequence[nn.Module]) -> None:
    """Refuse modules that cannot be stacked."""
    shapes = [{k: (t.shape, t.dtype) for k, t in [*m.named_parameters(), *m.named_buffers()]} for m in modules]
    for i, module in enumerate(modules):
        if shapes[i] != shapes[0] or repr(module) != repr(modules[0]):
            raise ValueError(
                f'run="vectorised" needs members of one architecture; member {i} differs from member 0. '
                'Use run="sequential".'
            )


def _plain(module: nn.Module, state: State, x: Any) -> Tensor:
    out: Tensor = functional_call(module, state, (x,)) if state else module(x)
    return out


def _recomputed(module: nn.Module, state: State, x: Any) -> Tensor:
    """As `_plain`, but nothing inside is kept for the backward pass, which computes it again.

    The second time, the module starts from copies of the buffers as they were before the first: running statistics
    move once, and whatever depends on buffers comes out the same. `checkpoint` restores the random numbers.
    """
    before = {name: b.detach().clone() for name, b in module.named_buffers()}
    first = True

    def call(x: Any) -> Tensor:
        nonlocal first
        if first:
            first = False
            return _plain(module, state, x)
        return _plain(module, state | {name: b.clone() for name, b in before.items()}, x)

    out: Tensor = checkpoint(call, x, use_reentrant=False)
    return out


def _vectorised(modules: Sequence[nn.Module], states: Sequence[State], inputs: Tensor | Sequence[Any]) -> Tensor:
    """All modules in one call of torch.func.vmap over their stacked weights and buffers."""
    template = modules[0]
    modes = [[m.training for m in module.modules()] for module in modules]
    if any(mode != modes[0] for mode in modes):
        raise ValueError('run="vectorised" needs all members in the same train or eval mode; use run="sequential".')
    weights = _stacked([dict(m.named_parameters()) | s for m, s in zip(modules, states, strict=True)])
    buffers = _stacked([dict(m.named_buffers()) for m in modules])
    one_input = not isinstance(inputs, Tensor) and all(x is inputs[0] for x in inputs)
    x = inputs if isinstance(inputs, Tensor) else inputs[0] if one_input else torch.stack(list(inputs))

    def call(weights: State, buffers: State, x: Any) -> tuple[Tensor, State]:
        state = weights | buffers
        out = functional_call(template, state, (x,))
        return out, {name: state[name] for name in buffers}  # functional_call put what changed into `state`

    run = vmap(call, in_dims=(0, 0, None if one_input else 0), randomness="different")
    try:
        out, buffers = run(weights, buffers, x)
    except RuntimeError as error:
        if "vmap" not in str(error):
            raise
        raise ValueError(f'This module cannot be vectorised; use run="sequential". torch.func says: {error}') from error
    with torch.no_grad():
        for i, module in enumerate(modules):
            for name, b in module.named_buffers():
                b.copy_(buffers[name][i])
    return out


def _stacked(states: Sequence[State]) -> State:
    return {name: torch.stack([state[name] for state in states]) for name in states[0]}
