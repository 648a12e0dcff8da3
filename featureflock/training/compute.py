"""How a recipe is computed: device, memory format, compilation, precision, processes.

None of it changes the mathematics, but all of it changes rounding, so the choices are stored with each run. "auto" is
the option that measured fastest (docs/notes/decisions.md).
"""

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from featureflock.cpu_kernels.bfloat16 import FASTER, bfloat16_speedup, has_bfloat16
from featureflock.cpu_kernels.compiler import compiler_problem
from featureflock.cpu_kernels.replace_convolutions import kernels_problem
from featureflock.distributed.env import launched_by_torchrun
from featureflock.distributed.shape import MeshShape
from featureflock.ensemble.compilation import Report, compile_modules, gain_from_compilation, warn
from featureflock.ensemble.ensemble import Ensemble
from featureflock.ensemble.execution import Execution
from featureflock.training.recipe import Precision

Switch = Literal["auto", "on", "off"]

_COMPILE_FLOPS = {"cpu": 2e13, "cuda": 2e15}
"""FLOPs above which compilation, most of a minute, saves time (docs/results/speed.md). For CUDA it is a guess."""


@dataclass(frozen=True)
class ComputeConfig:
    """Options that affect speed and rounding only."""

    device: str = "auto"
    """cpu, cuda, cuda:1, mps, …; auto: a CUDA GPU if available, otherwise the CPU."""
    channels_last: Switch = "auto"
    """Store images in the channels_last memory format; auto: if the network has convolutions."""
    compile: Switch = "auto"
    """Compile the members with torch.compile, one graph for all; auto: if the run is long enough to save time, not for
    bfloat16 and MLPs on a CPU, where it is not faster, and not where the compiler does not work."""
    cpu_kernels: Switch = "auto"
    """Compute 3×3 convolutions of compiled members on a CPU with featureflock's own C kernels; auto: where they are
    faster."""
    execution: Execution = "sequential"
    """Compute members one after another, all in one vectorised call, or with one member's activations at a time."""
    mesh: MeshShape = MeshShape()
    """Processes that share the work, started with torchrun (docs/tutorials/many_gpus.md)."""
    checkpoint_minutes: float = 5.0
    """Minutes between checkpoints within an epoch. There is always one at the end of each epoch."""
    test_every: int = 0
    """Number of epochs between evaluations on the test set; 0: only at the end of training."""

    def __post_init__(self) -> None:
        if not self.checkpoint_minutes >= 0 or self.test_every < 0:
            got = f"{self.checkpoint_minutes} and {self.test_every}"
            raise ValueError(f"checkpoint_minutes and test_every must be at least 0; got {got}.")


@dataclass(frozen=True)
class ResolvedCompute:
    """ComputeConfig with every `auto` resolved."""

    device: str
    precision: str
    channels_last: bool
    compile: bool
    execution: Execution
    threads: int
    cpu_kernels: bool = False

    def __str__(self) -> str:
        parts = [self.device, self.precision]
        parts += ["channels_last"] * self.channels_last + ["compiled"] * self.compile
        parts += [self.execution.replace("_", " ")] * (self.execution != "sequential")
        return ", ".join(parts + [f"{self.threads} thread{'s' * (self.threads > 1)}"] * (self.device == "cpu"))

    def prepare(self, ens: Ensemble, *, compile_required: bool = False, report: Report = warn) -> Ensemble:
        """Move an ensemble to the device and memory format, and compile its members.

        If they cannot be compiled, they are computed without, and `report` is called; with `compile_required`, the
        first computation raises ValueError.
        """
        ens.to(self.device)
        if self.channels_last:
            ens.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        ens.execution = self.execution
        if self.compile:
            # Otherwise some gradients are computed from values that were not rounded, as those of a maximum: 0 / 0.
            round_as_eager = self.device == "cpu" and self.precision == "bfloat16"
            compile_modules(
                ens.compiled_modules(),
                options={"emulate_precision_casts": True} if round_as_eager else {},
                kernels=self.cpu_kernels,
                dynamic=False,
                required=compile_required,
                report=report,
            )
        return ens

    def inputs(self, x: Tensor) -> Tensor:
        """Convert inputs to the memory format."""
        return x.contiguous(memory_format=torch.channels_last) if self.channels_last and x.ndim == 4 else x

    @contextmanager
    def computing(self, full_batch: bool) -> Iterator[None]:
        """Context of a forward pass: autocast, and no compilation of another graph for a smaller batch."""
        eager = torch.compiler.set_stance("force_eager") if self.compile and not full_batch else nullcontext()
        with eager, torch.autocast(torch.device(self.device).type, torch.bfloat16, self.precision == "bfloat16"):
            yield


