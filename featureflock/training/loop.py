"""The training loop: any method, any data, any network. It can be stopped at any moment and goes on to the same bits.

Everything random is a function of the seed and of what it is for: the order of epoch e of (seed, e), the augmentation
of a picture of (seed, e, index), dropout in step t of (seed, t). With the weights, running statistics and momentum of
a checkpoint, the rest of a run is what it would have been.

Shapes: n members, B examples, C classes.
"""

import math
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from signal import Signals
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from featureflock.core.transport import NonFiniteError
from featureflock.cpu_kernels.malloc import retained_memory
from featureflock.data import Batch, EpochKey, Examples, InputFormat, Splits, permutation, random_bits
from featureflock.distributed.env import restarted_by_torchrun
from featureflock.distributed.mesh import Mesh, join_mesh
from featureflock.ensemble.ensemble import Ensemble
from featureflock.ensemble.saving import save
from featureflock.methods import LossOutput, Method
from featureflock.training import checkpoint as checkpoints
from featureflock.training.build import build, multiplications
from featureflock.training.compute import ComputeConfig, ResolvedCompute, resolve_compute
from featureflock.training.recipe import Recipe, describe, differences
from featureflock.training.reporters import Reporter, RunPlan
from featureflock.training.run_folder import RunFolder
from featureflock.training.signals import SignalFlag, TrainingInterrupted, deferred_signals
from featureflock.training.state import State, fresh_state, non_finite_members
from featureflock.training.validation import DivergenceError, measure
from featureflock.utils.provenance import provenance

_ORDER, _STEP = 1, 2
"""Which random numbers are for what; 3 is building.py's."""


def train(
    recipe: Recipe,
    folder: Path | str,
    *,
    compute: ComputeConfig = ComputeConfig(),
    resume: bool = False,
    reporter: Reporter = Reporter(),
) -> dict[str, Any]:
    """Train an ensemble, in a folder that will hold all about it (see run_folder.py); returns what is in result.json.

    Args:
        recipe: what to train.
        folder: new, or with `resume` that of a run of the same recipe, which goes on from its last checkpoint.
        compute: how to compute it.
        reporter: what to tell a person meanwhile.

    Raises `Stopped` on Ctrl-C or SIGTERM, after writing a checkpoint, and `Diverged` if the loss is not finite.
    """
    with join_mesh(compute.mesh) as mesh:
        # What torchrun starts again goes on with what it had begun. A host whose own were well does not count it.
        resume = resume or bool(mesh.world.max(torch.tensor(int(restarted_by_torchrun()))))
        reporter = reporter if mesh.is_rank_zero else Reporter()
        return _train(recipe, RunFolder(Path(folder)), compute, resume, reporter, mesh)


def _train(
    recipe: Recipe, run: RunFolder, compute: ComputeConfig, resume: bool, reporter: Reporter, mesh: Mesh
) -> dict[str, Any]:
    description = describe(recipe)
    finished = mesh.on_rank_zero(lambda: run.check(description, resume))
    if finished is not None:
        reporter.note(f"{run} is finished already.")
        return finished
    splits = mesh.rank_zero_first(recipe.splits)
    taken = len(recipe.method.order(torch.arange(len(splits.train)), splits.train.labels))
    _check_parts(recipe, taken, mesh)
    ens = build(recipe, splits)
    parameters = sum(p.numel() for p in ens.parameters())
    setup = resolve_compute(compute, recipe.precision, ens, lambda: multiplications(recipe, ens, splits.train))
    environment = provenance()
    where = {**setup.to_json(), "torch": torch.__version__, "processor": environment["machine"]["processor"]}
    if mesh.world.size > 1:
        where["mesh"] = str(mesh)
    facts = {"recipe": description, "data": splits.train.digest(), "where": where}
    state = fresh_state(recipe, setup.prepare(ens.shard(mesh)))
    with ExitStack() as stack:
        mesh.on_rank_zero(lambda: stack.enter_context(run.locked()))
        finished = mesh.on_rank_zero(lambda: run.check(description, resume))  # again: others may have begun meanwhile
        if finished is not None:
            return finished
        notes = mesh.rank_zero_first(lambda: _go_on(run, state, facts))
        if int(mesh.world.max(torch.tensor(state.step))) != state.step:
            raise ValueError(f"{run} must be in a folder that all hosts share; here its checkpoint is not to be found.")
        if resume and state.step == 0:
            notes.append("There is no checkpoint yet: starting from the beginning.")
        processes = f" {mesh.world.size} processes, {mesh} (members × data), each" if mesh.world.size > 1 else ""
        for text in (*notes, f"Computing on{processes} {setup}."):
            reporter.note(text)
        mesh.on_rank_zero(lambda: _begin(run, state, description, {**environment, "setup": where}, splits))
        steps = math.ceil(taken / recipe.batch)
        try:
            reporter.start(RunPlan(recipe.epochs, steps, taken, state.step, state.epoch))
            with deferred_signals() as interrupts, torch.random.fork_rng(_gpus(setup)), retained_memory():
                loop = _Loop(recipe, compute, setup, run, facts, splits, state, reporter, interrupts, mesh)
                while state.epoch < recipe.epochs:
                    loop.run_epoch()
                    loop.finish_epoch()
                test = loop.measured(splits.test, "test")
                whole = mesh.gather_to_rank_zero(ens.state_dict())
                return mesh.on_rank_zero(lambda: _finish(run, recipe, splits, ens, whole, parameters, test))
        finally:
            reporter.close()


