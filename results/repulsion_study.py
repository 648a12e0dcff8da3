"""The repulsion study (docs/notes/study_protocol.md): tuning, and results that grow run by run.

    python results/repulsion_study.py tune fashion-mlp adp tuning
    python results/repulsion_study.py train runs repulsion-cifar10 --shard 1/2
    python results/repulsion_study.py add runs repulsion-cifar10 --human-labels cifar10h-counts.npy
    python results/repulsion_study.py add runs repulsion-cifar10 --first-seed 5 --seeds 11

tune   tunes one method on held-out images, adds it to results/tuning_SETTING.json, and prints what is chosen
train  trains the runs of a study that are not in results/ yet, all rows or some; resumes what was interrupted
add    measures the finished runs in a folder and adds them to results/NAME.json, and their primary comparison to
       results/repulsion_headline.json; also writes results/claims.json. Until all runs are there, the table has rows
       with fewer seeds

Runs in results/ are not trained or measured again, so they may come from several machines, and studies with the same
runs share them. A replication, with --first-seed, has a file of its own, results/NAME_from_seed_I.json.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import claims
import collect
import products_in_float32

from featureflock.core.priors import Cauchy
from featureflock.cpu_kernels.bfloat16 import has_bfloat16
from featureflock.evaluation.metrics.registry import METRICS
from featureflock.methods import ADP, DICE, DeepEnsembles, FeatureWGD, FunctionWGD, WeightWGD
from featureflock.studies import STUDIES, StudyRun, measure_study, study_results, study_runs, tune
from featureflock.studies.runner import Shard, to_train, train_and_predict
from featureflock.studies.search_space import with_values
from featureflock.studies.study import PAPER
from featureflock.training import ComputeConfig, Reporter
from featureflock.utils.files import write_atomically
from featureflock.utils.provenance import provenance

FOLDER = Path(__file__).parent
EAGER = ComputeConfig(compile="off")
RATES = {"learning_rate": (0.05, 0.1, 0.2, 0.4), "weight_decay": (5e-5, 5e-4, 2e-3)}
"""Of Deep Ensembles; the other methods use the best ones."""
FURTHER_RATES: list[dict[str, tuple[Any, ...]]] = [
    {"learning_rate": (0.8,), "weight_decay": (2e-3,)},
    {"learning_rate": (0.4,), "weight_decay": (5e-3,)},
]
"""Beyond the best of RATES, which is at their end."""
METHODS = {
    "deep-ensembles": DeepEnsembles(),
    "feature-wgd": FeatureWGD(Cauchy(3e-4), repulsion=8.0),
    "function-wgd": FunctionWGD(),
    "weight-wgd": WeightWGD(),
    "adp": ADP(),
    "dice": DICE(),
}


class Search(NamedTuple):
    """How methods are tuned in one setting."""

    study: str
    change: dict[str, Any]
    """Fields of the recipe that differ from the test runs."""
    options: dict[str, Any]
    """Arguments of `tune`."""
    spaces: dict[str, list[dict[str, tuple[Any, ...]]]]
    """By method, one or several search spaces; by default that of the method. A single point has one seed."""


def _repulsions(*points: tuple[float, tuple[float, ...]]) -> list[dict[str, tuple[Any, ...]]]:
    return [{"method.prior.precision": (precision,), "method.repulsion": values} for precision, values in points]


CIFAR100 = (1.5e-3, (10.0, 5.0)), (5e-3, (10.0, 5.0)), (3e-4, (10.0, 20.0)), (1e-4, (10.0, 20.0))
_FASHION = {"budget": 12, "seeds": 2, "held_out": 10_000, "corrupted_examples": 1_000}
SEARCHES = {
    "fashion-mlp": Search("repulsion-fashion-mnist-mlp", {}, _FASHION, {}),
    "fashion-cnn": Search(
        "repulsion-fashion-mnist-cnn",
        {},
        _FASHION,
        {
            "deep-ensembles": [RATES, *FURTHER_RATES],
            "feature-wgd": [
                {"method.prior.precision": (3e-4, 1e-3), "method.repulsion": (8.0, 3.0, 12.0, 20.0)},
                {"method.prior.precision": (1e-3, 3e-3), "method.repulsion": (3.0, 5.0)},
            ],
        },
    ),
    "cifar100": Search(
        "repulsion-cifar100",
        {"epochs": 3},
        {"budget": 2, "seeds": 1, "held_out": 5_000, "corrupted_examples": 400},
        {"deep-ensembles": [{"epochs": (3,)}], "feature-wgd": _repulsions(*CIFAR100)},
    ),
    "cifar100-longer": Search(
        "repulsion-cifar100",
        {"epochs": 8},
        {"budget": 2, "seeds": 1, "held_out": 5_000, "corrupted_examples": 400},
        {"deep-ensembles": [{"epochs": (8,)}], "feature-wgd": _repulsions((1e-4, (10.0,)))},
    ),
}


def tune_method(setting: str, name: str, folder: Path) -> dict[str, Any]:
    """Tune a method as the protocol says; the result is added to that of the methods tuned before."""
    search = SEARCHES[setting]
    recipe = replace(STUDIES[search.study].rows[0].recipe, method=METHODS[name], members=5, **search.change)
    searches = [
        tune(
            recipe if space is None else with_values(recipe, {field: values[0] for field, values in space.items()}),
            folder,
            space=space,
            by="corrupted_nll",
            accuracy_tolerance=0.002 if name == "deep-ensembles" else None,
            compute=EAGER,
            log=print,
            **search.options | ({"budget": 1, "seeds": 1} if space and _is_point(space) else {}),
        ).to_json()
        for space in search.spaces.get(name, [None])
    ]
    candidates: dict[str, dict[str, Any]] = {}
    for candidate in sorted((c for one in searches for c in one["candidates"]), key=lambda c: -len(c["seeds"])):
        candidates.setdefault(json.dumps(candidate["values"]), candidate)  # of one in two spaces, that with more seeds
    tuned = searches[0] | {"candidates": list(candidates.values())}
    file = results_file(f"tuning-{setting}")
    before = json.loads(file.read_text())["methods"] if file.exists() else []
    methods = [method for method in before if method["method"] != tuned["method"]] + [tuned]
    results = {"recipe": recipe.to_json(), "methods": methods, "provenance": provenance()}
    return collect.tuning(results, ["corrupted_nll", "corrupted_accuracy", "corrupted_brier", "corrupted_ece"])


def _is_point(space: dict[str, tuple[Any, ...]]) -> bool:
    return all(len(values) == 1 for values in space.values())


def chosen(methods: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The choice of the protocol by method: the largest mean relative gain over Deep Ensembles in the endpoints.

    Candidates that are behind Deep Ensembles on an endpoint are chosen only if all are, and those that are behind by
    more than 0.1 points of accuracy only if all are. Compared are the candidates with the most seeds, with the same
    seeds of Deep Ensembles' best.
    """
    (baseline,) = [method["candidates"][0]["seeds"] for method in methods if method["method"] == DeepEnsembles.title]
    choice = {}
    for method in methods:
        if method["method"] == DeepEnsembles.title:
            continue
        candidates = [candidate for candidate in method["candidates"] if not candidate["diverged"]]
        most = max(len(candidate["seeds"]) for candidate in candidates)
        ranked = [candidate for candidate in candidates if len(candidate["seeds"]) == most]
        best = max(ranked, key=lambda candidate: _gains(candidate["seeds"], baseline))
        choice[method["method"]] = best["values"] | {"gain": _gains(best["seeds"], baseline)[-1]}
    return choice


