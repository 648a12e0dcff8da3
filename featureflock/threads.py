"""n modules at once on a CPU, each on threads of its own.

Threads that share one operation wait for each other at its end, thousands of times in a step, and where it is bound by
memory they all are at once. Threads with a member each wait twice: after the forward and after the backward pass.

    out_i = f_i(x, w_i)            with a graph of its own for each i, forward side by side,
    ∂L/∂w_i = (∂out_i/∂w_i)ᵀ ∂L/∂out_i                             and backward side by side

Shapes: n members, T threads. min(n, T) members run at a time with an equal share of the threads; those that are left
over in the end have all threads, one after another.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten, tree_map

T = TypeVar("T")


def run_side_by_side(
    call: Callable[[nn.Module, dict[str, Tensor], Any], Tensor],
    modules: Sequence[nn.Module],
    states: Sequence[dict[str, Tensor]],
    inputs: Sequence[Any],
) -> list[Tensor]:
    """call(module i, state i, input i) for all i, with gradients."""
    one_by_one = _is_first(modules[0], inputs[0])
    if not torch.is_grad_enabled():
        return _undisturbed([partial(call, *parts) for parts in zip(modules, states, inputs, strict=True)], one_by_one)
    members = [_Member(call, *parts) for parts in zip(modules, states, inputs, strict=True)]
    outer = [tensor for member in members for tensor in member.outer]
    return list(_Members.apply(members, one_by_one, *outer))  # type: ignore[no-untyped-call]


class _Member:
    """A member's call and its graph, which begins at copies of whatever comes from outside and wants a gradient."""

    def __init__(self, call: Callable[..., Tensor], module: nn.Module, state: dict[str, Tensor], x: Any) -> None:
        self.outer: list[Tensor] = []
        """What wants a gradient, as others know it."""
        self.inner: list[Tensor] = []
        """The same, as this graph knows it; parameters are known to both."""
        copies = tree_map(self._detached, (state, x))
        own = [p for name, p in module.named_parameters() if p.requires_grad and name not in state]
        self.outer += own
        self.inner += own
        self._call = lambda: call(module, *copies)

    def forward(self) -> Tensor:
        with torch.enable_grad():
            self.out = self._call()  # type: ignore[no-untyped-call]
        return self.out.detach()

    def backward(self, grad: Tensor, keep: bool) -> tuple[Tensor | None, ...]:
        if not self.inner or not self.out.requires_grad:
            return (None,) * len(self.inner)
        return torch.autograd.grad(self.out, self.inner, grad, retain_graph=keep, allow_unused=True)

    def _detached(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.requires_grad:
            return value
        self.outer.append(value)
        self.inner.append(value.detach().requires_grad_())
        return self.inner[-1]


class _Members(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, members: list[_Member], one_by_one: bool, *outer: Tensor) -> tuple[Tensor, ...]:
        ctx.members, ctx.one_by_one = members, one_by_one
        return tuple(_undisturbed([member.forward for member in members], one_by_one))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        calls = [partial(member.backward, grad, keep) for member, grad in zip(ctx.members, grads, strict=True)]
        found = _side_by_side(calls, ctx.one_by_one)
        return (None, None, *(grad for member in found for grad in member))


def _undisturbed(calls: Sequence[Callable[[], T]], one_by_one: bool) -> list[T]:
    """Side by side, if nobody draws random numbers: which thread draws first would be chance."""
    before = torch.get_rng_state()
    results = _side_by_side(calls, one_by_one)
    if not torch.equal(before, torch.get_rng_state()):
        raise ValueError(
            'Members that draw random numbers, such as dropout, cannot be run="threaded"; use run="sequential".'
        )
    return results


def _side_by_side(calls: Sequence[Callable[[], T]], one_by_one: bool) -> list[T]:
    threads = torch.get_num_threads()
    workers = min(threads, len(calls))
    if workers < 2:
        return [call() for call in calls]
    together = len(calls) - len(calls) % workers
    surroundings, pool = _Surroundings.here(), _pool(workers, threads // workers)
    futures = []
    for call in calls[:together]:
        futures.append(pool.submit(surroundings.run, call))
        if one_by_one:
            wait(futures)
    wait(futures)
    return [future.result() for future in futures] + [call() for call in calls[together:]]


@dataclass(frozen=True)
class _Surroundings:
    """What PyTorch keeps for each thread and a call depends on."""

    grad: bool
    inference: bool
    autocast: dict[str, tuple[bool, torch.dtype]]

    @classmethod
    def here(cls) -> "_Surroundings":
        devices = ("cpu", "cuda")
        autocast = {d: (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices}
        return cls(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast)

    def run(self, call: Callable[[], T]) -> T:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for device, (enabled, dtype) in self.autocast.items():
                if enabled:
                    stack.enter_context(torch.autocast(device, dtype))
            return call()


@lru_cache
def _pool(workers: int, threads: int) -> ThreadPoolExecutor:
    """So many workers, each of which computes on so many threads."""
    ready = threading.Barrier(workers + 1)

    def start() -> None:
        torch.set_num_threads(threads)
        torch.get_num_threads()  # a thread takes over the setting when it first asks, and others will change it
        ready.wait()

    with _threads_kept():
        pool = ThreadPoolExecutor(workers, thread_name_prefix="member", initializer=start)
        for _ in range(workers):
            pool.submit(int)
        ready.wait()
    return pool


@contextmanager
def _threads_kept() -> Iterator[None]:
    """What a worker sets is its own, but libraries and later threads would follow it too."""
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


_seen: WeakKeyDictionary[nn.Module, set[tuple[Any, ...]]] = WeakKeyDictionary()


def _is_first(module: nn.Module, x: Any) -> bool:
    """Whether a compiled module would have to be compiled for this call: that is a thing for one thread."""
    if getattr(module, "_compiled_call_impl", None) is None:
        return False
    shapes = [tuple(leaf.shape) if isinstance(leaf, Tensor) else leaf for leaf in tree_flatten(x)[0]]
    kind = (module.training, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), str(shapes))
    seen = _seen.setdefault(module, set())
    first = kind not in seen
    seen.add(kind)
    return first
