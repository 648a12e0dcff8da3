"""Save an ensemble whose members are divided among processes: the files of `save`, without all members in one process.

    save_sharded(ens, "my-ensemble")        # on every process; rank 0 writes

Rank 0 collects the descriptions of the modules, which are small, and writes the weights tensor by tensor as it receives
them. So its memory does not grow with the number of members.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from featureflock.ensemble import module_codec as codec
from featureflock.ensemble.ensemble import Ensemble, RemoteMember
from featureflock.ensemble.saving import Content, encode, save, warn_about, write_folder
from featureflock.utils.files import atomic_path

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names in the header of a safetensors file."""
_Header = dict[str, tuple[str, list[int], int]]
"""dtype, shape and bytes of each tensor."""


def save_sharded(ens: Ensemble, folder: Path) -> None:
    """Save an ensemble that `Ensemble.shard` has divided; all processes call this."""
    mesh = ens.mesh
    if mesh.members.size == 1 or mesh.data.rank > 0:  # rank 0 has all members, or this process has a copy
        if mesh.is_rank_zero:
            save(ens, folder)
        return
    content, tensors = encode(ens, all_members=False)
    for key, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            raise ValueError(f"{key} has the dtype {tensor.dtype}, which safetensors cannot store.")
    header: _Header = {key: (_DTYPES[t.dtype], [*t.shape], t.nbytes) for key, t in tensors.items()}
    gathered: list[Any] | None = [None] * mesh.members.size if mesh.is_rank_zero else None
    dist.gather_object((content, header), gathered, dst=0, group=mesh.members.group)
    if gathered is None:
        order: list[Any] = [None]
        dist.broadcast_object_list(order, src=0, group=mesh.members.group)
        for key, owner in order[0]:
            if owner == mesh.members.rank:
                dist.send(_bytes(tensors[key]), dst=0, group=mesh.members.group)
        return
    merged, headers = _merged([each for each, _ in gathered]), [each for _, each in gathered]
    owners = {key: rank for rank in reversed(range(len(headers))) for key in headers[rank]}
    sizes = {key: headers[rank][key] for key, rank in owners.items()}
    keys = sorted(owners, key=lambda key: (-sizes[key][2] // max(1, _count(sizes[key][1])), key))  # aligned
    dist.broadcast_object_list([[(k, owners[k]) for k in keys if sizes[k][2]]], src=0, group=mesh.members.group)

    def receive(key: str) -> Tensor:
        if owners[key] == 0 or not sizes[key][2]:
            return _bytes(tensors[key]) if owners[key] == 0 else torch.empty(0, dtype=torch.uint8)
        received = torch.empty(sizes[key][2], dtype=torch.uint8)
        dist.recv(received, src=owners[key], group=mesh.members.group)
        return received

    def write_weights(path: Path) -> str:
        digest, start = hashlib.sha256(), 0
        entries = {}
        for key in keys:
            dtype, shape, size = sizes[key]
            entries[key] = {"dtype": dtype, "shape": shape, "data_offsets": [start, start + size]}
            start += size
        text = json.dumps(entries).encode()
        text += b" " * (-len(text) % 8)
        with atomic_path(path) as partial, open(partial, "xb") as file:
            for piece in (len(text).to_bytes(8, "little"), text):
                file.write(piece)
                digest.update(piece)
            for key in keys:
                data: Any = receive(key).numpy()
                file.write(data)
                digest.update(data)
            file.flush()
        return digest.hexdigest()

    warn_about(merged)
    write_folder(folder, merged, write_weights)


def _merged(contents: list[Content]) -> Content:
    """The description of the whole ensemble, from those of all processes."""
    first, *others = contents
    reason = next((each.no_modules_because for each in contents if each.no_modules_because is not None), None)
    for each in others:
        if first.modules is not None and each.modules is not None:
            for name in ("extractors", "head"):
                ours, theirs = (content["children"][name]["children"] for content in (first.modules, each.modules))
                remote = [i for i, child in ours.items() if child is not None and child.get("class") == _REMOTE]
                ours.update({i: theirs[i] for i in remote})
        first.state = each.state | first.state
        first.tensors = each.tensors | first.tensors
    first.modules, first.no_modules_because = None if reason else first.modules, reason
    first.local_classes = sorted({name for each in contents for name in each.local_classes})
    return first


_REMOTE = codec.class_name(RemoteMember)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _count(shape: list[int]) -> int:
    return torch.Size(shape).numel()
