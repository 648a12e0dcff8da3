"""Whole sets of corrupted pictures, made by several processes or copied from published files."""

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
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from featureflock.corruptions.apply import CORRUPTIONS, SEVERITIES, Name, corrupt, known
from featureflock.corruptions.files import CorruptedSet
from featureflock.corruptions.frost import frost_source
from featureflock.corruptions.images import Bytes
from featureflock.corruptions.writer import SetPlan
from featureflock.data.sources.download import DownloadProgress, no_progress
from featureflock.utils.files import working_folder

_TASK = 500
"""Pictures that a process makes at a time."""
ALGORITHM = 2
"""To be raised when the same seed gives other bytes than before."""

Task = tuple[str, int, int, int]
"""Corruption, severity, seed, first picture."""


def generate_set(
    images: Bytes,
    labels: NDArray[Any],
    folder: Path,
    *,
    corruptions: Sequence[str] = CORRUPTIONS,
    severities: Sequence[int] = SEVERITIES,
    seed: int = 0,
    workers: int | None = None,
    progress: DownloadProgress = no_progress,
    log: Callable[[str], None] = print,
) -> None:
    """Corrupt pictures, uint8 (N, H, W, 3), into files of the published layout.

    `workers` processes share the work, by default one for each core; how many does not change a byte, and 0 and 1 stand
    for this process alone. `progress` is told the number of pictures, those of files that were there included.
    """
    corrupt(images[:0], CORRUPTIONS[0], 1, seed=seed, indices=np.zeros(0, np.int64))  # pictures and seed are in order
    seed, data = int(seed), _digest(images, labels)
    about = {"algorithm": ALGORITHM, "seed": seed, "data": data, "source": "made by featureflock"}
    if workers is not None and workers < 0:
        raise ValueError(f"workers must be at least 0; got {workers}.")
    origins = {name: frost_source() if name == "frost" else "" for name in _names(corruptions)}
    plan = SetPlan(folder, len(images), images.shape[1:], origins, _checked(severities), about)
    missing = plan.begin(labels, log)
    tasks = [
        (name, severity, seed, start)
        for name in missing
        for severity in plan.severities
        for start in range(0, len(images), _TASK)
    ]
    workers = os.cpu_count() or 1 if workers is None else workers
    made = _made(images, tasks, min(workers, len(tasks)), folder)
    try:
        plan.write(missing, lambda name: (next(made) for task in tasks if task[0] == name), progress)
    finally:
        made.close()


def copy_set(
    published: CorruptedSet,
    labels: NDArray[Any],
    folder: Path,
    *,
    corruptions: Sequence[str] | None = None,
    severities: Sequence[int] | None = None,
    progress: DownloadProgress = no_progress,
    log: Callable[[str], None] = print,
) -> None:
    """Copy published files of corrupted pictures, after a look whether they belong to these labels."""
    if not np.array_equal(published.labels.numpy(), labels):
        raise ValueError(
            f"{published.folder / 'labels.npy'} does not have the labels of the test set; is it another data set?"
        )
    if folder.absolute() == published.folder.absolute():
        raise ValueError(f"{folder} cannot be copied into itself; give another folder.")
    names = published.corruptions if corruptions is None else _names(corruptions)
    chosen = published.severities if severities is None else _checked(severities)
    shapes = {published.images(name, severity).shape for name in names for severity in chosen}
    if len(shapes) != 1:
        raise ValueError(f"{published.folder} holds pictures of different sizes: {sorted(shapes)}.")
    words = f"files in {published.folder.absolute()}"
    plan = SetPlan(folder, len(labels), shapes.pop()[1:], dict.fromkeys(names, ""), chosen, {"source": words})
    missing = plan.begin(labels, log)

    def blocks(name: str) -> Iterator[bytes]:
        for severity in chosen:
            pictures = published.images(name, severity)
            for start in range(0, len(pictures), _TASK):
                yield pictures[start : start + _TASK].tobytes()

    plan.write(missing, blocks, progress)


def _made(images: Bytes, tasks: Sequence[Task], workers: int, folder: Path) -> Generator[bytes, None, None]:
    """The pictures of each task, in order. Clean ones go to the processes by a file in a folder of its own."""
    if workers <= 1:
        for task in tasks:
            yield _run(images, task)
        return
    with working_folder(folder) as work:
        # Sent to each process, they would keep the next from starting until this one has imported everything.
        np.save(work / "clean.npy", images)
        pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start_worker, (work / "clean.npy",))
        waiting: deque[Future[bytes]] = deque()
        try:
            for task in tasks:
                with _interrupts_held_back():
                    waiting.append(pool.submit(_run_in_worker, task))
                if len(waiting) > 8 * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as error:
            raise OSError(
                "A worker process was killed, most often for lack of memory; run this again, with fewer workers."
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """For the moment in which a process may be started, which inherits it: Ctrl-C is for this process alone.

    One that comes meanwhile is not lost, but comes after.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run(images: Bytes, task: Task) -> bytes:
    name, severity, seed, start = task
    part = images[start : start + _TASK]
    return corrupt(part, name, severity, seed=seed, indices=np.arange(start, start + len(part))).tobytes()


_images: Bytes
"""In a worker process: all clean pictures."""


def _run_in_worker(task: Task) -> bytes:
    return _run(_images, task)


def _start_worker(clean: Path) -> None:
    global _images
    _images = np.load(clean, mmap_mode="r")
    cv2.setNumThreads(1)
    # Ctrl-C and SIGTERM often go to a whole group of processes; they are for the first, which then ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:  # which may be killed without a chance to end its workers
        threading.Thread(target=_end_after, args=(parent,), daemon=True).start()


def _end_after(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)


def _names(corruptions: Sequence[str]) -> tuple[Name, ...]:
    chosen = {known(name) for name in corruptions}
    if not chosen:
        raise ValueError("At least one corruption must be chosen.")
    return tuple(name for name in CORRUPTIONS if name in chosen)


def _checked(severities: Sequence[int]) -> tuple[int, ...]:
    if not severities or any(not isinstance(s, int) or s not in SEVERITIES for s in severities):
        raise ValueError(f"severities must be some of 1, 2, 3, 4 and 5; got {', '.join(map(str, severities))}.")
    return tuple(sorted(set(severities)))


def _digest(images: Bytes, labels: NDArray[Any]) -> str:
    sha = hashlib.sha256(np.ascontiguousarray(images).data)
    sha.update(np.ascontiguousarray(labels.astype(np.int64)).data)
    return sha.hexdigest()
