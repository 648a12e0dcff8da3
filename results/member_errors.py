"""Where the members' errors coincide, clean and by corruption, for the runs of two rows with the same seeds.

    python results/member_errors.py runs/repulsion-cifar10 --json results/member_errors_cifar10.json

Reads the cached predictions in the run folders. For each test set: the accuracy of the members and of the ensemble, and
the fraction that all members get wrong with the same class, of the examples that some member gets wrong ("same error").
These errors no ensemble of these members can repair.
"""

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from featureflock.corruptions import CORRUPTIONS
from featureflock.utils.provenance import provenance


def errors(folder: Path, sets: Sequence[str]) -> dict[str, float]:
    """Means over test sets of one run."""
    totals: dict[str, list[float]] = {}
    for name in sets:
        stored = safetensors.torch.load_file(folder / "predictions" / f"{name}.safetensors")
        log_probs, labels = stored["log_probs"], stored["labels"]
        votes = log_probs.argmax(-1)
        wrong = votes != labels
        some = wrong.any(0)
        same = wrong.all(0) & (votes == votes[0]).all(0)
        ensemble = log_probs.logsumexp(0).argmax(-1) == labels
        numbers = {
            "member_accuracy": 1 - wrong.double().mean(),
            "accuracy": ensemble.double().mean(),
            "some_wrong": some.double().mean(),
            "all_wrong": wrong.all(0).double().mean(),
            "same_error": same.double().mean() / some.double().mean().clamp_min(1e-12),
            "disagreement": _disagreement(votes),
        }
        for key, value in numbers.items():
            totals.setdefault(key, []).append(float(value))
    return {key: sum(values) / len(values) for key, values in totals.items()}


def _disagreement(votes: torch.Tensor) -> torch.Tensor:
    n = len(votes)
    return (votes[:, None] != votes[None]).double().mean(-1).sum() / (n * (n - 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, help="folder of the runs")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    groups = {"clean": ["clean"], "corrupted": [f"{name}-{s}" for name in CORRUPTIONS for s in range(1, 6)]}
    groups |= {name: [f"{name}-{s}" for s in range(1, 6)] for name in CORRUPTIONS}
    groups |= {f"severity {s}": [f"{name}-{s}" for name in CORRUPTIONS] for s in range(1, 6)}
    runs: list[dict[str, Any]] = []
    for folder in sorted(path for path in options.runs.iterdir() if (path / "result.json").exists()):
        match = re.fullmatch(r"(.+)-seed(\d+)", folder.name)
        if match is None or not (folder / "predictions" / "zoom_blur-5.safetensors").exists():
            continue
        runs.append({"row": match[1], "seed": int(match[2]), "sets": {k: errors(folder, v) for k, v in groups.items()}})
        for name in ("clean", "corrupted"):
            print(folder.name, name, {key: round(value, 4) for key, value in runs[-1]["sets"][name].items()})
    if options.json:
        options.json.write_text(json.dumps({"runs": runs, "provenance": provenance()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
