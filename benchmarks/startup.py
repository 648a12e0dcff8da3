"""Start-up time: seconds of `featureflock --help` and similar commands, and what the import adds to PyTorch's.

Each time is that of a fresh process from start to end, and all take turns. What the import adds is the median of the
differences between `import torch, featureflock` and `import torch` in the same round, and the difference of the minimum
times, which other programs disturb least. Names are imported on first use: the last row is the cost for a program that
uses all of them. Targets: at most 0.3 s for the help and 0.2 s for the import.

    python benchmarks/startup.py [--quick] [--json results/benchmark_startup.json]
"""

import argparse
import subprocess
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from harness import row, seconds, write_json

TORCH = "import torch"
PROGRAMS = {
    "python": ["-c", "pass"],
    "featureflock --help": ["-m", "featureflock", "--help"],
    "featureflock --version": ["-m", "featureflock", "--version"],
    "featureflock trian": ["-m", "featureflock", "trian"],
    "featureflock train --help": ["-m", "featureflock", "train", "--help"],
    "featureflock evaluate --help": ["-m", "featureflock", "evaluate", "--help"],
    TORCH: ["-c", TORCH],
    "import torch, featureflock": ["-c", "import torch, featureflock"],
    "import torch; from featureflock import *": ["-c", "import torch; from featureflock import *"],
}
LIMITS = {
    "featureflock --help": 0.3,
    "featureflock --version": 0.3,
    "featureflock trian": 0.3,
    f"import torch, featureflock, on top of {TORCH}": 0.2,
}
LIMITED = tuple(name for name in PROGRAMS if name in LIMITS)
ADDED = ("import torch, featureflock", "import torch; from featureflock import *")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--rounds", type=int, default=10, help="number of timed rounds")
    parser.add_argument("--json", type=Path, help="JSON file to write the results to")
    args = parser.parse_args()
    rounds = 1 if args.quick else args.rounds
    rows = _rows(rounds)
    print(table(rows))
    write_json(args.json, {"rounds": rounds, "rows": rows})


def measure(scale: str) -> list[dict[str, Any]]:
    """Rows for the table of bench.py."""
    rows = _rows({"quick": 1, "usual": 5, "full": 20}[scale], [*LIMITED, TORCH, ADDED[0]])
    return [row(r["name"], r["seconds"], f"≤ {r['limit']}", "s") for r in rows if r["limit"] is not None]


def _rows(rounds: int, names: Iterable[str] = PROGRAMS) -> list[dict[str, Any]]:
    taken: dict[str, list[float]] = {name: [] for name in names}
    for name in taken:  # warm-up: files are cached and compiled
        _run(PROGRAMS[name])
    for _ in range(rounds):
        for name in taken:
            taken[name].append(seconds(partial(_run, PROGRAMS[name])))
    rows = [_row(name, median(times), min(times), times) for name, times in taken.items()]
    for name in [name for name in ADDED if name in taken]:
        added = [both - alone for both, alone in zip(taken[name], taken[TORCH], strict=True)]
        minimum = min(taken[name]) - min(taken[TORCH])
        rows.append(_row(f"{name}, on top of {TORCH}", median(added), minimum, added))
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown table of the results."""
    lines = ["| | seconds, median | minimum | target |", "|---|---:|---:|---:|"]
    for r in rows:
        target = "" if r["limit"] is None else f"at most {r['limit']:g}"
        lines.append(f"| {r['name']} | {r['median']:.3f} | {r['minimum']:.3f} | {target} |")
    return "\n".join(lines)


def _row(name: str, middle: float, minimum: float, taken: list[float]) -> dict[str, Any]:
    return {"name": name, "median": middle, "minimum": minimum, "limit": LIMITS.get(name), "seconds": taken}


def _run(arguments: list[str]) -> None:
    run = subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if "Traceback" in run.stderr:
        raise RuntimeError(run.stderr)


if __name__ == "__main__":
    main()
