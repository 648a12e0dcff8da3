"""Time of a training step under each switch of the engine: which combination is the fastest here?

Feature-WGD with members of a wide residual network on 32×32 pictures, in batches of 128, with all threads. The
combinations take turns, each with an ensemble of its own, and the median over the rounds is taken of each one's time
over that of the plain combination (default memory format, eager, float32) in the same round. What the first step takes
beyond a later one is what a run must gain back before compilation pays.

    python benchmarks/engine.py [--quick] [--json results/benchmark_engine.json]
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from measuring import seconds, write_json

from featureflock.methods import FeatureWGD
from featureflock.models import WideResNetConfig, linear_head
from featureflock.training import ResolvedCompute

SEED = 0
MEMBERS = 2
BATCH = 128
SETUPS = {
    "plain": ("float32", False, False),
    "channels_last": ("float32", True, False),
    "compiled": ("float32", False, True),
    "channels_last, compiled": ("float32", True, True),
    "channels_last, bfloat16": ("bfloat16", True, False),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the smallest network, one round")
    parser.add_argument("--rounds", type=int, default=5, help="how often each time is taken")
    parser.add_argument("--json", type=Path, help="where to write the results")
    args = parser.parse_args()
    networks = (
        [WideResNetConfig(10, 1)]
        if args.quick
        else [WideResNetConfig(10, 1), WideResNetConfig(16, 1), WideResNetConfig(16, 4)]
    )
    names = ["plain", "channels_last"] if args.quick else [name for name in SETUPS if "bfloat16" not in name]
    rounds = 1 if args.quick else args.rounds
    rows = [row for network in networks for row in _compare(network, names, rounds)]
    if not args.quick:  # on the smallest network alone: where a processor must imitate it, it takes very long
        rows += _compare(networks[0], ["plain", "channels_last, bfloat16"], rounds)
    about = {"seeds": [SEED], "members": MEMBERS, "batch": BATCH, "rounds": rounds, "threads": torch.get_num_threads()}
    write_json(args.json, about | {"rows": rows})


def table(rows: list[dict[str, Any]]) -> str:
    """The results in Markdown."""
    lines = ["| network | setup | time over plain | extra seconds of the first step |", "|---|---|---:|---:|"]
    for row in rows:
        ratios = row["over_plain_by_round"]
        spread = f"{row['over_plain']:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        lines.append(f"| {row['network']} | {row['setup']} | {spread} | {row['first_step_extra_seconds']:.0f} |")
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
                "setup": name,
                "seconds_a_member": median(taken[name]) / MEMBERS,
                "over_plain": median(ratios),
                "over_plain_by_round": ratios,
                "first_step_extra_seconds": compiling,
            }
        )
        spread = f"({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"  {name:24} {median(ratios):5.2f} {spread:16} of plain; the first step takes {compiling:5.1f} s more")
    return rows


def _training(network: WideResNetConfig, name: str) -> Callable[[], None]:
    precision, channels_last, compiled = SETUPS[name]
    setup = ResolvedCompute("cpu", precision, channels_last, compiled, "sequential", torch.get_num_threads())
    method = FeatureWGD()
    ens = setup.prepare(
        method.build(
            lambda: network.extractor((3, 32, 32)),
            lambda: linear_head(64 * network.width, 10),
            members=MEMBERS,
            seed=SEED,
        )
    )
    optimiser = torch.optim.SGD(ens.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4, fused=True)
    torch.manual_seed(SEED)
    x, y = setup.inputs(torch.randn(BATCH, 3, 32, 32)), torch.randint(10, (BATCH,))

    def step() -> None:
        optimiser.zero_grad()
        with setup.computing(full_batch=True):
            loss = method.loss(ens, x, y).loss
        loss.backward()
        optimiser.step()

    return step


if __name__ == "__main__":
    main()
