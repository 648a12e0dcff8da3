"""The folder of a training run:

recipe.json        the recipe, `Recipe.to_json()`
inputs.json        format of the inputs and names of the classes, `InputFormat.to_json()`
environment.json   versions, machine, commit, command and compute options, one entry per start of the run
metrics.jsonl      one line per epoch
checkpoints/       the last two checkpoints
ensemble/          the trained ensemble, for featureflock.load
result.json        final metrics; present when the run is finished
predictions/       cached predictions of each evaluated test set
tensorboard/       learning curves, if TensorBoard is installed
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from featureflock.training import checkpoint as checkpoints
from featureflock.training.checkpoint import Checkpoint
from featureflock.training.recipe import recipe_differences
from featureflock.utils.files import write_atomically

try:
    import fcntl
except ImportError:  # Windows, where folders are not locked
    fcntl = None  # type: ignore[assignment]


_FINAL = ("epoch", "step", "loss", "cross_entropy", "accuracy")
"""Metrics of the last epoch in result.json."""


class RunLockedError(ValueError):
    """Another process is training this run."""


@dataclass(frozen=True)
class RunFolder:
    """Reads and writes the files of a run."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    @property
    def ensemble(self) -> Path:
        """Folder of the trained ensemble."""
        return self.path / "ensemble"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def predictions(self) -> Path:
        """Folder of the cached predictions."""
        return self.path / "predictions"

    @property
    def metrics(self) -> Path:
        """File with one JSON line per epoch."""
        return self.path / "metrics.jsonl"

    def check(self, recipe: dict[str, Any], resume: bool) -> dict[str, Any] | None:
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
        differences = recipe_differences(recipe, self.read("recipe.json"))
        if differences:
            raise ValueError(
                f"{self} is a run of another recipe: {'; '.join(differences)}. Give the recipe of the run, or another "
                "folder."
            )
        return self.read("result.json") if (self.path / "result.json").exists() else None

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
                    raise RunLockedError(
                        f"{self} is being trained by another process; wait for it, or stop it."
                    ) from error
            yield

    def begin(self, recipe: dict[str, Any], inputs: dict[str, Any], environment: dict[str, Any]) -> None:
        """Write recipe.json and inputs.json, and add an entry to environment.json."""
        write_atomically(self.path / "recipe.json", _json(recipe))
        write_atomically(self.path / "inputs.json", _json(inputs))
        try:
            earlier = json.loads((self.path / "environment.json").read_bytes())
        except (OSError, ValueError):
            earlier = []
        write_atomically(self.path / "environment.json", _json([*earlier, environment]))

    def finish(self, members: int, parameters: int, examples: int, test: dict[str, Any]) -> dict[str, Any]:
        """Write and return result.json.

        Args:
            members, parameters: size of the ensemble.
            examples: number of training examples.
            test: metrics on the test set.
        """
        lines = self.read_metrics()
        last: dict[str, Any] = lines[-1] if lines else {}
        result: dict[str, Any] = {
            "members": members,
            "parameters": parameters,
            "seconds": sum(line["seconds"] for line in lines),
            "train": {"examples": examples, **{name: last[name] for name in _FINAL if name in last}},
            "test": test,
        }
        write_atomically(self.path / "result.json", _json(result))
        return result

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Turn write errors, mostly a full disk, into an OSError that says how to resume."""
        try:
            yield
        except OSError as error:
            raise OSError(
                f"Writing to {self} failed ({error.strerror or error}); earlier files are intact. Free some space, "
                "then resume with --resume."
            ) from error

    def newest_checkpoint(self) -> tuple[Checkpoint | None, list[str]]:
        """Return the newest intact checkpoint, if any, and messages about damaged ones."""
        return checkpoints.read_newest(self.checkpoints)

    def drop_metrics_from(self, epoch: int) -> None:
        """Remove the lines of this epoch and later ones, which will be written again."""
        lines = [line for line in self.read_metrics() if line["epoch"] < epoch]
        write_atomically(self.metrics, b"".join(_json(line, None) for line in lines))

    def add_metrics(self, line: dict[str, Any]) -> None:
        """Append the line of an epoch."""
        with open(self.metrics, "ab") as file:
            file.write(_json(line, None))
            file.flush()
            os.fsync(file.fileno())

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return all complete lines. A killed process may have left part of a line."""
        lines = []
        for text in self.metrics.read_bytes().splitlines() if self.metrics.exists() else []:
            try:
                lines.append(json.loads(text))
            except ValueError:
                continue
        return lines

    def read(self, name: str) -> Any:
        """Return the content of a JSON file."""
        try:
            return json.loads((self.path / name).read_bytes())
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{self.path / name} is missing; was it removed?") from error
        except ValueError as error:
            raise ValueError(f"{self.path / name} is not valid JSON; was it modified?") from error


def _json(value: Any, indent: int | None = 1) -> bytes:
    return (json.dumps(value, indent=indent, allow_nan=False) + "\n").encode()
