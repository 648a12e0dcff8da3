"""The training loop: any method, any data, any network. It can be stopped at any moment and goes on to the same bits.

Everything random is a function of the seed and of what it is for: the order of epoch e of (seed, e), the augmentation
of a picture of (seed, e, index), dropout in step t of (seed, t). With the weights, running statistics and momentum of
a checkpoint, the rest of a run is what it would have been.

Shapes: n members, B examples, C classes.
"""

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from featureflock.data import Batch, Draw, Examples, InputFormat, Splits, permutation, random_bits
from featureflock.ensemble import Ensemble, recorded
from featureflock.memory import keeping_memory
from featureflock.particles import NotFinite
from featureflock.provenance import provenance
from featureflock.saving import save
from featureflock.training import checkpoint as checkpoints
from featureflock.training.engine import Engine, Setup, set_up
from featureflock.training.interrupts import Interrupts, Stopped, listening
from featureflock.training.measuring import Diverged, measure
from featureflock.training.progress import Plan, Reporter
from featureflock.training.recipe import Recipe, describe, differences
from featureflock.training.run_folder import RunFolder
from featureflock.training.state import State, fresh_state, non_finite_members

_ORDER, _STEP, _SAMPLE = 1, 2, 3
"""Which random numbers are for what."""


def train(
    recipe: Recipe,
    folder: Path | str,
    *,
    engine: Engine = Engine(),
    resume: bool = False,
    reporter: Reporter = Reporter(),
) -> dict[str, Any]:
    """Train an ensemble, in a folder that will hold all about it (see run_folder.py); returns what is in result.json.

    Args:
        recipe: what to train.
        folder: new, or with `resume` that of a run of the same recipe, which goes on from its last checkpoint.
        engine: how to compute it.
        reporter: what to tell a person meanwhile.

    Raises `Stopped` on Ctrl-C or SIGTERM, after writing a checkpoint, and `Diverged` if the loss is not finite.
    """
    run = RunFolder(Path(folder))
    description = describe(recipe)
    finished = run.check(description, resume)
    if finished is not None:
        reporter.note(f"{run} is finished already.")
        return finished
    splits = recipe.data.load().divided(validation=recipe.validation, subset=recipe.subset, seed=recipe.split_seed)
    ens = build(recipe, splits)
    setup = set_up(engine, recipe.precision, ens, lambda: _work(recipe, ens, splits.train))
    environment = provenance()
    where = {**setup.to_json(), "torch": torch.__version__, "processor": environment["machine"]["processor"]}
    facts = {"recipe": description, "data": splits.train.digest(), "where": where}
    state = fresh_state(recipe, setup.prepare(ens))
    with run.locked():
        run.check(description, resume)  # again: another process may have begun meanwhile
        notes = _go_on(run, state, facts)
        if resume and state.step == 0:
            notes.append("There is no checkpoint yet: starting from the beginning.")
        for text in (*notes, f"Computing on {setup}."):
            reporter.note(text)
        with run.writing():
            inputs = InputFormat.of(splits).to_json()
            run.begin(description, inputs, {**environment, "setup": setup.to_json(), "from_step": state.step})
            run.forget_metrics_from(state.epoch + 1)
        taken = len(recipe.method.order(torch.arange(len(splits.train)), splits.train.labels))
        steps = math.ceil(taken / recipe.batch)
        try:
            reporter.start(Plan(recipe.epochs, steps, taken, state.step, state.epoch))
            with listening() as interrupts, torch.random.fork_rng(_gpus(setup)), keeping_memory():
                loop = _Loop(recipe, engine, setup, run, facts, splits, state, reporter, interrupts)
                while state.epoch < recipe.epochs:
                    loop.run_epoch()
                    loop.finish_epoch()
                test = loop.measured(splits.test, "test")
                with run.writing():
                    save(ens, run.ensemble)
                    return run.finish(len(ens), sum(p.numel() for p in ens.parameters()), test)
        finally:
            reporter.close()


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


def build(recipe: Recipe, splits: Splits) -> Ensemble:
    """The recipe's ensemble for these data, freshly initialised."""
    shape = splits.train.shape
    made: list[nn.Module] = []

    x = _sample(splits.train, recipe.model.sample)

    def make_extractor() -> nn.Module:
        made.append(recipe.model.extractor(shape))
        if x is not None:
            recipe.model.fit(made[-1], x)
        return made[-1]

    def make_head() -> nn.Module:
        return recipe.model.head(made[-1], splits.classes)

    size = len(splits.train)
    return recipe.method.build(make_extractor, make_head, members=recipe.members, seed=recipe.seed, train_size=size)


def _sample(examples: Examples, count: int) -> Tensor | None:
    """Some training inputs, always the same ones of the same data; None if none are asked for or can be read."""
    if not count:
        return None
    positions = permutation(len(examples), _SAMPLE)[:count].sort().values
    x = next(iter(examples.batches([positions], torch.device("cpu")))).x
    return x if len(x) else None


