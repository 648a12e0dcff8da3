"""Several workers on one study: each run is trained once, and the results equal those of one worker."""

import json
import time
from dataclasses import replace
from pathlib import Path

from featureflock.evaluation.endpoints import CLEAN
from featureflock.methods import DeepEnsembles, FeatureWGD
from featureflock.studies import Row, Shard, Study, run_study, study_runs
from featureflock.studies.study import smoke
from featureflock.training import RECIPES

SMALL = Study(
    "Two methods",
    tuple(Row(m.title, replace(RECIPES["cifar10-wrn16x4"].recipe, method=m)) for m in (DeepEnsembles(), FeatureWGD())),
    CLEAN,
    smoke=lambda recipe: replace(smoke(recipe), epochs=10),  # long enough for the workers to meet
)


def starts(folder: Path) -> list[int]:
    """How often each run was started."""
    runs = study_runs(SMALL, "smoke", folder)
    return [len(json.loads((run.folder / "environment.json").read_text())) for run in runs]


def test_workers_share_a_folder_and_train_each_run_once(tmp_path):
    """One worker alone; then a pool of two processes, and a worker in this process that tries to train the same run."""
    alone = run_study(SMALL, "smoke", tmp_path / "alone").results  # this also imports what training needs
    shared = tmp_path / "shared"
    runs = study_runs(SMALL, "smoke", shared)
    tables = []

    def join(done: int, total: int | None, what: str) -> None:
        if done == 0:
            deadline = time.monotonic() + 120
            while not (started := [k for k, run in enumerate(runs, 1) if (run.folder / "recipe.json").exists()]):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            tables.append(run_study(SMALL, "smoke", shared, shard=Shard(started[0], len(runs))).results)

    tables.append(run_study(SMALL, "smoke", shared, workers=2, training_progress=join).results)
    assert starts(shared) == [1, 1, 1, 1]
    assert tables[1]["rows"] == alone["rows"]
    assert tables[0] is None or tables[0]["rows"] == alone["rows"]  # None: the pool was still training