def resolve_device(name: str) -> torch.device:
    """The device of this name; `auto` is resolved."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
        if name == "cuda" and launched_by_torchrun():
            name = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    try:
        device = torch.device(name)
        usable = torch.zeros(1, device=device).device.type != "meta"
    except Exception as error:  # PyTorch raises many kinds
        reason = str(error).splitlines()[0].split(". ")[0].rstrip(".") if str(error) else type(error).__name__
        raise ValueError(f"The device {name} is not available: {reason}.") from error
    if not usable:
        raise ValueError(f"The device {name} stores no values, so nothing can be computed on it; use cpu or cuda.")
    return device


def resolve_precision(
    compute: ComputeConfig, precision: Precision, ens: Ensemble, flops: Callable[[], float], report: Report = warn
) -> Precision:
    """Resolve `auto`: bfloat16 where it is faster, on a GPU or for long training of convolutional networks on a CPU."""
    if precision != "auto":
        return precision
    device = resolve_device(compute.device)
    if device.type == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported(False) else "float32"
    if device.type != "cpu" or not has_bfloat16() or not _has_convolutions(ens) or flops() < _COMPILE_FLOPS["cpu"]:
        return "float32"
    speedup = bfloat16_speedup()
    if speedup < FASTER:
        return "float32"
    report(f"Using bfloat16: convolutions are {speedup:.1f} times as fast as in float32 on this processor.")
    return "bfloat16"


def resolve_compute(
    compute: ComputeConfig,
    precision: Precision,
    ens: Ensemble,
    flops: Callable[[], float],
    report: Report = warn,
) -> ResolvedCompute:
    """Resolve every `auto`. `flops` returns the approximate FLOPs of the run, if the choice depends on it.

    `report` is called with a sentence if a run would be compiled but the compiler does not work.
    """
    device = resolve_device(compute.device)
    precision = resolve_precision(compute, precision, ens, flops, report)
    channels_last = compute.channels_last == "on"
    if compute.channels_last == "auto":
        channels_last = _has_convolutions(ens)
    if compute.compile == "on" and compute.execution != "sequential":
        raise ValueError(f"--compile on does not work with --execution {compute.execution}; leave one of them out.")
    compile = compute.compile == "on"
    slower = device.type == "cpu" and precision == "bfloat16"
    pays = not slower and gain_from_compilation(ens.compiled_modules(), device)
    if compute.compile == "auto" and compute.execution == "sequential" and pays:
        compile = device.type in _COMPILE_FLOPS and flops() > _COMPILE_FLOPS[device.type]
    problem = compiler_problem(device.type) if compile and device.type in ("cpu", "cuda") else None
    if problem is not None and compute.compile == "on":
        raise ValueError(f"--compile on does not work here, because {problem}; leave it out.")
    if problem is not None:
        compile = False
        report(f"Computing without compilation, because {problem}.")
    kernels = compute.cpu_kernels != "off" and device.type == "cpu" and channels_last and compile
    if compute.cpu_kernels == "on" and not kernels:
        raise ValueError("--cpu-kernels on needs --compile on, channels_last and a CPU; leave it out.")
    if kernels and (problem := kernels_problem()) is not None:
        if compute.cpu_kernels == "on":
            raise ValueError(f"--cpu-kernels on does not work here, because {problem}; leave it out.")
        kernels = False
    threads = torch.get_num_threads()
    return ResolvedCompute(str(device), precision, channels_last, compile, compute.execution, threads, kernels)


def _has_convolutions(ens: Ensemble) -> bool:
    return any(isinstance(m, torch.nn.Conv2d) for m in ens.modules())


def faster_processes(compute: ComputeConfig, resolved: ResolvedCompute, members: int) -> int:
    """Number of CPU processes that would train faster than one, or 1.

    It is above 1 for compiled convolutional networks whose members can be divided equally (docs/results/speed.md).
    """
    default = compute.mesh == MeshShape() and not launched_by_torchrun()
    if default and resolved.device == "cpu" and resolved.compile and resolved.channels_last:
        return math.gcd(members, resolved.threads)
    return 1
