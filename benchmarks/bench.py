"""Run all benchmarks of speed and memory and print one table of measurements and targets.

Every number is a ratio of two things measured in turns in the same run, except for waiting times, which are in seconds.
The docstring of each benchmark describes how it measures.

    python benchmarks/bench.py [--full] [--only NAME …] [--json FILE]
"""

import argparse
import os
import time
from pathlib import Path
from typing import Any

import corruptions
import evaluation
import memory
import overhead
import peer_speed
import prediction
import processes
import scaling
import sharing
import startup
import throughput
import torch
import vectorised
from harness import progress, table, write_json

PARTS = {
    "overhead": overhead.measure,
    "throughput": throughput.measure,
    "processes": processes.measure,
    "scaling": scaling.measure,
    "memory": memory.measure,
    "vectorised": vectorised.measure,
    "sharing": sharing.measure,
    "prediction": prediction.measure,
    "evaluation": evaluation.measure,
    "corruptions": corruptions.measure,
    "startup": startup.measure,
    "peers": peer_speed.measure,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    scales = parser.add_mutually_exclusive_group()
    scales.add_argument("--quick", action="store_true", help="smoke test: the numbers mean nothing")
    scales.add_argument("--full", action="store_true", help="large networks, many rounds: half an hour or more")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="run only these parts")
    parser.add_argument("--json", type=Path, help="JSON file to write the results to")
    args = parser.parse_args()
    scale = "quick" if args.quick else "full" if args.full else "usual"
    rows: list[dict[str, Any]] = []
    for i, name in enumerate(args.only):
        progress(f"{name}, part {i + 1} of {len(args.only)} …")
        start = time.monotonic()
        load = os.getloadavg()[0]
        measured = PARTS[name](scale)
        rows += [{"part": name, "load_before": load, **row} for row in measured]
        print(f"\n{name}, {time.monotonic() - start:.0f} s\n\n{table(measured)}", flush=True)
        # After each part, so that an interruption loses nothing.
        write_json(args.json, {"seeds": [0], "scale": scale, "threads": torch.get_num_threads(), "rows": rows})
    met = [row["met"] for row in rows if row["met"] is not None]
    print(f"\n{sum(met)} of {len(met)} targets met.")


if __name__ == "__main__":
    main()
