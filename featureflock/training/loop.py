"""The training loop, for any method, data and network. A run can be stopped at any time and resumed bit-identically.

Random numbers are a function of the seed and their purpose: the order of epoch e of (seed, e), the augmentation of an
image of (seed, e, index), dropout in step t of (seed, t). So weights, running statistics and optimiser state determine
the rest of a run.

Shapes: n members, B examples.
"""

import math
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from signal import Signals
from typing import Any

import torch
from torch import Tensor

from featureflock.core.transport import NonFiniteError
from featureflock.data import Batch, EpochKey, Examples, InputFormat, Splits, TensorExamples
from featureflock.data.rng import Stream, permutation, random_bits
from featureflock.distributed.env import launcher_id, restarted_by_torchrun
from featureflock.distributed.mesh import Mesh, join_mesh
from featureflock.ensemble.sharded_saving import save_sharded
from featureflock.methods.base import check_loss_output
from featureflock.training.build import build, parameter_count, training_flops
from featureflock.training.checkpoint import CheckpointWriter
from featureflock.training.compute import (
    ComputeConfig,
    ResolvedCompute,
    faster_processes,
    resolve_compute,
    resolve_precision,
)
from featureflock.training.memory import check_memory
from featureflock.training.recipe import Recipe, recipe_differences
from featureflock.training.reporters import Reporter, RunPlan, loss_name
from featureflock.training.run_folder import Result, RunFolder
from featureflock.training.signals import TrainingInterrupted, deferred_signals
from featureflock.training.state import TrainingState, initial_state, non_finite_members, restore_newest
from featureflock.training.validation import DivergenceError, evaluate_examples
from featureflock.utils.provenance import provenance


def train(
    recipe: Recipe,
    folder: Path | str,
    *,
    compute: ComputeConfig = ComputeConfig(),
    resume: bool = False,
    reporter: Reporter = Reporter(),
) -> Result:
    """Train an ensemble and return the content of result.json.

        train(RECIPES["digits"].recipe, "runs/digits")
        ens = featureflock.load("runs/digits/ensemble")

    Args:
        recipe: what to train.
        folder: folder of the run (see run_folder.py). New, or with `resume` that of an unfinished run of this recipe.
        compute: device, precision, processes and other options that do not change the mathematics.
        resume: continue from the last checkpoint, if there is one.
        reporter: receives progress.

    Raises:
        TrainingInterrupted: on Ctrl-C or SIGTERM, after a checkpoint was written.
        DivergenceError: if a loss or weight is not finite.
    """
    run = RunFolder(Path(folder))
    # torchrun restarts all ranks after a failure, and after hosts have joined or left, which it does not count.
    restarted = run.was_started_by(launcher_id())
    with join_mesh(compute.mesh, recipe.size, adapt=restarted) as mesh:
        resume = resume or bool(mesh.world.max(torch.tensor(int(restarted or restarted_by_torchrun()))))
        reporter = reporter if mesh.is_rank_zero else Reporter()
        return _train(recipe, run, compute, resume, reporter, mesh)


