"""Processes of a mesh that fail, hang, are killed or interrupted: one error message, and resuming."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from helpers.meshes import command, finish, start
from helpers.short_runs import SHORT, RecordingReporter, same, weights
from torch.testing import assert_close

from featureflock.distributed import failures
from featureflock.distributed.shape import MeshShape
from featureflock.training import ComputeConfig, TrainingInterrupted, train
from featureflock.training.checkpoint import checkpoint_paths, read_newest
from featureflock.training.loop import _Loop
from featureflock.training.run_folder import RunFolder
from system.test_mesh import images

RUN = ("train", "digits", "--members", "3", "--epochs", "2")


def output(folder: Path) -> list[str]:
    """The output of each process."""
    return [(folder / str(rank)).read_text() for rank in range(len(list(folder.iterdir())))]


def newest_step(run: Path) -> int:
    names = [path.name for path in checkpoint_paths(run / "checkpoints")]
    return max((int(name.split("-")[1]) for name in names), default=0)


def wait_for(happens: Callable[[], bool], seconds: float = 100) -> None:
    deadline = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# Errors


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--method dice --mesh.data 2", "The loss of DICE cannot be split over a batch; use --mesh.data 1."),
        ("--mesh.data 2 --batch 1", "--mesh.data 2 needs at least 2 examples in every batch, but one has 1"),
        ("--members 1 --mesh.members 2", "1 members cannot be divided among 2 processes; use --mesh.members 1 or less"),
        ("--mesh.members 3", "A mesh of 3 × 1 needs 3 processes, not 2; start it with torchrun"),
        (
            "--mesh.data 2 --method.rule svgd --method.rule.noise 1",
            "Langevin noise cannot be computed for parts of a batch",
        ),
    ],
)
def test_user_errors_are_reported_once_and_before_training(flags, sentence, tmp_path):
    words = ("train", "digits", *flags.split(), "--out", tmp_path / "run")
    assert finish(start(2, tmp_path / "output", command, *words)) == [1, 1]
    first, second = output(tmp_path / "output")
    assert f"featureflock: {sentence}" in first
    assert first.count("\n") <= 2  # the line that says what is trained, and the error
    assert second == ""
    assert not (tmp_path / "run").exists()


def fail_in_step_7(how: str, *words: str) -> None:
    """The command, whose last rank fails in step 7."""
    failures.HEARTBEAT_SECONDS, failures.GRACE_SECONDS = 0.1, 1.0
    original = _Loop._step

    def step(self, batch):
        if self.state.step == 7 and self.mesh.world.rank == self.mesh.world.size - 1:
            if how == "raise":
                raise RuntimeError("a defect of this rank")
            os.kill(os.getpid(), signal.Signals[how])
        original(self, batch)

    _Loop._step = step
    command(*words)


def test_an_error_has_the_rank_in_its_traceback_and_ends_all_processes(tmp_path):
    words = (*RUN, "--mesh.data", "2", "--out", tmp_path / "run")
    assert finish(start(2, tmp_path / "output", fail_in_step_7, "raise", *words), 60) == [1, 1]
    first, second = output(tmp_path / "output")
    assert re.search(
        r"RuntimeError: a defect of this rank\nThis error occurred on rank 1 on \S+ \(process \d+\)\.\n$", second
    )
    assert "Error" not in first
    assert "learning rate" not in second


def test_a_killed_process_is_named_and_ends_the_others(tmp_path):
    """On 2 × 2 processes, where one has no direct connection to the killed one."""
    words = (*RUN, "--mesh.data", "2", "--out", tmp_path / "run")
    processes = start(4, tmp_path / "output", fail_in_step_7, "SIGKILL", *words)
    assert finish(processes, 60) == [1, 1, 1, -signal.SIGKILL]
    sentence = rf"rank 3 on \S+ \(process {processes[3].pid}\) exited without an error message; was it killed\?"
    assert len(re.findall(sentence, "".join(output(tmp_path / "output")))) == 1


def test_a_process_that_hangs_is_named_after_the_timeout(tmp_path):
    timeout = 3
    words = (*RUN, "--mesh.timeout", str(timeout), "--out", tmp_path / "run")
    processes = start(2, tmp_path / "output", fail_in_step_7, "SIGSTOP", *words)
    status = Path(f"/proc/{processes[1].pid}/stat")
    wait_for(lambda: " T " in status.read_text())
    began = time.monotonic()
    processes[0].join(60)
    assert time.monotonic() - began < timeout + 12
    assert finish(processes, 0) == [1, None]
    sentence = rf"featureflock: No response within {timeout} s from rank 1 on \S+ \(process {processes[1].pid}\)"
    assert len(re.findall(sentence, output(tmp_path / "output")[0])) == 1


# Resuming


def resume(folder: Path, shape: tuple[int, int], stop_after: int | None) -> None:
    """Train on this mesh until Ctrl-C comes in a step."""

    class Interrupt(RecordingReporter):
        def step(self, step, averages):
            if step == stop_after:
                os.kill(os.getpid(), signal.SIGINT)

        def log(self, text):
            print(text)

    torch.set_default_dtype(torch.float64)
    try:
        train(images(), folder, compute=ComputeConfig(mesh=MeshShape(*shape)), resume=True, reporter=Interrupt())
    except TrainingInterrupted:
        sys.exit(3)


def test_a_checkpoint_can_be_resumed_on_another_mesh(tmp_path):
    """2 × 2 processes, 1, 1 × 2, then 4 × 1 with 2, 1, 1 and 1 members: the same as a single process throughout."""
    run = tmp_path / "run"
    for shape, stop_after in (((2, 2), 3), ((1, 1), 8), ((1, 2), 12), ((4, 1), None)):
        count = shape[0] * shape[1]
        codes = finish(start(count, tmp_path / f"output {shape}", resume, run, shape, stop_after))
        assert codes == [0 if stop_after is None else 3] * count, output(tmp_path / f"output {shape}")
        assert newest_step(run) == stop_after or stop_after is None
    assert "Resuming after step 12" in output(tmp_path / "output (4, 1)")[0]
    assert finish(start(1, tmp_path / "output", resume, tmp_path / "one", (1, 1), None)) == [0]
    ours, theirs = (read_newest(folder / "checkpoints")[0] for folder in (run, tmp_path / "one"))
    for name in theirs.tensors.keys() - {"totals"}:
        assert_close(ours.tensors[name], theirs.tensors[name], rtol=1e-9, atol=1e-10)
    assert [entry["from_step"] for entry in json.loads((run / "environment.json").read_text())] == [0, 3, 8, 12]


def test_a_restart_before_the_first_checkpoint_starts_from_the_beginning(tmp_path, monkeypatch):
    class Killed(RecordingReporter):
        def step(self, step, averages):
            raise MemoryError

    with pytest.raises(MemoryError):
        train(SHORT, tmp_path / "run", reporter=Killed())
    assert (tmp_path / "run" / "recipe.json").exists()
    with pytest.raises(ValueError, match="already contains a run"):
        train(SHORT, tmp_path / "run")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    reporter = RecordingReporter()
    train(SHORT, tmp_path / "run", reporter=reporter)
    assert reporter.notes[0] == "There is no checkpoint yet; starting from the beginning."


def launched(launcher: str, how: str, *words: str) -> None:
    """The command, started by the torchrun with this folder of logs; with two processes, the last fails in step 7."""
    os.environ["TORCHELASTIC_ERROR_FILE"] = f"{launcher}/attempt_0/{os.environ.get('RANK', 0)}/error.json"
    fail_in_step_7(how, *words) if os.environ.get("WORLD_SIZE") == "2" else command(*words)


def test_a_torchrun_that_has_another_number_of_processes_resumes_on_a_mesh_that_fits(tmp_path):
    """Without --resume, and although torchrun does not count this as a restart; another torchrun is refused."""
    words = (*RUN, "--mesh.data", "2", "--checkpoint-minutes", "1e-5", "--out", tmp_path / "run")

    def run(processes: int, launcher: str) -> tuple[list[int | None], str]:
        folder = tmp_path / f"{processes} {launcher}"
        codes = finish(start(processes, folder, launched, launcher, "raise", *words), 60)
        return codes, output(folder)[0]

    assert run(2, "a")[0] == [1, 1]
    reached = newest_step(tmp_path / "run")
    assert 0 < reached <= 7
    codes, text = run(3, "b")
    assert codes == [1, 1, 1]
    assert "A mesh of 1 × 2 needs 2 processes, not 3" in text
    codes, text = run(3, "a")
    assert codes == [0, 0, 0]
    assert f"Resuming after step {reached}" in text
    assert "The mesh has changed to 1 × 3, to fit the number of processes." in text
    assert finish(start(1, tmp_path / "output", command, *RUN, "--out", tmp_path / "one")) == [0]
    assert_close(weights(tmp_path / "run"), weights(tmp_path / "one"), rtol=1e-4, atol=1e-5)


def leave_a_worker(run: Path) -> None:
    """Exit without releasing the lock, while a forked process is still alive."""
    with RunFolder(run).locked():
        if os.fork() == 0:
            time.sleep(30)
        os._exit(0)


def test_the_lock_of_a_killed_process_is_released_while_its_workers_are_alive(tmp_path):
    assert finish(start(1, tmp_path / "output", leave_a_worker, tmp_path / "run")) == [0]
    with RunFolder(tmp_path / "run").locked():
        pass


KILL_ONCE = """
import atexit
import os
import pathlib
import signal
from featureflock.training.loop import _Loop

