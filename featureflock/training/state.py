"""The state of a training run after a step: everything that the rest of the run depends on."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from featureflock.ensemble.ensemble import Ensemble
from featureflock.training.checkpoint import Checkpoint, Metadata, read_newest
from featureflock.training.recipe import Recipe, recipe_differences
from featureflock.training.run_folder import History, RunFolder

_PROGRESS = ("epoch", "batch", "step", "seconds", "unreadable")


@dataclass
class TrainingState:
    """Ensemble, optimisers, running totals and progress."""

    ens: Ensemble
    optimisers: list[torch.optim.Optimizer]
    """The recipe's optimiser, which follows its schedule, then the method's extra ones."""
    totals: Tensor
    """Sums over this epoch: loss, mean loss of the members, score (such as correct predictions), examples."""
    first_non_finite: Tensor
    """(n + 1,): the step at which the loss of each member, and last the total loss, was first not finite; or −1."""
    epoch: int = 0
    batch: int = 0
    """Completed batches of this epoch."""
    step: int = 0
    """Completed steps of the run."""
    seconds: float = 0.0
    """Training time of this epoch."""
    unreadable: list[str] = field(default_factory=list)
    """Examples of this epoch that could not be read."""

    def optimiser_state(self) -> dict[Tensor, dict[str, Any]]:
        """State of the optimisers for each parameter, such as its momentum; a live reference, not a copy."""
        groups = [(optimiser, group) for optimiser in self.optimisers for group in optimiser.param_groups]
        return {p: optimiser.state[p] for optimiser, group in groups for p in group["params"]}

    def checkpoint(self, identity: dict[str, Any]) -> Checkpoint:
        """Return the state as a checkpoint, with the identity of the run in its metadata."""
        tensors = {f"ensemble/{name}": tensor for name, tensor in self.ens.state_dict().items()}
        optimiser_state = self.optimiser_state()
        for name, parameter in self.ens.named_parameters():
            for key, value in optimiser_state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"optimiser/{name}/{key}"] = value
        tensors["totals"] = self.totals
        metadata = {**identity, **{name: getattr(self, name) for name in _PROGRESS}}
        return Checkpoint(tensors, cast(Metadata, metadata))

    def needed(self) -> Callable[[str], bool]:
        """Return a function that tells whether this process needs a tensor of a checkpoint, by its name."""
        local, parameters = {*self.ens.state_dict()}, {name for name, _ in self.ens.named_parameters()}

        def is_needed(path: str) -> bool:
            kind, _, name = path.partition("/")
            of_optimiser = kind == "optimiser" and name.rpartition("/")[0] in parameters
            return path == "totals" or (kind == "ensemble" and name in local) or of_optimiser

        return is_needed

    def restore(self, checkpoint: Checkpoint) -> None:
        """Load a checkpoint. Tensors take the memory format that the ensemble has now."""
        tensors = checkpoint.tensors
        of_ensemble = {path: t for path, t in tensors.items() if path.startswith("ensemble/")}
        self.ens.load_state_dict({path.removeprefix("ensemble/"): t for path, t in of_ensemble.items()})
        parameters, optimiser_state = dict(self.ens.named_parameters()), self.optimiser_state()
        for path, value in tensors.items():
            if path.startswith("optimiser/"):
                name, key = path.removeprefix("optimiser/").rsplit("/", 1)
                parameter = parameters[name]
                like = parameter if value.shape == parameter.shape else value.to(parameter.device)
                optimiser_state[parameter][key] = torch.empty_like(like, dtype=value.dtype).copy_(value)
        self.totals.copy_(tensors["totals"])
        for name in _PROGRESS:
            setattr(self, name, checkpoint.metadata[name])  # type: ignore[literal-required]


def restore_newest(run: RunFolder, state: TrainingState, identity: dict[str, Any]) -> tuple[History | None, list[str]]:
    """Restore the newest checkpoint, if there is one, and return the history in it and messages about it.

    All processes call this; `identity` is that of the run that is to be resumed.
    """
    checkpoint, messages = read_newest(run.checkpoints, state.ens.mesh, state.needed())
    if checkpoint is None:
        return None, messages
    if recipe_differences(identity["recipe"], checkpoint.metadata["recipe"]):
        raise ValueError(f"The checkpoints in {run.checkpoints} belong to another recipe; give another folder.")
    metadata = checkpoint.metadata
    for what, ours, theirs in (
        ("training data", identity["data"], metadata["data"]),
        ("test or validation data", identity["test_data"], metadata.get("test_data", identity["test_data"])),
    ):
        if ours != theirs:
            raise ValueError(f"The {what} have changed since {run} was started; restore them, or start a new run.")
    try:
        state.restore(checkpoint)
    except (RuntimeError, LookupError) as error:
        what = f"The newest checkpoint of {run} does not fit the networks of its recipe"
        raise ValueError(f"{what}; it was written by another version of the code. Start a new run.") from error
    messages.append(f"Resuming after step {state.step}; completed epochs: {state.epoch}.")
    changes = recipe_differences(identity["compute"], checkpoint.metadata["compute"])
    if changes:
        messages.append(f"The result will not be bit-identical: the {'; the '.join(changes)}.")
    return metadata.get("history"), messages


def non_finite_members(state: TrainingState) -> list[int] | None:
    """Members with non-finite weights or momentum; [] if only shared parameters have any; None if all are finite."""
    optimiser_state = state.optimiser_state()  # without buffers, which may be infinite on purpose, such as a mask

    def is_finite(parameter: Tensor) -> bool:
        tensors = (parameter, *(t for t in optimiser_state.get(parameter, {}).values() if isinstance(t, Tensor)))
        return all(bool(torch.isfinite(t).all()) for t in tensors)

    extractors = state.ens.extractors  # weights of members in one network belong to all of them
    separate = [*extractors] if isinstance(extractors, nn.ModuleList) else []
    bad = [not all(is_finite(p) for p in m.parameters()) for m in (*separate, state.ens)]
    *members, anywhere = state.ens.mesh.world.max(torch.tensor(bad, dtype=torch.int64)).tolist()
    return [i for i, member in enumerate(members) if member] if anywhere else None


def initial_state(recipe: Recipe, ens: Ensemble) -> TrainingState:
    """Return the state before the first step."""
    device = next(ens.parameters()).device

    def sgd(parameters: list[nn.Parameter]) -> torch.optim.SGD:
        decay, fused = recipe.weight_decay, device.type in ("cpu", "cuda")
        noise = [p for p in parameters if p is ens.log_variance]  # weight decay would pull the variance towards 1
        groups: list[dict[str, Any]] = [{"params": [p for p in parameters if p is not ens.log_variance]}]
        groups += [{"params": noise, "weight_decay": 0.0}] if noise else []
        return torch.optim.SGD(
            groups, recipe.learning_rate, recipe.momentum, nesterov=recipe.nesterov, weight_decay=decay, fused=fused
        )

    dtype = torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64
    totals = torch.zeros(4, dtype=dtype, device=device)
    first_non_finite = torch.full((len(ens) + 1,), -1, device=device)
    return TrainingState(ens, recipe.method.optimisers(ens, sgd), totals, first_non_finite)
