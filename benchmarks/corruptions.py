"""Images per second of each corruption, in one process with one thread, by processor time.

Smooth random images of CIFAR's size, in batches of 500. The severities take turns; the speed is the median over rounds
of the speed over all five severities. The last line is the sum for a set of 750,000 images: `featureflock data corrupt
cifar10` divides that among the cores, and reports how long it took.

    python benchmarks/corruptions.py [--quick] [--json results/benchmark_corruptions.json]
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import cv2
import numpy as np
import torch
from harness import row, seconds, write_json

from featureflock.corruptions import CORRUPTIONS, SEVERITIES, corrupt, frost_source
from featureflock.corruptions.images import Bytes, ImageRandom, plasma

SEED = 0
SET = 10_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few images, one round")
    parser.add_argument("--rounds", type=int, default=5, help="number of timed rounds")
    parser.add_argument("--json", type=Path, help="JSON file to write the results to")
    args = parser.parse_args()
    torch.set_num_threads(1)
    cv2.setNumThreads(1)
    rounds, count = (1, 20) if args.quick else (args.rounds, 500)
    x = _images(count)
    rows = [_measure(name, x, rounds) for name in CORRUPTIONS]
    total = sum(SET * len(SEVERITIES) / row["images_per_second"] for row in rows)
    print(f"all 15 × 5 × {SET:,}: {total:.0f} s on one core; this machine has {os.cpu_count()}")
    about = {"seeds": [SEED], "rounds": rounds, "batch": count, "threads": 1, "frost": frost_source()}
    write_json(args.json, about | {"rows": rows, "core_seconds_per_set": total})


def measure(scale: str) -> list[dict[str, Any]]:
    """Row for the table of bench.py: "full" generates the whole set, else the time is estimated from a few images."""
    if scale == "full":
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "featureflock", "data", "corrupt", "cifar10", "--out", folder]
            taken = seconds(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL))
        return [row(f"generating all 15 × 5 × {SET:,} corrupted images of CIFAR-10", [taken / 60], "≤ 15", "minutes")]
    x = _images(10 if scale == "quick" else 100)
    total = sum(SET * len(SEVERITIES) / _measure(name, x, 1)["images_per_second"] for name in CORRUPTIONS)
    name = f"generating all 15 × 5 × {SET:,} corrupted images, estimated"
    return [row(name, [total / 60 / (os.cpu_count() or 1)], "≤ 15", "minutes")]


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown table of the results."""
    lines = ["| corruption | images per second | slowest severity |", "|---|---:|---:|"]
    for r in rows:
        lines.append(f"| {r['corruption']} | {r['images_per_second']:,.0f} | {min(r['by_severity']):,.0f} |")
    return "\n".join(lines)


def _measure(name: str, x: Bytes, rounds: int) -> dict[str, Any]:
    index = np.arange(len(x))
    for severity in SEVERITIES:  # lookup tables are built on first use
        corrupt(x[:1], name, severity, seed=SEED, indices=index[:1])
    seconds: dict[int, list[float]] = {severity: [] for severity in SEVERITIES}
    for _ in range(rounds):
        for severity in SEVERITIES:
            start = time.process_time()
            corrupt(x, name, severity, seed=SEED, indices=index)
            seconds[severity].append(time.process_time() - start)
    by_round = [len(x) * len(SEVERITIES) / sum(times) for times in zip(*seconds.values(), strict=True)]
    by_severity = [len(x) / median(times) for times in seconds.values()]
    print(f"{name:18} {median(by_round):9,.0f} per second ({min(by_round):,.0f} to {max(by_round):,.0f})", flush=True)
    return {
        "corruption": name,
        "images_per_second": median(by_round),
        "by_round": by_round,
        "by_severity": by_severity,
    }


def _images(count: int) -> Bytes:
    maps = plasma(ImageRandom(np.arange(3 * count), (SEED,)), 32, 1.8).reshape(count, 3, 32, 32)
    return (255 * maps).astype(np.uint8).transpose(0, 2, 3, 1).copy()


if __name__ == "__main__":
    main()
