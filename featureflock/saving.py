"""Ensembles on disk: weights as safetensors, everything else as JSON. Nothing in a saved folder is ever executed.

A folder holds `ensemble.json` and the weights file that it names. Writing is atomic: the weights file is named by its
digest, and `ensemble.json` is replaced only when all else is complete, so that an interrupted `save` leaves the
ensemble that was there before.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from featureflock.describing import Reader, Undescribed, Writer
from featureflock.ensemble import Ensemble

_FORMAT = "featureflock ensemble"
_VERSION = 1
_INDEX = "ensemble.json"


def save(ens: Ensemble, folder: str | os.PathLike[str]) -> None:
    """Write an ensemble to a folder, atomically: safetensors for the weights, JSON for the rest.

    An ensemble that JSON cannot describe (a lambda as an attribute of a module, a hook) is saved all the same; to load
    it, build it with your code and pass it to `load` as `into`.
    """
    if not isinstance(ens, Ensemble):
        raise TypeError(f"save takes an Ensemble; got {type(ens).__name__}.")
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; give the name of a folder to save the ensemble in.")
    for name, tensor in _named_tensors(ens).items():
        if isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer):
            raise ValueError(f"{name} has no values yet; run the ensemble once on data before you save it.")
    writer, modules, undescribed = Writer(), None, None
    try:
        modules = writer.module(ens)
    except Undescribed as reason:
        writer, undescribed = Writer(), str(reason)
    state = {name: writer.tensor(tensor, name) for name, tensor in _named_tensors(ens).items()}

    data = safetensors.torch.save({key: t.detach().cpu().contiguous().clone() for key, t in writer.tensors.items()})
    digest = hashlib.sha256(data).hexdigest()
    weights = f"weights-{digest[:16]}.safetensors"
    index = {
        "format": _FORMAT,
        "version": _VERSION,
        "weights": {"file": weights, "bytes": len(data), "sha256": digest},
        "modules": modules,
        "undescribed": undescribed,
        "state": state,
        "tensors": {
            key: {"stride": None if t.is_contiguous() else list(t.stride()), "requires_grad": t.requires_grad}
            for key, t in writer.tensors.items()
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / weights, data)
    _write(folder / _INDEX, (json.dumps(index, indent=1) + "\n").encode())
    for leftover in (*folder.glob("weights-*.safetensors"), *folder.glob(".*.partial")):
        if leftover.name != weights:
            leftover.unlink()


def load(folder: str | os.PathLike[str], into: Ensemble | None = None) -> Ensemble:
    """Read an ensemble that `save` wrote; its predictions are bit-identical.

    No code comes from the folder: module classes of your own must be imported before. With `into`, an ensemble that
    your code has built is filled with the saved weights instead, and returned.
    """
    folder = Path(folder)
    index, tensors = _read(folder)
    if into is not None:
        _fill(into, {name: tensors[key] for name, key in index["state"].items()}, folder)
        return into
    if index["modules"] is None:
        raise ValueError(
            f"{folder} holds the weights but no description of the modules, because {index['undescribed']}; build the "
            "ensemble with your code and call load(folder, into=ensemble)."
        )
    try:
        ens = Reader(tensors).module(index["modules"])
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder / _INDEX} does not describe an ensemble: it was altered after saving.") from error
    if not isinstance(ens, Ensemble):
        raise ValueError(f"{folder / _INDEX} describes a {type(ens).__name__}, not an ensemble.")
    return ens


def _named_tensors(ens: Ensemble) -> dict[str, Tensor]:
    return dict(ens.named_parameters(remove_duplicate=False)) | dict(ens.named_buffers(remove_duplicate=False))


def _write(path: Path, data: bytes) -> None:
    """All of it or nothing, also when the machine stops in between."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with open(partial, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The index and the tensors of a saved folder, both checked."""
    path = folder / _INDEX
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no saved ensemble: there is no {_INDEX} in it.")
    try:
        index = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is no readable JSON; it is truncated or another program's file.") from error
    if not isinstance(index, dict) or index.get("format") != _FORMAT:
        raise ValueError(f"{path} was not written by featureflock.save.")
    if index.get("version") != _VERSION:
        raise ValueError(f"{path} has format {index.get('version')}; this version of featureflock reads {_VERSION}.")
    try:
        name, size, digest = (index["weights"][key] for key in ("file", "bytes", "sha256"))
        weights = folder / Path(name).name
        data = weights.read_bytes() if weights.is_file() else b""
        if len(data) != size or hashlib.sha256(data).hexdigest() != digest:
            raise ValueError(f"{weights} is missing, truncated or altered: it has not the digest that {path} gives.")
        tensors = {
            key: _laid_out(tensor, index["tensors"][key]["stride"], index["tensors"][key]["requires_grad"])
            for key, tensor in safetensors.torch.load(data).items()
        }
        if not {*index["state"].values()} <= {*tensors} or not {"modules", "undescribed"} <= {*index}:
            raise KeyError("state")
    except safetensors.SafetensorError as error:
        raise ValueError(f"{weights} is not a safetensors file.") from error
    except (KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"{path} lacks what featureflock.save writes: it was altered after saving.") from error
    return index, tensors


def _laid_out(tensor: Tensor, stride: list[int] | None, requires_grad: bool) -> Tensor:
    """The tensor in the memory layout that it had, so that the same kernels run on it."""
    if stride is not None:
        tensor = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype).copy_(tensor)
    return tensor.requires_grad_(requires_grad)


def _fill(into: Ensemble, saved: dict[str, Tensor], folder: Path) -> None:
    own = _named_tensors(into)
    for name in sorted({*own} ^ {*saved}):
        side = "the ensemble given as into" if name in own else folder
        raise ValueError(f"Only {side} has a tensor {name}; the two must have the same architecture.")
    for name, tensor in own.items():
        if (saved[name].shape, saved[name].dtype) != (tensor.shape, tensor.dtype):
            raise ValueError(
                f"{name} is {saved[name].dtype} {tuple(saved[name].shape)} in {folder} and {tensor.dtype} "
                f"{tuple(tensor.shape)} in the ensemble given as into; the two must have the same architecture."
            )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(saved[name])
