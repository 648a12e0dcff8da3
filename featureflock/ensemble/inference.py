"""Modules made ready for prediction alone: BatchNorm folded into convolutions, then compiled.

In eval mode BatchNorm is a fixed straight line y = γ (z − μ)/σ + β, and where z is what a convolution w gives, it is
another convolution:

    w' = (γ/σ) w,        b' = β + (γ/σ) (b − μ)
"""

import os
import shutil
from typing import Any

import torch
from torch import fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

_NORMS = {nn.Conv1d: nn.BatchNorm1d, nn.Conv2d: nn.BatchNorm2d, nn.Conv3d: nn.BatchNorm3d}


def folded(module: nn.Module) -> nn.Module:
    """A module in eval mode without the BatchNorms that follow a convolution and nothing else.

    It shares the other weights. A module that torch.fx cannot follow, such as one whose path depends on its input,
    comes back as it is.
    """
    try:
        traced = fx.symbolic_trace(module)
    except (fx.proxy.TraceError, TypeError, NotImplementedError, RuntimeError, AttributeError):
        return module
    modules = dict(traced.named_modules())
    calls = [node for node in traced.graph.nodes if node.op == "call_module"]
    times = {name: sum(node.target == name for node in calls) for name in {node.target for node in calls}}
    for node in calls:
        before = node.args[0] if node.args else None
        if not isinstance(before, fx.Node) or before.op != "call_module" or len(before.users) > 1:
            continue
        conv, norm = modules[str(before.target)], modules[str(node.target)]
        if type(norm) is not _NORMS.get(type(conv)) or norm.running_mean is None:
            continue
        if times[before.target] > 1 or times[node.target] > 1:  # shared by two places
            continue
        traced.set_submodule(str(before.target), fuse_conv_bn_eval(conv, norm))
        modules[str(before.target)] = traced.get_submodule(str(before.target))
        node.replace_all_uses_with(before)
        traced.graph.erase_node(node)
    traced.delete_all_unused_submodules()
    traced.recompile()
    return traced


def can_compile(device: torch.device) -> bool:
    """Whether torch.compile has what it needs: CUDA, or a C++ compiler for a CPU."""
    found = any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "clang++"))
    return device.type == "cuda" or (device.type == "cpu" and found)


def compiled_for_inference(module: nn.Module) -> nn.Module:
    """The module, which will be compiled for each shape of input when it first comes."""
    from featureflock import cpu_kernels as native  # imports the compiler, which takes a second

    options: dict[str, Any] = {}
    if native.is_worthwhile():
        options["post_grad_custom_pre_pass"] = native.faster_convolutions
    module.compile(options=options)
    return module
