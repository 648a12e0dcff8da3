"""All that is promised about speed and memory, in one table: what was measured, what is wanted.

Everything is a ratio of two things that took turns in this run, except what a person waits for, in seconds. The single
benchmarks say how each is measured.

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
import prediction
import scaling
import sharing_threads
import startup
import throughput
import torch
from measuring import progress, table, write_json

PARTS = {
    "overhead": overhead.measure,
    "throughput": throughput.measure,
    "threads": sharing_threads.measure,
    "scaling": scaling.measure,
    "memory": memory.measure,
    "prediction": prediction.measure,
    "evaluation": evaluation.measure,
    "corruptions": corruptions.measure,
    "startup": startup.measure,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    scales = parser.add_mutually_exclusive_group()
    scales.add_argument("--quick", action="store_true", help="whether it runs at all: figures mean nothing")
    scales.add_argument("--full", action="store_true", help="large settings, many rounds: half an hour or more")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="some parts alone")
    parser.add_argument("--json", type=Path, help="where to write the results")
    args = parser.parse_args()
    scale = "quick" if args.quick else "full" if args.full else "usual"
    rows: list[dict[str, Any]] = []
    for i, name in enumerate(args.only):
        progress(f"{name}, part {i + 1} of {len(args.only)} …")
        start = time.monotonic()
        load = os.getloadavg()[0]
        found = PARTS[name](scale)
        rows += [{"part": name, "load_before": load, **row} for row in found]
        print(f"\n{name}, {time.monotonic() - start:.0f} s\n\n{table(found)}", flush=True)
        # After each part, so that an interruption loses none.
        write_json(args.json, {"seeds": [0], "scale": scale, "threads": torch.get_num_threads(), "rows": rows})
    met = [row["met"] for row in rows if row["met"] is not None]
    print(f"\n{sum(met)} of {len(met)} limits met.")


if __name__ == "__main__":
    main()