def _gains(ours: dict[str, dict[str, float]], theirs: dict[str, dict[str, float]]) -> tuple[bool, bool, float]:
    """Whether no endpoint is behind, whether accuracy is not by more than 0.1 points, and the mean relative gain."""
    gains = []
    accuracy = sum(ours[seed]["accuracy"] - theirs[seed]["accuracy"] for seed in ours) / len(ours)
    for key in PAPER:
        sign = 1 if METRICS[key].better == "higher" else -1
        a, b = (sum(one[seed][key] for seed in ours) for one in (ours, theirs))
        gains.append(sign * (a - b) / b)
    return min(gains) >= 0, accuracy >= -0.001, sum(gains) / len(gains)


def results_file(name: str) -> Path:
    return FOLDER / f"{name.replace('-', '_')}.json"


def missing(runs: Sequence[StudyRun], records: Sequence[dict[str, Any]]) -> list[StudyRun]:
    """Runs without a record."""
    known = {(record["title"], record["folder"], record["members"]) for record in records}
    return [run for run in runs if (run.row.title, run.folder.name, run.size) not in known]


def known_records(runs: Sequence[StudyRun]) -> list[dict[str, Any]]:
    """The records of these runs in the results of any study, with their titles in this one."""
    found = {}
    for file in sorted(FOLDER.glob("repulsion_*.json")):
        for record in json.loads(file.read_text()).get("runs", []):
            found[record["folder"], record["members"]] = record
    keys = [(run.folder.name, run.size) for run in runs]
    return [{**found[key], "title": run.row.title} for run, key in zip(runs, keys, strict=True) if key in found]


