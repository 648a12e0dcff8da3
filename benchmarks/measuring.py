"""What the benchmarks share: peak memory measured in two ways, fresh processes, and the results file.

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
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

from torch.profiler import ProfilerActivity, profile

from featureflock.provenance import provenance

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


def seconds(call: Callable[[], object]) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def write_json(path: Path | None, content: dict[str, Any]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(provenance() | content, indent=1) + "\n")


def _status(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024
