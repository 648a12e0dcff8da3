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

from featureflock.data import DataSet
from featureflock.evaluation import Evaluation, cache_predictions, evaluate, mean
from featureflock.evaluation.evaluate_runs import EvaluationProgress
from featureflock.evaluation.statistics import paired_differences
from featureflock.methods import DeepEnsembles
from featureflock.studies.study import Row, Scale, Study
from featureflock.training import ComputeConfig, Recipe, Reporter, train
from featureflock.training.recipe import describe
from featureflock.training.run_folder import RunFolder, RunLockedError
from featureflock.utils.provenance import provenance


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


class StudyRun(NamedTuple):
    """A row of a study with one seed."""

    row: Row
    recipe: Recipe
    """What is trained for it."""
    size: int
    """Members that count: fewer than are trained where a row is a part of larger Deep Ensembles."""
    folder: Path

    @property
    def is_finished(self) -> bool:
        return (self.folder / "result.json").is_file()


@dataclass(frozen=True)
class StudyStatus:
    """How far a study is."""

    study_runs: list[StudyRun]
    left: list[StudyRun]
    """Cells that others are training, or have not begun."""
    results: dict[str, Any] | None = None
    """What was measured, when nothing is left: `rows`, each with its title, `ours` (mean, sd, seeds), `paper`, and its
    differences from Deep Ensembles, paired by seed; `runs`, each with its numbers; where and when."""
    evaluations: tuple[Evaluation, ...] = ()
    """All that was measured, for a report: one for each data set."""


def study_runs(study: Study, scale: Scale, folder: Path, seeds: int | None = None) -> list[StudyRun]:
    """All cells of a study, seed by seed, so that the first seed of every row is done first."""
    rows = study.rows_at(scale)
    found = []
    for seed in range(study.seeds_at(scale) if seeds is None else seeds):
        for row, recipe in rows:
            trained = replace(_trained(recipe, [other for _, other in rows]), seed=seed)
            found.append(StudyRun(row, trained, recipe.size, folder / _name(trained)))
    return found


def to_train(everything: Sequence[StudyRun]) -> list[StudyRun]:
    """The cells without those that are a part of another."""
    return list({cell.folder: cell for cell in everything}.values())


def reproduce(
    study: Study,
    scale: Scale,
    folder: Path,
    *,
    seeds: int | None = None,
    shard: Shard = Shard(),
    compute: ComputeConfig = ComputeConfig(),
    reporter: Callable[[StudyRun], Reporter] = lambda cell: Reporter(),
    progress: EvaluationProgress = lambda done, total, what: None,
    say: Callable[[str], None] = lambda text: None,
) -> StudyStatus:
    """Train what is missing, measure it, and when all cells are finished compare them.

    Args:
        study, scale: what to reproduce, and how large.
        folder: where runs are kept, and looked for.
        seeds: how many; by default the scale's number.
        shard: which worker this is, where several share the folder.
        compute, reporter, progress, say: as in `train` and `evaluate`.
    """
    everything = study_runs(study, scale, folder, seeds)
    runs = to_train(everything)
    own = runs[shard.number - 1 :: shard.of]
    for cell in (*own, *(cell for cell in runs if cell not in own)):
        if not cell.is_finished:
            say(f"{cell.row.title}, seed {cell.recipe.seed}: {cell.folder}")
            try:
                train(cell.recipe, cell.folder, compute=compute, resume=True, reporter=reporter(cell))
            except RunLockedError:
                say("Another worker is training it.")
                continue
        if cell in own:  # predictions are kept beside the run, for whoever makes the table
            cache_predictions([cell.folder], study.protocol(scale), compute=compute)
    left = [cell for cell in runs if not cell.is_finished]
    if left:
        return StudyStatus(everything, left)
    by_data: dict[DataSet, list[Path]] = {}
    for cell in runs:
        by_data.setdefault(cell.recipe.data, []).append(cell.folder)
    protocol = study.protocol(scale)
    evaluations = tuple(
        evaluate(folders, protocol, compute=compute, progress=progress, say=say) for folders in by_data.values()
    )
    folders = [folder for group in by_data.values() for folder in group]
    entries = [entry for evaluation in evaluations for entry in evaluation.results["runs"]]
    measured = dict(zip(folders, entries, strict=True))
    results = {
        "what": study.what,
        "scale": scale,
        "test_examples": entries[0]["clean"]["examples"],
        "corrupted_examples": protocol.of_corrupted,
        "rows": _rows(study, everything, measured),
        "runs": [_run(cell, measured[cell.folder]) for cell in runs],
        "provenance": provenance(),
    }
    return StudyStatus(everything, [], results, evaluations)


