"""Ensembles on disk: weights as safetensors, everything else as JSON. Nothing in a saved folder is ever executed.

A folder holds `ensemble.json` and the weights file that it names. Writing is atomic: the weights file has a new name
each time, and `ensemble.json` is replaced only when all else is complete, so that an interrupted `save` leaves the
ensemble that was there before.
"""

import contextlib
import hashlib
import json
import os
import re
import time
import uuid
import warnings
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from featureflock.ensemble.ensemble import Ensemble
from featureflock.ensemble.module_codec import ModuleDecoder, ModuleEncoder, NotSerializableError, UnknownClassError
from featureflock.utils.files import clear_partials, write_atomically

_FORMAT = "featureflock ensemble"
_VERSION = 1
_INDEX = "ensemble.json"
_WEIGHTS = re.compile(r"weights-[0-9a-f]{16}\.safetensors")


def save(ens: Ensemble, folder: str | os.PathLike[str]) -> None:
    """Write an ensemble to a folder, atomically: safetensors for the weights, JSON for the rest.

    An ensemble that JSON cannot describe (a lambda as an attribute of a module, a hook) is saved all the same, with a
    warning; to load it, build it with your code and pass it to `load` as `into`.
    """
    if not isinstance(ens, Ensemble):
        raise TypeError(f"save takes an Ensemble; got {type(ens).__name__}.")
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; give the name of a folder to save the ensemble in.")
    writer, modules, undescribed = ModuleEncoder(), None, None
    with ens.detached_from_mesh():
        try:
            modules = writer.module(ens)
        except NotSerializableError as reason:
            writer, undescribed = ModuleEncoder(), str(reason)
    state = {name: writer.tensor(tensor, name) for name, tensor in _named_tensors(ens).items()}
    for name, tensor in writer.tensors.items():
        _check_savable(name, tensor)
    if undescribed is not None:
        warnings.warn(f"Saving weights only, because {undescribed}; load them with load(folder, into=…).", stacklevel=2)

    data = safetensors.torch.save({key: t.detach().cpu().contiguous().clone() for key, t in writer.tensors.items()})
    weights = f"weights-{uuid.uuid4().hex[:16]}.safetensors"
    index = {
        "format": _FORMAT,
        "version": _VERSION,
        "weights": {"file": weights, "sha256": hashlib.sha256(data).hexdigest()},
        "modules": modules,
        "undescribed": undescribed,
        "temperature": ens.temperature,
        "state": state,
        "tensors": {key: {"stride": _stride(t), "requires_grad": t.requires_grad} for key, t in writer.tensors.items()},
    }
    folder.mkdir(parents=True, exist_ok=True)
    before = _weights_named_in(folder)
    write_atomically(folder / weights, data)
    try:
        write_atomically(folder / _INDEX, (json.dumps({**index, "sha256": _digest(index)}, indent=1) + "\n").encode())
    except BaseException:
        (folder / weights).unlink(missing_ok=True)
        raise
    _clear(folder, keep=weights, drop=before)


def load(folder: str | os.PathLike[str], into: Ensemble | None = None) -> Ensemble:
    """Read an ensemble that `save` wrote; its predictions are bit-identical.

    No code comes from the folder: module classes of your own must be imported before. With `into`, an ensemble that
    your code has built is filled with the saved weights instead, and returned.
    """
    folder = Path(folder)
    index, tensors = _read(folder)
    if into is not None:
        _fill(into, {name: tensors[key] for name, key in index["state"].items()}, folder)
        into.temperature = index.get("temperature")
        return into
    if index["modules"] is None:
        raise ValueError(
            f"{folder} holds the weights but no description of the modules, because {index['undescribed']}; build the "
            "ensemble with your code and call load(folder, into=ensemble)."
        )
    try:
        ens = ModuleDecoder(tensors).module(index["modules"])
    except UnknownClassError:
        raise
    except Exception as error:
        raise ValueError(f"{folder / _INDEX} does not describe an ensemble: it was altered after saving.") from error
    if not isinstance(ens, Ensemble):
        raise ValueError(f"{folder / _INDEX} describes a {type(ens).__name__}, not an ensemble.")
    return ens


def _named_tensors(ens: Ensemble) -> dict[str, Tensor]:
    return dict(ens.named_parameters(remove_duplicate=False)) | dict(ens.named_buffers(remove_duplicate=False))


def _check_savable(name: str, tensor: Tensor) -> None:
    if isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer):
        raise ValueError(f"{name} has no values yet; run the ensemble once on data before you save it.")
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        raise ValueError(f"{name} is sparse, quantised or without data, which safetensors cannot hold.")


def _stride(tensor: Tensor) -> list[int] | None:
    """The memory layout of a tensor that is dense but not in the usual order, such as channels_last; else None."""
    usual = torch.empty(tensor.shape, device="meta").stride()
    extent = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return list(tensor.stride()) if tensor.stride() != usual and extent == tensor.numel() else None


def _digest(index: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()


def _weights_named_in(folder: Path) -> str | None:
    """The weights file of the ensemble that is there already."""
    try:
        name = json.loads((folder / _INDEX).read_bytes())["weights"]["file"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    return name if isinstance(name, str) and _WEIGHTS.fullmatch(name) else None


def _clear(folder: Path, keep: str, drop: str | None) -> None:
    """Remove the weights that were replaced, and what saves that were killed an hour or more ago have left."""
    clear_partials(folder)
    for path in folder.iterdir():
        if path.name != keep and _WEIGHTS.fullmatch(path.name):
            with contextlib.suppress(FileNotFoundError):  # another save may have been quicker
                if path.name == drop or time.time() - path.stat().st_mtime > 3600:
                    path.unlink()


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The index and the tensors of a saved folder, both checked."""
    path = folder / _INDEX
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no saved ensemble: there is no {_INDEX} in it.")
    text = path.read_bytes()
    try:
        index = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no readable JSON; it is truncated or another program's file.") from error
    if not isinstance(index, dict) or index.get("format") != _FORMAT:
        raise ValueError(f"{path} was not written by featureflock.save.")
    if index.get("version") != _VERSION:
        raise ValueError(f"{path} has format {index.get('version')}; this version of featureflock reads {_VERSION}.")
    altered = f"{path} was altered after saving: it has not the content that its digest stands for."
    if index.pop("sha256", None) != _digest(index):
        raise ValueError(altered)
    try:
        name, digest = index["weights"]["file"], index["weights"]["sha256"]
        if not _WEIGHTS.fullmatch(name):
            raise ValueError(altered)
        try:
            data = (folder / name).read_bytes()
        except FileNotFoundError:
            if path.read_bytes() != text:  # saved anew just now
                return _read(folder)
            data = b""
        if hashlib.sha256(data).hexdigest() != digest:
            raise ValueError(f"{folder / name} is missing, truncated or altered: {_INDEX} gives another digest.")
        tensors = {
            key: _laid_out(tensor, index["tensors"][key]["stride"], index["tensors"][key]["requires_grad"])
            for key, tensor in safetensors.torch.load(data).items()
        }
        if not {*index["state"].values()} <= {*tensors} or not {"modules", "undescribed"} <= {*index}:
            raise ValueError(altered)
    except safetensors.SafetensorError as error:
        raise ValueError(f"{folder / name} is not a safetensors file.") from error
    except (LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(altered) from error
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
            if saved[name].stride() != tensor.stride():  # the memory format selects the kernels, and so the rounding
                tensor.data = torch.empty_strided(
                    tensor.shape, saved[name].stride(), dtype=tensor.dtype, device=tensor.device
                )
            tensor.copy_(saved[name])
