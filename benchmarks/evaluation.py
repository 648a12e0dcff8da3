"""Time of all metrics of an ensemble, computed from its predictions as `featureflock evaluate` does.

Ten members, 10,000 examples, 10 classes, random predictions: the clean test set, corrupted test sets and an OOD set.
Each has raw scores and scores after temperature scaling, with the ten temperatures of the test-time cross-validation;
the clean one also has everything about members, ensemble sizes and curves. Predictions are read from the run's cache,
or are in memory already. For comparison, plain loops compute the scores of two corrupted sets with NumPy and SciPy's
bounded minimisation. Both take turns, in one process with one thread; `processor` is the time that other programs
disturb least.

    python benchmarks/evaluation.py [--full] [--json results/benchmark_evaluation.json]

--full evaluates all 76 test sets (target: 30 s); without it there are 16 of the same size.
"""

import argparse
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from harness import row, write_json
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax, logsumexp

from featureflock.corruptions import CORRUPTIONS, SEVERITIES
from featureflock.data import Digits, InputFormat, Splits, TensorExamples
from featureflock.evaluation.calibration import BOUNDS, halves
from featureflock.evaluation.evaluate import measure_run
from featureflock.evaluation.metrics.registry import summarise
from featureflock.evaluation.plan import EvaluationPlan
from featureflock.evaluation.predictions import Predictions, load_predictions, write_cache
from featureflock.evaluation.run_predictions import RunPredictions, SetPredictions
from featureflock.evaluation.runs import TrainedRun
from featureflock.evaluation.test_sets import EvaluationSet, Kind
from featureflock.training.manifest import Manifest
from featureflock.training.run_folder import RunFolder
from featureflock.utils.serialization import to_json

SEED = 0
MEMBERS, CLASSES = 10, 10
CLEAN, OOD = ("clean", "clean"), ("ood", "noise")
"""Kind and label of two test sets."""
LIMIT = 30.0
Floats = NDArray[np.float64]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few small sets, one round")
    parser.add_argument("--full", action="store_true", help="15 corruptions × 5 severities instead of one severity")
    parser.add_argument("--rounds", type=int, default=3, help="number of timed rounds")
    parser.add_argument("--json", type=Path, help="JSON file to write the results to")
    args = parser.parse_args()
    rounds, examples = (1, 200) if args.quick else (args.rounds, 10_000)
    severities = SEVERITIES if args.full else SEVERITIES[2:3]
    corruptions = CORRUPTIONS[: 2 if args.quick else 15]
    names = [CLEAN, *(("corrupted", f"{c}-{s}") for c in corruptions for s in severities), OOD]
    rows, difference = _in_one_thread(names, examples, rounds)
    print(table(rows))
    print(f"plain loops and the library differ by at most {difference:.1e}")
    about = {"seeds": [SEED], "rounds": rounds, "threads": 1, "members": MEMBERS, "examples": examples}
    about |= {"classes": CLASSES, "test_sets": len(names) - 1, "largest_difference": difference}
    write_json(args.json, about | {"rows": rows})


def measure(scale: str) -> list[dict[str, Any]]:
    """Rows for the table of bench.py: always all 76 test sets."""
    corruptions, examples = (CORRUPTIONS[:2], 200) if scale == "quick" else (CORRUPTIONS, 10_000)
    names = [CLEAN, *(("corrupted", f"{c}-{s}") for c in corruptions for s in SEVERITIES), OOD]
    rows, _ = _in_one_thread(names, examples, 3 if scale == "full" else 1, parts=False)
    everything, plain = rows[0], rows[-1]
    return [
        row(everything["name"], [wall for wall, _ in everything["by_round"]], f"≤ {LIMIT}", "s"),
        row("scores of a test set: speed-up over plain loops", [plain["slower"]]),
    ]