original = _Loop._step

def step(self, batch):
    if self.state.step == 25 and os.environ["RANK"] == "0" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    original(self, batch)

_Loop._step = step

@atexit.register
def threads():
    names = [path.read_text().strip() for path in pathlib.Path("/proc/self/task").glob("*/comm")]
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
        os.write(1, f"Threads at exit: {names}\\n".encode())
"""


def test_torchrun_restarts_a_killed_group_which_ends_with_the_same_bits(tmp_path):
    """Rank 0 is killed, which has locked the folder and writes its files."""
    run, alike = tmp_path / "run", tmp_path / "alike"
    (tmp_path / "kill_once.py").write_text(KILL_ONCE)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1")
    process = subprocess.Popen(
        [sys.executable, *torchrun, "-m", "featureflock", *RUN, "--checkpoint-minutes", "1e-5", "--out", run],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "FEATUREFLOCK_PLUGINS": "kill_once"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        text, errors = process.communicate(timeout=100)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, errors
    assert text.count("Resuming after step") == 1
    assert text.count("epoch 2/2") == 1
    assert text.count("Threads at exit") == 2
    assert "gloo" not in text  # a thread of PyTorch that outlives the interpreter can abort the process
    assert finish(start(2, tmp_path / "output", command, *RUN, "--out", alike)) == [0, 0]
    assert same(weights(run), weights(alike))
    first, second = output(tmp_path / "output")
    assert [first.count(f"epoch {epoch}/2") for epoch in (1, 2)] == [1, 1]
    assert second == ""
    assert len((alike / "metrics.jsonl").read_text().splitlines()) == 2
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2