def _check_parts(recipe: Recipe, taken: int, mesh: Mesh) -> None:
    """Refuse batches of which a process would have no part."""
    last = taken % recipe.batch or recipe.batch
    if mesh.data.size > 1:
        if not recipe.method.splits_over_batch:
            raise ValueError(
                f"The loss of {recipe.method.title} cannot be computed for parts of a batch; use --mesh.data 1."
            )
        if recipe.batch < mesh.data.size or 1 < last < mesh.data.size:
            raise ValueError(
                f"With --mesh.data {mesh.data.size} each batch needs as many examples at least, and some have "
                f"{min(last, recipe.batch)}; change --batch."
            )


def _begin(
    run: RunFolder, state: State, description: dict[str, Any], environment: dict[str, Any], splits: Splits
) -> None:
    with run.writing():
        run.begin(description, InputFormat.of(splits).to_json(), {**environment, "from_step": state.step})
        run.forget_metrics_from(state.epoch + 1)


def _finish(
    run: RunFolder,
    recipe: Recipe,
    splits: Splits,
    ens: Ensemble,
    weights: dict[str, Tensor],
    parameters: int,
    test: dict[str, Any],
) -> dict[str, Any]:
    """Write the whole ensemble, whose weights these are, and what the run came to."""
    if ens.mesh.world.size > 1:
        ens = build(recipe, splits)
        ens.load_state_dict(weights)
    with run.writing():
        save(ens, run.ensemble)
        return run.finish(len(ens), parameters, test)


def _go_on(run: RunFolder, state: State, facts: dict[str, Any]) -> list[str]:
    """Bring the state to where the run's last checkpoint is, if there is one; what has to be said of that."""
    found, notes = run.newest_checkpoint()
    if found is None:
        return notes
    if differences(facts["recipe"], found.facts["recipe"]):
        raise ValueError(f"The checkpoints in {run.checkpoints} are of another recipe; give another folder.")
    if found.facts["data"] != facts["data"]:
        raise ValueError(f"The training data are not those that {run} was started with.")
    state.restore(found)
    changes = differences(facts["where"], found.facts["where"])
    note = f"Going on after step {state.step}; epochs done: {state.epoch}."
    return [*notes, note, *([f"Not to the same bits: the {'; the '.join(changes)}."] if changes else [])]


