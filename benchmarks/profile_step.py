"""Where the time of a training step goes: WRN-16-4, batch 128, one member, one thread, by torch.profiler.

plain           eager, default memory format
featureflock    as in training: channels_last, compiled, freed memory retained

python benchmarks/profile_step.py [--quick] [--json results/bench_profile.json]
"""

import argparse
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import in_fresh_process, write_json
from torch.profiler import ProfilerActivity, profile

from featureflock.cpu_kernels.malloc import reuse_freed_memory
from featureflock.methods import DeepEnsembles
from featureflock.models import WideResNetConfig
from featureflock.training import ComputeConfig, Recipe
from featureflock.training.compute import resolve_compute
from featureflock.training.state import initial_state

SEED, BATCH = 0, 128
KINDS: dict[str, Callable[[str], bool]] = {
    "convolutions, forward": lambda name: name in ("aten::mkldnn_convolution", "aten::convolution_overrideable"),
    "convolutions, backward, PyTorch": lambda name: name == "aten::convolution_backward",
    "convolutions and their input gradients, Winograd": lambda name: name == "featureflock::winograd",
    "weight gradients, C kernel": lambda name: name == "featureflock::weight_gradient",
    "BatchNorm, ReLU, additions": lambda name: (
        name.startswith("## Call Compiled")
        or any(part in name for part in ("batch_norm", "relu", "threshold", "aten::add", "aten::mean", "aten::div"))
    ),
    "optimiser": lambda name: "sgd" in name or "foreach" in name,
    "everything else": lambda name: True,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smallest network, not compiled")
    parser.add_argument("--json", type=Path, help="JSON file to write the results to")
    args = parser.parse_args()
    network = WideResNetConfig(10, 1) if args.quick else WideResNetConfig(16, 4)
    sides = {
        "plain": in_fresh_process(_profile, network, False, False),
        "featureflock": in_fresh_process(_profile, network, True, not args.quick),
    }
    rows = [{"kind": kind, **{side: milliseconds[kind] for side, milliseconds in sides.items()}} for kind in KINDS]
    print(table(rows))
    write_json(args.json, {"seeds": [SEED], "batch": BATCH, "threads": 1, "rows": rows})


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown table of the results."""
    lines = ["| | plain, ms | fraction | featureflock, ms | fraction |", "|---|---:|---:|---:|---:|"]
    sides = ("plain", "featureflock")
    totals = {side: sum(row[side] for row in rows) for side in sides}
    for row in [*rows, {"kind": "a step of one member", **totals}]:
        cells = [f"{row[side]:,.0f} | {100 * row[side] / totals[side]:.0f} %" for side in sides]
        lines.append(f"| {row['kind']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _profile(network: WideResNetConfig, ours: bool, compile: bool) -> dict[str, float]:
    torch.set_num_threads(1)
    method, made = DeepEnsembles(), network.extractor((3, 32, 32))
    ens = method.build(lambda: network.extractor((3, 32, 32)), lambda: network.head(made, 10), members=1, seed=SEED)
    compute = ComputeConfig(
        channels_last="on" if ours else "off", compile="on" if compile else "off", execution="sequential"
    )
    resolved = resolve_compute(compute, "float32", ens, lambda: 0.0)
    state = initial_state(Recipe(method=method), resolved.prepare(ens))
    x, y = resolved.inputs(torch.randn(BATCH, 3, 32, 32)), torch.randint(10, (BATCH,))

    def step() -> None:
        state.optimisers[0].zero_grad()
        method.loss(ens, x, y).loss.backward()
        state.optimisers[0].step()

    if ours:
        reuse_freed_memory()
    for _ in range(3):
        step()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(3):
            step()
    milliseconds: dict[str, float] = defaultdict(float)
    for event in profiler.key_averages():
        kind = next(kind for kind, fits in KINDS.items() if fits(event.key))
        milliseconds[kind] += event.self_cpu_time_total / 1e3 / 3
    return {kind: milliseconds[kind] for kind in KINDS}


if __name__ == "__main__":
    main()
