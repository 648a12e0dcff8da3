"""Get a published data set into the cache, from the first source that has it or from the user's files.

get("cifar10")                          download
get("cifar10", "/data/cifar")           read cifar-10-python.tar.gz, its content, or class folders, from a folder
"""

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path

from featureflock.data.sources import cache
from featureflock.data.sources.archives import Arrays, DataFile, find_files
from featureflock.data.sources.class_folders import read_class_folders, sort_by_digest
from featureflock.data.sources.registry import PUBLISHED_SETS, PublishedSet
from featureflock.utils.files import clear_partials, working_folder
from featureflock.utils.progress import ProgressCallback, no_progress


def get(
    name: str,
    from_folder: str | os.PathLike[str] | None = None,
    progress: ProgressCallback = no_progress,
    *,
    log: Callable[[str], None] = print,
) -> Path:
    """Put a data set into the cache, unless it is there and intact, and return its file.

    Args:
        name: of a published set, such as cifar10.
        from_folder: read the published files in this folder (extracted or in their archive), or for CIFAR class folders
            of images, instead of downloading, and replace what is cached. Files of the same format with another number
            of images are stored as a custom version, `published=False`, which the next download replaces.
        progress: called during downloads.
        log: called with messages.
    """
    published = PUBLISHED_SETS[name]
    clear_cache()
    if from_folder is not None:
        folder = Path(from_folder).expanduser()
        if not folder.exists():
            raise ValueError(f"There is no {folder}; give the folder that contains {published.files}.")
        arrays, is_published = _read(published, folder, progress, log)
        _prepare_cache()
        path = cache.store(name, arrays, source=f"files in {folder.absolute()}", published=is_published)
        if not is_published:
            counts = f"{_counts(arrays)} images instead of {published.train:,} + {published.test:,}"
            log(f"Stored as a custom version of {published.title}: {counts}.")
        return path
    try:
        if cache.load(name).published:
            log(f"{published.title} is already in the cache.")
            return cache.path_of(name)
        log(f"The cached {published.title} is a custom version; downloading the published one.")
    except FileNotFoundError:
        pass
    except ValueError as error:
        log(f"{str(error).split('; run:')[0]}; downloading it again.")
    folder, failures = _prepare_cache(), []
    for source in published.sources:
        try:
            with working_folder(folder) as work:
                arrays, is_published = _read(published, source.fetch(work, progress), progress, log)
            if not is_published:
                raise ValueError(f"it has {_counts(arrays)} images")
        except (OSError, ValueError) as error:
            failures.append(f"{source.title} ({str(error).rstrip('.')})")
        else:
            return cache.store(name, arrays, source=source.title, published=True)
    raise OSError(
        f"{published.title} could not be downloaded from {' or '.join(failures)}; copy {published.files} into a folder "
        f"and run: featureflock data get {name} --from FOLDER"
    )


def _read(
    published: PublishedSet, place: Path, progress: ProgressCallback, log: Callable[[str], None]
) -> tuple[Arrays, bool]:
    """Return the arrays, and whether they are the published ones; raise ValueError if they are damaged."""
    progress(0, None, f"reading {place.name or place}")
    files: dict[str, DataFile] = {}
    if match := find_files(place, published.layouts):
        layout, files = match
        arrays = layout.read(files, published.shape, published.classes)
    elif not (read := _read_class_folders(published, place)):
        raise ValueError(
            f"{place} does not contain {published.title}; give the folder that contains {published.files}."
        )
    else:
        arrays = read
    if (len(arrays["train_y"]), len(arrays["test_y"])) != (published.train, published.test):
        return arrays, False
    if published.is_official(arrays, files):
        return arrays, True
    if wrong := ", ".join(published.differing(arrays)):
        raise ValueError(f"{place} is damaged: it has the size of {published.title}, but different content ({wrong}).")
    log(
        f"These are the images of {published.title}, but not in the official order; they are sorted. Files for the "
        "official order, such as published corruptions, do not fit them."
    )
    return sort_by_digest(arrays, published.class_names), True


def _read_class_folders(published: PublishedSet, place: Path) -> Arrays | None:
    if not published.unordered_sha256:
        return None
    counts = {"train": published.train // published.classes, "test": published.test // published.classes}
    return read_class_folders(place, published.title, published.class_names, published.shape, counts)


def _counts(arrays: Arrays) -> str:
    return f"{len(arrays['train_y']):,} + {len(arrays['test_y']):,}"


def clear_cache() -> None:
    """Remove what killed processes left in the cache folder."""
    with contextlib.suppress(OSError):
        clear_partials(cache.cache_folder())


def _prepare_cache() -> Path:
    """Create the cache folder."""
    folder = cache.cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, "it is not writable")
    except OSError as error:
        raise OSError(f"{folder} cannot be used ({error.strerror}); set {cache.VARIABLE} to another folder.") from error
    return folder
