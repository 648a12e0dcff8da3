"""The shape of a mesh, and how it adapts to the number of processes."""

from dataclasses import dataclass


@dataclass(frozen=True)
class MeshShape:
    """Number of processes along each axis of the mesh. MeshShape(members=2, data=4) needs 8 processes."""

    members: int | None = None
    """Number of processes to divide the members among; None for as many as there are members and processes for."""
    data: int | None = None
    """Number of processes to divide each batch among; None for the number of processes divided by `members`."""
    timeout: float = 600.0
    """Seconds that a process waits for the others before it reports which of them are missing, and exits."""

    def __post_init__(self) -> None:
        if any(size is not None and size < 1 for size in (self.members, self.data)):
            raise ValueError(f"A mesh needs at least one process per axis; got {self.members} and {self.data}.")
        if not 0 < self.timeout < 1e6:
            raise ValueError(f"mesh.timeout must be a positive number of seconds; got {self.timeout}.")

    def sizes(self, processes: int, n: int | None = None, adapt: bool = False) -> tuple[int, int]:
        """Return the numbers of processes (M, D) along the axes, with M · D = processes.

        Args:
            processes: number of processes.
            n: number of members, if it is known; M is at most n where this shape leaves it open.
            adapt: use the nearest shape that fits, as for a job that has lost a host: M is the largest divisor of
                `processes` that is at most n and the M of this shape. Otherwise a shape that does not fit is refused.
        """
        if self.members is None and self.data is None:
            members = _largest_divisor(processes, n or processes)
        else:
            members = self.members or max(1, processes // (self.data or 1))
        data = self.data or max(1, processes // members)
        if members * data != processes:
            if not adapt:
                raise ValueError(
                    f"A mesh of {members} × {data} needs {members * data} processes, not {processes}; start it with "
                    f"torchrun --nproc-per-node={members * data} -m featureflock …, or leave --mesh.members and "
                    "--mesh.data out."
                )
            members = _largest_divisor(processes, min(members, n or members))
            data = processes // members
        return members, data


def _largest_divisor(number: int, most: int) -> int:
    return next(k for k in range(min(number, most), 0, -1) if number % k == 0)
