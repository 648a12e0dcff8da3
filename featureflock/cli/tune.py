"""featureflock tune: choose the hyper-parameters of methods on held-out examples, with the same budget for each."""

import ast
import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from featureflock.cli.recipe_flags import component_name, read_flags, train_command
from featureflock.cli.reproduce import check_count
from featureflock.cli.terminal import make_console, progress_bar, resumed_by_same_command
from featureflock.distributed.env import launched_by_torchrun
from featureflock.methods import METHODS, DeepEnsembles, Single
from featureflock.reports import markdown, terminal_table
from featureflock.reports.tables import Table
from featureflock.reports.tuning import best_settings, tuning_table
from featureflock.studies.search_space import canonical, count_candidates, default_space, has_field, rounds
from featureflock.studies.tuning import Tuning, ranking_metric, tune
from featureflock.training import LineReporter, ProgressBarReporter, Recipe
from featureflock.utils.files import check_folder, write_atomically
from featureflock.utils.provenance import provenance


@dataclass(frozen=True)
class Search:
    """What to try, and how to choose."""

    methods: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME …")] = ()
    """Methods to tune, each with the same budget; by default the recipe's. The best settings are then compared."""
    space: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FIELD=VALUES …")] = ()
    """Values to try, such as method.repulsion=1,5,10 learning-rate=0.05,0.1; by default those of the method."""
    budget: int = 20
    """Largest number of training runs of each method."""
    seeds: int = 3
    """Number of seeds of the last candidates, from 100 + --seed on. Of those trained with one seed, a third is trained
    with a second, and so on."""
    by: str = "nll"
    """Metric to choose by, on the held-out examples and averaged over seeds: nll, accuracy, brier, ece, corrupted_nll,
    or any other metric that can rank candidates."""
    accuracy_tolerance: float | None = None
    """Do not choose candidates whose accuracy is lower than the best by more than this many points."""
    held_out: int | None = None
    """Number of held-out examples; by default a fifth of the training set, at most 5,000."""
    corrupted_examples: int | None = None
    """Number of held-out examples in each of the 75 corrupted sets. By default these are evaluated only if --by needs
    them, with all held-out examples."""
    workers: int = 1
    """Number of processes on this machine that train candidates in parallel."""
    out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")] = Path("tuning")
    """Folder for runs and tables. Finished runs are not trained again; commands with the same folder share the work."""


def main(args: list[str]) -> None:
    """Run `featureflock tune` with these arguments."""
    if not args or args[0] in ("-h", "--help"):
        print(
            "usage: featureflock tune NAME [FLAGS]\n\n"
            "Choose the hyper-parameters of a recipe on held-out examples, within a budget of training runs: for\n"
            "feature-WGD the prior precision, the repulsion and the rank. The test set is not used.\n"
            "featureflock train --help lists the recipes, and featureflock tune NAME --help the flags. For example:\n"
            "  featureflock tune digits-cnn --methods feature-wgd deep-ensembles --budget 20\n"
            "  featureflock tune digits-cnn --space method.repulsion=1,3,10 --seeds 1"
        )
        return
    extra = ("search", Annotated[Search, tyro.conf.arg(name="")], dataclasses.field(default=Search()))
    name, options = read_flags("tune", args, "Tunes it on held-out examples. ", extra)
    search: Search = options.search
    recipes = _recipes(options.recipe, search.methods)
    spaces = {title: _space(recipe, search.space, len(recipes) > 1) for title, recipe in recipes.items()}
    _check(recipes, spaces, search)
    check_folder(search.out)
    console = make_console()
    tunings: dict[str, Tuning] = {}
    for title, recipe in recipes.items():
        with resumed_by_same_command("the search"), progress_bar(console, "runs") as progress:
            tolerance = search.accuracy_tolerance
            tunings[title] = tune(
                recipe,
                search.out,
                space=spaces[title],
                budget=search.budget,
                seeds=search.seeds,
                by=search.by,
                accuracy_tolerance=None if tolerance is None else tolerance / 100,
                held_out=search.held_out,
                corrupted_examples=search.corrupted_examples,
                workers=search.workers,
                compute=options.compute,
                reporter=lambda: ProgressBarReporter(console) if console.is_terminal else LineReporter(console),
                progress=progress,
                log=lambda text: console.print(text, soft_wrap=True),
            )
    tables = [tuning_table(tuning) for tuning in tunings.values()]
    if len(tunings) > 1:
        tables.append(best_settings(list(tunings.values()), DeepEnsembles.title))
    _write(name, search, list(tunings.values()), tables)
    for table in tables:
        console.print(terminal_table(table))
    console.print(f"wrote {search.out}/tune-{name}.json and tune-{name}.md", soft_wrap=True)
    own_flags = {field.name.replace("_", "-") for field in dataclasses.fields(Search)}
    for tuning in tunings.values():
        best = tuning.candidates[0]
        for note in tuning.notes:
            console.print(f"{tuning.best.method.title}: {note}", soft_wrap=True)
        words = ["--method", str(component_name(tuning.best, "method"))] if search.methods else []
        words += [w for field, v in best.values.items() for w in (f"--{field.replace('_', '-')}", str(v))]
        dropped = own_flags | ({"method"} if search.methods else set())
        command = train_command(name, args[1:], dropped, words)
        console.print(f"{tuning.best.method.title}, best by {tuning.metric.key}: {best.title}.", soft_wrap=True)
        console.print(f"  {command}", soft_wrap=True)


