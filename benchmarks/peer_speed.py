"""Speed and memory of one Deep Ensemble trained with other libraries and with this one, side by side.

    make bench PEERS=1                                              # or, where the extra `peers` is installed:
    python benchmarks/peer_speed.py [--quick] [--full] [--json results/peer_speed.json]

The networks, data, epochs, batch size and optimiser are the same, so are their initial distributions. Every library
uses its own training loop and its defaults:

    featureflock      `train` with `Recipe(method=DeepEnsembles())`; prediction with `ens.for_inference()`
    TorchEnsemble     `VotingClassifier.fit`, without saving models; prediction with `predict`
    TorchUncertainty  `deep_ensembles`, `ClassificationRoutine` and `TUTrainer`, without logger and checkpoints

A round trains each library once, in a fresh process with an empty compilation cache, in random order. Ratios are taken
within a round: ours relative to theirs.

    time per step         from the end of the first epoch to the end of the last, per batch of all members
    time to accuracy      from the import of the library, after that of PyTorch, to the end of the first epoch after
                          which the averaged prediction reaches the accuracy on the test set
    peak memory           peak resident set of the process
    prediction            examples per second, after a first call that may compile

Evaluations after each epoch are not timed. Clock: the wall clock, or with --cpu the CPU time of the process and its
children, for a machine that is busy (set OMP_NUM_THREADS=1 too).
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from harness import MB, progress, ratios, row, table, write_json
from peer_training import JOBS, OURS, PEERS, TRAIN
from peers import is_installed

ENVIRONMENT = Path(__file__).parents[1] / ".venv" / "peers" / "bin" / "python"
"""Interpreter of the environment that `make bench PEERS=1` creates."""


def compare(job: str, accuracy: float, rounds: list[dict[str, Any]], clock: str = "wall") -> list[dict[str, Any]]:
    """Rows of a table: ours relative to each other library, from rounds of summaries by library.

    The target of a time or of memory is at most 1, of prediction at least 1. A time to accuracy is left out if a run
    has not reached it.
    """
    measures: tuple[tuple[str, str, Callable[[dict[str, Any]], float | None]], ...] = (
        ("time per step", "≤ 1", lambda run: run[clock]["step"]),
        (f"time to {accuracy:g} % accuracy", "≤ 1", lambda run: run[clock]["to_accuracy"]),
        ("peak memory", "≤ 1", lambda run: run["peak_memory"] / MB),
        ("examples predicted per second", "≥ 1", lambda run: run[clock]["examples_per_second"]),
    )
    rows = []
    for peer in [library for library in rounds[0] if library != OURS]:
        for name, target, value in measures:
            ours, theirs = ([value(each[library]) for each in rounds] for library in (OURS, peer))
            reached = [(a, b) for a, b in zip(ours, theirs, strict=True) if a is not None and b is not None]
            if reached:
                by_round = ratios([a for a, _ in reached], [b for _, b in reached])
                title = f"{job}: {name}, relative to {peer}"
                rows.append(row(title, by_round, target, ours=ours, theirs=theirs))
        accuracies = [{library: each[library]["accuracies"] for library in (OURS, peer)} for each in rounds]
        rows[-1]["accuracies_by_epoch"] = accuracies
    return rows


def measure(scale: str, rounds: int | None = None, clock: str = "wall") -> list[dict[str, Any]]:
    """Rows for the table of bench.py; none, with a message, if no other library is installed."""
    python = str(ENVIRONMENT) if ENVIRONMENT.exists() else sys.executable
    rows, libraries = [], list(TRAIN)
    for name, job in JOBS[scale].items():
        results: list[dict[str, Any]] = []
        for i in range(rounds or {"quick": 1, "usual": 3, "full": 7}[scale]):
            found = {}
            for library in random.Random(i).sample(libraries, len(libraries)):
                progress(f"  {name}, round {i + 1}: {library}")
                found[library] = _in_its_process(python, library, scale, name)
                if "missing" in found[library]:
                    progress(f"  left out: {library}, because {found.pop(library)['missing']}")
                    libraries.remove(library)
            results.append({library: found[library] for library in TRAIN if library in found})
        if libraries == [OURS]:
            progress("  no other library is installed; run make bench PEERS=1")
            return []
        rows += compare(name, job.accuracy, results, clock)
    return rows


def _in_its_process(python: str, library: str, scale: str, job: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as cache:
        run = subprocess.run(
            [python, Path(__file__).with_name("peer_training.py"), library, scale, job],
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "PYTHONWARNINGS": "ignore"},
            capture_output=True,
            text=True,
        )
    if run.returncode:
        raise RuntimeError(f"{library}, {job} failed:\n{run.stderr}")
    summary: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    scales = parser.add_mutually_exclusive_group()
    scales.add_argument("--quick", action="store_true", help="smoke test: the numbers mean nothing")
    scales.add_argument("--full", action="store_true", help="a large network too, more rounds")
    parser.add_argument("--rounds", type=int, help="number of rounds")
    parser.add_argument("--cpu", action="store_true", help="compare CPU time, on a machine that is busy")
    parser.add_argument("--json", type=Path, help="JSON file to write the results to")
    args = parser.parse_args()
    scale, clock = "quick" if args.quick else "full" if args.full else "usual", "cpu" if args.cpu else "wall"
    load = os.getloadavg()[0]
    rows = measure(scale, args.rounds, clock)
    print(table(rows))
    versions = {name: version(name) for name in PEERS.values() if is_installed(name)}
    content = {"seeds": [0], "scale": scale, "clock": clock, "load_before": load, "threads": torch.get_num_threads()}
    write_json(args.json, {**content, "peers": versions, "rows": rows})


if __name__ == "__main__":
    main()
