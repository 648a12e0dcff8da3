"""The memory that training needs at least, computed before anything is allocated.

    n networks    3 · n · parameters           weights, gradients and momentum
    a batch       n · activations(B)           what the forward pass stores for the backward pass

A network on PyTorch's meta device has sizes and no values, so both are exact for any size. What else is needed, such as
copies and workspaces, is not counted: a run is refused only if it cannot work.
"""

import contextlib
import os

import torch
from torch import Tensor, nn

from featureflock.data import Splits
from featureflock.models import MODELS, ModelConfig
from featureflock.training.compute import ComputeConfig, resolve_device
from featureflock.training.recipe import Recipe

_CGROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Files with the memory limit of a container."""


def check_memory(recipe: Recipe, splits: Splits, compute: ComputeConfig, processes: tuple[int, int] = (1, 1)) -> None:
    """Raise ValueError if training cannot fit into the memory of the device.

    `processes` are the sizes of the mesh, members × data. User-defined networks that are not registered, or that cannot
    be computed without values, are not checked.
    """
    if not _is_registered(recipe.model):
        return
    device = resolve_device(compute.device)
    limit = device_memory(device)
    if limit is None:
        return
    shape, members = splits.train.shape, recipe.size
    try:
        with torch.random.fork_rng([]), torch.device("meta"):
            network = recipe.model.extractor(shape)
            if recipe.model.share(network, members) is not None:
                members = 1
    except ValueError:  # sizes that do not fit
        raise
    except Exception:
        return
    members = -(-members // processes[0])
    parameters = sum(p.numel() * p.element_size() for p in network.parameters())
    needed = (3 if recipe.momentum else 2) * members * parameters
    what = f"{members} network{'s' * (members > 1)} of {sum(p.numel() for p in network.parameters()):,} parameters"
    if needed > limit:
        text = f"{what} need at least {_size(needed)} for weights, gradients and momentum, and {device} has"
        raise ValueError(f"{text} {_size(limit)}; choose a smaller network or fewer members.")
    batch = -(-min(recipe.batch, len(splits.train)) // processes[1])
    activations = _activations(network, torch.empty(batch, *shape, device="meta"))
    graphs = 1 if compute.execution == "low_memory" else members
    half = recipe.precision == "bfloat16" or (recipe.precision == "auto" and device.type != "cpu")
    stored = graphs * activations // (2 if half else 1)
    if stored > limit:
        text = f"A batch of {batch:,} examples needs at least {_size(stored)} for the activations of {graphs} network"
        text += f"{'s' * (graphs > 1)}, and {device} has"
        raise ValueError(f"{text} {_size(limit)}; choose a smaller --batch.")


def device_memory(device: torch.device) -> int | None:
    """Memory of a device in bytes, which a container may limit; None if it is unknown."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    if device.type != "cpu":
        return None
    limits = []
    with contextlib.suppress(ValueError, OSError, AttributeError):  # not POSIX
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for path in _CGROUPS:
        with contextlib.suppress(ValueError, OSError), open(path) as file:  # ValueError for "max"
            limits.append(int(file.read()))
    return min(limits, default=None)


def _is_registered(model: ModelConfig) -> bool:
    """Whether a network, and the one that it wraps, is registered. Others may not expect to be built once more."""
    base = getattr(model, "base", None)
    return type(model) in MODELS.values() and (not isinstance(base, ModelConfig) or _is_registered(base))


def _activations(network: nn.Module, x: Tensor) -> int:
    """Bytes that a forward pass on the meta device stores for the backward pass; 0 if it is not known."""
    stored: dict[int, Tensor] = {}
    own = {p.untyped_storage()._cdata for p in network.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        stored[tensor.untyped_storage()._cdata] = tensor
        return tensor

    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            network.train()(x)
    except Exception:  # such as a branch that depends on values
        return 0
    return sum(tensor.untyped_storage().nbytes() for key, tensor in stored.items() if key not in own)


def _size(count: int) -> str:
    return f"{count / 1e9:,.0f} GB" if count >= 1e10 else f"{count / 1e9:,.1f} GB"
