"""A run's folder, which says by itself what is in it:

recipe.json        what was trained
inputs.json        what its inputs look like, and the names of the classes
environment.json   with what: versions, machine, commit, command; one entry for each time the run was started
metrics.jsonl      one line an epoch
checkpoints/       the last two
ensemble/          the trained ensemble, for featureflock.load
result.json        what it came to; there when the run is finished
predictions/       what the members say of each test set that the run was evaluated on
tensorboard/       the same curves for TensorBoard, if that is installed
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
from featureflock.training.recipe import differences
from featureflock.utils.files import write_atomically

try:
    import fcntl
except ImportError:  # Windows, where a folder is not locked
    fcntl = None  # type: ignore[assignment]


_LAST = ("epoch", "step", "loss", "cross_entropy", "accuracy")


class RunLockedError(ValueError):
    """Another process is training this run."""


@dataclass(frozen=True)
class RunFolder:
    path: Path

    def __str__(self) -> str:
        return str(self.path)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def ensemble(self) -> Path:
        return self.path / "ensemble"

    @property
    def predictions(self) -> Path:
        return self.path / "predictions"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    def check(self, recipe: dict[str, Any], resume: bool) -> dict[str, Any] | None:
        """See that there is nothing in the way, or a run of this recipe that is to be resumed; its result, if any."""
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"{self} is a file; give the name of a folder for the run.")
        parent = next(p for p in (self.path, *self.path.absolute().parents) if p.exists())
        if not os.access(parent, os.W_OK):
            raise ValueError(f"{parent} cannot be written to; give a folder for the run elsewhere.")
        known = self.path / "recipe.json"
        if not known.exists():
            if self.path.exists() and any(p for p in self.path.iterdir() if not p.name.startswith(".")):
                raise ValueError(f"{self} holds other files but no run; give the name of a new folder.")
            return None
        if not resume:
            raise ValueError(f"{self} holds a run already; add --resume to go on with it, or give another folder.")
        differing = differences(recipe, self.read("recipe.json"))
        if differing:
            raise ValueError(
                f"{self} is a run of another recipe: {'; '.join(differing)}. Give the recipe that it was started with, "
                "or another folder."
            )
        return self.read("result.json") if (self.path / "result.json").exists() else None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes out; the system unlocks it whatever becomes of this one."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(f"{self} cannot be made ({error.strerror}); give a folder for the run elsewhere.") from error
        with open(self.path / ".lock", "ab") as file:
            if fcntl is not None:
                # Processes that are forked to read data may outlive this one, and must not keep it locked.
                os.register_at_fork(after_in_child=file.close)
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError as error:
                    raise RunLockedError(
                        f"{self} is being trained by another process; wait for it, or stop it."
                    ) from error
            yield

    def begin(self, recipe: dict[str, Any], inputs: dict[str, Any], environment: dict[str, Any]) -> None:
        """Write what is trained, on what, and with what."""
        write_atomically(self.path / "recipe.json", _json(recipe))
        write_atomically(self.path / "inputs.json", _json(inputs))
        try:
            before = json.loads((self.path / "environment.json").read_bytes())
        except (OSError, ValueError):
            before = []
        write_atomically(self.path / "environment.json", _json([*before, environment]))

    def finish(self, members: int, parameters: int, test: dict[str, Any]) -> dict[str, Any]:
        """Write what the run came to."""
        lines = self.read_metrics()
        last = {name: value for name, value in lines[-1].items() if name in _LAST} if lines else {}
        seconds = sum(line["seconds"] for line in lines)
        result = {"members": members, "parameters": parameters, "seconds": seconds, "train": last, "test": test}
        write_atomically(self.path / "result.json", _json(result))
        return result

    @contextmanager
    def writing(self) -> Iterator[None]:
        """What cannot be written, for want of room most often, is said with the way to go on."""
        try:
            yield
        except OSError as error:
            raise OSError(
                f"{self} could not be written to ({error.strerror or error}); what was written before is sound. Make "
                "room, then go on with --resume."
            ) from error

    def newest_checkpoint(self) -> tuple[Checkpoint | None, list[str]]:
        return checkpoints.read_newest(self.checkpoints)

    def forget_metrics_from(self, epoch: int) -> None:
        """Keep the lines of the epochs before this one: the others will be written again."""
        kept = [line for line in self.read_metrics() if line["epoch"] < epoch]
        write_atomically(self.metrics, b"".join(_line(line) for line in kept))

    def add_metrics(self, line: dict[str, Any]) -> None:
        with open(self.metrics, "ab") as file:
            file.write(_line(line))
            file.flush()
            os.fsync(file.fileno())

    def read_metrics(self) -> list[dict[str, Any]]:
        """All whole lines: a process that was killed may have left a piece of one."""
        lines = []
        for text in self.metrics.read_bytes().splitlines() if self.metrics.exists() else []:
            try:
                lines.append(json.loads(text))
            except ValueError:
                continue
        return lines

    def read(self, name: str) -> Any:
        """What is in one of its JSON files."""
        try:
            return json.loads((self.path / name).read_bytes())
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{self.path / name} is missing; was it removed?") from error
        except ValueError as error:
            raise ValueError(f"{self.path / name} is no readable JSON; was it altered?") from error


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()


def _line(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, allow_nan=False) + "\n").encode()
