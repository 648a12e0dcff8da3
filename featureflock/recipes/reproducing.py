"""A study carried out: cells (a row and a seed) are trained where they are missing, measured, and set beside the paper.

A cell is a folder, named by what is trained in it, so studies that have a recipe in common share its runs. Finished
cells are left alone and begun ones are gone on with. Several workers may work in one folder, on one machine or on many
that share a disk: each begins with its own cells, then helps with what is left; a cell that is being trained is locked
(flock), and whoever finds it so goes on to the next.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from featureflock.evaluation import evaluate
from featureflock.evaluation.comparing import Mean, mean
from featureflock.evaluation.evaluating import Progress
from featureflock.recipes.study import Row, Scale, Study
from featureflock.training import Engine, Recipe, Reporter, train
from featureflock.training.recipe import describe
from featureflock.training.run_folder import Busy


class Shard(NamedTuple):
    """Worker `number` of `of`, counted from 1."""

    number: int = 1
    of: int = 1

    @classmethod
    def parse(cls, text: str) -> "Shard":
        number, _, of = text.partition("/")
        if not (number.isdigit() and of.isdigit() and 1 <= int(number) <= int(of)):
            raise ValueError(f"--shard is a worker's number and how many there are, such as 3/8; got {text!r}.")
        return cls(int(number), int(of))


class Cell(NamedTuple):
    """A row of a study with one seed."""

    row: Row
    recipe: Recipe
    folder: Path

    @property
    def is_finished(self) -> bool:
        return (self.folder / "result.json").is_file()


@dataclass(frozen=True)
class Outcome:
    """How far a study is."""

    cells: list[Cell]
    left: list[Cell]
    """Cells that others are training, or have not begun."""
    results: dict[str, Any] | None
    """What was measured, when nothing is left: `rows`, each with its title, `ours` (mean, sd, seeds) and `paper`."""


def cells(study: Study, scale: Scale, folder: Path, seeds: int | None = None) -> list[Cell]:
    """All cells of a study, seed by seed, so that the first seed of every row is done first."""
    found = []
    for seed in range(study.seeds_at(scale) if seeds is None else seeds):
        for row in study.rows:
            recipe = study.recipe(row, scale, seed)
            found.append(Cell(row, recipe, folder / scale / _name(recipe)))
    return found


def reproduce(
    study: Study,
    scale: Scale,
    folder: Path,
    *,
    seeds: int | None = None,
    shard: Shard = Shard(),
    engine: Engine = Engine(),
    reporter: Callable[[Cell], Reporter] = lambda cell: Reporter(),
    progress: Progress = lambda done, total, what: None,
    say: Callable[[str], None] = lambda text: None,
) -> Outcome:
    """Train what is missing, measure it, and when all cells are finished compare them.

    Args:
        study, scale: what to reproduce, and how large.
        folder: where runs are kept, and looked for.
        seeds: how many; by default the scale's number.
        shard: which worker this is, where several share the folder.
        engine, reporter, progress, say: as in `train` and `evaluate`.
    """
    everything = cells(study, scale, folder, seeds)
    own = everything[shard.number - 1 :: shard.of]
    for cell in (*own, *(cell for cell in everything if cell not in own)):
        if not cell.is_finished:
            say(f"{cell.row.title}, seed {cell.recipe.seed}: {cell.folder}")
            try:
                train(cell.recipe, cell.folder, engine=engine, resume=True, reporter=reporter(cell))
            except Busy:
                say("Another worker is training it.")
                continue
        if cell in own:  # predictions are kept beside the run, for whoever makes the table
            evaluate([cell.folder], study.protocol(scale), engine=engine)
    left = [cell for cell in everything if not cell.is_finished]
    if left:
        return Outcome(everything, left, None)
    runs = [cell.folder for cell in everything]
    measured = evaluate(runs, study.protocol(scale), engine=engine, progress=progress, say=say).results
    return Outcome(
        everything, [], {"what": study.what, "scale": scale, "rows": _rows(study, everything, measured), **measured}
    )


def _rows(study: Study, everything: Sequence[Cell], measured: dict[str, Any]) -> list[dict[str, Any]]:
    summaries = {cell.folder: run["summary"] for cell, run in zip(everything, measured["runs"], strict=True)}
    rows = []
    for row in study.rows:
        own = [summaries[cell.folder] for cell in everything if cell.row is row]
        ours = {key: mean([summary[key] for summary in own]) for key in study.columns if key in own[0]}
        rows.append({"title": row.title, "ours": {k: m._asdict() for k, m in ours.items()}, "paper": dict(row.paper)})
    return rows


def markdown(outcome: Outcome) -> str:
    """Our numbers, and the paper's below them."""
    assert outcome.results is not None
    rows = outcome.results["rows"]
    keys = list(rows[0]["ours"])
    lines = ["| | " + " | ".join(key.replace("_", " ") for key in keys) + " |", "|---" + "|---:" * len(keys) + "|"]
    for row in rows:
        lines.append(f"| {row['title']} | " + " | ".join(shown(key, Mean(**row["ours"][key])) for key in keys) + " |")
        if row["paper"]:
            lines.append("| *paper* | " + " | ".join(row["paper"].get(key, "") for key in keys) + " |")
    return "\n".join(lines) + "\n"


def shown(key: str, value: Mean) -> str:
    """As the paper prints it: accuracies in % with one digit, everything else with three."""
    factor, digits = (100, 1) if key.endswith("accuracy") else (1, 3)
    spread = "" if value.sd is None else f" ± {factor * value.sd:.{digits}f}"
    return f"{factor * value.mean:.{digits}f}{spread}"


def _name(recipe: Recipe) -> str:
    """A folder's name: the method, what tells recipes apart, and the seed."""
    content = json.dumps(describe(replace(recipe, seed=0)), sort_keys=True)
    method = recipe.method.title.lower().replace(" ", "-")
    return f"{method}-{hashlib.sha256(content.encode()).hexdigest()[:8]}-seed{recipe.seed}"
