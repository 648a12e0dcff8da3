"""Shared parts of the benchmarks: peak memory, processes that take turns, table rows and the results file.

Peak memory is measured in two ways:

    allocated   peak of tensor allocations minus releases, from torch.profiler: exact, but without what libraries such
                as oneDNN allocate internally
    resident    how far Linux's peak resident set (VmHWM, reset through /proc/self/clear_refs) rises above the resident
                set before the call: includes everything, to within a few megabytes that the C library keeps

Both count from the state before the call. Releases of older tensors do not count in the first, so the measured call
should not release any.
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
    """Return `function(*args)`, computed in a new interpreter.

    The C library there returns every released block above 64 kB to the system at once. Its default threshold grows
    while the program runs, and the resident set would include memory cached for later.
    """
    variables = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "KINETO_LOG_LEVEL": "99"}
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            return pool.submit(function, *args).result()
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def peak_allocated(call: Callable[[], object]) -> int:
    """Peak bytes of tensors allocated during `call`, including its return value."""
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
    """Bytes by which the resident set rises during `call`; None where the system cannot reset the peak."""
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
    """Log progress to stderr."""
    print(text, file=sys.stderr, flush=True)


def seconds(call: Callable[[], object]) -> float:
    """Wall-clock time of a call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def cpu_seconds(call: Callable[[], object]) -> float:
    """CPU time of all threads of this process: of a call on one thread, its time on an idle core."""
    start = time.process_time()
    call()
    return time.process_time() - start


class Worker:
    """A separate process that does one unit of work on request and is idle in between.

    It runs `work(turn, *args)`, which calls `turn()` after each unit. The first `warm_up` units run at once, so that
    compilation and caches are not measured. The constructor returns after them, so that the next worker finds compiled
    code on disk.
    """

    def __init__(self, work: Callable[..., None], *args: Any, warm_up: int = 2) -> None:
        self._here, there = get_context("spawn").Pipe()
        self._process = get_context("spawn").Process(target=_take_turns, args=(there, work, warm_up, args))
        self._process.start()
        there.close()
        self._here.recv()

    def seconds(self, units: int = 1) -> float:
        """Total time of the next units of work."""
        total = 0.0
        for _ in range(units):
            self._here.send("go")
            total += self._here.recv()
        return total

    def close(self) -> None:
        self._here.send("stop")
        self._process.join()


def _take_turns(pipe: Any, work: Callable[..., None], warm_up: int, args: tuple[Any, ...]) -> None:
    start, units = 0.0, 0

    def turn() -> None:
        nonlocal start, units
        took, units = time.perf_counter() - start, units + 1
        if units >= warm_up:
            pipe.send(took)
            if pipe.recv() == "stop":
                sys.exit()
        start = time.perf_counter()

    work(turn, *args)


def ratios(numerators: list[float], denominators: list[float]) -> list[float]:
    """Ratios of times from the same rounds."""
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


def row(name: str, by_round: list[float], target: str = "", unit: str = "×", **more: Any) -> dict[str, Any]:
    """One table row: the median over rounds, and the target, such as "≤ 1.05"."""
    value = median(by_round)
    limit = float(target.split()[1]) if target else None
    met = None if limit is None else value <= limit if target.startswith("≤") else value >= limit
    return {"name": name, "value": value, "by_round": by_round, "unit": unit, "target": target, "met": met, **more}


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown table of rows."""
    lines = ["| | measured | range over rounds | target | |", "|---|---:|---:|---:|---|"]
    for r in rows:
        low, high = min(r["by_round"]), max(r["by_round"])
        spread = "" if len(r["by_round"]) == 1 else f"{low:.3g} to {high:.3g}"
        met = {None: "", True: "met", False: "**not met**"}[r["met"]]
        lines.append(f"| {r['name']} | {r['value']:.3g} {r['unit']} | {spread} | {r['target']} | {met} |")
    return "\n".join(lines)


def write_json(path: Path | None, content: dict[str, Any]) -> None:
    """Write the results with their provenance; nothing if `path` is None."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(provenance() | content, indent=1) + "\n")


def _status(field: str) -> int:
    match = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024
