"""What the kernels share: a C file compiled for this processor when it is first asked for, and threads to run it in."""

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch


@lru_cache
def compiled(name: str, pointers: int, numbers: int) -> Any:
    """The function `name` in the C file `name`, of so many pointers, then so many longs; it returns 0 if all is well.

    None where there is no C compiler that can make it.
    """
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    source = Path(__file__).with_name(f"{name}.c")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, f"{name}.so")
        flags = ["-O3", "-march=native", "-shared", "-fPIC"]
        if subprocess.run([compiler, *flags, "-o", library, source], capture_output=True, check=False).returncode:
            return None
        function = getattr(ctypes.CDLL(str(library)), name)
    function.argtypes = [ctypes.c_void_p] * pointers + [ctypes.c_long] * numbers
    return function


def in_threads(part: Callable[[int, int], int], count: int) -> None:
    """part(first, last) for as many parts of 0 … count as PyTorch has threads.

    The kernels are called through ctypes, which lets other Python threads run meanwhile.
    """
    threads = min(torch.get_num_threads(), count)
    bounds = list(pairwise(count * k // threads for k in range(threads + 1)))
    codes = [part(*bounds[0])] if threads == 1 else _pool(threads).map(lambda b: part(*b), bounds)
    if any(codes):
        raise MemoryError("Not enough memory for a convolution.")


@lru_cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="kernel")
