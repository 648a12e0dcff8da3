"""Members × data: an ensemble on many processes of torch.distributed. One process is the mesh 1 × 1.

The processes form a table. Those of one row have the same part of each batch and some of the members each; those of
one column have the same members and a part of the batch each:

    rank d·M + m    members n m/M … n (m + 1)/M,  examples B d/D … B (d + 1)/D        of D rows and M columns

Along a row, what members give is gathered, so that everything behind them (layer, shared head, loss) is computed alike
in each process, on all n members; what comes back for its own members is then there already. Along a column a process
has its part's mean loss, and gradients are averaged:

    gather      x_m ↦ [x_0 … x_M]        backward: the rows of ∂L/∂[x_0 … x_M] that belong to x_m
    take        [x_0 … x_M] ↦ x_m        backward: gather
    averaged    x ↦ x                    backward: Σ_d (B_d/B) ∂L_d/∂x

Shapes: n members, B examples in a batch, M × D processes.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.rendezvous import rendezvous

from featureflock.distributed.env import is_rank_zero
from featureflock.distributed.failures import ReportedElsewhere, failure_reporting, fresh_store_prefix

T = TypeVar("T")


@dataclass(frozen=True)
class MeshShape:
    """How many processes share the work, in two directions; `torchrun` starts them."""

    members: int | None = None
    """Processes that members are divided among; None for all that there are beside `data`."""
    data: int = 1
    """Processes that each batch is divided among."""
    timeout: float = 600.0
    """Seconds that a process waits for the others before it says who is missing, and ends."""

    def __post_init__(self) -> None:
        if (self.members is not None and self.members < 1) or self.data < 1:
            raise ValueError(f"A mesh needs at least one process each way; got {self.members} and {self.data}.")
        if not 0 < self.timeout < 1e6:
            raise ValueError(f"mesh.timeout must be a positive number of seconds; got {self.timeout}.")


class Axis:
    """One direction of the mesh: `size` processes, of which this is number `rank`."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)

    def part(self, count: int) -> slice:
        """Which of `count` things are this process's: as equal as can be, the first processes have one more."""
        start, stop = (_start(count, self.size, r) for r in (self.rank, self.rank + 1))
        return slice(start, stop)

    def sum(self, x: Tensor) -> Tensor:
        """Σ over processes, in place."""
        if self.size > 1:
            dist.all_reduce(x, group=self.group)
        return x

    def largest(self, x: Tensor) -> Tensor:
        """The maximum over processes, in place."""
        if self.size > 1:
            dist.all_reduce(x, dist.ReduceOp.MAX, group=self.group)
        return x

    def each(self, number: int) -> list[int]:
        """Every process's number."""
        numbers = torch.zeros(self.size, dtype=torch.int64)
        numbers[self.rank] = number
        return self.sum(numbers).tolist()

    def gather(self, part: Tensor, count: int) -> Tensor:
        """All processes' parts of `count` rows, with gradients; see above."""
        return part if self.size == 1 else _Gather.apply(part, self, count)  # type: ignore[no-untyped-call]

    def take(self, whole: Tensor) -> Tensor:
        """This process's part of the rows, with gradients; see above."""
        return whole if self.size == 1 else _Take.apply(whole, self)  # type: ignore[no-untyped-call]

    def rows(self, part: Tensor, count: int) -> Tensor:
        """`gather` without gradients."""
        most = _start(count, self.size, 1)
        sent = part.new_zeros(most, *part.shape[1:])
        sent[: len(part)] = part
        received = part.new_empty(self.size * most, *part.shape[1:])
        dist.all_gather(list(received.split(most)), sent, group=self.group)
        if count % self.size == 0:
            return received
        sizes = [_start(count, self.size, r + 1) - _start(count, self.size, r) for r in range(self.size)]
        return torch.cat([piece[:size] for piece, size in zip(received.split(most), sizes, strict=True)])


def _start(count: int, size: int, rank: int) -> int:
    return count // size * rank + min(rank, count % size)


