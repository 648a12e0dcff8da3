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
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from featureflock.training.recipe import recipe_differences
from featureflock.utils.files import read_regular, write_atomically

try:
    import fcntl
except ImportError:  # Windows, where folders are not locked
    fcntl = None  # type: ignore[assignment]


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

    def __str__(self) -> str:
        return str(self.path)

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
            raise ValueError(f"{self} is a run of another recipe: {'; '.join(differences)}. Give another folder.")
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
                    raise RunLockedError(f"{self} is being trained by another process; wait for it.") from error
            yield

    def begin(self, recipe: dict[str, Any], inputs: dict[str, Any], environment: dict[str, Any], epoch: int) -> None:
        """Write recipe.json and inputs.json, add to environment.json, and drop metrics of epochs after `epoch`."""
        with self.writing():
            write_atomically(self.path / "recipe.json", _json(recipe))
            write_atomically(self.path / "inputs.json", _json(inputs))
            try:
                earlier = json.loads(read_regular(self.path / "environment.json"))
            except (OSError, ValueError):
                earlier = []
            write_atomically(self.path / "environment.json", _json([*earlier, environment]))
            lines = [line for line in self.read_metrics() if line["epoch"] <= epoch]
            write_atomically(self.metrics, b"".join(_json(line, None) for line in lines))

    def finish(self, members: int, parameters: int, examples: int, test: dict[str, Any]) -> dict[str, Any]:
        """Write and return result.json, with the number of training examples and the metrics on the test set."""
        lines = self.read_metrics()
        names = ("epoch", "step", "loss", "cross_entropy", "member_nll", "accuracy", "rmse")
        last = {name: lines[-1][name] for name in names if name in lines[-1]} if lines else {}
        result: dict[str, Any] = {
            "members": members,
            "parameters": parameters,
            "seconds": sum(line["seconds"] for line in lines),
            "train": {"examples": examples, **last},
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
            text = f"Writing to {self} failed ({error.strerror or error}); earlier files are intact"
            raise OSError(f"{text}. Free some space, then resume with --resume.") from error

    def add_metrics(self, line: dict[str, Any]) -> None:
        """Append the line of an epoch."""
        with self.writing(), open(self.metrics, "ab") as file:
            file.write(_json(line, None))
            file.flush()
            os.fsync(file.fileno())

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return all complete lines. A killed process may have left part of a line."""
        lines = []
        for text in read_regular(self.metrics).splitlines() if self.metrics.exists() else []:
            with suppress(ValueError):
                lines.append(json.loads(text))
        return lines

    def read(self, name: str) -> Any:
        """Return the content of a JSON file."""
        try:
            return json.loads(read_regular(self.path / name, "train the run again in another folder"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{self.path / name} is not valid JSON; was it modified?") from error


def _json(value: Any, indent: int | None = 1) -> bytes:
    return (json.dumps(value, indent=indent, allow_nan=False) + "\n").encode()
