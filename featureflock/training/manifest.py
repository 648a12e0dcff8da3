"""The manifest of a finished run: the digests of its files, which belong together. It is written last.

    manifest.json    SHA-256 of recipe.json, inputs.json, environment.json, metrics.jsonl, result.json and the weights,
                     digests of the training, validation and test data, and a digest of the manifest itself

The temperature of the ensemble is not part of it, because a finished run may be calibrated.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from featureflock.ensemble.saving import weights_digest
from featureflock.utils.digests import json_digest, sha256
from featureflock.utils.files import read_regular, write_atomically
from featureflock.utils.json_files import check_json, read_json
from featureflock.utils.serialization import to_json

MANIFEST = "manifest.json"
FILES = ("recipe.json", "inputs.json", "environment.json", "metrics.jsonl", "result.json")
_FORMAT, _VERSION = "featureflock run", 1
_REPAIR = "remove it, then repeat the command that trained the run, with --resume"
RESTORE = "restore it, or train the run again in another folder"


@dataclass(frozen=True)
class Manifest:
    """What belongs to a run."""

    files: dict[str, str]
    """SHA-256 of each file."""
    weights: str
    """SHA-256 of the weights of the ensemble."""
    data: dict[str, str]
    """Digests of the data: train, test and, if there are any, validation."""
    format: str = _FORMAT
    version: int = _VERSION

    @property
    def identity(self) -> str:
        """Digest of all that determines predictions: weights, recipe and input format."""
        return json_digest([self.weights, self.files["recipe.json"], self.files["inputs.json"]])


def write_manifest(run: Path, ensemble: Path, data: dict[str, str]) -> None:
    """Write the manifest of a run, whose files are complete."""
    files = {name: sha256((run / name).read_bytes()) for name in FILES}
    content = to_json(Manifest(files, weights_digest(ensemble), data), tag=False)
    text = json.dumps({**content, "sha256": json_digest(content)}, indent=1) + "\n"
    write_atomically(run / MANIFEST, text.encode())


def read_manifest(run: Path) -> Manifest:
    """Read and verify manifest.json."""
    path = run / MANIFEST
    value: dict[str, Any] = read_json(path, dict[str, Any], _REPAIR)
    if (value.get("format"), value.get("version")) != (_FORMAT, _VERSION):
        raise ValueError(f"{path} is not a manifest that this version of featureflock reads; {_REPAIR}.")
    if value.pop("sha256", None) != json_digest(value):
        raise ValueError(f"{path} is damaged: its content has changed; {_REPAIR}.")
    manifest: Manifest = check_json(value, str(path), Manifest, _REPAIR)
    if manifest.files.keys() != {*FILES}:
        raise ValueError(f"{path} is damaged: it does not name all files; {_REPAIR}.")
    return manifest


def verify_run(run: Path, ensemble: Path) -> Manifest:
    """Return the manifest, after verifying that each file belongs to the run; ValueError names those that do not."""
    manifest = read_manifest(run)
    contents = {name: read_regular(run / name, RESTORE, max_bytes=None) for name in FILES}
    wrong = [name for name, data in contents.items() if sha256(data) != manifest.files[name]]
    if weights_digest(ensemble) != manifest.weights:
        wrong.append(ensemble.name)
    if len(wrong) > len(FILES) / 2:
        what = f"{run / MANIFEST} does not belong to the other files in {run}"
        raise ValueError(f"{what}: {', '.join(wrong)} differ from it; {RESTORE}.")
    if wrong:
        raise not_of_this_run(run, wrong)
    return manifest


def not_of_this_run(run: Path, names: list[str]) -> ValueError:
    """The error for files of a run whose content is not that in the manifest."""
    verb = "does" if len(names) == 1 else "do"
    what = f"{run / names[0]}{''.join(f' and {name}' for name in names[1:])} {verb} not belong to this run"
    return ValueError(f"{what}: modified, damaged or copied from another run; {RESTORE}.")
