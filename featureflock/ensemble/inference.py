"""Optimise ensembles for inference: fold BatchNorm into convolutions, then compile.

In eval mode, BatchNorm is the affine map y = γ (z − μ)/σ + β. If z is the output of a convolution (w, b), then y is the
output of another convolution:

    w' = (γ/σ) w,        b' = β + (γ/σ) (b − μ)
"""

import copy
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from featureflock.cpu_kernels.compiler import compiler_problem
from featureflock.cpu_kernels.replace_convolutions import kernels_problem
from featureflock.ensemble.compilation import compile_modules, gain_from_compilation, warn
from featureflock.ensemble.sharing import SharedMembers

if TYPE_CHECKING:
    from featureflock.ensemble.ensemble import Ensemble

_NORMS = {nn.Conv1d: nn.BatchNorm1d, nn.Conv2d: nn.BatchNorm2d, nn.Conv3d: nn.BatchNorm3d}


def optimised(ens: "Ensemble", compile: bool | None) -> "Ensemble":
    """A copy of an ensemble for prediction; see `Ensemble.for_inference`."""
    with ens.detached_from_mesh():
        ens = copy.deepcopy(ens).eval().requires_grad_(False)
    device = next((p.device for p in ens.parameters()), torch.device("cpu"))
    heads = [fold_batch_norm(head) for head in ens.head] if isinstance(ens.head, nn.ModuleList) else None
    in_one = isinstance(ens.extractors, SharedMembers)
    extractors = ens.extractors if in_one else nn.ModuleList(map(fold_batch_norm, ens.extractors))
    trunk = None if ens.trunk is None else fold_batch_norm(ens.trunk)
    fast = type(ens)(extractors, heads or fold_batch_norm(ens.head), trunk=trunk)
    _share_classes(fast.compiled_modules())
    fast.copy_task(ens)
    fast.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if compile is None and not gain_from_compilation(fast.compiled_modules(), device):
        compile = False
    available = device.type in ("cpu", "cuda")
    problem = compiler_problem(device.type) if available and compile is not False else None
    if problem is not None and compile:
        raise ValueError(f"The ensemble cannot be compiled, because {problem}; use compile=False.")
    if problem is not None:
        warn(f"Computing without compilation, because {problem}.")
    elif available if compile is None else compile:
        kernels = device.type == "cpu" and kernels_problem() is None
        compile_modules(fast.compiled_modules(), kernels=kernels, required=bool(compile))
    return fast.eval()


def fold_batch_norm(module: nn.Module) -> nn.Module:
    """Return a module in eval mode, with every BatchNorm that directly follows a convolution folded into it.

    The result shares the other weights with the input. A module without such a BatchNorm is returned unchanged, and so
    is one that torch.fx cannot trace, for example because its control flow depends on its input.
    """
    try:
        traced = fx.symbolic_trace(module)
    except (fx.proxy.TraceError, TypeError, NotImplementedError, RuntimeError, AttributeError):
        return module
    modules = dict(traced.named_modules())
    calls = [node for node in traced.graph.nodes if node.op == "call_module"]
    times, folded = Counter(node.target for node in calls), False
    for node in calls:
        previous = node.args[0] if node.args else None
        if not isinstance(previous, fx.Node) or previous.op != "call_module" or len(previous.users) > 1:
            continue
        conv, norm = modules[str(previous.target)], modules[str(node.target)]
        once = times[previous.target] == times[node.target] == 1
        if type(norm) is not _NORMS.get(type(conv)) or norm.running_mean is None or not once:
            continue
        modules[str(previous.target)] = fused = fuse_conv_bn_eval(conv, norm)
        traced.set_submodule(str(previous.target), fused)
        node.replace_all_uses_with(previous)
        traced.graph.erase_node(node)
        folded = True
    if not folded:
        return module
    traced.delete_all_unused_submodules()
    traced.recompile()
    return traced


def _share_classes(modules: Sequence[nn.Module]) -> None:
    """Give traced modules with the same code the same class, for which torch.compile makes one graph, not one each."""
    classes: dict[str, type[fx.GraphModule]] = {}
    for module in modules:
        if isinstance(module, fx.GraphModule):
            module.__class__ = classes.setdefault(module.code, type(module))
