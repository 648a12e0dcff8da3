"""The mesh of processes, members × data, that trains one ensemble with torch.distributed.

    with join_mesh(MeshShape(members=2, data=2)) as mesh:        # torchrun --nproc-per-node=4 …
        ens.shard(mesh)

The processes form a table of D rows and M columns. Processes of one row have the same part of each batch and different
members; processes of one column have the same members and different parts of the batch:

    rank d·M + m    members n m/M … n (m + 1)/M,  examples B d/D … B (d + 1)/D

Along a row, the outputs of the members are gathered, so that each process computes everything after them for all n
members, and gets the gradients of its own members without further communication. Layer and shared head are divided
among the processes of a row where that gives the same result (exchange.py). Along a column, each process has the mean
loss of its part, and gradients are averaged:

    gather             x_m ↦ [x_0 … x_M]     backward: the rows of ∂L/∂[x_0 … x_M] that belong to x_m
    local_rows         [x_0 … x_M] ↦ x_m     backward: gather
    average_gradient   x ↦ x                 backward: Σ_d (B_d/B) ∂L_d/∂x

A single process is the mesh 1 × 1.

Shapes: n members, B examples in a batch, M × D processes.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # imported later, its default arguments would keep the process group alive
from torch import Tensor
from torch.autograd.function import once_differentiable

from featureflock.distributed.env import is_rank_zero, world_size
from featureflock.distributed.failures import AlreadyReported, failure_reporting, fresh_store_prefix
from featureflock.distributed.rendezvous import connect, read_launch
from featureflock.distributed.shape import MeshShape

T = TypeVar("T")


class Axis:
    """One axis of the mesh: `size` processes, of which this one has number `rank`."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)

    def local_slice(self, count: int) -> slice:
        """Return this process's part of `count` items: 0 … 2 or 3 … 4 of five items on two processes."""
        starts = [count // self.size * rank + min(rank, count % self.size) for rank in (self.rank, self.rank + 1)]
        return slice(*starts)

    def part_sizes(self, count: int) -> list[int]:
        """Return the number of items in each process's part of `count` items."""
        return [count // self.size + (rank < count % self.size) for rank in range(self.size)]

    def sum(self, x: Tensor) -> Tensor:
        """Sum x over the processes, in place."""
        if self.size > 1:
            dist.all_reduce(x, group=self.group)
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        """Replace x by its value on the first process of the axis, in place."""
        if self.group is not None:
            dist.broadcast(x, dist.get_global_rank(self.group, 0), group=self.group)
        return x

    def max(self, x: Tensor) -> Tensor:
        """Take the maximum of x over the processes, in place."""
        if self.size > 1:
            dist.all_reduce(x, dist.ReduceOp.MAX, group=self.group)
        return x

    def all_gather_int(self, value: int) -> list[int]:
        """Return the value of every process, by rank."""
        values = torch.zeros(self.size, dtype=torch.int64)
        values[self.rank] = value
        return self.sum(values).tolist()

    def gather(self, local: Tensor, count: int) -> Tensor:
        """Concatenate the local rows of all processes, `count` in total; differentiable, see the module docstring."""
        return local if self.size == 1 else _Gather.apply(local, self, count)  # type: ignore[no-untyped-call]

    def local_rows(self, x: Tensor) -> Tensor:
        """Return this process's part of the rows of x; differentiable, see the module docstring."""
        return x if self.size == 1 else _LocalRows.apply(x, self)  # type: ignore[no-untyped-call]

    def all_gather_rows(self, local: Tensor, count: int) -> Tensor:
        """Concatenate the local rows of all processes without autograd."""
        fewest, longer = divmod(count, self.size)
        most = fewest + bool(longer)
        padded = local.new_zeros(most, *local.shape[1:])
        padded[: len(local)] = local
        received = local.new_empty(self.size * most, *local.shape[1:])
        dist.all_gather(list(received.split(most)), padded, group=self.group)
        if not longer:
            return received
        return torch.cat([piece[: most if r < longer else fewest] for r, piece in enumerate(received.split(most))])


class Mesh:
    """The axes of the mesh as seen from this process. `Mesh()` is a single process."""

    def __init__(
        self,
        members: Axis = Axis(),
        data: Axis = Axis(),
        world: Axis = Axis(),
        storage_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.members, self.data, self.world = members, data, world
        self.storage_group = storage_group
        """All processes once more, for threads that write checkpoints during training; None for a single process."""
        self.batch_fraction = 1 / data.size
        """B_d/B: the fraction of the current batch that this process has. Set it, before the backward pass, if parts
        are not equal."""

    @property
    def is_rank_zero(self) -> bool:
        """True on global rank 0, which writes the files and does the printing."""
        return self.world.rank == 0

    @property
    def sizes(self) -> tuple[int, int]:
        """M and D, the numbers of processes along the axes."""
        return self.members.size, self.data.size

    def __str__(self) -> str:
        return f"{self.members.size} × {self.data.size}"

    def local_members(self, n: int) -> range:
        """Return the numbers of this process's members; ValueError if some process would have none."""
        if n < self.members.size:
            sentence = f"{n} members cannot be divided among {self.members.size} processes"
            raise ValueError(f"{sentence}; use --mesh.members {n} or less, and --mesh.data for the others.")
        return range(n)[self.members.local_slice(n)]

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor x by Σ_d (B_d/B) x_d, the average over the data axis weighted by batch fractions."""
        if self.data.size == 1:
            return
        groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for x in tensors:
            groups.setdefault((x.dtype, x.device), []).append(x)
        for group in groups.values():
            flat = torch.cat([x.reshape(-1) for x in group])
            pieces = self.data.sum(flat.mul_(self.batch_fraction)).split([x.numel() for x in group])
            for x, piece in zip(group, pieces, strict=True):
                x.copy_(piece.view(x.shape))

    def average_gradient(self, x: Tensor) -> Tensor:
        """Return x; in the backward pass, average its gradient over the data axis (see the module docstring)."""
        if self.data.size > 1 and x.requires_grad:
            x = x.view_as(x)
            x.register_hook(lambda grad: self.data.sum(grad * self.batch_fraction))
        return x

    @contextmanager
    def member_rng(self) -> Iterator[None]:
        """Give each process along the members axis its own random numbers, for example for dropout masks.

        Afterwards all processes continue with the same random numbers, however many each of them used.
        """
        if self.members.size == 1:
            yield
            return
        gpus = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.random.fork_rng(gpus):
            torch.manual_seed(int(torch.randint(2**62, ())) + self.members.rank)
            yield

    def on_rank_zero(self, call: Callable[[], T]) -> T:
        """Call a function on rank 0 and return its result on all ranks.

        If it raises, rank 0 raises the error and the other ranks raise AlreadyReported.
        """
        if self.world.size == 1:
            return call()
        result: list[T] = []  # stays empty after an error
        try:
            if self.is_rank_zero:
                result = [call()]
        finally:
            message = [result]
            dist.broadcast_object_list(message, src=0)
        if not message[0]:
            raise AlreadyReported(1)
        return message[0][0]

    def rank_zero_first(self, call: Callable[[], T]) -> T:
        """Call a function on rank 0, which may download or repair files, and then on all other ranks."""
        results: list[T] = []
        self.on_rank_zero(lambda: results.append(call()))
        return results[0] if results else call()

    def gather_to_rank_zero(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of all processes of a row on rank 0, by name, and the local tensors on all other ranks."""
        gathered = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
        if self.members.size == 1 or self.data.rank > 0:
            return gathered
        for rank in range(1, self.members.size):
            if self.members.rank == rank:
                header = [[(name, t.dtype, t.shape) for name, t in gathered.items()]]
                dist.send_object_list(header, dst=0)
                dist.send(torch.cat([t.reshape(-1).view(torch.uint8) for t in gathered.values()]), dst=0)
            elif self.is_rank_zero:
                header = [None]  # type: ignore[list-item]
                dist.recv_object_list(header, src=rank)
                sizes = [dtype.itemsize * shape.numel() for _, dtype, shape in header[0]]
                received = torch.empty(sum(sizes), dtype=torch.uint8)
                dist.recv(received, src=rank)
                for (name, dtype, shape), piece in zip(header[0], received.split(sizes), strict=True):
                    gathered.setdefault(name, piece.clone().view(dtype).view(shape))
        return gathered


SINGLE_PROCESS = Mesh()
"""The mesh of a single process."""


@contextmanager
def join_mesh(shape: MeshShape = MeshShape(), n: int | None = None, *, adapt: bool = False) -> Iterator[Mesh]:
    """Join the mesh of all processes that torchrun started, for the duration of the context.

    Tensors on CPUs are sent with gloo, tensors on GPUs with NCCL. If a process does not respond within `shape.timeout`
    seconds, the others report its rank and exit.

    Args:
        shape: numbers of processes along the axes.
        n: number of members, if processes beyond it are to divide the batch (`MeshShape.sizes`).
        adapt: use the nearest shape that fits the number of processes, if any process asks for it.
    """
    processes = world_size()
    if processes == 1:
        try:
            shape.sizes(1, n, adapt)
        except ValueError:
            if is_rank_zero():
                raise
            raise AlreadyReported(1) from None
        yield SINGLE_PROCESS
        return
    timeout = timedelta(seconds=shape.timeout)
    launch = read_launch()
    rank, stores = launch.rank, connect(launch, shape.timeout, connections=2)
    store, heartbeat_store = fresh_store_prefix(stores, rank, processes, shape.timeout)
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)) % torch.cuda.device_count())
    try:
        with failure_reporting(store, heartbeat_store, rank, processes, shape.timeout):
            dist.init_process_group(backend, store=store, rank=rank, world_size=processes, timeout=timeout)
            world = Axis(dist.group.WORLD)
            members, data = shape.sizes(processes, n, bool(world.max(torch.tensor(int(adapt)))))
            table = torch.arange(processes).view(data, members)
            axes = _axis(table.tolist(), timeout), _axis(table.T.tolist(), timeout)
            storage_group = dist.new_group(backend="gloo", timeout=timeout)
            yield Mesh(*axes, world, storage_group)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _axis(groups: list[list[int]], timeout: timedelta) -> Axis:
    """Return the axis whose process groups have these ranks."""
    if len(groups[0]) == 1:
        return Axis()
    alone = len(groups) == 1
    return Axis(dist.group.WORLD if alone else dist.new_subgroups_by_enumeration(groups, timeout=timeout)[0])


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, axis: Axis, count: int) -> Tensor:
        ctx.part = axis.local_slice(count)
        return axis.all_gather_rows(local, count)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad[ctx.part], None, None


class _LocalRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis, ctx.count = axis, len(x)
        return x[axis.local_slice(len(x))].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.axis.all_gather_rows(grad, ctx.count), None
