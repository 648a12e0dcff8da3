"""Save and load ensembles: weights as safetensors, everything else as JSON. No code in a saved folder is executed.

    ff.save(ens, "my-ensemble")
    ens = ff.load("my-ensemble")

A folder has `ensemble.json` and the weights file that it names. Saving is atomic: the weights file gets a new name each
time, and `ensemble.json` is replaced last, so an interrupted `save` leaves the previous ensemble intact.
"""

import contextlib
import json
import os
import re
import time
import uuid
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, cast

import safetensors
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save_file
from torch import Tensor, nn

from featureflock.ensemble import module_codec as codec
from featureflock.ensemble.ensemble import Ensemble
from featureflock.utils.digests import file_digest, json_digest, once_per_version, sha256
from featureflock.utils.files import atomic_path, clear_partials, read_regular, write_atomically
from featureflock.utils.json_files import check_json, read_json

_FORMAT = "featureflock ensemble"
_VERSION = 2
_INDEX = "ensemble.json"
_WEIGHTS = re.compile(r"weights-[0-9a-f]{16}\.safetensors")


class _WeightsEntry(TypedDict):
    file: str
    sha256: str


class _TensorEntry(TypedDict):
    stride: list[int] | None
    requires_grad: bool


class _Index(TypedDict):
    """Content of ensemble.json, without the digest of the index itself."""

    format: str
    version: int
    weights: _WeightsEntry
    modules: dict[str, Any] | None
    no_modules_because: str | None
    calibration: float
    state: dict[str, str]
    tensors: dict[str, _TensorEntry]


def save(ens: Ensemble, folder: str | os.PathLike[str]) -> None:
    """Save an ensemble to a folder, atomically: safetensors for the weights, JSON for the modules.

    Modules that JSON cannot represent (with a lambda or a configuration object as an attribute, or with hooks) are not
    saved, only their weights, with a warning. To load these, build the ensemble with your code and pass it to `load` as
    `into`. Classes that are defined in a script, a notebook or a function are saved by name, with a warning too: other
    programs do not have them.
    """
    if not isinstance(ens, Ensemble):
        raise ValueError(f"save takes an Ensemble; got {type(ens).__name__}.")
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; choose a folder to save the ensemble in.")
    content, tensors = encode(ens)
    warn_about(content)
    write_folder(folder, content, lambda path: _write_weights(path, tensors))


@dataclass
class Content:
    """What ensemble.json has of an ensemble."""

    modules: dict[str, Any] | None
    no_modules_because: str | None
    local_classes: list[str]
    """Names of classes that other programs cannot find."""
    calibration: float
    state: dict[str, str]
    tensors: dict[str, _TensorEntry]


def encode(ens: Ensemble, all_members: bool = True) -> tuple[Content, dict[str, Tensor]]:
    """Describe an ensemble, and return its tensors by key; without `all_members`, those of this process."""
    encoder, modules, no_modules_because = codec.ModuleEncoder(without=ens.calibration), None, None
    with ens.detached_from_mesh(all_members):
        try:
            modules = encoder.module(ens)
        except codec.NotSerializableError as reason:
            encoder, no_modules_because = codec.ModuleEncoder(), str(reason)
    state = {name: cast(str, encoder.tensor(tensor, name)) for name, tensor in _named_tensors(ens).items()}
    tensors = encoder.tensors
    for name, tensor in tensors.items():
        if isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer):
            raise ValueError(f"{name} has no values yet; run the ensemble once on data before you save it.")
        if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
            raise ValueError(f"{name} is sparse, quantised or on the meta device, which safetensors cannot store.")
    entries: dict[str, _TensorEntry] = {
        k: {"stride": _stride(t), "requires_grad": t.requires_grad} for k, t in tensors.items()
    }
    local = sorted({cls.__qualname__ for cls in encoder.classes if _is_local(cls)})
    return Content(modules, no_modules_because, local, float(ens.calibration), state, entries), tensors


def warn_about(content: Content) -> None:
    """Warn about what other programs will not be able to load."""
    if content.no_modules_because is not None:
        message = f"Saving weights only, because {content.no_modules_because}; load them with load(folder, into=…)."
        warnings.warn(message, stacklevel=3)
    elif local := content.local_classes:
        names = ", ".join(local)
        message = f"Other programs cannot find {names}, defined in a script, a notebook or a function"
        message += "; there, call load(folder, into=ensemble) with an ensemble that your code has built, or move the "
        warnings.warn(f"{message}class{'es' * (len(local) > 1)} to a module that they import.", stacklevel=3)


