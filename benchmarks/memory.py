"""Peak memory of training n members: more than Deep Ensembles? And low_memory more than one member?

Against Deep Ensembles: the peak resident set of a process that trains WRN-10-2 × 10 for three steps, feature-WGD over
Deep Ensembles. All else is about a single step:

Members are residual networks with batch normalisation on 32×32 images, in batches of 64, and have a shared linear head
behind a ParticleLayer; SGD with momentum. Every configuration has a fresh process and trains for two steps first, so
that gradients and momenta exist. Then the peak of one more step beyond what is there before it: parameters, gradients
(zeroed, not released), momenta and the batch do not count; activations do, and everything temporary. The resident set
is watched in the third step and the allocations of tensors are counted in the fourth (measuring.py).

    wanted     low_memory with n = 20 at most 1.5 times the peak of one member run plainly, in at most 1.4 of the time

Time: the two ways of running take turns on one ensemble, and the median is taken of the ratio of their times. These are
the processor's time in one thread, so that other work on the machine disturbs them little. Computing the features again
costs one more forward pass: 4/3 if a backward pass takes as long as two.

    python benchmarks/memory.py [--quick] [--json results/benchmark_memory.json]
"""

import argparse
import resource
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from measuring import MB, in_fresh_process, peak_allocated, peak_resident, progress, row, write_json
from torch import Tensor, nn
from torch.nn import functional as F

import featureflock as ff
from featureflock.cpu_kernels.malloc import retained_memory
from featureflock.ensemble.execution import Execution
from featureflock.methods import DeepEnsembles, FeatureWGD, Method
from featureflock.models import WideResNetConfig

SEED = 0
CLASSES = 10
LIMIT = 1.5
"""Peak memory wanted for n members in low memory, in peaks of one member."""


@dataclass(frozen=True)
class RunGroup:
    members: int = 20
    width: int = 24
    blocks: int = 3
    """In each of three stages, of width, 2 width and 4 width channels."""
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
    parser.add_argument("--rounds", type=int, default=3, help="how often each time is taken")
    parser.add_argument("--json", type=Path, help="where to write the results")
    args = parser.parse_args()
    results = _measure("quick" if args.quick else "full", args.rounds)
    write_json(args.json, {"seeds": [SEED], "threads": 1, "rounds": args.rounds, "limit": LIMIT} | results)


def measure(scale: str) -> list[dict[str, Any]]:
    """The rows of the common table."""
    quick = scale == "quick"
    found = _measure(scale, {"quick": 1, "usual": 3, "full": 5}[scale])
    n, last = found["setting"]["members"], found["rows"][-1]
    peaks = [last[f"{kind}_multiple"] for kind in ("allocated", "resident") if last[f"{kind}_multiple"] is not None]
    over = [found["feature_wgd_over_deep_ensembles"]]
    return [
        row("peak memory of training, feature-WGD over Deep Ensembles", over, "≤ 1.05"),
        row(f"low_memory, n = {n}: peak of a step over one member's", [max(peaks)], "" if quick else f"≤ {LIMIT}"),
        row(f"low_memory, n = {n}: time over sequential", found["time_low_memory_over_sequential"], "≤ 1.4"),
    ]


def _measure(scale: str, rounds: int) -> dict[str, Any]:
    network, members = (WideResNetConfig(10, 1), 2) if scale == "quick" else (WideResNetConfig(10, 2), 10)
    progress("  against Deep Ensembles")
    peaks = [in_fresh_process(_whole_training, m, network, members) for m in (FeatureWGD(), DeepEnsembles())]
    print(f"Peak resident memory, feature-WGD over Deep Ensembles: {peaks[0] / peaks[1]:.3f}\n")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {"feature_wgd_over_deep_ensembles": peaks[0] / peaks[1], **_low_memory(scale, rounds)}
    finally:
        torch.set_num_threads(threads)


def _whole_training(method: Method, network: WideResNetConfig, members: int) -> int:
    """The peak resident set in bytes of this process, after three steps."""
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


