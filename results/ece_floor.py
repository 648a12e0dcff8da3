"""How low can ECE be on these test sets? That of predictions which are calibrated perfectly, beside the measured one.

    python results/ece_floor.py runs --json results/ece_floor_fashion_mlp.json

Reads the cached predictions of finished runs. The averaged probabilities, after temperature scaling, are taken for the
truth: labels are drawn from them, so that the same predictions are calibrated by construction, and ECE is computed as
in the evaluation, by test-time cross-validation. What is left is due to the finite number of examples alone.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from featureflock.corruptions import CORRUPTIONS, SEVERITIES
from featureflock.evaluation.calibration import calibrated, fit_temperature, tempered
from featureflock.training.run_folder import RunFolder
from featureflock.utils.provenance import provenance

DRAWS = {"clean": 20, "corrupted": 2}
"""Drawn labels of each test set."""


def measured_and_floor(file: Path, draws: int, generator: torch.Generator) -> tuple[float, list[float]]:
    """ECE of cached predictions after temperature scaling, and with labels drawn from them."""
    stored = safetensors.torch.load_file(file)
    members, labels = stored["log_probs"].double(), stored["labels"]
    averaged = members.logsumexp(0) - math.log(len(members))
    perfect = tempered(averaged, fit_temperature(averaged, labels))
    floors = []
    for _ in range(draws):
        drawn = torch.multinomial(perfect.exp(), 1, generator=generator).squeeze(1)
        floors.append(calibrated(perfect, drawn).scores.ece)
    return calibrated(averaged, labels).scores.ece, floors


def floor_of_run(folder: Path) -> dict[str, Any]:
    """ECE and its floor on the clean test set, and their means over the corrupted ones (cECE)."""
    generator = torch.Generator().manual_seed(0)
    sets = {"clean": ["clean"], "corrupted": [f"{name}-{severity}" for name in CORRUPTIONS for severity in SEVERITIES]}
    result: dict[str, Any] = {}
    for key, names in sets.items():
        files = [folder / "predictions" / f"{name}.safetensors" for name in names]
        found = [measured_and_floor(file, DRAWS[key], generator) for file in files]
        measured = sum(ece for ece, _ in found) / len(found)
        floors = torch.tensor([floor for _, floor in found], dtype=torch.float64).mean(0)
        result[key] = {"ece": measured, "floor": floors.mean().item(), "sd": floors.std().item()}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, help="folder of the runs")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    runs = []
    for folder in sorted(options.runs.iterdir()):
        run = RunFolder(folder)
        if run.is_finished:
            recipe = json.loads((folder / "recipe.json").read_text())
            runs.append({"folder": folder.name, "seed": recipe["seed"], **floor_of_run(folder)})
            print(json.dumps(runs[-1]))
    if options.json:
        options.json.write_text(json.dumps({"draws": DRAWS, "runs": runs, "provenance": provenance()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
