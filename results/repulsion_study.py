"""Add finished runs of the repulsion study to its results, and compare the rows again.

    python results/repulsion_study.py RUNS repulsion-cifar10 --human-labels cifar10h-counts.npy

RUNS is the folder of `featureflock reproduce --scale laptop`, with the runs in RUNS/NAME or RUNS. The file
results/NAME.json grows by the runs that it does not have yet. So the runs may come from several machines, none is
trained twice, and a study that is not complete has a table of what there is: rows with fewer seeds, or rows missing.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from featureflock.studies import STUDIES, StudyRun, measure_study, study_results, study_runs
from featureflock.training import ComputeConfig
from featureflock.utils.files import write_atomically

FOLDER = Path(__file__).parent


def file_of(name: str) -> Path:
    return FOLDER / f"{name.replace('-', '_')}.json"


def recorded(name: str) -> list[dict[str, Any]]:
    """Records of the runs in the results file."""
    file = file_of(name)
    return list(json.loads(file.read_text())["runs"]) if file.exists() else []


def missing(runs: Sequence[StudyRun], records: Sequence[dict[str, Any]]) -> list[StudyRun]:
    """Runs without a record. Those of an earlier recipe with the same title do not count."""
    known = {(record["folder"], record["members"]) for record in records}
    return [run for run in runs if (run.folder.name, run.size) not in known]


def update(name: str, folder: Path, human_labels: Path | None, seeds: int) -> dict[str, Any]:
    study = STUDIES[name]
    runs = study_runs(study, "laptop", folder, seeds)
    names = {run.folder.name for run in runs}
    records = [record for record in recorded(name) if record["folder"] in names]
    finished = [run for run in missing(runs, records) if run.is_finished]
    protocol = replace(study.protocol("laptop"), human_labels=human_labels)
    by_data: dict[str, list[StudyRun]] = {}
    for run in finished:
        by_data.setdefault(run.folder.name, []).append(run)
    for group in by_data.values():
        records += measure_study(study, group, protocol, ComputeConfig(compile="off"))[0]
    order = {(run.row.title, run.recipe.seed): i for i, run in enumerate(runs)}
    records.sort(key=lambda record: order[record["title"], record["seed"]])
    return study_results(study, "laptop", runs, records, 10_000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, help="folder of the runs")
    parser.add_argument("name", help="study, such as repulsion-cifar10")
    parser.add_argument("--human-labels", type=Path, help="human labels of the test set, as for featureflock evaluate")
    parser.add_argument("--seeds", type=int, default=10, help="largest number of seeds")
    options = parser.parse_args()
    results = update(options.name, options.runs, options.human_labels, options.seeds)
    write_atomically(file_of(options.name), (json.dumps(results, indent=1) + "\n").encode())
    for row in results["rows"]:
        print(row["title"], row["ours"]["accuracy"]["seeds"], "seeds")


if __name__ == "__main__":
    main()