def write_folder(folder: Path, content: Content, write_weights: Callable[[Path], str]) -> None:
    """Write the files of an ensemble; `write_weights` writes the tensors to a file and returns its digest."""
    folder.mkdir(parents=True, exist_ok=True)
    previous = _current_weights(folder)
    weights = f"weights-{uuid.uuid4().hex[:16]}.safetensors"
    try:
        digest = write_weights(folder / weights)
        index: _Index = {
            "format": _FORMAT,
            "version": _VERSION,
            "weights": {"file": weights, "sha256": digest},
            "modules": content.modules,
            "no_modules_because": content.no_modules_because,
            "calibration": content.calibration,
            "state": content.state,
            "tensors": content.tensors,
        }
        text = json.dumps({**index, "sha256": json_digest(index)}, indent=1) + "\n"
        write_atomically(folder / _INDEX, text.encode())
    except BaseException:
        if _current_weights(folder) != weights:  # the exception may have come after the index was replaced
            (folder / weights).unlink(missing_ok=True)
        raise
    _remove_old_weights(folder, current=weights, previous=previous)


def load(folder: str | os.PathLike[str], into: Ensemble | None = None) -> Ensemble:
    """Load an ensemble that `save` wrote; its predictions are bit-identical.

    User-defined module classes must be imported first, because no code is loaded from the folder. With `into`, the
    weights are loaded into an ensemble that your code has built, and that ensemble is returned.
    """
    folder = Path(folder)
    index, tensors = _read(folder)
    if into is not None:
        _load_weights(into, {name: tensors[key] for name, key in index["state"].items()}, folder)
        _set_calibration(into, index)
        return into
    if index["modules"] is None:
        raise ValueError(f"{folder} has no modules, because {index['no_modules_because']}; {codec.USE_INTO}.")
    try:
        ens = codec.ModuleDecoder(tensors).module(index["modules"])
    except codec.UnknownClassError:
        raise
    except Exception as error:
        raise ValueError(f"{folder / _INDEX} does not describe an ensemble; it was modified after saving.") from error
    if not isinstance(ens, Ensemble):
        raise ValueError(f"{folder / _INDEX} describes a {type(ens).__name__}, not an Ensemble.")
    ens._parameters.setdefault("log_variance", None)
    dtype = next((p.dtype for p in ens.parameters() if p.is_floating_point()), torch.float32)
    ens._buffers[ens.task.calibration] = torch.ones((), dtype=dtype)
    _set_calibration(ens, index)
    return ens


def _set_calibration(ens: Ensemble, index: _Index) -> None:
    """The calibration is stored in the index, so that calibrating does not change the weights file."""
    setattr(ens, ens.task.calibration, index["calibration"])


def _is_local(cls: type[nn.Module]) -> bool:
    return cls.__module__ == "__main__" or "<locals>" in cls.__qualname__


def _named_tensors(ens: Ensemble) -> dict[str, Tensor]:
    buffers = {name: b for name, b in ens.named_buffers(remove_duplicate=False) if b is not ens.calibration}
    return dict(ens.named_parameters(remove_duplicate=False)) | buffers


def _stride(tensor: Tensor) -> list[int] | None:
    """Return the strides of a dense tensor that is not contiguous, such as channels_last; otherwise None.

    The memory layout selects the kernels, and so the rounding.
    """
    contiguous, strides = torch.empty(tensor.shape, device="meta").stride(), list(tensor.stride())
    return strides if tensor.stride() != contiguous and _extent(tensor, strides) == tensor.numel() else None


def _extent(tensor: Tensor, strides: list[int]) -> int:
    """Number of elements from the first to the last of a tensor with these strides."""
    return 1 + sum((size - 1) * step for size, step in zip(tensor.shape, strides, strict=True))


def _write_weights(path: Path, tensors: dict[str, Tensor]) -> str:
    """Write a safetensors file atomically and return its digest."""
    with atomic_path(path) as partial:
        try:
            save_file({key: t.detach().cpu().contiguous().clone() for key, t in tensors.items()}, partial)
        except safetensors.SafetensorError as error:  # such as a full disk
            raise OSError(f"{path} cannot be written: {error}") from error
        return file_digest(partial)