def _rows(study: Study, everything: Sequence[StudyRun], measured: dict[Path, dict[str, Any]]) -> list[dict[str, Any]]:
    by_row: dict[str, dict[int, dict[str, float]]] = {}
    """Of each row the numbers by seed."""
    for cell in everything:
        numbers = _numbers(measured[cell.folder], cell.size)
        kept = {key: numbers[key] for key in study.columns if key in numbers}
        by_row.setdefault(_row_key(cell), {})[cell.recipe.seed] = kept
    rows = []
    first_seed = [cell for cell in everything if cell.recipe.seed == everything[0].recipe.seed]
    for cell in first_seed:
        own, baseline = by_row[_row_key(cell)], _baseline(cell, first_seed)
        keys = [key for key in study.columns if all(key in numbers for numbers in own.values())]
        row: dict[str, Any] = {
            "title": cell.row.title,
            "members": cell.size,
            "ours": {key: mean([numbers[key] for numbers in own.values()])._asdict() for key in keys},
            "paper": dict(cell.row.paper),
        }
        if baseline is not None:
            row["against"] = baseline.row.title
            row["differences"] = paired_differences(own, by_row[_row_key(baseline)])
        rows.append(row)
    return rows


def _row_key(cell: StudyRun) -> str:
    return f"{_name(replace(cell.recipe, seed=0))}, {cell.size}"


def _numbers(entry: dict[str, Any], size: int) -> dict[str, float]:
    """A run's summary; of the scores of parts of it where fewer members count."""
    found: dict[str, float] = entry["summary"] if size == entry["members"] else entry["clean"]["by_size"][str(size)]
    return found


def _baseline(cell: StudyRun, others: Sequence[StudyRun]) -> StudyRun | None:
    """The Deep Ensembles of the same size, trained the same way."""
    if isinstance(cell.recipe.method, DeepEnsembles):
        return None
    same = replace(cell.recipe, method=DeepEnsembles(), members=None)
    return next(
        (
            other
            for other in sorted(others, key=lambda other: other.size != cell.size)
            if replace(other.recipe, members=None) == same and (other.size == cell.size or cell.size == 1)
        ),
        None,
    )


def _run(cell: StudyRun, entry: dict[str, Any]) -> dict[str, Any]:
    """A run in a few lines."""
    result = RunFolder(cell.folder).read("result.json")
    return {
        "folder": cell.folder.name,
        "title": cell.row.title,
        "seed": cell.recipe.seed,
        "members": entry["members"],
        "recipe": entry["recipe"],
        "numbers": entry["summary"],
        "train_accuracy": result["train"]["accuracy"] / 100,
        "seconds": result["seconds"],
        "commits": sorted({start.get("commit") or "unknown" for start in entry["environment"]}),
        "machine": entry["environment"][-1].get("machine"),
    }


def _trained(recipe: Recipe, recipes: Sequence[Recipe]) -> Recipe:
    """What is trained for a recipe: of Deep Ensembles that differ in size alone, which share members, the largest."""
    if not isinstance(recipe.method, DeepEnsembles):
        return recipe
    alike = [other for other in recipes if replace(other, members=recipe.members) == recipe]
    return max(alike, key=lambda other: other.size)


def _name(recipe: Recipe) -> str:
    """A folder's name: the method, what tells recipes apart, and the seed."""
    content = json.dumps(describe(replace(recipe, seed=0)), sort_keys=True)
    method = recipe.method.title.lower().replace(" ", "-")
    return f"{method}-{hashlib.sha256(content.encode()).hexdigest()[:8]}-seed{recipe.seed}"
