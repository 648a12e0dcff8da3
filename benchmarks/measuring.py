"""What the benchmarks share: peak memory measured in two ways, processes that take turns, rows and the results file.

    allocated   the highest sum of the allocations minus releases of tensor memory that torch.profiler sees: exact,
                but blind to what libraries such as oneDNN allocate for themselves
    resident    how far Linux's peak resident set (VmHWM, set back through /proc/self/clear_refs) rises above the
                resident set before: sees everything, to within the few megabytes that the C library keeps for itself

Both count from what is there before the call. Releases of earlier tensors count as zero in the first, so a call under
measurement should release none.
"""

import ctypes
import gc
import json
import os
import re
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from torch.profiler import ProfilerActivity, profile

from featureflock.utils.provenance import provenance

MB = 2**20
T = TypeVar("T")


def in_fresh_process(function: Callable[..., T], *args: Any) -> T:
    """The result of `function`, computed in a new interpreter.

    There the C library gives every block above 64 kB straight back when it is released. Its usual threshold grows as
    the program runs, and the resident set would then include memory kept for later.
    """
    settings = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "KINETO_LOG_LEVEL": "99"}
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            return pool.submit(function, *args).result()
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def peak_allocated(call: Callable[[], object]) -> int:
    """Bytes of tensors alive at once during `call`, beyond those before it; its return value counts."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = call()
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    del result
    return peak


def peak_resident(call: Callable[[], object]) -> int | None:
    """Bytes by which the resident set rises during `call`; None where the system does not let us set the peak back."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
        result = call()
        after = _status("VmHWM")
    except (OSError, AttributeError):
        return None
    del result
    return after - before


def progress(text: str) -> None:
    """Tell a person who waits what is going on, beside the results."""
    print(text, file=sys.stderr, flush=True)


def seconds(call: Callable[[], object]) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


class Worker:
    """A process of its own that does a piece of work whenever it is told to, and is still meanwhile.

    It calls work(turn, *args), which calls turn() after each piece. The first `warm_up` pieces are done at once, so
    that compilation and caches are not part of what is measured. The next worker starts only then: it finds on disk
    what this one has compiled.
    """

    def __init__(self, work: Callable[..., None], *args: Any, warm_up: int = 2) -> None:
        self._here, there = get_context("spawn").Pipe()
        self._process = get_context("spawn").Process(target=_take_turns, args=(there, work, warm_up, args))
        self._process.start()
        there.close()
        self._here.recv()

    def seconds(self, pieces: int = 1) -> float:
        """How long the next pieces take, together."""
        total = 0.0
        for _ in range(pieces):
            self._here.send("go")
            total += self._here.recv()
        return total

    def close(self) -> None:
        self._here.send("stop")
        self._process.join()


def _take_turns(pipe: Any, work: Callable[..., None], warm_up: int, args: tuple[Any, ...]) -> None:
    start, pieces = 0.0, 0

    def turn() -> None:
        nonlocal start, pieces
        took, pieces = time.perf_counter() - start, pieces + 1
        if pieces >= warm_up:
            pipe.send(took)
            if pipe.recv() == "stop":
                sys.exit()
        start = time.perf_counter()

    work(turn, *args)


def ratios(over: list[float], under: list[float]) -> list[float]:
    """Of times from the same rounds."""
    return [a / b for a, b in zip(over, under, strict=True)]


def row(what: str, by_round: list[float], wanted: str = "", unit: str = "×", **more: Any) -> dict[str, Any]:
    """A line of a table: the median of what was measured in each round, and what is wanted, such as "≤ 1.05"."""
    value = median(by_round)
    limit = float(wanted.split()[1]) if wanted else None
    met = None if limit is None else value <= limit if wanted.startswith("≤") else value >= limit
    return {"what": what, "value": value, "by_round": by_round, "unit": unit, "wanted": wanted, "met": met, **more}


def table(rows: list[dict[str, Any]]) -> str:
    """Rows in Markdown."""
    lines = ["| | measured | rounds: least to most | wanted | |", "|---|---:|---:|---:|---|"]
    for r in rows:
        least, most = min(r["by_round"]), max(r["by_round"])
        spread = "" if len(r["by_round"]) == 1 else f"{least:.3g} to {most:.3g}"
        met = {None: "", True: "met", False: "**not met**"}[r["met"]]
        lines.append(f"| {r['what']} | {r['value']:.3g} {r['unit']} | {spread} | {r['wanted']} | {met} |")
    return "\n".join(lines)


def write_json(path: Path | None, content: dict[str, Any]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(provenance() | content, indent=1) + "\n")


def _status(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024
