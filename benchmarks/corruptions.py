"""Pictures a second of each corruption, in one process with one thread, by processor time.

Pictures are soft ones of CIFAR's size, in batches of 500. The severities take turns; the speed is that of the median
round over all five severities. The last line is the sum for a set of 750,000 pictures: `featureflock data corrupt
cifar10` shares that among the cores, and says how long it really took.

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
from measuring import row, seconds, write_json

from featureflock.corruptions import CORRUPTIONS, SEVERITIES, corrupt, frost_source
from featureflock.corruptions.images import Bytes, ImageRandom
from featureflock.corruptions.plasma import plasma

SEED = 0
SET = 10_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few pictures, one round")
    parser.add_argument("--rounds", type=int, default=5, help="how often each time is taken")
    parser.add_argument("--json", type=Path, help="where to write the results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    cv2.setNumThreads(1)
    rounds, count = (1, 20) if args.quick else (args.rounds, 500)
    x = _pictures(count)
    rows = [_measure(name, x, rounds) for name in CORRUPTIONS]
    total = sum(SET * len(SEVERITIES) / row["pictures_a_second"] for row in rows)
    print(f"all 15 × 5 × {SET:,}: {total:.0f} s of one core; {os.cpu_count()} cores here")
    about = {"seeds": [SEED], "rounds": rounds, "batch": count, "threads": 1, "frost": frost_source()}
    write_json(args.json, about | {"rows": rows, "core_seconds_of_a_set": total})


def measure(scale: str) -> list[dict[str, Any]]:
    """The row of the common table; with "full" the whole set is made, else it is reckoned from a few pictures."""
    if scale == "full":
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "featureflock", "data", "corrupt", "cifar10", "--out", folder]
            taken = seconds(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL))
        return [row(f"making all 15 × 5 × {SET:,} corrupted pictures of CIFAR-10", [taken / 60], "≤ 15", "minutes")]
    x = _pictures(10 if scale == "quick" else 100)
    total = sum(SET * len(SEVERITIES) / _measure(name, x, 1)["pictures_a_second"] for name in CORRUPTIONS)
    what = f"making all 15 × 5 × {SET:,} corrupted pictures, reckoned"
    return [row(what, [total / 60 / (os.cpu_count() or 1)], "≤ 15", "minutes")]


def table(rows: list[dict[str, Any]]) -> str:
    """The results in Markdown."""
    lines = ["| corruption | pictures a second | slowest severity |", "|---|---:|---:|"]
    for r in rows:
        lines.append(f"| {r['corruption']} | {r['pictures_a_second']:,.0f} | {min(r['by_severity']):,.0f} |")
    return "\n".join(lines)


def _measure(name: str, x: Bytes, rounds: int) -> dict[str, Any]:
    index = np.arange(len(x))
    for severity in SEVERITIES:  # tables are made at the first use
        corrupt(x[:1], name, severity, seed=SEED, indices=index[:1])
    seconds: dict[int, list[float]] = {severity: [] for severity in SEVERITIES}
    for _ in range(rounds):
        for severity in SEVERITIES:
            start = time.process_time()
            corrupt(x, name, severity, seed=SEED, indices=index)
            seconds[severity].append(time.process_time() - start)
    by_round = [len(x) * len(SEVERITIES) / sum(times) for times in zip(*seconds.values(), strict=True)]
    by_severity = [len(x) / median(times) for times in seconds.values()]
    print(f"{name:18} {median(by_round):9,.0f} a second ({min(by_round):,.0f} to {max(by_round):,.0f})", flush=True)
    return {
        "corruption": name,
        "pictures_a_second": median(by_round),
        "by_round": by_round,
        "by_severity": by_severity,
    }


def _pictures(count: int) -> Bytes:
    maps = plasma(ImageRandom(np.arange(3 * count), (SEED,)), 32, 1.8).reshape(count, 3, 32, 32)
    return (255 * maps).astype(np.uint8).transpose(0, 2, 3, 1).copy()


if __name__ == "__main__":
    main()