def _train(
    recipe: Recipe, run: RunFolder, compute: ComputeConfig, resume: bool, reporter: Reporter, mesh: Mesh
) -> Result:
    recipe_json = recipe.to_json()
    if differences := recipe_differences(recipe_json, mesh.on_rank_zero(lambda: recipe_json)):
        raise ValueError(f"This process was started with another recipe than rank 0: {'; '.join(differences)}.")
    result = mesh.on_rank_zero(lambda: run.check(recipe_json, resume))
    if result is not None:
        reporter.log(f"{run} is already finished.")
        return result
    splits = mesh.rank_zero_first(recipe.splits)
    examples = len(recipe.method.order(torch.arange(len(splits.train)), splits.train.labels))
    recipe.method.check_task(splits.task, splits.train.labels)
    _check_batches(recipe, examples, mesh)
    check_memory(recipe, splits, compute, mesh.sizes)
    ens = build(recipe, splits, mesh)
    parameters = parameter_count(ens)
    notes = list[str]()
    flops = cache(lambda: training_flops(recipe, ens, splits.train))
    # Rank 0 decides, as processes may measure different speeds.
    precision = mesh.on_rank_zero(lambda: resolve_precision(compute, recipe.precision, ens, flops, notes.append))
    resolved = resolve_compute(compute, precision, ens, flops, notes.append)
    environment = provenance()
    platform = {**asdict(resolved), "torch": torch.__version__, "processor": environment["machine"]["processor"]}
    if mesh.world.size > 1:
        platform["mesh"] = str(mesh)
    data = mesh.on_rank_zero(splits.digests)
    identity = {"recipe": recipe_json, "data": data.pop("train"), "test_data": data, "compute": platform}

    def without_compilation(text: str) -> None:
        reporter.log(text)
        platform["compile"] = False

    required = compute.compile == "on"
    resolved.prepare(ens, compile_required=required, report=without_compilation)
    state = initial_state(recipe, ens)
    with ExitStack() as stack:
        mesh.on_rank_zero(lambda: stack.enter_context(run.locked()))
        result = mesh.on_rank_zero(lambda: run.check(recipe_json, resume))  # another process may have finished it
        if result is not None:
            return result
        history, messages = restore_newest(run, state, identity)
        if resume and state.step == 0:
            messages.append("There is no checkpoint yet; starting from the beginning.")
        if (compute.mesh.members or mesh.members.size, compute.mesh.data or mesh.data.size) != mesh.sizes:
            messages.append(f"The mesh has changed to {mesh}, to fit the number of processes.")
        processes = f" {mesh.world.size} processes, {mesh} (members × data), each" if mesh.world.size > 1 else ""
        for text in (*messages, *notes, f"Computing on{processes} {resolved}."):
            reporter.log(text)
        started = {**environment, "compute": platform, "from_step": state.step}
        if launchers := sorted({*mesh.world.all_gather_int(launcher_id())} - {0}):
            started["launchers"] = launchers
        inputs = InputFormat.of(splits).to_json()
        mesh.on_rank_zero(lambda: run.begin(recipe_json, inputs, started, state.epoch, history))
        faster = faster_processes(compute, resolved, len(ens)) if isinstance(splits.train, TensorExamples) else 1
        try:
            steps, device = math.ceil(examples / recipe.batch), torch.device(resolved.device)
            plan = RunPlan(recipe.epochs, steps, examples, state.step, state.epoch, faster, ens.task.score)
            reporter.start(plan)
            with (
                deferred_signals() as signals,
                torch.random.fork_rng([device] if device.type == "cuda" else []),
                CheckpointWriter(run.checkpoints, mesh) as writer,
            ):
                loop = _Loop(recipe, compute, resolved, run, identity, splits, state, reporter, signals, mesh, writer)
                while state.epoch < recipe.epochs:
                    loop.run_epoch()
                    loop.finish_epoch()
                return loop.finish_run(parameters)
        finally:
            reporter.close()


def _check_batches(recipe: Recipe, examples: int, mesh: Mesh) -> None:
    """Raise ValueError if there are too few examples, or a process along the data axis has no part of some batch."""
    if examples < 2:
        raise ValueError(
            f"The training set has {examples} example; training needs at least two. Choose a larger --subset."
        )
    if mesh.data.size == 1:
        return
    if not recipe.method.splits_over_batch:
        raise ValueError(f"The loss of {recipe.method.title} cannot be split over a batch; use --mesh.data 1.")
    last = examples % recipe.batch or recipe.batch
    if recipe.batch < mesh.data.size or 1 < last < mesh.data.size:
        needed = f"--mesh.data {mesh.data.size} needs at least {mesh.data.size} examples in every batch"
        raise ValueError(f"{needed}, but one has {min(last, recipe.batch)}; change --batch.")


