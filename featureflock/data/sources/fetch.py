"""Getting a published data set into the cache: from the first source that has it, or from files that the user has."""

import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from featureflock.data.sources import cache
from featureflock.data.sources.archives import DataFile, Raw, find
from featureflock.data.sources.download import DownloadProgress, silent
from featureflock.data.sources.registry import PublishedSet, known
from featureflock.utils.files import clear_partials, working_folder


def get(
    name: str,
    from_folder: str | os.PathLike[str] | None = None,
    progress: DownloadProgress = silent,
    *,
    say: Callable[[str], None] = print,
) -> Path:
    """Put a data set into the cache, if it is not there and sound, and return its file.

    With `from_folder` it is read from the published files in that folder (extracted, or in their archive), and always
    replaces what is there. A collection in the same format with other counts than the published ones is kept as what it
    is, `published=False`; without `from_folder` such a one gives way to the published set.
    """
    facts = known(name)
    if from_folder is not None:
        return _from_folder(name, facts, Path(from_folder).expanduser(), progress, say)
    try:
        held = cache.load(name)
        if held.published:
            say(f"{facts.title} is already here.")
            return cache.path_of(name)
        say(f"The {facts.title} that is here is not the published one; fetching that.")
    except FileNotFoundError:
        pass
    except ValueError as error:
        say(f"{str(error).split('; run:')[0]}; fetching it again.")
    return _from_sources(name, facts, progress)


def _from_folder(
    name: str, facts: PublishedSet, place: Path, progress: DownloadProgress, say: Callable[[str], None]
) -> Path:
    if not place.exists():
        raise ValueError(f"There is no {place}; give the folder that holds {facts.by_hand}.")
    raw, published = _read(facts, place, progress)
    _prepare()
    path = cache.store(name, raw, source=f"files in {place.absolute()}", published=published)
    if not published:
        say(
            f"Kept, but it is not the published {facts.title}: {len(raw['train_y']):,} + {len(raw['test_y']):,} "
            f"pictures instead of {facts.train:,} + {facts.test:,}."
        )
    return path


def _from_sources(name: str, facts: PublishedSet, progress: DownloadProgress) -> Path:
    folder = _prepare()
    reasons = []
    for source in facts.sources:
        try:
            with working_folder(folder) as work:
                raw, published = _read(facts, source.fetch(work, progress), progress)
            if not published:
                raise ValueError(f"it has {len(raw['train_y']):,} + {len(raw['test_y']):,} pictures")
        except (OSError, ValueError) as error:
            reasons.append(f"{source.words} ({str(error).rstrip('.')})")
        else:
            return cache.store(name, raw, source=source.words, published=True)
    raise OSError(
        f"{facts.title} could not be fetched from {' nor from '.join(reasons)}; bring {facts.by_hand} into a folder "
        f"and run: featureflock data get {name} --from FOLDER"
    )


def _read(facts: PublishedSet, place: Path, progress: DownloadProgress) -> tuple[Raw, bool]:
    """The arrays, and whether they are the published ones: these counts with another content are a damaged copy."""
    progress(0, None, f"reading {place.name or place}")
    found = find(place, facts.layouts)
    if found is None:
        raise ValueError(f"{place} holds no {facts.title}; give the folder that holds {facts.by_hand}.")
    layout, files = found
    raw = layout.read(files, facts.shape, facts.classes)
    if (len(raw["train_y"]), len(raw["test_y"])) != (facts.train, facts.test):
        return raw, False
    _check_content(facts, place, files, raw)
    return raw, True


def _check_content(facts: PublishedSet, place: Path, files: Mapping[str, DataFile], raw: Raw) -> None:
    wrong = [key for key, digest in (facts.sha256 or {}).items() if cache.sha256(raw[key]) != digest]
    for file, digest in facts.md5.items():
        if hashlib.md5(files[file].data, usedforsecurity=False).hexdigest() != digest:
            wrong.append(file)
    if wrong:
        raise ValueError(
            f"{place} is damaged: it has as many pictures as the published {facts.title}, but other content "
            f"({', '.join(wrong)})."
        )


def _prepare() -> Path:
    """The cache folder, made if need be and rid of what killed processes left."""
    folder = cache.cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        clear_partials(folder)
    except OSError as error:
        raise OSError(
            f"The cache folder {folder} cannot be used ({error.strerror}); set {cache.VARIABLE} to another folder."
        ) from error
    if not os.access(folder, os.W_OK):
        raise OSError(f"The cache folder {folder} cannot be written to; set {cache.VARIABLE} to another folder.")
    return folder
