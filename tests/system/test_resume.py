"""Runs that are killed, interrupted or without disk space resume bit-identically. Real processes, signals and limits.

Faults at every single write are injected in-process by tests/unit/training/test_faults.py.
"""

import json
import multiprocessing
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import featureflock as ff
from featureflock.data import CustomData, streaming
from featureflock.methods import FeatureWGD
from featureflock.models import CustomModelConfig
from featureflock.training import ComputeConfig, Recipe, TrainingInterrupted, train
from featureflock.training.checkpoint import checkpoint_paths, read_newest
from featureflock.training.run_folder import RunFolder

FLOCK = Path(sys.executable).with_name("featureflock")
EPOCHS, STEPS = 8, 16


class Extractor(nn.Sequential):
    """Has everything that a resume could get wrong: running statistics, dropout, augmentation, momentum."""

    feature_dim = 8

    def __init__(self):
        super().__init__(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.3), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        )


def recipe() -> Recipe:
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(4, (500,), generator=generator)
    x = torch.randint(0, 64, (500, 3, 12, 12), generator=generator) + 40 * y[:, None, None, None]
    data = CustomData((x.to(torch.uint8), y), (x[:100].to(torch.uint8), y[:100]), padding=2, flip=True)
    return Recipe(data, CustomModelConfig(Extractor), FeatureWGD(), 3, EPOCHS, 32, decay_epochs=(5,), validation=0)


def work(folder: Path, minutes: float) -> None:
    """Train in a separate process."""
    torch.set_num_threads(1)
    train(recipe(), folder, compute=ComputeConfig(checkpoint_minutes=minutes, test_every=5), resume=True)


def start(folder: Path, minutes: float) -> multiprocessing.Process:
    # Processes are forked from one that has imported everything, so that they spend their time training.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["featureflock.training", "torch._dynamo", "torch.utils.flop_counter"])
    process = context.Process(target=work, args=(folder, minutes))
    process.start()
    return process


def content(folder: Path) -> dict[str, torch.Tensor]:
    return dict(ff.load(folder / "ensemble").state_dict())


def lines(folder: Path) -> list[dict]:
    """Metrics without times."""
    read = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in ("seconds", "images_per_second")} for line in read]


def newest_step(folder: Path) -> int:
    names = [path.name for path in checkpoint_paths(folder / "checkpoints")]
    return max((int(name.split("-")[1]) for name in names), default=0)


def assert_same_run(a: Path, b: Path) -> None:
    for folder in (a, b):
        RunFolder(folder).verify()
    ours, theirs = content(a), content(b)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert lines(a) == lines(b)
    ends = [json.loads((folder / "result.json").read_text()) for folder in (a, b)]
    assert ends[0]["test"] == ends[1]["test"]
    last = [read_newest(folder / "checkpoints")[0] for folder in (a, b)]
    assert all(torch.equal(last[0].tensors[name], last[1].tensors[name]) for name in last[1].tensors)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    process = start(folder, 5.0)
    process.join(120)
    assert process.exitcode == 0
    return folder


def test_a_run_killed_again_and_again_resumes_bit_identically(undisturbed, tmp_path):
    random_, folder, kills, killed_at = random.Random(0), tmp_path / "run", 0, set()
    while kills < 5:
        before, process = newest_step(folder), start(folder, 0.0)
        target = before + random_.randint(5, 20)  # a random step, with a checkpoint after every step
        while newest_step(folder) < target and process.is_alive():
            time.sleep(random_.uniform(0, 0.005))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        kills += 1
        killed_at.add(newest_step(folder))
    newest = checkpoint_paths(folder / "checkpoints")[-1] / "0.safetensors"
    newest.write_bytes(newest.read_bytes()[:-100])  # a truncated checkpoint only costs time
    process = start(folder, 5.0)
    process.join(120)
    assert process.exitcode == 0
    assert_same_run(folder, undisturbed)
    assert any(step % STEPS for step in killed_at)
    assert len(killed_at) == kills  # it made progress each time