def train_missing(
    name: str, folder: Path, titles: Sequence[str], shard: Shard, seeds: int | None = None, first_seed: int = 0
) -> None:
    """Train the runs that have no record, of the rows with these titles or of all, and cache their predictions."""
    study = STUDIES[name]
    if unknown := set(titles) - {row.title for row in study.rows}:
        raise SystemExit(f"{name} has no row {unknown.pop()!r}; it has {', '.join(row.title for row in study.rows)}.")
    runs = study_runs(study, "laptop", folder, seeds, first_seed)
    runs = missing(runs, known_records(runs))
    wanted = to_train([run for run in runs if not titles or run.row.title in titles])
    for run in wanted[shard.number - 1 :: shard.workers]:
        print(f"{run}: {run.folder}", flush=True)
        train_and_predict(run, Reporter(), study.protocol("laptop"), EAGER)


def add(name: str, folder: Path, human_labels: Path | None, seeds: int, first_seed: int = 0) -> dict[str, Any]:
    """The results of a study with the finished runs in a folder; runs of other recipes are dropped."""
    study = STUDIES[name]
    runs = study_runs(study, "laptop", folder, seeds, first_seed)
    order = {(run.row.title, run.folder.name): i for i, run in enumerate(runs)}
    records = known_records(runs)
    protocol = replace(study.protocol("laptop"), human_labels=human_labels)
    for run in missing(runs, records):
        if run.is_finished:
            records += measure_study(study, [run], protocol, EAGER)[0]
    records.sort(key=lambda record: order[record["title"], record["folder"]])
    return study_results(study, "laptop", runs, records, 10_000)


MOST_SEEDS = 20


def headline() -> dict[str, Any]:
    """The primary comparisons, over all seeds of each setting: feature-WGD tuned vs Deep Ensembles."""
    settings = []
    for setting in claims.SETTINGS:
        study = STUDIES[setting.study]
        runs = study_runs(study, "laptop", Path(), MOST_SEEDS)
        rows = {row["title"]: row for row in study_results(study, "laptop", runs, known_records(runs), 10_000)["rows"]}
        tuned = rows.get(setting.tuned + setting.end, {})
        if "differences" not in tuned:
            continue
        baseline = rows[tuned["against"]]
        differences = tuned["differences"]
        settings.append(
            {
                "setting": setting.title,
                "method": tuned["title"],
                "seeds": differences["accuracy"]["seeds"],
                "baseline": baseline["ours"],
                "ours": tuned["ours"],
                "differences": differences,
            }
        )
    return {"settings": settings}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    tuner = commands.add_parser("tune", help="tune a method on held-out images")
    tuner.add_argument("setting", choices=list(SEARCHES))
    tuner.add_argument("method", choices=list(METHODS))
    tuner.add_argument("folder", type=Path, help="folder for the runs")
    adder = commands.add_parser("add", help="add finished runs to the results of a study")
    adder.add_argument("folder", type=Path, help="folder of the runs")
    adder.add_argument("name", choices=[name for name in STUDIES if name.startswith("repulsion-")])
    adder.add_argument("--human-labels", type=Path, help="human labels of the test set, as for featureflock evaluate")
    adder.add_argument("--seeds", type=int, default=10, help="largest number of seeds")
    adder.add_argument("--first-seed", type=int, default=0, help="the first seed; others follow")
    trainer = commands.add_parser("train", help="train the runs that the results of a study do not have")
    trainer.add_argument("folder", type=Path, help="folder for the runs")
    trainer.add_argument("name", choices=[name for name in STUDIES if name.startswith("repulsion-")])
    trainer.add_argument("--rows", nargs="+", default=[], help="titles of rows; all by default")
    trainer.add_argument("--seeds", type=int, help="number of seeds, instead of the study's own")
    trainer.add_argument("--first-seed", type=int, default=0, help="the first seed; others follow")
    trainer.add_argument("--shard", type=Shard.parse, default=Shard(), help="I/K, the I-th of K workers")
    options = parser.parse_args()
    if not has_bfloat16():
        products_in_float32.install()
    if options.command == "tune":
        results = tune_method(options.setting, options.method, options.folder)
        file = results_file(f"tuning-{options.setting}")
    elif options.command == "train":
        train_missing(options.name, options.folder, options.rows, options.shard, options.seeds, options.first_seed)
        return
    else:
        results = add(options.name, options.folder, options.human_labels, options.seeds, options.first_seed)
        suffix = f"-from-seed-{options.first_seed}" if options.first_seed else ""
        file = results_file(options.name + suffix)
        for row in results["rows"]:
            print(f"{row['title']}: {row['ours']['accuracy']['seeds']} seeds")
    _write(file, results)
    if options.command == "tune":
        for method, values in chosen(results["methods"]).items():
            print(f"{method}: {values}")
    else:
        _write(results_file("repulsion-headline"), headline())
        _write(results_file("claims"), claims.measure())


def _write(file: Path, results: dict[str, Any]) -> None:
    write_atomically(file, (json.dumps(results, indent=1) + "\n").encode())
    print(f"wrote {file}")


if __name__ == "__main__":
    main()