class Mesh:
    """This process's place among all; by default it is the only one."""

    def __init__(self, members: Axis = Axis(), data: Axis = Axis(), world: Axis = Axis()) -> None:
        self.members, self.data, self.world = members, data, world
        self.share = 1 / data.size
        """B_d/B: this process's share of the examples in the present batch. Set it where parts are not equal."""

    @property
    def is_rank_zero(self) -> bool:
        """Whether this is the process that writes files and talks to people."""
        return self.world.rank == 0

    def __str__(self) -> str:
        return f"{self.members.size} × {self.data.size}"

    def average(self, tensors: Sequence[Tensor], *, among_all: bool = False) -> None:
        """Σ_d (B_d/B) x_d in place of each x: over the processes with other examples; or over all, also those with
        other members, which have the same up to rounding."""
        axis, weight = (self.world, self.share / self.members.size) if among_all else (self.data, self.share)
        if axis.size == 1:
            return
        groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for x in tensors:
            groups.setdefault((x.dtype, x.device), []).append(x)
        for same in groups.values():
            flat = torch.cat([x.reshape(-1) for x in same])
            pieces = axis.sum(flat.mul_(weight)).split([x.numel() for x in same])
            for x, piece in zip(same, pieces, strict=True):
                x.copy_(piece.view(x.shape))

    def averaged(self, x: Tensor) -> Tensor:
        """The identity, through which gradients of the parts of a batch come back as that of the batch; see above."""
        return x if self.data.size == 1 else _Averaged.apply(x, self)  # type: ignore[no-untyped-call]

    @contextmanager
    def own_random_numbers(self) -> Iterator[None]:
        """For what members draw, such as dropout's masks: other members, other numbers. Afterwards all processes draw
        the same again, however many their members drew."""
        if self.members.size == 1:
            yield
            return
        gpus = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.random.fork_rng(gpus):
            torch.manual_seed(int(torch.randint(2**62, ())) + self.members.rank)
            yield

    def on_first(self, call: Callable[[], T]) -> T:
        """What `call` gives in the first process, for all; if that is an error, the others only say that there was."""
        if self.world.size == 1:
            return call()
        error: Exception | None = None
        said: list[Any] = [None, None]
        if self.is_rank_zero:
            try:
                said = [True, call()]
            except Exception as e:
                error, said = e, [False, None]
        dist.broadcast_object_list(said, src=0)
        if error is not None:
            raise error
        if not said[0]:
            raise ReportedElsewhere(1)
        return said[1]  # type: ignore[no-any-return]

    def first_then_all(self, call: Callable[[], T]) -> T:
        """`call()` in the first process, so that others find what it fetched or mended, then in all others."""
        given: list[T] = []
        self.on_first(lambda: given.append(call()))
        return given[0] if given else call()

    def collect(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """In the first process all tensors of its row, by name; elsewhere those that are there."""
        mine = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
        if self.members.size == 1 or self.data.rank > 0:
            return mine
        for rank in range(1, self.members.size):
            if self.members.rank == rank:
                header = [[(name, t.dtype, t.shape) for name, t in mine.items()]]
                dist.send_object_list(header, dst=0)
                dist.send(_bytes(mine.values()), dst=0)
            elif self.is_rank_zero:
                header = [None]  # type: ignore[list-item]
                dist.recv_object_list(header, src=rank)
                sizes = [dtype.itemsize * shape.numel() for _, dtype, shape in header[0]]
                received = torch.empty(sum(sizes), dtype=torch.uint8)
                dist.recv(received, src=rank)
                for (name, dtype, shape), piece in zip(header[0], received.split(sizes), strict=True):
                    mine.setdefault(name, piece.clone().view(dtype).view(shape))
        return mine


SINGLE_PROCESS = Mesh()
"""The mesh of one process."""


def _bytes(tensors: Any) -> Tensor:
    return torch.cat([t.reshape(-1).view(torch.uint8) for t in tensors])


@contextmanager
def join_mesh(shape: MeshShape = MeshShape()) -> Iterator[Mesh]:
    """The mesh of all processes that a launcher has started, for as long as the context lasts.

        with joined(MeshShape(members=2, data=2)) as mesh:        # torchrun --nproc-per-node=4 …
            ens.shard(mesh)

    gloo carries what is on CPUs, NCCL what is on GPUs. If a process does not answer, the others end with its name.
    """
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    members = processes // shape.data if shape.members is None else shape.members
    if members * shape.data != processes:
        if not is_rank_zero():
            raise ReportedElsewhere(1)
        raise ValueError(
            f"A mesh of {members or 1} × {shape.data} needs {(members or 1) * shape.data} processes, and there "
            f"{'is' if processes == 1 else 'are'} {processes}; start it with torchrun --nproc-per-node="
            f"{(members or 1) * shape.data} -m featureflock …, or change --mesh.members and --mesh.data."
        )
    if processes == 1:
        yield SINGLE_PROCESS
        return
    patience = timedelta(seconds=shape.timeout)
    (store, rank, _), (sign, _, _) = (next(rendezvous("env://", timeout=patience)) for _ in range(2))
    store, sign = fresh_store_prefix([store, sign], rank, processes, shape.timeout)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    try:
        with failure_reporting(store, sign, rank, processes, shape.timeout):
            dist.init_process_group(backend, store=store, rank=rank, world_size=processes, timeout=patience)
            kind = "cuda" if torch.cuda.is_available() else "cpu"
            table = init_device_mesh(kind, (shape.data, members), mesh_dim_names=("data", "members"))
            for name in ("members", "data"):
                dist.distributed_c10d._set_pg_timeout(patience, table.get_group(name))
            yield Mesh(Axis(table.get_group("members")), Axis(table.get_group("data")), Axis(dist.group.WORLD))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, axis: Axis, count: int) -> Tensor:
        ctx.part = axis.part(count)
        return axis.rows(part, count)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad[ctx.part], None, None


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, axis: Axis) -> Tensor:
        ctx.axis, ctx.count = axis, len(whole)
        return whole[axis.part(len(whole))].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.axis.rows(grad, ctx.count), None


class _Averaged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh) -> Tensor:
        ctx.mesh = mesh
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.mesh.data.sum(grad * ctx.mesh.share), None
