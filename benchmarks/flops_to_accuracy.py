"""FLOPs that finished runs of `featureflock train` needed to reach an accuracy.

    FLOPs = 3 · F · (examples seen, over all epochs) · members

F, the FLOPs of one forward pass of a member on one example, is counted (two per multiply-add in matrix products and
convolutions); a backward pass takes twice as many. The numbers do not depend on a machine. "FLOPs to A %" is what was
spent when the test accuracy of the ensemble was first measured at A % or more: after an epoch if the run measured it
then (`--test-every 1`), else at its end.

    python benchmarks/flops_to_accuracy.py RUN [RUN …] [--at 90] [--json results/to_accuracy.json]
    python benchmarks/flops_to_accuracy.py --quick
"""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from harness import write_json

from featureflock.ensemble.ensemble import Ensemble
from featureflock.evaluation.runs import read_run
from featureflock.models import CNNConfig
from featureflock.training import RECIPES, ComputeConfig, train
from featureflock.training.build import forward_flops


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, help="folders of finished runs")
    parser.add_argument("--at", type=float, default=90.0, help="target test accuracy in %%")
    parser.add_argument("--quick", action="store_true", help="train and compare two short runs on digits")
    parser.add_argument("--json", type=Path, help="JSON file to write the results to")
    args = parser.parse_args()
    if not args.runs and not args.quick:
        parser.error("give folders of finished runs, or --quick")
    with tempfile.TemporaryDirectory() as folder:
        runs = [*args.runs, *(_quick_runs(Path(folder)) if args.quick else [])]
        rows = [_row(run, args.at) for run in runs]
    print(table(rows))
    write_json(args.json, {"at": args.at, "rows": rows})


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown table of the results."""
    at = rows[0]["at"]
    heads = [
        "run",
        "members",
        "epochs",
        "FLOPs",
        "test accuracy, %",
        "member accuracy, %",
        f"FLOPs to {at:g} %",
        "hours",
    ]
    lines = [f"| {' | '.join(heads)} |", f"|---|{'---:|' * (len(heads) - 1)}"]
    for row in rows:
        reached = "not reached" if row["flop_to"] is None else f"{row['flop_to']:.2e}"
        accuracies = f"{row['accuracy']:.2f} | {row['member_accuracy']:.2f}"
        counts = f"{row['members']} | {row['epochs']} | {row['flop']:.2e}"
        lines.append(f"| {row['run']} | {counts} | {accuracies} | {reached} | {row['seconds'] / 3600:.2f} |")
    return "\n".join(lines)


def _row(folder: Path, at: float) -> dict[str, Any]:
    run = read_run(folder)
    ens, result = run.load_ensemble(), run.result
    each = member_flop(ens, run.inputs.shape)
    seen, spent = 0, []
    for line in run.curves:
        seen += round(line["images_per_second"] * line["seconds"])
        spent.append(3 * each * seen * len(ens))
    known = [line["test"]["accuracy"] if "test" in line else None for line in run.curves]
    known[-1] = result["test"]["accuracy"]
    reached = (flop for flop, accuracy in zip(spent, known, strict=True) if accuracy is not None and accuracy >= at)
    return {
        "run": folder.name,
        "recipe": run.recipe,
        "environment": run.environment,
        "members": len(ens),
        "epochs": len(run.curves),
        "forward_flop": each,
        "flop": spent[-1],
        "accuracy": result["test"]["accuracy"],
        "member_accuracy": mean(result["test"]["member_accuracy"]),
        "nll": result["test"]["nll"],
        "at": at,
        "flop_to": next(reached, None),
        "flop_by_epoch": spent,
        "accuracy_by_epoch": known,
        "seconds": result["seconds"],
    }


def member_flop(ens: Ensemble, shape: tuple[int, ...]) -> int:
    """FLOPs of one member's forward pass on one example, with its head."""
    head = ens.head[0] if isinstance(ens.head, torch.nn.ModuleList) else ens.head
    return forward_flops(torch.nn.Sequential(ens.extractors[0], head), torch.zeros(1, *shape))


def _quick_runs(folder: Path) -> list[Path]:
    steps = replace(
        RECIPES["digits-cnn"].recipe, model=CNNConfig(8), members=2, subset=200, epochs=2, decay_epochs=(1,)
    )
    cycle = replace(steps, decay_epochs=(), schedule="one-cycle")
    for name, recipe in (("steps", steps), ("one-cycle", cycle)):
        train(recipe, folder / name, compute=ComputeConfig(test_every=1))
    return [folder / "steps", folder / "one-cycle"]


if __name__ == "__main__":
    main()
