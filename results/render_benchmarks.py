"""Markdown tables of benchmarks: the speed that a user asks for, and other libraries."""

import re
from typing import Any

from render import KEYS, current_words, markdown

SPEED = (
    (r"WRN-16-4 × \d+: train, speed-up .*", "training WRN-16-4 in float32, relative to a plain PyTorch loop"),
    (r"WRN-16-4 × \d+, bfloat16: train, speed-up .*", "training WRN-16-4 in bfloat16, relative to that loop"),
    (r"WRN-16-4 × \d+: train, fraction .*", "training WRN-16-4 in float32, relative to the machine's peak"),
    (r"WRN-16-4 × \d+: prediction, speed-up .*", "prediction with `for_inference`, relative to a plain loop"),
    (r"WRN-10-1 × 5: feature-WGD, method only", "feature-WGD's own part of a step, five small CNNs"),
    (r"low_memory, n = 20: peak memory .*", "memory of 20 members with `low_memory`, in members"),
    (r"low_memory, n = 20: time relative .*", "time of a step with `low_memory`, relative to sequential"),
    (r"all metrics of 76 test sets.*", "all metrics of 76 test sets"),
    (r"generating all .* corrupted images.*", "generating 750,000 corrupted images"),
)
"""Row of results/bench.json -> its label on the page about speed."""


def speed(results: dict[str, Any]) -> str:
    """The rows of the benchmarks that a user asks for."""
    rows = []
    for pattern, label in SPEED:
        for stored in results["rows"]:
            row = {KEYS.get(key, key): value for key, value in stored.items()}
            if re.fullmatch(pattern, current_words(row["name"])):
                values = row["by_round"]
                spread = f"{min(values):.3g} to {max(values):.3g}" if len(values) > 1 else ""
                rows.append([label, f"{row['value']:.3g} {row['unit']}", spread])
    machine = results["machine"]
    note = f"Medians, and ranges over rounds. {machine['cores']} cores of an {machine['processor']}, {results['date']}."
    return f"{markdown(['', 'measured', 'range'], rows)}\n\n{note}"


def peer_speed(results: dict[str, Any]) -> str:
    """Ours relative to each other library, median and range over rounds; bold where ours is behind."""
    cells: dict[str, dict[str, str]] = {}
    for row in results["rows"]:
        name, peer = row["name"].split(", relative to ")
        low, high = min(row["by_round"]), max(row["by_round"])
        text = f"{row['value']:.2f} ×" + (f" [{low:.2f}, {high:.2f}]" if len(row["by_round"]) > 1 else "")
        cells.setdefault(name, {})[peer] = text if row["met"] else f"**{text}**"
    peers = list(dict.fromkeys(peer for of in cells.values() for peer in of))
    table = markdown(
        ["featureflock", *(f"relative to {peer}" for peer in peers)],
        [[name, *(of.get(peer, "–") for peer in peers)] for name, of in cells.items()],
    )
    behind = sum(not row["met"] for row in results["rows"])
    rounds, threads = max(len(row["by_round"]) for row in results["rows"]), results["threads"]
    clock = {"wall": "wall clock", "cpu": "CPU time"}[results["clock"]]
    machine = f"{results['machine']['processor']}, {threads} thread{'s' * (threads > 1)}"
    load = f"load {results['load_before']:.1f} before"
    note = f"Behind in {behind} of {len(results['rows'])}, in bold. Rounds: {rounds}; {clock}; {machine}; {load}."
    return f"{table}\n\n{note}"
