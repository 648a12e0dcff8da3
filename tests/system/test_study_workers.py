"""Several workers on one study: each run is trained once, and the results equal those of one worker."""

import json
import multiprocessing
from dataclasses import replace
from pathlib import Path

import torch

from featureflock.methods import DeepEnsembles, FeatureWGD
from featureflock.studies import Row, Shard, Study, run_study, study_runs
from featureflock.studies.study import CLEAN
from featureflock.training import RECIPES

SMALL = Study(
    "Two methods",
    tuple(Row(m.title, replace(RECIPES["cifar10-wrn16x4"].recipe, method=m)) for m in (DeepEnsembles(), FeatureWGD())),
    CLEAN,
    seeds=2,
)


def work(folder: Path, shard: tuple[int, int], results) -> None:
    torch.set_num_threads(1)
    status = run_study(SMALL, "smoke", folder, shard=Shard(*shard))
    results.put(status.results)


def starts(folder: Path) -> list[int]:
    """How often each run was started."""
    runs = study_runs(SMALL, "smoke", folder)
    return [len(json.loads((run.folder / "environment.json").read_text())) for run in runs]


def test_workers_share_a_folder_and_train_each_run_once(tmp_path):
    """A pool of two processes and a worker of another shard, at the same time in one folder; then one process alone."""
    shared = tmp_path / "shared"
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    worker = context.Process(target=work, args=(shared, (2, 2), results))
    worker.start()
    tables = [run_study(SMALL, "smoke", shared, workers=2).results, results.get(timeout=300)]
    worker.join(60)
    assert worker.exitcode == 0
    assert starts(shared) == [1, 1, 1, 1]
    assert any(tables), "the last worker compares the runs"
    alone = run_study(SMALL, "smoke", tmp_path / "alone").results
    assert alone is not None
    assert all(table["rows"] == alone["rows"] for table in tables if table is not None)