def _current_weights(folder: Path) -> str | None:
    """Return the name of the weights file of the ensemble in a folder, if there is one."""
    try:
        return _read_index(folder)["weights"]["file"]
    except (OSError, ValueError):
        return None


def _remove_old_weights(folder: Path, current: str, previous: str | None) -> None:
    """Remove the previous weights, and files of saves that were killed more than an hour ago."""
    clear_partials(folder)
    for path in folder.iterdir():
        if path.name != current and _WEIGHTS.fullmatch(path.name):
            with contextlib.suppress(FileNotFoundError):  # another save may have removed it
                if path.name == previous or time.time() - path.stat().st_mtime > 3600:
                    path.unlink()


def weights_digest(folder: Path) -> str:
    """SHA-256 of the weights of a saved ensemble, after verifying them."""
    index = _read_index(folder)
    path, digest = folder / index["weights"]["file"], index["weights"]["sha256"]
    if not path.exists() or file_digest(path) != digest:
        if _read_index(folder) != index:  # another save has just replaced it
            return weights_digest(folder)
        raise _modified(path)
    return digest


def _read_index(folder: Path) -> _Index:
    """Read and verify the index of a saved folder."""
    path = folder / _INDEX
    if not path.exists():
        raise FileNotFoundError(f"{folder} has no saved ensemble: it has no {_INDEX}.")
    value = read_json(path, max_depth=500)  # of nested modules
    if not isinstance(value, dict) or value.get("format") != _FORMAT:
        raise ValueError(f"{path} was not written by featureflock.save.")
    if value.get("version") != _VERSION:
        raise ValueError(f"{path} has format {value.get('version')}; this version of featureflock reads {_VERSION}.")
    if value.pop("sha256", None) != json_digest(value):
        raise ValueError(f"{path} was modified after saving: its digest does not match its content.")
    index: _Index = check_json(value, str(path), _Index)
    if not _WEIGHTS.fullmatch(index["weights"]["file"]):
        raise ValueError(f"{path} was modified after saving: it names no weights file.")
    return index


def _read(folder: Path) -> tuple[_Index, dict[str, Tensor]]:
    """Read and verify the index and the tensors of a saved folder."""
    index = _read_index(folder)
    path = folder / index["weights"]["file"]
    data = b""
    with contextlib.suppress(FileNotFoundError):
        data = read_regular(path, max_bytes=None)
    if not data or once_per_version(path, "bytes", lambda: sha256(data)) != index["weights"]["sha256"]:
        if _read_index(folder) != index:  # another save has just replaced it
            return _read(folder)
        raise _modified(path)
    modified = f"{folder / _INDEX} was modified after saving: it does not fit the weights."
    try:
        tensors = load_tensors(data)
        for key, tensor in tensors.items():
            if (stride := index["tensors"][key]["stride"]) is not None:
                if _extent(tensor, stride) != tensor.numel():
                    raise ValueError(modified)
                tensors[key] = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype).copy_(tensor)
            tensors[key].requires_grad_(index["tensors"][key]["requires_grad"])
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file.") from error
    except (LookupError, TypeError, RuntimeError) as error:
        raise ValueError(modified) from error
    if not {*index["state"].values()} <= {*tensors}:
        raise ValueError(modified)
    return index, tensors


def _modified(path: Path) -> ValueError:
    return ValueError(f"{path} is missing, truncated or modified: its digest is not that in {_INDEX}.")


def _load_weights(into: Ensemble, saved: dict[str, Tensor], folder: Path) -> None:
    current = _named_tensors(into)
    for name in sorted({*current} ^ {*saved}):
        owner = "the ensemble given as into" if name in current else folder
        raise ValueError(f"Only {owner} has a tensor {name}; the two must have the same architecture.")
    for name, tensor in current.items():
        if (saved[name].shape, saved[name].dtype) != (tensor.shape, tensor.dtype):
            in_folder, in_ens = (f"{t.dtype} {tuple(t.shape)}" for t in (saved[name], tensor))
            raise ValueError(f"{name} is {in_folder} in {folder} and {in_ens} in the ensemble given as into.")
    with torch.no_grad():
        for name, tensor in current.items():
            if saved[name].stride() != tensor.stride():
                tensor.data = tensor.new_empty_strided(tensor.shape, saved[name].stride())
            tensor.copy_(saved[name])