def _in_one_thread(
    names: list[tuple[Kind, str]], examples: int, rounds: int, parts: bool = True
) -> tuple[list[dict[str, Any]], float]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            return _measure(_random_run(Path(folder), names, examples), rounds, parts)
    finally:
        torch.set_num_threads(threads)


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown table of the results."""
    lines = ["| | seconds | processor seconds | target |", "|---|---:|---:|---:|"]
    for r in rows:
        target = "" if r["limit"] is None else f"at most {r['limit']:g}"
        slower = f" ({r['slower']:.1f} times as long)" if "slower" in r else ""
        lines.append(f"| {r['name']} | {r['seconds']:.2f} | {r['processor']:.2f}{slower} | {target} |")
    return "\n".join(lines)


def _random_run(folder: Path, names: list[tuple[Kind, str]], examples: int) -> EvaluationPlan:
    """A run with random predictions, which are less accurate the more severe the corruption."""
    noise = torch.Generator().manual_seed(SEED)
    places, labels = torch.arange(examples), torch.arange(examples) % CLASSES
    nothing = TensorExamples(torch.zeros(examples, 1), labels)
    recipe = {"method": {"class": "DeepEnsembles"}, "seed": SEED}
    manifest = Manifest({"recipe.json": "", "inputs.json": ""}, "made up", {})
    inputs = InputFormat.of(Splits(nothing, nothing, CLASSES))
    run = TrainedRun(RunFolder(folder), recipe, [], {}, [], inputs, manifest)  # type: ignore[typeddict-item]
    test_sets = []
    for kind, label in names:
        skill = 0 if kind == "ood" else 6 - 0.8 * (int(label[-1]) if label[-1].isdigit() else 0)
        common = 2 * torch.randn(examples, CLASSES, generator=noise)
        common[places, labels] += skill
        logits = 1.5 * (common + 1.5 * torch.randn(MEMBERS, examples, CLASSES, generator=noise))
        found = Predictions(logits.log_softmax(-1), labels, places)
        test_sets.append(EvaluationSet(kind, label, label, places, nothing.select))
        write_cache(run, test_sets[-1].name, label, {**found._asdict(), "asked": places.clone()})
    return EvaluationPlan([run], Splits(nothing, nothing, CLASSES), Digits(), test_sets, {})


def _measure(plan: EvaluationPlan, rounds: int, parts: bool) -> tuple[list[dict[str, Any]], float]:
    """Time everything; with `parts` also reading and computing separately. Returns the largest difference too."""
    (run,), test_sets = plan.runs, plan.test_sets
    loaded = {test_set.label: load_predictions(run, test_set) for test_set in test_sets}
    some = [loaded[test_set.label] for test_set in test_sets[1:3]]
    ours = [to_json(_in_memory(each).scores, tag=False) for each in some]
    plain = [_plain(each) for each in some]
    difference = max(
        abs(a[kind][m] - b[kind][m]) for a, b in zip(ours, plain, strict=True) for kind in b for m in b[kind]
    )

    def from_memory() -> None:
        corrupted: dict[str, dict[str, SetPredictions]] = {}
        for test_set in test_sets[1:-1]:
            corruption, _, severity = test_set.label.rpartition("-")
            corrupted.setdefault(corruption, {})[severity] = _in_memory(loaded[test_set.label])
        ood = {"noise": _in_memory(loaded["noise"])}
        summarise(RunPredictions(_in_memory(loaded["clean"]), corrupted=corrupted, ood=ood))

    sets = f"{len(test_sets) - 1} test sets"
    calls: dict[str, Callable[[], object]] = {}
    if parts:
        calls[f"reading the predictions on {sets}"] = lambda: [load_predictions(run, each) for each in test_sets]
        calls[f"all metrics of {sets}, predictions in memory"] = from_memory
    calls |= {
        f"all metrics of {sets}, including reading": lambda: measure_run(run, plan, "made up"),
        f"scores of {len(some)} corrupted sets": lambda: [_in_memory(each).scores for each in some],
        "the same with plain loops": lambda: [_plain(each) for each in some],
    }
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            wall, processor = time.perf_counter(), time.process_time()
            call()
            taken[name].append((time.perf_counter() - wall, time.process_time() - processor))
    rows: list[dict[str, Any]] = []
    for name, times in taken.items():
        walls, processors = zip(*times, strict=True)
        limit = LIMIT if name.startswith("all") else None
        middle = {"name": name, "seconds": median(walls), "processor": median(processors), "limit": limit}
        rows.append(middle | {"by_round": times})
    ours_and_plain = zip(rows[-2]["by_round"], rows[-1]["by_round"], strict=True)
    rows[-1]["slower"] = median(loops / scored for (_, scored), (_, loops) in ours_and_plain)
    return rows, difference


def _in_memory(predictions: Predictions) -> SetPredictions:
    return SetPredictions(lambda: (predictions.log_probs, predictions.labels))


# Plain reference implementation


def _plain(predictions: Predictions) -> dict[str, dict[str, float]]:
    """Scores raw and after temperature scaling, as `SetPredictions.scores` gives them."""
    x, y = predictions.log_probs.double().numpy(), predictions.labels.numpy()
    log_p = logsumexp(x, axis=0) - math.log(len(x))
    parts = []
    for pair in halves(len(y), 5, 0):
        first, second = (half.numpy() for half in pair)
        for fit, test in ((first, second), (second, first)):
            temperature = _plain_temperature(log_p[fit], y[fit])
            parts.append(_plain_scores(log_softmax(log_p[test] / temperature, axis=-1), y[test]))
    mean = {name: float(np.mean([part[name] for part in parts])) for name in parts[0]}
    return {"calibrated": mean, "raw": _plain_scores(log_p, y)}


def _plain_temperature(log_p: Floats, y: NDArray[np.int64]) -> float:
    def nll(u: float) -> float:
        return float(-log_softmax(log_p / math.exp(u), axis=-1)[np.arange(len(y)), y].mean())

    bounds = [math.log(bound) for bound in BOUNDS]
    return math.exp(minimize_scalar(nll, bounds=bounds, method="bounded", options={"xatol": 1e-9}).x)


def _plain_scores(log_p: Floats, y: NDArray[np.int64]) -> dict[str, float]:
    p, each = np.exp(log_p), np.arange(len(y))
    top, correct = p.max(-1), p.argmax(-1) == y
    ece = 0.0
    for k in range(15):
        inside = (top > k / 15) & (top <= (k + 1) / 15)
        if inside.any():
            ece += inside.mean() * abs(top[inside].mean() - correct[inside].mean())
    wrong = ~correct[np.argsort(-top, kind="stable")]
    return {
        "accuracy": float(correct.mean()),
        "nll": float(-log_p[each, y].mean()),
        "brier": float(((p - np.eye(p.shape[-1])[y]) ** 2).sum(-1).mean()),
        "ece": float(ece),
        "aurc": float((wrong.cumsum() / (1 + each)).mean()),
    }


if __name__ == "__main__":
    main()