SETTINGS = {"quick": RunGroup(6, 8, 1, 16), "usual": RunGroup(width=16, blocks=1), "full": RunGroup()}


def _low_memory(scale: str, rounds: int) -> dict[str, Any]:
    setting = SETTINGS[scale]
    progress("  low_memory")
    print(f"{setting}\n\n   n  run         parameters etc.   allocated          resident")
    n = setting.members
    cases: list[tuple[int, Execution]] = [(1, "sequential"), (n, "sequential"), (n, "low_memory")]
    if scale == "full":
        cases.insert(1, (1, "low_memory"))
    rows: list[dict[str, Any]] = []
    for n, execution in cases:
        found = in_fresh_process(_memory, setting, n, execution)
        rows.append(found)
        text = f"{n:4}  {execution:10} {found['kept_bytes'] / MB:14.1f} MB"
        for kind in ("allocated", "resident"):
            peak, one = found[f"{kind}_bytes"], rows[0][f"{kind}_bytes"]
            found[f"{kind}_multiple"] = None if peak is None else peak / one
            text += "   –" if peak is None else f"   {peak / MB:7.1f} MB {peak / one:5.2f}×"
        print(text, flush=True)
    worst = max(rows[-1][f"{kind}_multiple"] or 0.0 for kind in ("allocated", "resident"))
    print(f"\nPeak memory of n = {setting.members} in low memory: {worst:.2f}× one member; wanted ≤ {LIMIT}×.")
    ratios = _time_ratios(setting, rounds)
    spread = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f} in {rounds} rounds)"
    print(f"Time of a step with n = {setting.members}, low_memory over sequential: {spread}.")
    return {"setting": asdict(setting), "rows": rows, "time_low_memory_over_sequential": ratios}


def _memory(setting: RunGroup, n: int, execution: Execution) -> dict[str, Any]:
    torch.set_num_threads(1)
    ensemble, step = _training(setting, n, execution)
    step()
    step()
    kept = sum(2 * t.nbytes for t in ensemble.parameters()) + sum(t.nbytes for t in ensemble.state_dict().values())
    return {
        "n": n,
        "execution": execution,
        "kept_bytes": kept,  # parameters, gradients, momenta, running statistics
        "resident_bytes": peak_resident(step),
        "allocated_bytes": peak_allocated(step),
    }


def _time_ratios(setting: RunGroup, rounds: int) -> list[float]:
    ensemble, step = _training(setting, setting.members, "sequential")
    executions: tuple[Execution, Execution] = "sequential", "low_memory"
    seconds = []
    with retained_memory():  # as in training
        for execution in (rounds + 1) * executions:
            ensemble.execution = execution
            start = time.process_time()
            step()
            seconds.append(time.process_time() - start)
    return [low / plain for plain, low in zip(seconds[2::2], seconds[3::2], strict=True)]  # the first two warm up


def _training(setting: RunGroup, n: int, execution: Execution) -> tuple[ff.Ensemble, Callable[[], None]]:
    """An ensemble and a function that trains it for one step."""
    torch.manual_seed(SEED)
    layer = ff.ParticleLayer(rank=min(5, n))
    head = nn.Linear(4 * setting.width, CLASSES)
    ensemble = ff.Ensemble([_extractor(setting) for _ in range(n)], head, layer, execution=execution)
    optimizer = torch.optim.SGD(ensemble.parameters(), lr=0.01, momentum=0.9)
    x, y = torch.randn(setting.batch, 3, 32, 32), torch.randint(CLASSES, (setting.batch,))

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        F.cross_entropy(ensemble(x).flatten(0, 1), y.repeat(n)).backward()
        optimizer.step()

    return ensemble, step


def _extractor(setting: RunGroup) -> nn.Module:
    width = setting.width
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    for stage in range(3):
        for k in range(setting.blocks):
            down = stage > 0 and k == 0
            layers.append(Block((width << stage) >> down, width << stage, stride=1 + down))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


if __name__ == "__main__":
    main()
