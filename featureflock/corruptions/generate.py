"""Generate corrupted sets in several processes, or copy published ones."""

import contextlib
import hashlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import product
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from featureflock.corruptions.apply import CORRUPTIONS, SEVERITIES, check_corruption, corrupt
from featureflock.corruptions.files import CorruptedSet, SetWriter
from featureflock.corruptions.frost import frost_source
from featureflock.corruptions.images import Bytes
from featureflock.utils.files import working_folder
from featureflock.utils.progress import ProgressCallback, no_progress

_TASK_SIZE = 500  # images in one task of a worker process
ALGORITHM = 2
"""Version of the corruptions, to be increased when a seed gives different bytes."""

Task = tuple[str, int, int, int]  # corruption, severity, seed, first image


def generate_set(
    images: Bytes,
    labels: NDArray[Any],
    folder: Path,
    *,
    corruptions: Sequence[str] = CORRUPTIONS,
    severities: Sequence[int] = SEVERITIES,
    seed: int = 0,
    workers: int | None = None,
    progress: ProgressCallback = no_progress,
    log: Callable[[str], None] = print,
) -> None:
    """Generate a corrupted set in the published layout, or resume one.

    Args:
        images: clean images, uint8 (N, H, W, 3).
        labels: integers from 0 to 255, (N,).
        folder: output folder.
        corruptions, severities: which ones to generate.
        seed: random seed.
        workers: number of processes, by default one per core; 0 and 1 mean this process. The bytes do not depend on it.
        progress: called with the number of images done, including those of files already present.
        log: called with messages.
    """
    corrupt(images[:0], CORRUPTIONS[0], 1, seed=seed, indices=np.zeros(0, np.int64))  # checks images and seed
    seed, data = int(seed), source_digest(images, labels)
    metadata = {"algorithm": ALGORITHM, "seed": seed, "data": data, "source": "made by featureflock"}
    if workers is not None and workers < 0:
        raise ValueError(f"workers must be at least 0; got {workers}.")
    origins = {name: frost_source() if name == "frost" else "" for name in _in_order(corruptions)}
    writer = SetWriter(folder, len(images), images.shape[1:], origins, _check_severities(severities), metadata)
    missing = writer.prepare(labels, log)
    starts = range(0, len(images), _TASK_SIZE)
    tasks = [(name, severity, seed, start) for name, severity, start in product(missing, writer.severities, starts)]
    workers = os.cpu_count() or 1 if workers is None else workers
    with contextlib.closing(_run_tasks(images, tasks, min(workers, len(tasks)), folder)) as results:
        writer.write(missing, lambda name: (next(results) for task in tasks if task[0] == name), progress)


def source_digest(images: Bytes, labels: NDArray[Any]) -> str:
    """SHA-256 of clean images (N, H, W, 3) and their labels: the `data` of a generated set."""
    return hashlib.sha256(images.tobytes() + labels.astype(np.int64).tobytes()).hexdigest()


def copy_set(
    published: CorruptedSet,
    labels: NDArray[Any],
    folder: Path,
    *,
    corruptions: Sequence[str] | None = None,
    severities: Sequence[int] | None = None,
    progress: ProgressCallback = no_progress,
    log: Callable[[str], None] = print,
) -> None:
    """Copy a published set after checking that it has these labels; the arguments are those of `generate_set`."""
    if not np.array_equal(published.labels.numpy(), labels):
        path = published.folder / "labels.npy"
        raise ValueError(f"{path} does not match the labels of the test set; is it of another data set?")
    if folder.absolute() == published.folder.absolute():
        raise ValueError(f"{folder} cannot be copied into itself; give another folder.")
    names = published.corruptions if corruptions is None else _in_order(corruptions)
    chosen = published.severities if severities is None else _check_severities(severities)
    shapes = {published.images(name, severity).shape for name in names for severity in chosen}
    if len(shapes) != 1:
        raise ValueError(f"{published.folder} contains images of different sizes: {sorted(shapes)}.")
    source = f"files in {published.folder.absolute()}"
    writer = SetWriter(folder, len(labels), shapes.pop()[1:], dict.fromkeys(names, ""), chosen, {"source": source})
    missing = writer.prepare(labels, log)
    writer.write(missing, lambda name: (published.images(name, s).tobytes() for s in chosen), progress)


def _run_tasks(images: Bytes, tasks: Sequence[Task], workers: int, folder: Path) -> Generator[bytes, None, None]:
    """Yield the corrupted images of each task, in order."""
    if workers <= 1:
        for task in tasks:
            yield _run(images, task)
        return
    with working_folder(folder) as work:
        path = work / "clean.npy"  # workers read the images from a file, which is faster than sending them
        np.save(path, images)
        pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start_worker)
        waiting: deque[Future[bytes]] = deque()
        try:
            for task in tasks:
                with _blocked_interrupts():
                    waiting.append(pool.submit(_run, path, task))
                if len(waiting) > 8 * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as error:
            raise OSError("A worker process was killed, probably for lack of memory; use fewer workers.") from error
        finally:
            pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _blocked_interrupts() -> Iterator[None]:
    """Block Ctrl-C while a worker may be started, which inherits the mask; an interrupt is delivered afterwards."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run(images: Bytes | Path, task: Task) -> bytes:
    name, severity, seed, start = task
    images = np.load(images, mmap_mode="r") if isinstance(images, Path) else images
    part = images[start : start + _TASK_SIZE]
    return corrupt(part, name, severity, seed=seed, indices=np.arange(start, start + len(part))).tobytes()


def _start_worker() -> None:
    cv2.setNumThreads(1)
    # Ctrl-C and SIGTERM reach the whole process group; the main process handles them and ends the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def exit_with_parent() -> None:  # which may be killed before it can end its workers
        parent.join()
        os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()


def _in_order(corruptions: Sequence[str]) -> tuple[str, ...]:
    chosen = {check_corruption(name) for name in corruptions}
    if not chosen:
        raise ValueError("Choose at least one corruption.")
    return tuple(name for name in CORRUPTIONS if name in chosen)


def _check_severities(severities: Sequence[int]) -> tuple[int, ...]:
    if not severities or any(not isinstance(s, int) or s not in SEVERITIES for s in severities):
        raise ValueError(f"severities must be from 1 to 5; got {', '.join(map(str, severities))}.")
    return tuple(sorted(set(severities)))
