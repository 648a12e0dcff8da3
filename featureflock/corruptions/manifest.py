"""The manifest of a corrupted set that featureflock wrote: featureflock.json, with the digest of every file.

A file is entered when it is complete, so an interrupted set can be resumed. The manifest has a digest of its own.
"""

import json
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from featureflock.corruptions.apply import SEVERITIES
from featureflock.utils.digests import json_digest
from featureflock.utils.files import write_atomically
from featureflock.utils.json_files import check_json, read_json

MANIFEST = "featureflock.json"
FORMAT, VERSION = "featureflock corruptions", 2
_ADVICE = "remove the folder and generate the set again"


FileEntry = TypedDict("FileEntry", {"sha256": str, "from": str})
"""Digest of a file of images, and their source if that differs between machines, else \"\"."""


class Manifest(TypedDict):
    """Content of featureflock.json, without the digest of the manifest itself."""

    format: str
    version: int
    severities: list[int]
    source: str
    """Where the images came from, for messages."""
    labels: str
    """Digest of labels.npy."""
    files: dict[str, FileEntry]
    """By name of the file."""
    data: NotRequired[str]
    """Digest of the clean images and labels that a set was generated from."""


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of a set; None for folders without one, such as published files."""
    path = folder / MANIFEST
    if not path.exists():
        return None
    value = read_json(path, dict[str, Any], _ADVICE)
    if (value.get("format"), value.get("version")) != (FORMAT, VERSION):
        raise ValueError(f"{path} is not a manifest that this version of featureflock reads; {_ADVICE}.")
    if value.pop("sha256", None) != json_digest(value):
        raise ValueError(f"{path} is damaged: its content has changed; {_ADVICE}.")
    manifest: Manifest = check_json(value, str(path), Manifest, _ADVICE)
    if not manifest["severities"] or not {*manifest["severities"]} <= {*SEVERITIES}:
        raise ValueError(f"{path} is damaged: its severities are {manifest['severities']}; {_ADVICE}.")
    return manifest


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest of a set, atomically."""
    content = {**manifest, "sha256": json_digest(manifest)}
    write_atomically(folder / MANIFEST, (json.dumps(content, indent=1, sort_keys=True) + "\n").encode())
