"""What a run is made of at a moment: enough to go on from as if nothing had happened."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from featureflock.ensemble.ensemble import Ensemble
from featureflock.training.checkpoint import Checkpoint
from featureflock.training.recipe import Recipe


@dataclass
class State:
    ens: Ensemble
    optimisers: list[torch.optim.Optimizer]
    """The recipe's, which follows its schedule, then the method's own."""
    totals: Tensor
    """Sums over this epoch: the loss, the members' mean cross-entropy, correct answers, examples."""
    first_bad: Tensor
    """(n + 1,): the step at which each member's loss, and lastly the whole, was first not finite; −1 for never."""
    epoch: int = 0
    batch: int = 0
    """Batches of this epoch that are done."""
    step: int = 0
    """Steps of the whole run that are done."""
    seconds: float = 0.0
    """That this epoch has taken."""
    unreadable: list[str] = field(default_factory=list)
    """Examples that could not be read in this epoch."""

    def remembered(self) -> dict[Tensor, dict[str, Any]]:
        """What the optimisers remember of each parameter, such as its momentum; to read and to write."""
        groups = [(optimiser, group) for optimiser in self.optimisers for group in optimiser.param_groups]
        return {p: optimiser.state[p] for optimiser, group in groups for p in group["params"]}

    def checkpoint(self, facts: dict[str, Any]) -> Checkpoint:
        tensors = {f"ensemble/{name}": tensor for name, tensor in self.ens.state_dict().items()}
        remembered = self.remembered()
        for name, parameter in self.ens.named_parameters():
            for key, value in remembered.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"optimiser/{name}/{key}"] = value
        tensors["totals"] = self.totals
        where = {name: getattr(self, name) for name in ("epoch", "batch", "step", "seconds", "unreadable")}
        return Checkpoint(tensors, {**facts, **where})

    def restore(self, checkpoint: Checkpoint) -> None:
        """The inverse of `checkpoint`. Memory formats are those of the ensemble, whatever they were before."""
        tensors = checkpoint.tensors
        prefix = "ensemble/"
        weights = {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}
        here = self.ens.state_dict().keys()  # others may have some of the members
        self.ens.load_state_dict({name: t for name, t in weights.items() if name in here})
        parameters, remembered = dict(self.ens.named_parameters()), self.remembered()
        for path, value in tensors.items():
            if path.startswith("optimiser/"):
                name, key = path.removeprefix("optimiser/").rsplit("/", 1)
                if name not in parameters:
                    continue
                parameter = parameters[name]
                like = parameter if value.shape == parameter.shape else value.to(parameter.device)
                remembered[parameter][key] = torch.empty_like(like, dtype=value.dtype).copy_(value)
        self.totals.copy_(tensors["totals"])
        for name in ("epoch", "batch", "step", "seconds", "unreadable"):
            setattr(self, name, checkpoint.facts[name])


def non_finite_members(state: State) -> list[int] | None:
    """Members with a weight or momentum that is not finite, or [] if that is in what they share; None if all is well.

    Buffers may hold infinities by design, such as a mask.
    """

    remembered = state.remembered()

    def sound(parameter: Tensor) -> bool:
        tensors = (parameter, *(t for t in remembered.get(parameter, {}).values() if isinstance(t, Tensor)))
        return all(bool(torch.isfinite(t).all()) for t in tensors)

    bad = [not all(sound(p) for p in m.parameters()) for m in (*state.ens.extractors, state.ens)]
    *members, anyone = state.ens.mesh.world.max(torch.tensor(bad, dtype=torch.int64)).tolist()
    return [i for i, member in enumerate(members) if member] if anyone else None


def fresh_state(recipe: Recipe, ens: Ensemble) -> State:
    device = next(ens.parameters()).device

    def sgd(parameters: list[nn.Parameter]) -> torch.optim.SGD:
        return torch.optim.SGD(
            parameters,
            lr=recipe.learning_rate,
            momentum=recipe.momentum,
            nesterov=recipe.nesterov,
            weight_decay=recipe.weight_decay,
            fused=device.type in ("cpu", "cuda"),
        )

    exact = torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64
    totals = torch.zeros(4, dtype=exact, device=device)
    first_bad = torch.full((len(ens) + 1,), -1, device=device)
    return State(ens, recipe.method.optimisers(ens, sgd), totals, first_bad)