@dataclass
class _Loop:
    recipe: Recipe
    engine: Engine
    setup: Setup
    run: RunFolder
    facts: dict[str, Any]
    splits: Splits
    state: State
    reporter: Reporter
    interrupts: Interrupts
    _seen: tuple[float, float] | None = None

    def run_epoch(self) -> None:
        """The rest of this epoch's batches, then a checkpoint."""
        recipe, state, device = self.recipe, self.state, torch.device(self.setup.device)
        examples = self.splits.train
        shuffled = permutation(len(examples), recipe.seed, _ORDER, state.epoch)
        order = recipe.method.order(shuffled, examples.labels).split(recipe.batch)
        state.ens.train()
        saved = time.monotonic()
        began = saved - state.seconds
        draw = Draw(recipe.seed, state.epoch)
        for batch in examples.batches(order[state.batch :], device, draw):
            self._tell_unreadable(batch)
            # A rest of one example, also where the others are broken, has no variance for BatchNorm to learn from.
            if len(batch.y) > 1 or len(batch.y) == recipe.batch:
                for group in state.optimisers[0].param_groups:
                    group["lr"] = recipe.learning_rate_of(state.epoch + (state.batch + 0.5) / len(order))
                self._step(batch)
            state.batch, state.step = state.batch + 1, state.step + 1
            state.seconds = time.monotonic() - began
            self.reporter.step(state.step, self._averages)
            self._stop_if_asked()
            if state.batch < len(order) and time.monotonic() - saved >= 60 * self.engine.checkpoint_minutes:
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
            "unreadable": len(state.unreadable),
        }
        if splits.validation is not None:
            line["validation"] = self.measured(splits.validation, "validation")
        if self.engine.test_every and (state.epoch + 1) % self.engine.test_every == 0:
            line["test"] = self.measured(splits.test, "test")
        with self.run.writing():
            self.run.add_metrics(line)
        self.reporter.epoch(line)
        state.totals.zero_()
        state.epoch, state.batch, state.seconds, state.unreadable = state.epoch + 1, 0, 0.0, []

    def measured(self, examples: Examples, what: str) -> dict[str, Any]:
        self.reporter.measuring(what)

        def on_batch(batch: Batch) -> None:
            self._stop_if_asked()
            for name in batch.unreadable:
                self.reporter.note(f"Left out of what is measured: {name}, which cannot be read.")

        return measure(self.state.ens, examples, self.setup, self.recipe.batch, on_batch)

    def _step(self, batch: Batch) -> None:
        state = self.state
        torch.manual_seed(int(random_bits(self.recipe.seed, _STEP, state.step)))
        for optimiser in state.optimisers:
            optimiser.zero_grad()
        try:
            with recorded(state.ens) as calls, self.setup.computing(full_batch=len(batch.y) == self.recipe.batch):
                loss = self.recipe.method.loss(state.ens, self.setup.inputs(batch.x), batch.y)
        except NotFinite as error:
            raise self._divergence(error.members, state.step) from error
        if not calls:
            raise ValueError(f"{type(self.recipe.method).__name__}.loss must call ens(x) for the members' predictions.")
        loss.backward()
        for optimiser in state.optimisers:
            optimiser.step()
        _, logits = calls[-1]
        self._count(loss.detach(), logits.detach(), batch.y)

    def _count(self, loss: Tensor, logits_nbc: Tensor, y_b: Tensor) -> None:
        """Add to the epoch's sums, and note who is not finite.

        Nothing is read off a GPU here, which would make it wait: that is done when a checkpoint is written.
        """
        state, size = self.state, len(y_b)
        log_p_nbc = logits_nbc.float().log_softmax(-1)
        ce_n = F.nll_loss(log_p_nbc.flatten(0, 1), y_b.repeat(len(log_p_nbc)), reduction="none").view(-1, size).mean(1)
        correct = (log_p_nbc.logsumexp(0).argmax(-1) == y_b).sum()
        state.totals[:3] += torch.stack([loss.float() * size, ce_n.mean() * size, correct.float()]).to(state.totals)
        state.totals[3] += size
        bad = ~torch.isfinite(torch.cat([ce_n, loss.float().view(1)]))
        state.first_bad.masked_fill_(bad & (state.first_bad < 0), state.step)
        if self.setup.device == "cpu":
            self._refuse_non_finite()

    def _refuse_non_finite(self) -> None:
        bad = self.state.first_bad.tolist()
        steps = [step for step in bad if step >= 0]
        if steps:
            raise self._divergence([i for i, step in enumerate(bad[:-1]) if step == min(steps)], min(steps))

    def _divergence(self, members: list[int], step: int) -> Diverged:
        who = f" of member{'s' * (len(members) > 1)} {', '.join(map(str, members))}" if members else ""
        epoch, kept = self.state.epoch, self.run.checkpoints
        return Diverged(
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
        with self.run.writing():
            checkpoints.write(self.run.checkpoints, state.step, state.checkpoint(self.facts))

    def _stop_if_asked(self) -> None:
        if self.interrupts.received is not None:
            self._save()
            epoch = min(self.state.epoch + 1, self.recipe.epochs)
            raise Stopped(
                f"Stopped after step {self.state.step}, in epoch {epoch}; all is saved in {self.run}. To go on, give "
                "the same command with --resume.",
                self.interrupts.received,
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
            self.reporter.note(f"Skipped {name}, which cannot be read; {len(self.state.unreadable)} in this epoch.")


def _work(recipe: Recipe, ens: Ensemble, examples: Examples) -> float:
    """Multiplications of the whole run, roughly: a backward pass takes twice as many as a forward pass."""
    x = next(iter(examples.batches([torch.arange(min(8, len(examples)))], torch.device("cpu")))).x[:1]
    if not len(x):  # none of them can be read; the loop will say so
        return 0.0
    extractor = ens.extractors[0]
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        extractor.eval()(x)
    extractor.train()
    multiplications: float = counter.get_total_flops() / 2
    return 3 * multiplications * len(ens) * len(examples) * recipe.epochs


def _gpus(setup: Setup) -> list[torch.device]:
    device = torch.device(setup.device)
    return [device] if device.type == "cuda" else []
