"""Peak memory of training: feature-WGD relative to Deep Ensembles, and `low_memory` relative to one member.

Relative to Deep Ensembles: the peak resident set of a process that trains WRN-10-2 × 10 for three steps. The rest is
about a single step:

Members are residual networks with batch normalisation on 32×32 images, batches of 64, with a shared linear head after a
ParticleLayer; SGD with momentum. Every case runs in a fresh process and trains two steps first, so that gradients and
momenta exist. Then the peak of one more step is measured on top of what exists before it: parameters, gradients
(zeroed, not released), momenta and the batch do not count; activations and temporary tensors do. The resident set is
measured in the third step and tensor allocations in the fourth (harness.py).

    target     low_memory with n = 20: at most 1.5 × the peak of one sequential member, and at most 1.35 × the time

Time: the two execution modes take turns on one ensemble; reported is the median of the ratio of their processor times
in one thread. All members but the last are computed a second time. With f and b the times of a forward and a backward
pass of the members, and s the rest of the step, low memory cannot take less than

    1 + (1 − 1/n) f / (f + b + s)

of the time: 1.32 for n = 20 if a backward pass takes as long as two forward passes, but 1.38 if it takes as long as
1.5. This limit is measured too, in the same rounds.

    python benchmarks/memory.py [--quick] [--json results/benchmark_memory.json]
"""

import argparse
import resource
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from harness import MB, cpu_seconds, in_fresh_process, peak_allocated, peak_resident, progress, row, write_json
from torch import Tensor, nn
from torch.nn import functional as F

import featureflock as ff
from featureflock.cpu_kernels.malloc import reuse_freed_memory
from featureflock.ensemble.execution import Execution
from featureflock.methods import DeepEnsembles, FeatureWGD, Method
from featureflock.models import WideResNetConfig

SEED = 0
CLASSES = 10
LIMIT = 1.5
"""Target for the peak memory of n members in low memory, relative to one member."""


@dataclass(frozen=True)
class Configuration:
    members: int = 20
    width: int = 24
    blocks: int = 3
    """Per stage; the three stages have width, 2 width and 4 width channels."""
    batch: int = 64


class Block(nn.Module):
    """Two 3×3 convolutions with batch normalisation, and a shortcut around them."""

    def __init__(self, c_in: int, c_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(c_in, c_out, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(c_out), nn.BatchNorm2d(c_out)
        self.shortcut = nn.Identity() if c_in == c_out else nn.Conv2d(c_in, c_out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="6 members of a small network")
    parser.add_argument("--rounds", type=int, default=3, help="number of timed rounds")
    parser.add_argument("--json", type=Path, help="JSON file to write the results to")
    args = parser.parse_args()
    results = _measure("quick" if args.quick else "full", args.rounds)
    write_json(args.json, {"seeds": [SEED], "threads": 1, "rounds": args.rounds, "limit": LIMIT} | results)


def measure(scale: str) -> list[dict[str, Any]]:
    """Rows for the table of bench.py."""
    quick = scale == "quick"
    measured = _measure(scale, {"quick": 1, "usual": 3, "full": 5}[scale])
    n, last = measured["configuration"]["members"], measured["rows"][-1]
    peaks = [last[f"{kind}_multiple"] for kind in ("allocated", "resident") if last[f"{kind}_multiple"] is not None]
    ratio = [measured["feature_wgd_over_deep_ensembles"]]
    return [
        row("peak memory of training, feature-WGD relative to Deep Ensembles", ratio, "≤ 1.05"),
        row(
            f"low_memory, n = {n}: peak memory of a step relative to one member",
            [max(peaks)],
            "" if quick else f"≤ {LIMIT}",
        ),
        row(f"low_memory, n = {n}: time relative to sequential", measured["time_low_memory_over_sequential"], "≤ 1.35"),
        row(f"low_memory, n = {n}: time of one more forward pass of all but one member", measured["time_limit"]),
    ]


def _measure(scale: str, rounds: int) -> dict[str, Any]:
    network, members = (WideResNetConfig(10, 1), 2) if scale == "quick" else (WideResNetConfig(10, 2), 10)
    progress("  feature-WGD and Deep Ensembles")
    peaks = [in_fresh_process(_peak_of_training, m, network, members) for m in (FeatureWGD(), DeepEnsembles())]
    print(f"Peak resident memory, feature-WGD relative to Deep Ensembles: {peaks[0] / peaks[1]:.3f}\n")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {"feature_wgd_over_deep_ensembles": peaks[0] / peaks[1], **_low_memory(scale, rounds)}
    finally:
        torch.set_num_threads(threads)


def _peak_of_training(method: Method, network: WideResNetConfig, members: int) -> int:
    """Peak resident set of this process in bytes, after three training steps."""
    made = network.extractor((3, 32, 32))
    ens = method.build(
        lambda: network.extractor((3, 32, 32)), lambda: network.head(made, CLASSES), members=members, seed=SEED
    )
    optimizer = torch.optim.SGD(ens.parameters(), lr=0.01, momentum=0.9)
    x, y = torch.randn(128, 3, 32, 32), torch.randint(CLASSES, (128,))
    for _ in range(3):
        optimizer.zero_grad()
        method.loss(ens, x, y).loss.backward()
        optimizer.step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


CONFIGURATIONS = {
    "quick": Configuration(6, 8, 1, 16),
    "usual": Configuration(width=16, blocks=1),
    "full": Configuration(),
}


def _low_memory(scale: str, rounds: int) -> dict[str, Any]:
    configuration = CONFIGURATIONS[scale]
    progress("  low_memory")
    print(f"{configuration}\n\n   n  run         parameters etc.   allocated          resident")
    n = configuration.members
    cases: list[tuple[int, Execution]] = [(1, "sequential"), (n, "sequential"), (n, "low_memory")]
    if scale == "full":
        cases.insert(1, (1, "low_memory"))
    rows: list[dict[str, Any]] = []
    for n, execution in cases:
        measured = in_fresh_process(_memory, configuration, n, execution)
        rows.append(measured)
        text = f"{n:4}  {execution:10} {measured['persistent_bytes'] / MB:14.1f} MB"
        for kind in ("allocated", "resident"):
            peak, one = measured[f"{kind}_bytes"], rows[0][f"{kind}_bytes"]
            measured[f"{kind}_multiple"] = None if peak is None else peak / one
            text += "   –" if peak is None else f"   {peak / MB:7.1f} MB {peak / one:5.2f}×"
        print(text, flush=True)
    worst = max(rows[-1][f"{kind}_multiple"] or 0.0 for kind in ("allocated", "resident"))
    print(f"\nPeak memory of n = {configuration.members} in low memory: {worst:.2f}× one member; target ≤ {LIMIT}×.")
    ratios, limits = _time_ratios(configuration, rounds)
    spread = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f} in {rounds} rounds)"
    print(f"Time of a step with n = {configuration.members}, low_memory relative to sequential: {spread}.")
    print(f"With the time of one more forward pass of all members but one: {median(limits):.2f}.")
    times = {"time_low_memory_over_sequential": ratios, "time_limit": limits}
    return {"configuration": asdict(configuration), "rows": rows, **times}


