"""torch.compile as an optimisation that never makes a computation fail.

    problem = compiler_problem("cpu")            # a compiler that is missing, broken or hangs (cpu_kernels/compiler.py)
    compile_modules(modules, report=log)         # faults that appear later, when a network is compiled

A graph is compiled, with its backward pass, before any of it is computed. If that fails, the graph is computed as it
is, the modules become ordinary ones again, and the reason is reported once. So the state of training is that of an
ordinary step.
"""

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx, nn

from featureflock.cpu_kernels.compiler import set_cache_folders
from featureflock.cpu_kernels.replace_convolutions import replace_convolutions

Report = Callable[[str], None]


def warn(text: str) -> None:
    """Report with a Python warning."""
    warnings.warn(text, stacklevel=2)


def compile_modules(
    modules: Sequence[nn.Module],
    *,
    options: dict[str, Any] | None = None,
    kernels: bool = False,
    dynamic: bool | None = None,
    required: bool = False,
    report: Report = warn,
) -> None:
    """Compile modules at their first call; modules with the same code use the same graphs.

    Args:
        modules: the modules, which are changed in place.
        options: options of torch.compile's default backend.
        kernels: use our kernels for the convolutions that they support.
        dynamic: as in torch.compile.
        required: raise ValueError if they cannot be compiled, instead of computing without compilation.
        report: called with a sentence if they cannot be compiled.
    """
    _use_private_folders()
    compilation = _Compilation(modules, options or {}, kernels, required, report)
    compiled = torch.compile(_call, backend=compilation, dynamic=dynamic)
    for module in modules:
        module._compiled_call_impl = _Call(compilation, module, compiled)


def gain_from_compilation(modules: Sequence[nn.Module], device: torch.device) -> bool:
    """False for networks of linear layers on a CPU: five MLPs 512-512 take 30 ms per step if compiled, 25 ms if not."""
    of_linear = all(
        type(m) is nn.Linear or not [*m.parameters(recurse=False)] for module in modules for m in module.modules()
    )
    return device.type != "cpu" or not of_linear


def _call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The call of any module. `Module.compile` would skip those of PyTorch itself, such as nn.Sequential."""
    return module._call_impl(*args, **kwargs)


class _Compilation:
    """The backend of torch.compile for some modules, and whether it has failed."""

    def __init__(
        self, modules: Sequence[nn.Module], options: dict[str, Any], kernels: bool, required: bool, report: Report
    ) -> None:
        self.modules, self.options, self.kernels = modules, options, kernels
        self.required, self.report = required, report
        self.failure: str | None = None

    def __eq__(self, other: object) -> bool:
        """Equal backends share their graphs, also between runs. PyTorch compiles few graphs of a module."""
        if not isinstance(other, _Compilation) or self.failure is not None or other.failure is not None:
            return False
        return (self.options, self.kernels) == (other.options, other.kernels)

    def __hash__(self) -> int:
        return hash(tuple(self.options))

    def __call__(self, graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        from torch._inductor.compile_fx import compile_fx

        try:
            if self.kernels:
                replace_convolutions(graph.graph)
                graph.recompile()
            with _backward_at_once():
                return compile_fx(graph, inputs, config_patches=self.options)  # type: ignore[return-value]
        except Exception as error:
            self.fail(error)
            return graph.forward

    def fail(self, error: Exception) -> None:
        """Make the modules ordinary ones again and report why, once."""
        for module in self.modules:
            module._compiled_call_impl = None
        if self.failure is None:
            self.failure = f"torch.compile failed: {_reason(error)}"
            if not self.required:
                self.report(f"Computing without compilation, because {self.failure}.")


class _Call:
    """The call of a compiled module."""

    def __init__(self, compilation: _Compilation, module: nn.Module, compiled: Any) -> None:
        self.compilation, self.module, self.compiled = compilation, module, compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from torch._dynamo.exc import TorchDynamoException

        try:
            out = self.compiled(self.module, *args, **kwargs)
        except TorchDynamoException as error:  # the module could not be traced, and nothing was computed
            self.compilation.fail(error)
            out = None if self.compilation.required else self.module(*args, **kwargs)
        if self.compilation.required and self.compilation.failure is not None:
            raise ValueError(f"{self.compilation.failure}. Use compile=False, or --compile off.")
        return out


def _use_private_folders() -> None:
    """Let torch.compile store nothing in its predictable folder among temporary files."""
    folder = set_cache_folders()
    from torch._inductor import codecache

    # Precompiled headers, which are compiled into all code, ignore TORCHINDUCTOR_CACHE_DIR.
    if hasattr(codecache, "_HEADER_DIR"):
        codecache._HEADER_DIR = str(folder / "precompiled_headers")
        codecache._HEADER_LOCK_DIR = str(folder / "precompiled_headers" / "locks")
    elif hasattr(torch._inductor.config, "cpp_cache_precompile_headers"):
        torch._inductor.config.cpp_cache_precompile_headers = False


def _backward_at_once() -> Any:
    """Compile the backward pass with the forward pass, where its failure can still be mended."""
    from torch._functorch import config

    if hasattr(config, "force_non_lazy_backward_lowering"):
        return config.patch(force_non_lazy_backward_lowering=True)
    return nullcontext()


def _reason(error: BaseException) -> str:
    """The first line that says what went wrong, from the innermost error."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    chosen = next((line for line in lines if "error:" in line), lines[0] if lines else "")
    return f"{type(error).__name__}: {chosen[:300].rstrip('.:')}" if chosen else type(error).__name__