@dataclass
class _Loop:
    recipe: Recipe
    compute: ComputeConfig
    resolved: ResolvedCompute
    run: RunFolder
    identity: dict[str, Any]
    splits: Splits
    state: TrainingState
    reporter: Reporter
    signals: list[int]
    mesh: Mesh
    writer: CheckpointWriter
    _saved_step: int = 0
    """Step of the last checkpoint."""
    _averages: tuple[float, float] = (0.0, 0.0)

    def __post_init__(self) -> None:
        self._saved_step = self.state.step

    def run_epoch(self) -> None:
        """Train on the remaining batches of this epoch, then write a checkpoint."""
        recipe, state, data = self.recipe, self.state, self.mesh.data
        examples = self.splits.train
        shuffled = permutation(len(examples), recipe.seed, Stream.EPOCH_ORDER, state.epoch)
        batches = recipe.method.order(shuffled, examples.labels).split(recipe.batch)
        order = [positions[data.local_slice(len(positions))] for positions in batches]
        state.ens.train()
        saved = time.monotonic()
        started = saved - state.seconds
        key = EpochKey(recipe.seed, state.epoch)
        self._before_workers(examples)
        rows = examples.read_by(self.mesh.members)
        for batch in rows.batches(order[state.batch :], torch.device(self.resolved.device), key):
            self._report_unreadable(batch)
            # BatchNorm cannot train on a single example, the remainder of an epoch or of a batch of unreadable files.
            sizes = data.all_gather_int(len(batch.y))
            if (sum(sizes) > 1 or sum(sizes) == recipe.batch) and min(sizes) > 0:
                self.mesh.batch_fraction = len(batch.y) / sum(sizes)
                for group in state.optimisers[0].param_groups:
                    group["lr"] = recipe.learning_rate_at(state.epoch + (state.batch + 0.5) / len(order))
                self._step(batch)
            state.batch, state.step = state.batch + 1, state.step + 1
            state.seconds = time.monotonic() - started
            self.reporter.step(state.step, self._current_averages)
            due = time.monotonic() - saved >= 60 * self.compute.checkpoint_minutes
            signal_, due = self.mesh.world.max(torch.tensor([next(iter(self.signals), 0), int(due)])).tolist()
            self._stop_on(signal_)
            if state.batch < len(order) and due:
                self._save_checkpoint()
                saved = time.monotonic()
        self._save_checkpoint()

    def finish_epoch(self) -> None:
        """Evaluate, write the line of the epoch, and advance. A run that is killed in here repeats it when resumed."""
        state, splits = self.state, self.splits
        loss, member_loss, score, count = state.totals.tolist()
        task = state.ens.task
        if not count:
            raise OSError("No batch of this epoch had two examples that can be read; check the training files.")
        line = {
            "epoch": state.epoch + 1,
            "step": state.step,
            "learning_rate": self.recipe.learning_rate_at(state.epoch + 1 - 0.5 / state.batch),
            "loss": loss / count,
            loss_name(task): member_loss / count,
            task.score: task.score_from(score / count),
            "seconds": state.seconds,
            "images_per_second": count / state.seconds,
            "unreadable": sum(self.mesh.data.all_gather_int(len(state.unreadable))),
        }
        if splits.validation is not None:
            line["validation"] = self.evaluate(splits.validation, "validation")
        if self.compute.test_every and (state.epoch + 1) % self.compute.test_every == 0:
            line["test"] = self.evaluate(splits.test, "test")
        if self.mesh.is_rank_zero:
            self.run.add_metrics(line)
        self.reporter.epoch(line)
        state.totals.zero_()
        state.epoch, state.batch, state.seconds, state.unreadable = state.epoch + 1, 0, 0.0, []

    def finish_run(self, parameters: int) -> Result:
        """Evaluate on the test set, save the ensemble of all processes, and write result.json and the manifest."""
        test, ens = self.evaluate(self.splits.test, "test"), self.state.ens
        self._wait_for_checkpoint()
        with self.run.writing():
            save_sharded(ens, self.run.ensemble)

        def finish() -> Result:
            with self.run.writing():
                data = {"train": self.identity["data"], **self.identity["test_data"]}
                return self.run.finish(len(ens), parameters, len(self.splits.train), test, data)

        return self.mesh.on_rank_zero(finish)

    def evaluate(self, examples: Examples, name: str) -> dict[str, Any]:
        """Metrics on a set of examples."""
        self.reporter.evaluating(name)
        self._before_workers(examples)

        def on_batch(batch: Batch) -> None:
            if self.mesh.world.size == 1:  # processes may have different numbers of batches, so they cannot agree here
                self._stop_on(next(iter(self.signals), 0))
            for file in batch.unreadable:
                self.reporter.log(f"Skipped {file} of the {name} set, because it cannot be read.")

        return evaluate_examples(self.state.ens, examples, self.resolved, self.recipe.batch, on_batch)

    def _step(self, batch: Batch) -> None:
        """One optimisation step."""
        recipe, state, data = self.recipe, self.state, self.mesh.data
        rank = (data.rank,) if data.rank > 0 else ()
        torch.manual_seed(int(random_bits(recipe.seed, Stream.TRAINING_STEP, state.step, *rank)))
        for optimiser in state.optimisers:
            optimiser.zero_grad()
        full_batch = len(batch.y) == len(range(recipe.batch)[data.local_slice(recipe.batch)])
        try:
            with self.resolved.computing(full_batch):
                output = recipe.method.loss(state.ens, self.resolved.inputs(batch.x), batch.y)
        except NonFiniteError as error:
            raise self._divergence(error.members, state.step) from error
        loss, outputs = check_loss_output(output, recipe.method, len(state.ens), len(batch.y))
        loss.backward()
        state.ens.average_gradients()
        for optimiser in state.optimisers:
            optimiser.step()
        self._add_to_totals(loss.detach(), outputs.detach(), batch.y)

    def _add_to_totals(self, loss: Tensor, outputs: Tensor, y: Tensor) -> None:
        """Add a batch to the totals of the epoch, and record members whose loss is not finite.

        Nothing is read from a GPU here, because that would block. Reading happens when a checkpoint is written.
        """
        state, size, task = self.state, len(y), self.state.ens.task
        noise = None if state.ens.log_variance is None else state.ens.log_variance.detach()
        loss_n = task.losses(outputs.float(), y, noise)
        terms = task.score_terms(task.member_predictions(outputs.float(), noise), y)
        score = terms.sum() / task.count(y)
        sums = torch.stack([loss.float(), loss_n.mean(), score.float(), torch.ones_like(loss, dtype=torch.float32)])
        bad = ~torch.isfinite(torch.cat([loss_n, loss.float().view(1)]))
        sums = self.mesh.data.sum(torch.cat([(sums * size).to(state.totals), bad.to(state.totals)]))
        state.totals += sums[:4]
        state.first_non_finite.masked_fill_((sums[4:] > 0) & (state.first_non_finite < 0), state.step)
        if self.resolved.device == "cpu":
            self._check_losses()

    def _check_losses(self) -> None:
        """Raise DivergenceError if a loss was not finite, naming the members that were first."""
        first = self.state.first_non_finite.tolist()
        steps = [step for step in first if step >= 0]
        if steps:
            raise self._divergence([i for i, step in enumerate(first[:-1]) if step == min(steps)], min(steps))

    def _divergence(self, members: list[int], step: int) -> DivergenceError:
        whose = f" of member{'s' * (len(members) > 1)} {', '.join(map(str, members))}" if members else ""
        folder = self.run.checkpoints
        self._wait_for_checkpoint()
        checkpoint = f"the last good checkpoint is in {folder}" if folder.exists() else "there was no checkpoint yet"
        rate = self.state.optimisers[0].param_groups[0]["lr"]
        where = f"at step {step + 1} (epoch {self.state.epoch + 1}, learning rate {rate:g})"
        advice = "Try a lower learning rate, in another folder."
        return DivergenceError(f"The loss{whose} was not finite {where}; {checkpoint}. {advice}")

    def _save_checkpoint(self) -> None:
        """Start to write a checkpoint of this step, unless there is one, or a loss or weight is not finite."""
        state = self.state
        self._read_averages()
        self._check_losses()
        members = non_finite_members(state)
        if members is not None:
            raise self._divergence(members, state.step - 1)
        if state.step != self._saved_step:
            checkpoint = state.checkpoint({**self.identity, "history": self.run.history})
            with self.run.writing():
                self.writer.write(state.step, checkpoint)
            self._saved_step = state.step

    def _before_workers(self, examples: Examples) -> None:
        """Do not fork data loading processes while a thread is writing a checkpoint."""
        if not isinstance(examples, TensorExamples):
            self._wait_for_checkpoint()

    def _wait_for_checkpoint(self) -> None:
        """Wait until the last checkpoint is complete."""
        with self.run.writing():
            self.writer.wait()

    def _stop_on(self, signal_: int) -> None:
        """Save and raise TrainingInterrupted if a process received a signal."""
        if signal_:
            self._save_checkpoint()
            self._wait_for_checkpoint()
            stopped = f"after step {self.state.step}, in epoch {min(self.state.epoch + 1, self.recipe.epochs)}"
            text = f"Stopped {stopped}; everything is saved in {self.run}. To resume, repeat the command with --resume."
            raise TrainingInterrupted(text, Signals(signal_))

    def _current_averages(self) -> tuple[float, float]:
        """Mean loss of the members and score of this epoch; on a GPU as of the last checkpoint."""
        if self.resolved.device == "cpu" or not any(self._averages):
            self._read_averages()
        return self._averages

    def _read_averages(self) -> None:
        _, loss, score, count = self.state.totals.tolist()
        self._averages = loss / max(count, 1), self.state.ens.task.score_from(score / max(count, 1))

    def _report_unreadable(self, batch: Batch) -> None:
        for name in batch.unreadable:
            self.state.unreadable.append(name)
            text = f"Skipped {name}, which cannot be read; {len(self.state.unreadable)} in this epoch."
            self.reporter.log(text)
            if self.mesh.members.rank == 0 and self.mesh.data.rank > 0:  # files that rank 0 does not read
                print(f"rank {self.mesh.world.rank}: {text}", file=sys.stderr)