def _memory(configuration: Configuration, n: int, execution: Execution) -> dict[str, Any]:
    torch.set_num_threads(1)
    ensemble, step = _training(configuration, n, execution)
    step()
    step()
    persistent = sum(2 * t.nbytes for t in ensemble.parameters()) + sum(
        t.nbytes for t in ensemble.state_dict().values()
    )
    return {
        "n": n,
        "execution": execution,
        "persistent_bytes": persistent,  # parameters, gradients, momenta, running statistics
        "resident_bytes": peak_resident(step),
        "allocated_bytes": peak_allocated(step),
    }


def _time_ratios(configuration: Configuration, rounds: int) -> tuple[list[float], list[float]]:
    """Time of low memory relative to sequential in each round, and its limit."""
    ensemble, step = _training(configuration, configuration.members, "sequential")
    x = torch.randn(configuration.batch, 3, 32, 32)
    reuse_freed_memory()  # as in training

    @torch.no_grad()
    def forward() -> None:
        for extractor in ensemble.extractors[:-1]:
            extractor(x)

    executions: tuple[Execution, Execution] = "sequential", "low_memory"
    ratios, limits = [], []
    for _ in range(rounds + 1):
        seconds = {}
        for execution in executions:
            ensemble.execution = execution
            seconds[execution] = cpu_seconds(step)
        ratios.append(seconds["low_memory"] / seconds["sequential"])
        limits.append(1 + cpu_seconds(forward) / seconds["sequential"])
    return ratios[1:], limits[1:]  # the first warms up


def _training(configuration: Configuration, n: int, execution: Execution) -> tuple[ff.Ensemble, Callable[[], None]]:
    """An ensemble, and a function that trains it for one step."""
    torch.manual_seed(SEED)
    layer = ff.ParticleLayer(rank=min(5, n))
    head = nn.Linear(4 * configuration.width, CLASSES)
    ensemble = ff.Ensemble([_extractor(configuration) for _ in range(n)], head, layer, execution=execution)
    optimizer = torch.optim.SGD(ensemble.parameters(), lr=0.01, momentum=0.9)
    x, y = torch.randn(configuration.batch, 3, 32, 32), torch.randint(CLASSES, (configuration.batch,))

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        F.cross_entropy(ensemble(x).flatten(0, 1), y.repeat(n)).backward()
        optimizer.step()

    return ensemble, step


def _extractor(configuration: Configuration) -> nn.Module:
    width = configuration.width
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    for stage in range(3):
        for k in range(configuration.blocks):
            down = stage > 0 and k == 0
            layers.append(Block((width << stage) >> down, width << stage, stride=1 + down))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


if __name__ == "__main__":
    main()
