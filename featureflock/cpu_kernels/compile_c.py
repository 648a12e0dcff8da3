"""Compile a C kernel for this processor on first use."""

import ctypes
import os
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch


@lru_cache
def load_kernel(name: str, pointers: int, integers: int) -> Any:
    """Return the C function `name` of the file `name`.c, or None if no C compiler can compile it.

    It takes pointers, then `long` integers, the last one the number of threads, and returns 1 if memory ran out.
    """
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    source = Path(__file__).with_name(f"{name}.c")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, f"{name}.so")
        flags = ["-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"]
        if subprocess.run([compiler, *flags, "-o", library, source], capture_output=True, check=False).returncode:
            return None
        function = getattr(ctypes.CDLL(str(library)), name)
    function.argtypes = [ctypes.c_void_p] * pointers + [ctypes.c_long] * integers
    return function


def call_kernel(function: Any, *args: int | None) -> None:
    """Call a kernel with PyTorch's number of threads. ctypes releases the GIL meanwhile."""
    if function(*args, torch.get_num_threads()):
        raise MemoryError("Not enough memory for a convolution.")
