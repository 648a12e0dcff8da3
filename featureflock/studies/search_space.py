"""Search spaces of `tune`: which candidates are trained, and how many in each round.

{"method.repulsion": (1.0, 5.0), "method.prior.precision": (1e-3, 1e-2)}        recipe field -> values
"""

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from featureflock.training import Recipe
from featureflock.utils.registry import unknown_name

Space = Mapping[str, Sequence[Any]]
"""Values to try by recipe field, such as {"method.repulsion": (1.0, 5.0)}."""

_KEPT = 3
"""A round trains one in _KEPT candidates of the round before."""
_FACTORS = {"learning_rate": (0.25, 0.5, 1.0, 2.0, 4.0), "weight_decay": (0.1, 0.3, 1.0, 3.0, 10.0)}
"""Search space of methods without hyper-parameters, relative to the recipe."""


def default_space(recipe: Recipe) -> dict[str, tuple[Any, ...]]:
    """The search space of the recipe's method; for a method without one, learning rate and weight decay."""
    space: dict[str, tuple[Any, ...]] = {}
    for field, values in recipe.method.search_space.items():
        if has_field(recipe, f"method.{field}"):  # a uniform prior has no precision
            allowed = [v for v in values if v <= recipe.size] if field == "rank" else values
            space[f"method.{field}"] = tuple(allowed)
    if not space:
        space = {field: tuple(f * getattr(recipe, field) for f in factors) for field, factors in _FACTORS.items()}
    return {field: tuple(dict.fromkeys(values)) for field, values in space.items()}


def rounds(points: int, budget: int, seeds: int) -> list[int]:
    """Number of candidates trained in each round, with one more seed each; their sum is at most the budget."""
    if seeds < 1 or budget < seeds:
        raise ValueError(f"seeds must be at least 1 and budget at least seeds; got seeds={seeds} and budget={budget}.")
    if points * seeds <= budget:
        return [points] * seeds
    fitting = [c for c in range(1, min(points, budget) + 1) if sum(_halved(c, seeds)) <= budget]
    return _halved(fitting[-1], seeds)


def count_candidates(recipe: Recipe, space: Space) -> int:
    """Number of points of the space, with the recipe's own values; a space that cannot be right is refused."""
    for field, values in space.items():
        if not values:
            raise ValueError(f"The search space has no values for {field}; give at least one.")
        for value in values:
            with_values(recipe, {field: value})  # refuses unknown fields and impossible values
    inside = all(_get(recipe, field) in values for field, values in space.items())
    return math.prod(len(set(values)) for values in space.values()) + (not inside)


def draw_candidates(recipe: Recipe, space: Space, count: int) -> list[dict[str, Any]]:
    """`count` different points of the space, the recipe's own values first; all points if there are no more."""
    own = {field: _get(recipe, field) for field in space}
    values_of = {field: list(dict.fromkeys(values)) for field, values in space.items()}
    if count >= count_candidates(recipe, space):
        grid = (dict(zip(values_of, point, strict=True)) for point in itertools.product(*values_of.values()))
        return [own, *(point for point in grid if point != own)]
    generator, drawn = random.Random(0), [own]
    while len(drawn) < count:
        columns = []
        for values in values_of.values():
            column = (values * math.ceil(count / len(values)))[:count]
            generator.shuffle(column)
            columns.append(column)
        for point in zip(*columns, strict=True):
            values_at = dict(zip(values_of, point, strict=True))
            if values_at not in drawn and len(drawn) < count:
                drawn.append(values_at)
    return drawn


def with_values(recipe: Recipe, values: Mapping[str, Any]) -> Recipe:
    """The recipe with other values of some fields, such as {"method.prior.precision": 1e-2}."""
    for field, value in values.items():
        recipe = _replaced(recipe, canonical(field).split("."), value, field)
    return recipe


def has_field(recipe: Recipe, field: str) -> bool:
    """Whether the recipe has this field, such as method.prior.precision."""
    owner, _, name = field.rpartition(".")
    try:
        return name in getattr(_get(recipe, owner), "__dataclass_fields__", {})
    except AttributeError:
        return False


def canonical(field: str) -> str:
    """The name of a field, from a flag: --learning-rate is learning_rate."""
    return field.removeprefix("--").replace("-", "_")


def _halved(candidates: int, seeds: int) -> list[int]:
    return [math.ceil(candidates / _KEPT**k) for k in range(seeds)]


def _get(owner: Any, path: str) -> Any:
    for name in filter(None, path.split(".")):
        owner = getattr(owner, name)
    return owner


def _replaced(owner: Any, path: list[str], value: Any, field: str) -> Any:
    name, rest = path[0], path[1:]
    names = list(getattr(owner, "__dataclass_fields__", {}))
    if name not in names:
        raise (
            unknown_name(f"field {field!r} to tune:", name, names)
            if names
            else ValueError(f"There is no field {field!r} to tune.")
        )
    new = _replaced(getattr(owner, name), rest, value, field) if rest else value
    return replace(owner, **{name: new})
