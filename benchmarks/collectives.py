"""Record the collectives of a training step: purpose, size and time of each call."""

import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Call:
    """One collective call: its group, purpose and size."""

    collective: str
    axis: str
    purpose: str
    processes: int
    passed: int
    """Bytes that this process passed to it."""

    @property
    def sent(self) -> float:
        """Bytes that this process sends in a ring."""
        factor = {"all_reduce": 2 / self.processes, "all_to_all": 1 / self.processes}.get(self.collective, 1)
        return (self.processes - 1) * self.passed * factor


@dataclass
class Timed:
    call: Call
    seconds: float
    again: Callable[[], object]
    """Repeats the collective on other values."""


class _TimedWork:
    """A collective in the background, of which only the time to wait for it counts."""

    def __init__(self, work: Any, timed: Timed) -> None:
        self.work, self.timed = work, timed

    def wait(self) -> None:
        start = time.perf_counter()
        self.work.wait()
        self.timed.seconds += time.perf_counter() - start


@contextmanager
def recorded() -> Iterator[list[Timed]]:
    """Record every all_reduce, all_gather and all_to_all in this context; raise on any other collective."""
    calls: list[Timed] = []
    names = ("all_reduce", "all_gather", "all_to_all_single", "broadcast", "send", "recv")
    original = {name: getattr(dist, name) for name in names}

    def all_reduce(x: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        purpose, axis = _purpose(group)
        start = time.perf_counter()
        work = original["all_reduce"](x, op, group, async_op)
        took, other = time.perf_counter() - start, torch.zeros_like(x)
        call = Call("all_reduce", axis, purpose, dist.get_world_size(group), x.nbytes)
        calls.append(Timed(call, took, lambda: original["all_reduce"](other, op, group)))
        return work if work is None else _TimedWork(work, calls[-1])

    def all_gather(received: list[Tensor], x: Tensor, group: Any = None, async_op: bool = False) -> Any:
        purpose, axis = _purpose(group)
        start = time.perf_counter()
        work = original["all_gather"](received, x, group, async_op)
        took, other = time.perf_counter() - start, [torch.zeros_like(piece) for piece in received]
        call = Call("all_gather", axis, purpose, dist.get_world_size(group), x.nbytes)
        calls.append(Timed(call, took, lambda: original["all_gather"](other, other[0].clone(), group)))
        return work

    def all_to_all(received: Tensor, x: Tensor, lengths: list[int], sent: list[int], group: Any = None) -> None:
        start = time.perf_counter()
        original["all_to_all_single"](received, x, lengths, sent, group)
        took, other, processes = time.perf_counter() - start, (received.clone(), x.clone()), dist.get_world_size(group)
        call = Call("all_to_all", "members", "gather", processes, x.nbytes)
        calls.append(Timed(call, took, lambda: original["all_to_all_single"](*other, lengths, sent, group)))

    def refused(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("A training step uses a collective that this benchmark does not know.")

    wrapped = dict.fromkeys(original, refused) | {"all_reduce": all_reduce, "all_gather": all_gather}
    wrapped["all_to_all_single"] = all_to_all
    for name, function in wrapped.items():
        setattr(dist, name, function)
    try:
        yield calls
    finally:
        for name, function in original.items():
            setattr(dist, name, function)


def _purpose(group: Any) -> tuple[str, str]:
    """Purpose and axis of a collective, from the function that calls it."""
    frame = inspect.currentframe()
    while frame is not None:
        match frame.f_code.co_qualname:
            case "_grams":
                return "n × n sums", "all" if group is dist.group.WORLD else "data"
            case "Axis.all_gather_rows":
                return "gather", "members"
            case "Mesh.average_gradient.<locals>.<lambda>":
                return "gradients", "data"
            case "Mesh.average":
                return "gradients", "data"
            case "GradientReducer._start_next":
                return "gradients", "all" if frame.f_locals["bucket"].is_shared else "data"
            case "Axis.max":
                return "bookkeeping", "all"
        frame = frame.f_back
    return "bookkeeping", "data"
