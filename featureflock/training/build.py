"""What is made of a recipe before it is trained: its ensemble, and how much work that will be."""

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from featureflock.data import Examples, Splits, permutation
from featureflock.ensemble.ensemble import Ensemble, eval_mode
from featureflock.training.recipe import Recipe

SAMPLE = 3
"""Which random numbers draw the examples that networks are fitted to; 1 and 2 are the loop's."""


def build(recipe: Recipe, splits: Splits) -> Ensemble:
    """The recipe's ensemble for these data, freshly initialised."""
    shape = splits.train.shape
    made: list[nn.Module] = []

    x = _sample(splits.train, recipe.model.fit_examples)

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
    positions = permutation(len(examples), SAMPLE)[:count].sort().values
    x = next(iter(examples.batches([positions], torch.device("cpu")))).x
    return x if len(x) else None


def multiplications(recipe: Recipe, ens: Ensemble, examples: Examples) -> float:
    """Multiplications of the whole run, roughly: a backward pass takes twice as many as a forward pass."""
    x = next(iter(examples.batches([torch.arange(min(8, len(examples)))], torch.device("cpu")))).x[:1]
    if not len(x):  # none of them can be read; the loop will say so
        return 0.0
    return 3 * forward_flop(ens.extractors[0], x) / 2 * len(ens) * len(examples) * recipe.epochs


def forward_flop(network: nn.Module, x: Tensor) -> int:
    """Floating-point operations of the products in one forward pass, two for each multiplication."""
    with torch.no_grad(), eval_mode(network), FlopCounterMode(display=False) as counter:
        network(x)
    return int(counter.get_total_flops())