def _recipes(recipe: Recipe, methods: Sequence[str]) -> dict[str, Recipe]:
    """The recipe with each method, by title. A method that the recipe has already keeps its settings."""
    chosen = {}
    for name in methods or [str(component_name(recipe, "method"))]:
        cls = METHODS[name]
        method = recipe.method if type(recipe.method) is cls else cls()
        members = 1 if isinstance(method, Single) else recipe.members
        chosen[method.title] = replace(recipe, method=method, members=members)
    return chosen


def _space(recipe: Recipe, given: Sequence[str], several_methods: bool) -> dict[str, tuple[Any, ...]]:
    """The values of the flag --space, or the default space of the method.

    With several methods, fields that a method does not have are left out.
    """
    space: dict[str, tuple[Any, ...]] = {}
    for text in given:
        field, equals, values = text.partition("=")
        if not equals or not values:
            raise ValueError(f"--space takes fields and values such as method.repulsion=1,5,10; got {text!r}.")
        if not several_methods or has_field(recipe, canonical(field)):
            space[canonical(field)] = tuple(map(_value, values.split(",")))
    return space or default_space(recipe)


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text.strip().capitalize() if text.strip().lower() in _WORDS else text.strip())
    except (ValueError, SyntaxError):
        return text.strip()


_WORDS = ("none", "true", "false")


def _check(recipes: Mapping[str, Recipe], spaces: Mapping[str, Any], search: Search) -> None:
    """Refuse what cannot work before anything is trained."""
    if launched_by_torchrun():
        raise ValueError("tune does not run under torchrun; start the same command once for each GPU or host.")
    check_count("workers", search.workers)
    check_count("seeds", search.seeds)
    check_count("budget", search.budget, most=100_000)
    if search.accuracy_tolerance is not None and not search.accuracy_tolerance >= 0:
        raise ValueError(f"--accuracy-tolerance must be at least 0 points; got {search.accuracy_tolerance}.")
    for title, recipe in recipes.items():
        ranking_metric(search.by, recipe.data.task.kind)
        if recipe.split_seed:
            raise ValueError("tune holds out other examples for each seed; leave --split-seed out.")
        rounds(count_candidates(recipe, spaces[title]), search.budget, search.seeds)


def _write(name: str, search: Search, tunings: Sequence[Tuning], tables: Sequence[Table]) -> None:
    content = {
        "what": f"tuning of {name}",
        "budget": search.budget,
        "methods": [tuning.to_json() for tuning in tunings],
        "provenance": provenance(),
    }
    write_atomically(search.out / f"tune-{name}.json", (json.dumps(content, indent=1) + "\n").encode())
    write_atomically(search.out / f"tune-{name}.md", "\n".join(map(markdown, tables)).encode())
