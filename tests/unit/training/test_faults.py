"""A run that fails at any of its writes, by a full disk or a kill, resumes bit-identically."""

import errno
import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.short_runs import SHORT, same, weights

from featureflock.methods import DeepEnsembles
from featureflock.models import MLPConfig
from featureflock.training import ComputeConfig, train
from featureflock.training.checkpoint import read_newest
from featureflock.training.run_folder import RunFolder

RECIPE = replace(SHORT, model=MLPConfig((4,)), method=DeepEnsembles(), members=2, epochs=2, batch=30, subset=60)


class Killed(BaseException):
    """Stands for SIGKILL: from then on, nothing is written or removed any more."""


class Writes:
    """Counts the calls that make data durable, and fails from a given call on."""

    def __init__(self, patch: pytest.MonkeyPatch, fail_at: int | None = None, kill: bool = False) -> None:
        self.count, self.fail_at, self.kill = 0, fail_at, kill
        patch.setattr(os, "replace", self._counted(os.replace))
        patch.setattr(os, "fsync", self._counted(os.fsync))
        unlink, rmtree = Path.unlink, shutil.rmtree
        patch.setattr(Path, "unlink", lambda path, **options: None if self.dead else unlink(path, **options))
        patch.setattr(shutil, "rmtree", lambda path, **options: None if self.dead else rmtree(path, **options))

    @property
    def dead(self) -> bool:
        return self.kill and self.fail_at is not None and self.count > self.fail_at

    def _counted(self, call):
        def counted(*args):
            self.count += 1
            if self.dead:
                raise Killed
            if self.fail_at is not None and self.count == self.fail_at + 1:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return call(*args)

        return counted


def run(folder: Path, fail_at: int | None = None, kill: bool = False) -> int:
    """Train with a checkpoint after each step; return the number of writes."""
    with pytest.MonkeyPatch.context() as patch:
        writes = Writes(patch, fail_at, kill)
        train(RECIPE, folder, compute=ComputeConfig(checkpoint_minutes=0), resume=True)
    return writes.count


def outcome(folder: Path) -> tuple:
    RunFolder(folder).verify()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        del line["seconds"], line["images_per_second"]
    return lines, json.loads((folder / "result.json").read_text())["test"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> tuple[Path, int]:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    return folder, run(folder)


@pytest.mark.parametrize("kill", [False, True], ids=["full disk", "killed"])
def test_a_run_that_fails_at_any_write_resumes_bit_identically(kill, undisturbed, tmp_path):
    reference, writes = undisturbed
    assert writes > 20
    failed = 0
    for fail_at in range(writes):
        folder = tmp_path / str(fail_at)
        message = None
        try:
            run(folder, fail_at, kill)
        except (Killed, OSError) as error:
            message = str(error)
            failed += 1
        if not kill:
            assert message is None or re.search("No space left on device.*resume with --resume", message)
            assert not list(folder.rglob("*.partial"))
        run(folder)
        assert outcome(folder) == outcome(reference)
        assert same(weights(folder), weights(reference))
        ours, theirs = (read_newest(path / "checkpoints")[0].tensors for path in (folder, reference))
        assert same(ours, theirs)
    assert failed == writes if kill else failed > writes / 2  # that a folder cannot be synced is no error
