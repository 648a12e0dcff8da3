"""featureflock tune: prior precision and rank, chosen on training examples that are held out."""

import dataclasses
import itertools
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from featureflock.cli.recipe_flags import read_flags
from featureflock.cli.reproduce import print_table, run_with_progress
from featureflock.cli.terminal import make_console
from featureflock.data import HeldOut
from featureflock.methods import DeepEnsembles, Method
from featureflock.studies import Row, Shard, Study
from featureflock.studies.study import CLEAN, CORRUPTED
from featureflock.training import Recipe

_HIGHER_IS_BETTER = ("accuracy", "corrupted_accuracy")


@dataclass(frozen=True)
class Search:
    """What to try, and what to choose by."""

    precisions: tuple[float, ...] = (1e-4, 1e-3, 1e-2, 1e-1)
    """Precisions of the method's prior."""
    ranks: tuple[int, ...] = ()
    """Ranks of the projection; by default only the recipe's."""
    by: Literal["nll", "accuracy", "brier", "ece", "corrupted_accuracy", "corrupted_nll"] = "nll"
    """What is best, on the held-out examples: after temperature scaling, mean over seeds."""
    held_out: int = 5_000
    """How many training examples are held out to choose by, as many of each class. The test set is not looked at."""
    reference: bool = False
    """Also train Deep Ensembles, and show how candidates differ from them on the held-out examples."""
    seeds: int = 1
    """How many seeds each candidate is trained with."""
    shard: Annotated[str, tyro.conf.arg(metavar="I/K")] = "1/1"
    """Which worker this is of how many that share the folder."""
    out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")] = Path("tuning")
    """Where runs and tables are kept: what is finished there is not trained again."""


def main(args: list[str]) -> None:
    """Run `featureflock tune` with these arguments."""
    if not args or args[0] in ("-h", "--help"):
        print(
            "usage: featureflock tune NAME [FLAGS]\n\n"
            "Trains a recipe with several prior precisions and ranks, each without a part of the training set, and\n"
            "says which does best on that part. The test set is not looked at. featureflock train --help lists the\n"
            "recipes, featureflock tune NAME --help the flags. For instance:\n"
            "  featureflock tune digits-cnn --precisions 1e-3 1e-2 1e-1 --ranks 3 5 --held-out 200"
        )
        return
    own = ("search", Annotated[Search, tyro.conf.arg(name="")], dataclasses.field(default=Search()))
    name, options = read_flags("tune", args, "Chooses precision and rank on held-out examples. ", own)
    search: Search = options.search
    study, tried = candidates(options.recipe, search)
    console = make_console()
    outcome = carry_out(
        console,
        f"tune-{name}",
        study,
        "paper",
        search.out,
        seeds=search.seeds,
        shard=Shard.parse(search.shard),
        compute=options.compute,
    )
    if outcome.results is None:
        return
    best = choose([row for row in outcome.results["rows"] if row["title"] in tried], search.by)
    console.print(f"Best by {search.by.replace('_', ' ')} on held-out examples: {best}.", soft_wrap=True)
    for field, values in (("precision", search.precisions), ("rank", search.ranks)):
        if len(values) > 1 and tried[best].get(field) in (min(values), max(values)):
            console.print(f"That is the end of the {field}s tried; it may be worth trying further.", soft_wrap=True)
    flags = {"precision": "--method.prior.precision", "rank": "--method.rank"}
    words = [word for field, value in tried[best].items() for word in (flags[field], f"{value:g}")]
    command = shlex.join(["featureflock", "train", name, *_other_flags(args[1:]), *words])
    console.print(f"To train with it, on everything: {command}", soft_wrap=True)


def candidates(recipe: Recipe, search: Search) -> tuple[Study, dict[str, dict[str, float]]]:
    """A study whose rows are the candidates, and what each row's title stands for."""
    if search.seeds < 1 or search.held_out < 1:
        raise ValueError(f"--seeds and --held-out must be at least 1; got {search.seeds} and {search.held_out}.")
    tried: dict[str, dict[str, float]] = {}
    rows = []
    data = HeldOut(recipe.data, search.held_out, recipe.split_seed)
    for precision, rank in itertools.product(search.precisions or (None,), search.ranks or (None,)):
        chosen = {"precision": precision, "rank": rank}
        known = {field: value for field, value in chosen.items() if value is not None}
        title = ", ".join(f"{field} {value:g}" for field, value in known.items()) or "as it is"
        tried[title] = known
        rows.append(Row(title, replace(recipe, data=data, method=_with(recipe.method, precision, rank))))
    if search.reference:
        rows.append(Row(DeepEnsembles.title, replace(recipe, data=data, method=DeepEnsembles())))
    columns = (*CLEAN, *(CORRUPTED if search.by.startswith("corrupted") else ()), "member_accuracy", "disagreement")
    what = f"{recipe.method.title} on {search.held_out:,} held-out training examples"
    return Study(what, tuple(rows), columns, search.seeds), tried


def choose(rows: list[dict[str, Any]], by: str) -> str:
    """The title of the best row."""
    sign = -1 if by in _HIGHER_IS_BETTER else 1
    return str(min(rows, key=lambda row: sign * row["ours"][by]["mean"])["title"])


def _with(method: Method, precision: float | None, rank: int | None) -> Method:
    changes: dict[str, Any] = {}
    if precision is not None:
        prior: Any = getattr(method, "prior", None)
        if not hasattr(prior, "precision"):
            raise ValueError(f"{method.title} has no prior precision to tune; give --precisions without a number.")
        changes["prior"] = replace(prior, precision=precision)
    if rank is not None:
        if not hasattr(method, "rank"):
            raise ValueError(f"{method.title} has no rank to tune; leave --ranks out, or give another --method.")
        changes["rank"] = rank
    return replace(method, **changes)  # type: ignore[type-var]


def _other_flags(flags: list[str]) -> list[str]:
    """The recipe's flags, without those of the search."""
    own = {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(Search)}
    kept, dropping = [], False
    for word in flags:
        if word.startswith("--"):
            dropping = word.split("=")[0] in own
        if not dropping:
            kept.append(word)
    return kept
