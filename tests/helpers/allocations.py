"""Count the memory that tensors take: what lives at the same time, at most."""

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """The bytes of all tensors that are created in this context: `peak` of those alive, and `total`."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self.total = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = function(*args, **(kwargs or {}))
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                if storage._cdata not in before and storage._cdata not in self._alive:
                    self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                    self.total += storage.nbytes()
        self.peak = max(self.peak, self.alive)
        return out

    @property
    def alive(self) -> int:
        return sum(size for reference, size in self._alive.values() if not reference.expired())