@dataclass
class _Loop:
    recipe: Recipe
    compute: ComputeConfig
    setup: ResolvedCompute
    run: RunFolder
    facts: dict[str, Any]
    splits: Splits
    state: State
    reporter: Reporter
    interrupts: SignalFlag
    mesh: Mesh
    _seen: tuple[float, float] | None = None

    def run_epoch(self) -> None:
        """The rest of this epoch's batches, then a checkpoint."""
        recipe, state, device = self.recipe, self.state, torch.device(self.setup.device)
        examples = self.splits.train
        shuffled = permutation(len(examples), recipe.seed, _ORDER, state.epoch)
        whole = recipe.method.order(shuffled, examples.labels).split(recipe.batch)
        order = [positions[self.mesh.data.local_slice(len(positions))] for positions in whole]
        state.ens.train()
        saved = time.monotonic()
        began = saved - state.seconds
        draw = EpochKey(recipe.seed, state.epoch)
        for batch in examples.batches(order[state.batch :], device, draw):
            self._tell_unreadable(batch)
            # A rest of one example, also where the others are broken, has no variance for BatchNorm to learn from.
            sizes = self.mesh.data.all_gather_int(len(batch.y))
            if (sum(sizes) > 1 or sum(sizes) == recipe.batch) and min(sizes) > 0:
                self.mesh.batch_fraction = len(batch.y) / sum(sizes)
                for group in state.optimisers[0].param_groups:
                    group["lr"] = recipe.learning_rate_of(state.epoch + (state.batch + 0.5) / len(order))
                self._step(batch)
            state.batch, state.step = state.batch + 1, state.step + 1
            state.seconds = time.monotonic() - began
            self.reporter.step(state.step, self._averages)
            due = time.monotonic() - saved >= 60 * self.compute.checkpoint_minutes
            signal_, due = self.mesh.world.max(torch.tensor([self.interrupts.received or 0, int(due)])).tolist()
            self._stop_if(signal_)
            if state.batch < len(order) and due:
                self._save()
                saved = time.monotonic()
        self._save()

    def finish_epoch(self) -> None:
        """Measure, write the epoch's line and turn to the next.

        A process that is killed in here goes on from the checkpoint before it, and does it again.
        """
        state, splits = self.state, self.splits
        loss, cross_entropy, correct, count = state.totals.tolist()
        if not count:
            raise OSError("Not one training example could be read in this epoch.")
        line = {
            "epoch": state.epoch + 1,
            "step": state.step,
            "learning_rate": self.recipe.learning_rate_of(state.epoch + 1 - 0.5 / state.batch),
            "loss": loss / count,
            "cross_entropy": cross_entropy / count,
            "accuracy": 100 * correct / count,
            "seconds": state.seconds,
            "images_per_second": count / state.seconds,
            "unreadable": sum(self.mesh.data.all_gather_int(len(state.unreadable))),
        }
        if splits.validation is not None:
            line["validation"] = self.measured(splits.validation, "validation")
        if self.compute.test_every and (state.epoch + 1) % self.compute.test_every == 0:
            line["test"] = self.measured(splits.test, "test")
        if self.mesh.is_rank_zero:
            with self.run.writing():
                self.run.add_metrics(line)
        self.reporter.epoch(line)
        state.totals.zero_()
        state.epoch, state.batch, state.seconds, state.unreadable = state.epoch + 1, 0, 0.0, []

    def measured(self, examples: Examples, what: str) -> dict[str, Any]:
        self.reporter.measuring(what)

        def on_batch(batch: Batch) -> None:
            if self.mesh.world.size == 1:  # several may have other numbers of batches here, and could not agree
                self._stop_if(self.interrupts.received or 0)
            for name in batch.unreadable:
                self.reporter.note(f"Left out of what is measured: {name}, which cannot be read.")

        return measure(self.state.ens, examples, self.setup, self.recipe.batch, on_batch)

    def _step(self, batch: Batch) -> None:
        state = self.state
        part = (self.mesh.data.rank,) * (self.mesh.data.rank > 0)
        torch.manual_seed(int(random_bits(self.recipe.seed, _STEP, state.step, *part)))
        for optimiser in state.optimisers:
            optimiser.zero_grad()
        try:
            usual = len(range(self.recipe.batch)[self.mesh.data.local_slice(self.recipe.batch)])
            with self.setup.computing(full_batch=len(batch.y) == usual):
                output = self.recipe.method.loss(state.ens, self.setup.inputs(batch.x), batch.y)
        except NonFiniteError as error:
            raise self._divergence(error.members, state.step) from error
        loss, outputs = _checked(output, self.recipe.method, len(state.ens), len(batch.y))
        loss.backward()
        state.ens.average_gradients()
        for optimiser in state.optimisers:
            optimiser.step()
        self._count(loss.detach(), outputs.detach(), batch.y)

    def _count(self, loss: Tensor, logits_nbc: Tensor, y_b: Tensor) -> None:
        """Add to the epoch's sums, and note who is not finite.

        Nothing is read off a GPU here, which would make it wait: that is done when a checkpoint is written.
        """
        state, size = self.state, len(y_b)
        log_p_nbc = logits_nbc.float().log_softmax(-1)
        ce_n = F.nll_loss(log_p_nbc.flatten(0, 1), y_b.repeat(len(log_p_nbc)), reduction="none").view(-1, size).mean(1)
        correct = (log_p_nbc.logsumexp(0).argmax(-1) == y_b).sum()
        counted = torch.stack([loss.float() * size, ce_n.mean() * size, correct.float(), torch.full_like(loss, size)])
        bad = ~torch.isfinite(torch.cat([ce_n, loss.float().view(1)]))
        sums = self.mesh.data.sum(torch.cat([counted.to(state.totals), bad.to(state.totals)]))
        state.totals += sums[:4]
        state.first_bad.masked_fill_((sums[4:] > 0) & (state.first_bad < 0), state.step)
        if self.setup.device == "cpu":
            self._refuse_non_finite()

    def _refuse_non_finite(self) -> None:
        bad = self.state.first_bad.tolist()
        steps = [step for step in bad if step >= 0]
        if steps:
            raise self._divergence([i for i, step in enumerate(bad[:-1]) if step == min(steps)], min(steps))

    def _divergence(self, members: list[int], step: int) -> DivergenceError:
        who = f" of member{'s' * (len(members) > 1)} {', '.join(map(str, members))}" if members else ""
        epoch, kept = self.state.epoch, self.run.checkpoints
        return DivergenceError(
            f"The loss{who} was not finite at step {step + 1} (epoch {epoch + 1}, learning rate "
            f"{self.state.optimisers[0].param_groups[0]['lr']:g}); "
            f"{f'the last good checkpoint is kept in {kept}' if kept.exists() else 'there was no checkpoint yet'}. "
            "A lower learning rate helps most often; start it in another folder."
        )

    def _save(self) -> None:
        state = self.state
        self._look()
        self._refuse_non_finite()
        members = non_finite_members(state)
        if members is not None:
            raise self._divergence(members, state.step - 1)
        checkpoint = state.checkpoint(self.facts)
        checkpoint = replace(checkpoint, tensors=self.mesh.gather_to_rank_zero(checkpoint.tensors))
        if self.mesh.is_rank_zero:
            with self.run.writing():
                checkpoints.write(self.run.checkpoints, state.step, checkpoint)

    def _stop_if(self, signal_: int) -> None:
        """Stop if a process has been asked to."""
        if signal_:
            self._save()
            epoch = min(self.state.epoch + 1, self.recipe.epochs)
            raise TrainingInterrupted(
                f"Stopped after step {self.state.step}, in epoch {epoch}; all is saved in {self.run}. To go on, give "
                "the same command with --resume.",
                Signals(signal_),
            )

    def _averages(self) -> tuple[float, float]:
        """The members' mean cross-entropy and the accuracy in this epoch; on a GPU as of the last checkpoint."""
        if self.setup.device == "cpu" or self._seen is None:
            self._look()
        assert self._seen is not None
        return self._seen

    def _look(self) -> None:
        _, cross_entropy, correct, count = self.state.totals.tolist()
        self._seen = cross_entropy / max(count, 1), 100 * correct / max(count, 1)

    def _tell_unreadable(self, batch: Batch) -> None:
        for name in batch.unreadable:
            self.state.unreadable.append(name)
            text = f"Skipped {name}, which cannot be read; {len(self.state.unreadable)} in this epoch."
            self.reporter.note(text)
            if self.mesh.members.rank == 0 and self.mesh.data.rank > 0:  # what the first process does not see
                print(f"rank {self.mesh.world.rank}: {text}", file=sys.stderr)


def _checked(output: object, method: Method, members: int, examples: int) -> LossOutput:
    """Raise ValueError unless a method's loss is a scalar with outputs (n, B, C)."""
    got = type(output).__name__
    if isinstance(output, LossOutput):
        if output.loss.ndim == 0 and output.outputs.shape[:-1] == (members, examples):
            return output
        scalar = output.loss.ndim == 0
        got = (
            f"outputs of shape {tuple(output.outputs.shape)}"
            if scalar
            else f"a loss of shape {tuple(output.loss.shape)}"
        )
    raise ValueError(
        f"{type(method).__name__}.loss must return LossOutput(loss, outputs), a scalar and the members' logits "
        f"({members}, {examples}, classes); got {got}."
    )


def _gpus(setup: ResolvedCompute) -> list[torch.device]:
    device = torch.device(setup.device)
    return [device] if device.type == "cuda" else []
