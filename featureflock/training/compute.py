"""How a recipe is computed on a machine: device, memory format, compilation, precision.

None of it changes the mathematics, but each changes the rounding, so what was chosen is kept with the run. "auto"
stands for what measured fastest (docs/decisions.md).
"""

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from featureflock.distributed.env import launched_by_torchrun
from featureflock.distributed.mesh import MeshShape
from featureflock.ensemble.ensemble import Ensemble
from featureflock.ensemble.execution import Execution
from featureflock.ensemble.inference import can_compile
from featureflock.training.recipe import Precision

Switch = Literal["auto", "on", "off"]


@dataclass(frozen=True)
class ComputeConfig:
    """Switches of the machinery."""

    device: str = "auto"
    """cpu, cuda, cuda:1, mps, …; auto: a CUDA GPU if there is one, else the CPU."""
    channels_last: Switch = "auto"
    """Keep pictures as pixels with all their channels, which convolutions like; auto: where there are convolutions."""
    compile: Switch = "auto"
    """Compile the members with torch.compile, one graph for all; auto: if that pays for itself within the run."""
    execution: Execution = "sequential"
    """Members one after another; all in one call; or with the activations of one member alive at a time."""
    mesh: MeshShape = MeshShape()
    """Processes that share the work; see docs/scaling.md."""
    checkpoint_minutes: float = 5.0
    """Minutes between checkpoints within an epoch; there is always one at the end of each."""
    test_every: int = 0
    """Also measure on the test set after every so many epochs; 0 for the end of training only."""

    def __post_init__(self) -> None:
        if not self.checkpoint_minutes >= 0 or self.test_every < 0:
            raise ValueError(
                f"checkpoint_minutes and test_every must be at least 0; got {self.checkpoint_minutes} and "
                f"{self.test_every}."
            )


@dataclass(frozen=True)
class ResolvedCompute:
    """ComputeConfig with every `auto` resolved."""

    device: str
    precision: str
    channels_last: bool
    compile: bool
    execution: Execution
    threads: int

    def __str__(self) -> str:
        parts = [self.device, self.precision]
        parts += ["channels_last"] * self.channels_last + ["compiled"] * self.compile
        parts += [self.execution.replace("_", " ")] * (self.execution != "sequential")
        return ", ".join(parts + [f"{self.threads} thread{'s' * (self.threads > 1)}"] * (self.device == "cpu"))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def prepare(self, ens: Ensemble) -> Ensemble:
        """Move an ensemble to the device, in the memory format, and compile its members."""
        ens.to(self.device)
        if self.channels_last:
            ens.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        ens.execution = self.execution
        if self.compile:
            # Members have the same code, so the graph of the first serves all.
            options = _compiler_options(self)
            for extractor in ens.extractors:
                extractor.compile(dynamic=False, options=options)
        return ens

    def inputs(self, x: Tensor) -> Tensor:
        return x.contiguous(memory_format=torch.channels_last) if self.channels_last and x.ndim == 4 else x

    @contextmanager
    def computing(self, full_batch: bool) -> Iterator[None]:
        """Autocast where it is wanted. The odd batch at the end of an epoch is not worth a graph of its own."""
        eager = torch.compiler.set_stance("force_eager") if self.compile and not full_batch else nullcontext()
        with eager, torch.autocast(torch.device(self.device).type, torch.bfloat16, self.precision == "bfloat16"):
            yield


def resolve_compute(
    compute: ComputeConfig, precision: Precision, ens: Ensemble, work: Callable[[], float]
) -> ResolvedCompute:
    """Decide what is "auto"; `work` tells how many multiplications the whole run takes, roughly."""
    name = compute.device if compute.device != "auto" else _best_device()
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"The device {name} cannot be used here: {str(error).splitlines()[0]}") from error
    if precision == "auto":
        precision = "bfloat16" if device.type == "cuda" and torch.cuda.is_bf16_supported(False) else "float32"
    convolutions = any(isinstance(m, torch.nn.Conv2d) for m in ens.modules())
    if compute.compile == "on" and compute.execution != "sequential":
        raise ValueError(f"--compile on and --execution {compute.execution} do not go together; leave one of them out.")
    if compute.compile == "on" and device.type == "cpu" and not can_compile(device):
        raise ValueError("--compile on needs a C++ compiler (g++ or clang++), and there is none; leave it out.")
    compilable = compute.execution == "sequential" and can_compile(device)
    return ResolvedCompute(
        device=str(device),
        precision=precision,
        channels_last=compute.channels_last == "on" or (compute.channels_last == "auto" and convolutions),
        compile=compute.compile == "on"
        or (compute.compile == "auto" and compilable and work() > _WORTH_COMPILING.get(device.type, math.inf)),
        execution=compute.execution,
        threads=torch.get_num_threads(),
    )


def _best_device() -> str:
    if not torch.cuda.is_available():
        return "cpu"
    return f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if launched_by_torchrun() else "cuda"


_WORTH_COMPILING = {"cpu": 1e13, "cuda": 1e15}
"""Multiplications from which on compiling pays for itself: it takes the better part of a minute, and saves a CPU a
quarter of its time (docs/speed.md). The number for CUDA is a guess that nothing was measured for."""


def _compiler_options(setup: ResolvedCompute) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if setup.device == "cpu" and setup.channels_last:
        from featureflock import cpu_kernels as native  # imports the compiler, which takes a second

        if native.is_worthwhile():
            options["post_grad_custom_pre_pass"] = native.faster_convolutions
    return options
