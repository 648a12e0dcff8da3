"""Optimise modules for inference: fold BatchNorm into convolutions, then compile.

In eval mode, BatchNorm is the affine map y = γ (z − μ)/σ + β. If z is the output of a convolution (w, b), then y is the
output of another convolution:

    w' = (γ/σ) w,        b' = β + (γ/σ) (b − μ)
"""

import os
import shutil
from collections import Counter

import torch
from torch import fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

_NORMS = {nn.Conv1d: nn.BatchNorm1d, nn.Conv2d: nn.BatchNorm2d, nn.Conv3d: nn.BatchNorm3d}


def fold_batch_norm(module: nn.Module) -> nn.Module:
    """Return a module in eval mode, with every BatchNorm that directly follows a convolution folded into it.

    The result shares the other weights with the input. A module that torch.fx cannot trace, for example because its
    control flow depends on its input, is returned unchanged.
    """
    try:
        traced = fx.symbolic_trace(module)
    except (fx.proxy.TraceError, TypeError, NotImplementedError, RuntimeError, AttributeError):
        return module
    modules = dict(traced.named_modules())
    calls = [node for node in traced.graph.nodes if node.op == "call_module"]
    times = Counter(node.target for node in calls)
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
    traced.delete_all_unused_submodules()
    traced.recompile()
    return traced


def can_compile(device: torch.device) -> bool:
    """Return whether torch.compile can be used: with CUDA, or with a C++ compiler on a CPU."""
    has_compiler = any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "clang++"))
    return device.type == "cuda" or (device.type == "cpu" and has_compiler)
