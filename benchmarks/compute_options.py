"""Time of a training step with each compute option: memory format, compilation, precision.

Feature-WGD with wide residual networks on 32×32 images, batches of 128, all threads. The combinations take turns, each
with its own ensemble. Reported is the median over rounds of the time relative to the plain combination (default memory
format, eager, float32) in the same round. The extra time of the first step is what a run must save before compilation
pays off.

    python benchmarks/compute_options.py [--quick] [--json results/benchmark_engine.json]
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from harness import seconds, write_json

from featureflock.methods import FeatureWGD
from featureflock.models import WideResNetConfig, linear_head
from featureflock.training.compute import ResolvedCompute

SEED = 0
MEMBERS = 2
BATCH = 128
OPTIONS = {
    "plain": ("float32", False, False),
    "channels_last": ("float32", True, False),
    "compiled": ("float32", False, True),
    "channels_last, compiled": ("float32", True, True),
    "channels_last, bfloat16": ("bfloat16", True, False),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smallest network, one round")
    parser.add_argument("--rounds", type=int, default=5, help="number of timed rounds")
    parser.add_argument("--json", type=Path, help="JSON file to write the results to")
    args = parser.parse_args()
    networks = (
        [WideResNetConfig(10, 1)]
        if args.quick
        else [WideResNetConfig(10, 1), WideResNetConfig(16, 1), WideResNetConfig(16, 4)]
    )
    names = ["plain", "channels_last"] if args.quick else [name for name in OPTIONS if "bfloat16" not in name]
    rounds = 1 if args.quick else args.rounds
    rows = [row for network in networks for row in _compare(network, names, rounds)]
    if not args.quick:  # smallest network only: very slow on processors without bfloat16
        rows += _compare(networks[0], ["plain", "channels_last, bfloat16"], rounds)
    about = {"seeds": [SEED], "members": MEMBERS, "batch": BATCH, "rounds": rounds, "threads": torch.get_num_threads()}
    write_json(args.json, about | {"rows": rows})


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown table of the results."""
    lines = ["| network | options | time relative to plain | extra seconds of the first step |", "|---|---|---:|---:|"]
    for row in rows:
        ratios = row["over_plain_by_round"]
        spread = f"{row['over_plain']:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        lines.append(f"| {row['network']} | {row['options']} | {spread} | {row['first_step_extra_seconds']:.0f} |")
    return "\n".join(lines)


def _compare(network: WideResNetConfig, names: list[str], rounds: int) -> list[dict[str, Any]]:
    print(f"WRN-{network.depth}-{network.width}, {MEMBERS} members, batch {BATCH}")
    steps, first = {}, {}
    for name in names:
        steps[name] = _training(network, name)
        first[name] = seconds(steps[name])
    taken: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            taken[name].append(seconds(steps[name]))
    rows = []
    for name in names:
        ratios = [a / b for a, b in zip(taken[name], taken["plain"], strict=True)]
        compiling = first[name] - median(taken[name])
        rows.append(
            {
                "network": f"WRN-{network.depth}-{network.width}",
                "options": name,
                "seconds_a_member": median(taken[name]) / MEMBERS,
                "over_plain": median(ratios),
                "over_plain_by_round": ratios,
                "first_step_extra_seconds": compiling,
            }
        )
        spread = f"({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"  {name:24} {median(ratios):5.2f} {spread:16} × plain; first step {compiling:5.1f} s longer")
    return rows


def _training(network: WideResNetConfig, name: str) -> Callable[[], None]:
    precision, channels_last, compiled = OPTIONS[name]
    compute = ResolvedCompute("cpu", precision, channels_last, compiled, "sequential", torch.get_num_threads())
    method = FeatureWGD()
    ens = compute.prepare(
        method.build(
            lambda: network.extractor((3, 32, 32)),
            lambda: linear_head(64 * network.width, 10),
            members=MEMBERS,
            seed=SEED,
        )
    )
    optimiser = torch.optim.SGD(ens.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4, fused=True)
    torch.manual_seed(SEED)
    x, y = compute.inputs(torch.randn(BATCH, 3, 32, 32)), torch.randint(10, (BATCH,))

    def step() -> None:
        optimiser.zero_grad()
        with compute.computing(full_batch=True):
            loss = method.loss(ens, x, y).loss
        loss.backward()
        optimiser.step()

    return step


if __name__ == "__main__":
    main()
