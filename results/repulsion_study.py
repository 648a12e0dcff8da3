"""The repulsion study (docs/notes/study_protocol.md): tuning on Fashion-MNIST, and results that grow run by run.

    python results/repulsion_study.py tune mlp deep-ensembles tuning
    featureflock reproduce repulsion-cifar10 --scale laptop --out runs --shard 1/2
    python results/repulsion_study.py add runs/laptop repulsion-cifar10 --human-labels cifar10h-counts.npy

tune   tunes one method within the budget of the protocol, and writes results/tuning_fashion_SETTING_METHOD.json
add    measures the finished runs in a folder and adds them to results/NAME.json, and their primary comparison to
       results/repulsion_headline.json. Runs in these files are not measured again, so they may come from several
       machines. Until all runs are there, the table has rows with fewer seeds
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import collect

from featureflock.core.priors import Cauchy
from featureflock.methods import ADP, DICE, DeepEnsembles, FeatureWGD, FunctionWGD, WeightWGD
from featureflock.studies import STUDIES, StudyRun, measure_study, study_results, study_runs, tune
from featureflock.training import ComputeConfig
from featureflock.utils.files import write_atomically
from featureflock.utils.provenance import provenance

FOLDER = Path(__file__).parent
EAGER = ComputeConfig(compile="off")
PRECISIONS, REPULSIONS = (1e-4, 3e-4, 1e-3), (1.0, 2.0, 3.0, 5.0, 8.0, 12.0)
RATES = {"mlp": (0.0075, 0.015, 0.03, 0.06, 0.12), "cnn": (0.05, 0.1, 0.2, 0.4)}
"""Learning rates of Deep Ensembles; the other methods use the best one."""
FIRST_RATE = {"mlp": 0.03, "cnn": 0.2}
METHODS = {
    "deep-ensembles": DeepEnsembles(),
    "feature-wgd": FeatureWGD(Cauchy(3e-4), repulsion=3.0),
    "function-wgd": FunctionWGD(),
    "weight-wgd": WeightWGD(),
    "adp": ADP(),
    "dice": DICE(),
}


def tune_method(setting: str, name: str, folder: Path) -> dict[str, Any]:
    """Tune a method with the protocol's budget and rule."""
    recipe = replace(STUDIES[f"repulsion-fashion-mnist-{setting}"].rows[0].recipe, method=METHODS[name], members=5)
    space: dict[str, Any] | None = None
    if name == "deep-ensembles":
        recipe = replace(recipe, learning_rate=FIRST_RATE[setting], weight_decay=5e-4)
        space = {"learning_rate": RATES[setting], "weight_decay": (5e-5, 5e-4, 2e-3, 5e-3)}
    elif name == "feature-wgd":
        space = {"method.prior.precision": PRECISIONS, "method.repulsion": REPULSIONS}
    tuning = tune(
        recipe,
        folder,
        space=space,
        budget=12,
        seeds=2,
        by="corrupted_nll",
        accuracy_tolerance=0.002 if name == "deep-ensembles" else None,
        held_out=10_000,
        corrupted_examples=1_000,
        compute=EAGER,
        log=print,
    )
    results = {"recipe": recipe.to_json(), "methods": [tuning.to_json()], "provenance": provenance()}
    return collect.tuning(results, [*tuning_metrics()])


def tuning_metrics() -> list[str]:
    return ["corrupted_nll", "corrupted_accuracy", "corrupted_brier", "corrupted_ece"]


def results_file(name: str) -> Path:
    return FOLDER / f"{name.replace('-', '_')}.json"


def missing(runs: Sequence[StudyRun], records: Sequence[dict[str, Any]]) -> list[StudyRun]:
    """Runs without a record."""
    known = {(record["title"], record["folder"], record["members"]) for record in records}
    return [run for run in runs if (run.row.title, run.folder.name, run.size) not in known]


def add(name: str, folder: Path, human_labels: Path | None, seeds: int) -> dict[str, Any]:
    """The results of a study with the finished runs in a folder; runs of other recipes are dropped."""
    study, file = STUDIES[name], results_file(name)
    runs = study_runs(study, "laptop", folder, seeds)
    order = {(run.row.title, run.folder.name): i for i, run in enumerate(runs)}
    before = json.loads(file.read_text())["runs"] if file.exists() else []
    records = [record for record in before if (record["title"], record["folder"]) in order]
    protocol = replace(study.protocol("laptop"), human_labels=human_labels)
    for run in missing(runs, records):
        if run.is_finished:
            records += measure_study(study, [run], protocol, EAGER)[0]
    records.sort(key=lambda record: order[record["title"], record["folder"]])
    return study_results(study, "laptop", runs, records, 10_000)


HEADLINES = {
    ("repulsion-fashion-mnist-mlp", 10): "Fashion-MNIST, MLP × 10",
    ("repulsion-fashion-mnist-mlp", 5): "Fashion-MNIST, MLP × 5",
    ("repulsion-fashion-mnist-cnn", 10): "Fashion-MNIST, CNN × 10",
    ("repulsion-fashion-mnist-cnn", 5): "Fashion-MNIST, CNN × 5",
    ("repulsion-cifar10", 5): "CIFAR-10, fast CNN × 5",
    ("repulsion-cifar100", 5): "CIFAR-100, fast CNN × 5",
}
"""Study and number of members -> title of the primary comparison."""


def headline() -> dict[str, Any]:
    """The primary comparisons of all settings that have results: feature-WGD tuned vs Deep Ensembles."""
    settings = []
    for (name, members), title in HEADLINES.items():
        if not (file := results_file(name)).exists():
            continue
        rows = [row for row in json.loads(file.read_text())["rows"] if row["members"] == members]
        (tuned,) = [row for row in rows if row["title"].startswith("feature-WGD, τ")] or [None]
        if tuned is None or "differences" not in tuned:
            continue
        (baseline,) = [row for row in rows if row["title"] == tuned["against"]]
        differences = tuned["differences"]
        settings.append(
            {
                "setting": title,
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
    tuner = commands.add_parser("tune", help="tune a method on held-out images of Fashion-MNIST")
    tuner.add_argument("setting", choices=list(RATES))
    tuner.add_argument("method", choices=list(METHODS))
    tuner.add_argument("folder", type=Path, help="folder for the runs")
    adder = commands.add_parser("add", help="add finished runs to the results of a study")
    adder.add_argument("folder", type=Path, help="folder of the runs")
    adder.add_argument("name", help="study, such as repulsion-cifar10")
    adder.add_argument("--human-labels", type=Path, help="human labels of the test set, as for featureflock evaluate")
    adder.add_argument("--seeds", type=int, default=10, help="largest number of seeds")
    options = parser.parse_args()
    if options.command == "tune":
        results = tune_method(options.setting, options.method, options.folder)
        file = results_file(f"tuning_fashion_{options.setting}_{options.method}")
    else:
        results = add(options.name, options.folder, options.human_labels, options.seeds)
        file = results_file(options.name)
        for row in results["rows"]:
            print(f"{row['title']}: {row['ours']['accuracy']['seeds']} seeds")
    _write(file, results)
    if options.command == "add":
        _write(results_file("repulsion-headline"), headline())


def _write(file: Path, results: dict[str, Any]) -> None:
    write_atomically(file, (json.dumps(results, indent=1) + "\n").encode())
    print(f"wrote {file}")


if __name__ == "__main__":
    main()
