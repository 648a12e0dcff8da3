"""Several optimisers as one, for training libraries that take one."""

from collections.abc import Callable, Sequence
from typing import Any

import torch


class ChainedOptimiser(torch.optim.Optimizer):
    """Steps all optimisers. A schedule of learning rates changes those of the first one only."""

    def __init__(self, optimisers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimisers = list(optimisers)
        self._rates = [[group["lr"] for group in optimiser.param_groups] for optimiser in self.optimisers]
        super().__init__([group for optimiser in self.optimisers for group in optimiser.param_groups], {})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimiser, rates in zip(self.optimisers[1:], self._rates[1:], strict=True):
            for group, rate in zip(optimiser.param_groups, rates, strict=True):
                group["lr"] = rate
        for optimiser in self.optimisers:
            optimiser.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"optimisers": [optimiser.state_dict() for optimiser in self.optimisers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for optimiser, state in zip(self.optimisers, state_dict["optimisers"], strict=True):
            optimiser.load_state_dict(state)
        self.param_groups = [group for optimiser in self.optimisers for group in optimiser.param_groups]
