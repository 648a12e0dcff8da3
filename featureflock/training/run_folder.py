"""The folder of a training run:

recipe.json        the recipe, `Recipe.to_json()`
inputs.json        format of the inputs and names of the classes, `InputFormat.to_json()`
environment.json   versions, machine, commit, command and compute options, one entry per start of the run
metrics.jsonl      one line per epoch
checkpoints/       the last two checkpoints, a folder each
ensemble/          the trained ensemble, for featureflock.load
result.json        final metrics
manifest.json      digests of the files above; written last, when the run is finished
predictions/       cached predictions of each evaluated test set
tensorboard/       learning curves, if TensorBoard is installed

Files of a finished run are verified when they are read. Those of an unfinished run are checked for their types.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NotRequired, TypedDict, cast

from featureflock.data import InputFormat
from featureflock.training.manifest import (
    MANIFEST,
    RESTORE,
    Manifest,
    not_of_this_run,
    read_manifest,
    verify_run,
    write_manifest,
)
from featureflock.training.recipe import RecipeJSON, recipe_differences
from featureflock.utils.digests import json_digest, sha256
from featureflock.utils.files import read_regular, write_atomically
from featureflock.utils.json_files import parse_json

try:
    import fcntl
except ImportError:  # Windows, where folders are not locked
    fcntl = None  # type: ignore[assignment]


class TrainingResult(TypedDict):
    """`train` of result.json; it also has the metrics of the last epoch."""

    examples: int
    accuracy: NotRequired[float]
    """In percent."""


class Result(TypedDict):
    """Content of result.json."""

    members: int
    parameters: int
    seconds: float
    train: TrainingResult
    test: dict[str, Any]


class EpochMetrics(TypedDict):
    """A line of metrics.jsonl; it also has the losses and scores of the epoch."""

    epoch: int
    step: int
    seconds: float


class History(TypedDict):
    """What a checkpoint knows of environment.json and metrics.jsonl: their digests up to this point."""

    starts: int
    """Number of entries of environment.json."""
    environment: str
    metrics: str


class RunLockedError(ValueError):
    """Another process is training this run."""


class RunFolder:
    """Reads and writes the files of a run."""

    def __init__(self, path: Path) -> None:
        try:
            str(path).encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{path} is not a name in Unicode, which safetensors needs; rename the folder.") from error
        self.path = path
        self.metrics = path / "metrics.jsonl"
        self.checkpoints, self.ensemble = path / "checkpoints", path / "ensemble"
        self.predictions = path / "predictions"
        self._starts: list[dict[str, Any]] = []
        self._lines: list[dict[str, Any]] = []

    def __str__(self) -> str:
        return str(self.path)

    @property
    def is_finished(self) -> bool:
        return (self.path / MANIFEST).is_file() and (self.path / "result.json").is_file()

    def check(self, recipe: dict[str, Any], resume: bool) -> Result | None:
        """Raise ValueError unless a run of this recipe can start here or be resumed. Return its result if finished."""
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"{self} is a file; give the name of a folder for the run.")
        parent = next(p for p in (self.path, *self.path.absolute().parents) if p.exists())
        if not os.access(parent, os.W_OK):
            raise ValueError(f"{parent} is not writable; give another folder for the run.")
        if not (self.path / "recipe.json").exists():
            if self.path.exists() and any(p for p in self.path.iterdir() if not p.name.startswith(".")):
                raise ValueError(f"{self} contains other files but no run; give the name of a new folder.")
            return None
        if not resume:
            raise ValueError(f"{self} already contains a run; add --resume to resume it, or give another folder.")
        differences = recipe_differences(recipe, self.read_recipe())
        if differences:
            raise ValueError(f"{self} is a run of another recipe: {'; '.join(differences)}. Give another folder.")
        return self.read_result() if self.is_finished else None

    def was_started_by(self, launcher: int) -> bool:
        """Whether environment.json names this torchrun (`launcher_id`) as one of those that last started the run."""
        with suppress(OSError, ValueError):  # `begin` reports what is wrong with it
            return launcher in self.read_environment()[-1].get("launchers", [])
        return False

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Create the folder and lock it. The operating system releases the lock when the process ends."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(f"{self} cannot be created ({error.strerror}); give another folder for the run.") from error
        with open(self.path / ".lock", "ab") as file:
            if fcntl is not None:
                # Forked data loading processes may outlive this one and must not hold the lock.
                os.register_at_fork(after_in_child=file.close)
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError as error:
                    raise RunLockedError(f"{self} is being trained by another process; wait for it.") from error
            yield

    def begin(
        self,
        recipe: dict[str, Any],
        inputs: dict[str, Any],
        environment: dict[str, Any],
        epoch: int,
        history: History | None = None,
    ) -> None:
        """Write recipe.json and inputs.json, add to environment.json, and drop metrics of epochs after `epoch`.

        `history` is that of the checkpoint from which the run resumes; files that differ from it are refused.
        """
        earlier = self.read_environment() if (self.path / "environment.json").exists() else []
        lines = [line for line in self.read_metrics() if line["epoch"] <= epoch]
        if [line["epoch"] for line in lines] != list(range(1, epoch + 1)):
            raise ValueError(f"{self.metrics} does not have exactly one line for each finished epoch; {RESTORE}.")
        if history is not None:
            for name, ours, theirs in (
                (self.metrics.name, json_digest(lines), history["metrics"]),
                ("environment.json", json_digest(earlier[: history["starts"]]), history["environment"]),
            ):
                if ours != theirs:
                    raise not_of_this_run(self.path, [name])
        self._starts, self._lines = [*earlier, environment], lines
        with self.writing():
            (self.path / MANIFEST).unlink(missing_ok=True)  # of a run whose result was removed to finish it again
            write_atomically(self.path / "recipe.json", _json(recipe))
            write_atomically(self.path / "inputs.json", _json(inputs))
            write_atomically(self.path / "environment.json", _json(self._starts))
            self._write_metrics()

    @property
    def history(self) -> History:
        """Digests of environment.json and metrics.jsonl, as this process has written them."""
        starts, metrics = json_digest(self._starts), json_digest(self._lines)
        return {"starts": len(self._starts), "environment": starts, "metrics": metrics}

    def finish(
        self, members: int, parameters: int, examples: int, test: dict[str, Any], data: dict[str, str]
    ) -> Result:
        """Write and return result.json, then write the manifest.

        Args:
            members, parameters, examples: numbers of members, of parameters and of training examples.
            test: metrics on the test set.
            data: digests of the data.
        """
        lines = self._lines
        names = ("epoch", "step", "loss", "cross_entropy", "member_nll", "accuracy", "rmse")
        last = {name: lines[-1][name] for name in names if name in lines[-1]} if lines else {}
        result: Result = {
            "members": members,
            "parameters": parameters,
            "seconds": sum(line["seconds"] for line in lines),
            "train": cast(TrainingResult, {"examples": examples, **last}),
            "test": test,
        }
        self._write_metrics()  # once more, so that the manifest has the digest of what this process knows
        write_atomically(self.path / "result.json", _json(result))
        write_manifest(self.path, self.ensemble, data)
        return result

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Turn write errors, mostly a full disk, into an OSError that says how to resume."""
        try:
            yield
        except OSError as error:
            text = f"Writing to {self} failed ({error.strerror or error}); earlier files are intact"
            raise OSError(f"{text}. Free some space, then resume with --resume.") from error

    def add_metrics(self, line: dict[str, Any]) -> None:
        """Append the line of an epoch."""
        self._lines.append(line)
        with self.writing(), open(self.metrics, "ab") as file:
            file.write(_json(line, None))
            file.flush()
            os.fsync(file.fileno())

    def _write_metrics(self) -> None:
        write_atomically(self.metrics, b"".join(_json(line, None) for line in self._lines))

    def verify(self) -> Manifest:
        """Return the manifest of a finished run, after verifying that all files belong to it."""
        return verify_run(self.path, self.ensemble)

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return all complete lines of metrics.jsonl. A killed process may have left part of a line."""
        if not self.metrics.exists():
            return []
        *lines, _ = self._content(self.metrics.name).split(b"\n")
        return [self._parse(line, f"Line {k} of {self.metrics}", EpochMetrics) for k, line in enumerate(lines, 1)]

    def read_recipe(self) -> dict[str, Any]:
        """Return the content of recipe.json."""
        return self._read("recipe.json", RecipeJSON)  # type: ignore[no-any-return]

    def read_inputs(self) -> InputFormat:
        """Return the format of the inputs."""
        return self._read("inputs.json", InputFormat)  # type: ignore[no-any-return]

    def read_environment(self) -> list[dict[str, Any]]:
        """Return the content of environment.json: one entry for each start of the run."""
        return self._read("environment.json", list[dict[str, Any]])  # type: ignore[no-any-return]

    def read_result(self) -> Result:
        """Return the content of result.json."""
        return self._read("result.json", Result)  # type: ignore[no-any-return]

    def _read(self, name: str, hint: Any) -> Any:
        return self._parse(self._content(name), str(self.path / name), hint)

    def _parse(self, text: bytes, name: str, hint: Any) -> Any:
        return parse_json(text, name, hint, RESTORE)

    def _content(self, name: str) -> bytes:
        """Return the content of a file, after verifying that it belongs to a finished run."""
        data = read_regular(self.path / name, RESTORE)
        if self.is_finished and sha256(data) != read_manifest(self.path).files[name]:
            raise not_of_this_run(self.path, [name])
        return data


def _json(value: Any, indent: int | None = 1) -> bytes:
    return (json.dumps(value, indent=indent, allow_nan=False) + "\n").encode()