def test_a_full_disk_is_reported_and_nothing_is_lost(undisturbed, tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(TrainingInterrupted):
        interrupted(folder)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        # No file may grow beyond 4 kB. Like a full disk, this fails in the middle of writing a checkpoint.
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        with pytest.raises(OSError, match=r"Writing to .* failed .* resume with --resume"):
            train(recipe(), folder, compute=ComputeConfig(test_every=5, checkpoint_minutes=0), resume=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(folder.glob("checkpoints/.*"))
    work(folder, 5.0)
    assert_same_run(folder, undisturbed)


def interrupted(folder: Path) -> None:
    """Train until a Ctrl-C arrives in step 21."""
    from featureflock.training import Reporter

    class Interrupt(Reporter):
        def step(self, step, averages):
            if step == 21:
                os.kill(os.getpid(), signal.SIGINT)

    train(recipe(), folder, compute=ComputeConfig(test_every=5), reporter=Interrupt())


def test_an_interrupt_saves_the_current_step(undisturbed, tmp_path):
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(
        TrainingInterrupted, match=r"Stopped after step 21, in epoch 2; everything is saved .* with --resume"
    ):
        interrupted(tmp_path / "run")
    assert signal.getsignal(signal.SIGINT) is handler
    assert newest_step(tmp_path / "run") == 21
    work(tmp_path / "run", 5.0)
    assert_same_run(tmp_path / "run", undisturbed)


def test_changed_data_are_refused(tmp_path):
    with pytest.raises(TrainingInterrupted):
        interrupted(tmp_path / "run")
    path = tmp_path / "run" / "recipe.json"
    other = replace(recipe(), data=CustomData(recipe().data.train, recipe().data.test, padding=1, flip=True))
    with pytest.raises(ValueError, match=r"another recipe: data.padding is 1 instead of 2"):
        train(other, tmp_path / "run", resume=True)
    path.write_text(path.read_text()[:-20])
    with pytest.raises(ValueError, match=r"recipe\.json is damaged: it is not valid JSON"):
        train(recipe(), tmp_path / "run", resume=True)


class Slow(Dataset):
    """Examples that are slow to read."""

    def __len__(self):
        return 400

    def __getitem__(self, index):
        time.sleep(0.001)
        return torch.rand(6) + index % 2, index % 2


def work_with_workers(folder: Path) -> None:
    os.setsid()
    multiprocessing.set_start_method("fork", force=True)  # workers that need not import everything again
    ignore_signals = streaming._ignore_signals
    streaming._ignore_signals = lambda worker: (time.sleep(0.05), ignore_signals(worker))  # workers that start slowly
    torch.set_num_threads(1)
    model = CustomModelConfig(partial(nn.Linear, 6, 4), partial(nn.Linear, 4, 2))
    data = CustomData(Slow(), Slow(), workers=2)
    try:
        train(Recipe(data, model, members=2, epochs=3, batch=16), folder, resume=True)
    except TrainingInterrupted as stopped:
        sys.exit(128 + stopped.by)


def group_is_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_signal_to_the_process_group_saves_and_leaves_no_worker(tmp_path):
    """Schedulers send signals to the process and all its workers, even to those that have just started."""
    context = multiprocessing.get_context("forkserver")
    for folder, disturbed in ((tmp_path / "a", False), (tmp_path / "b", True)):
        process = context.Process(target=work_with_workers, args=(folder,), daemon=False)
        process.start()
        if disturbed:
            while newest_step(folder) < 25:
                time.sleep(0.01)
            os.killpg(process.pid, signal.SIGTERM)
            process.join(60)
            assert process.exitcode == 143
            assert 25 < newest_step(folder) < 75
            for _ in range(1000):
                if not group_is_alive(process.pid):
                    break
                time.sleep(0.01)
            assert not group_is_alive(process.pid)
            process = context.Process(target=work_with_workers, args=(folder,), daemon=False)
            process.start()
        process.join(60)
        assert process.exitcode == 0
    assert_same_run(tmp_path / "a", tmp_path / "b")


# The command itself

COMMAND = [
    FLOCK,
    "train",
    "digits",
    "--epochs",
    "13",
    "--decay-epochs",
    "10",
    "--members",
    "3",
    "--checkpoint-minutes",
    "0.005",
]


def flock(out: Path, *flags: str, **options) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*COMMAND, "--out", out, *flags], env=environment, **pipes, **options)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("finished") / "run"
    process = flock(out)
    text, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    assert re.search(r"epoch 13/13, learning rate 0.003, loss \S+, accuracy \S+ %", text)
    assert f"featureflock.load('{out}/ensemble')" in text
    assert "--method deep-ensembles" in text
    return out


def test_the_command_is_stopped_by_sigterm_and_resumes_without_a_reader(finished, tmp_path):
    out = tmp_path / "run"
    process = flock(out)
    while newest_step(out) < 30:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 143
    assert "Finishing this step and saving" in errors
    message = r"\nfeatureflock: Stopped after step \d+, in epoch \d+; everything is saved .* --resume\.\n$"
    assert re.search(message, errors)
    with flock(out, "--resume") as process:  # as in … | head
        lines = iter(process.stdout.readline, "")
        assert any("Resuming after step" in line for line in lines)
        process.stdout.close()
    assert_same_run(out, finished)
