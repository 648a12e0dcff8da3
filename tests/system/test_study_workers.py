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
    results.put(None if status.results is None else status.results["rows"])


def starts(folder: Path) -> list[int]:
    """How often each run was started."""
    runs = study_runs(SMALL, "smoke", folder)
    return [len(json.loads((run.folder / "environment.json").read_text())) for run in runs]


def test_workers_share_a_folder_and_train_each_run_once(tmp_path):
    """Two workers with the same shard number, and one pool of two processes."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    workers = [context.Process(target=work, args=(tmp_path / "shards", (2, 2), results)) for _ in range(2)]
    for worker in workers:
        worker.start()
    pooled = run_study(SMALL, "smoke", tmp_path / "pool", workers=2).results
    tables = [rows for rows in (results.get(timeout=300) for _ in workers) if rows is not None]
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    assert starts(tmp_path / "shards") == starts(tmp_path / "pool") == [1, 1, 1, 1]
    assert tables, "the last worker compares the runs"
    assert pooled is not None
    again = run_study(SMALL, "smoke", tmp_path / "shards")
    assert again.unfinished == []
    assert again.results is not None
    assert all(table == again.results["rows"] for table in tables)
    assert pooled["rows"] == again.results["rows"]
