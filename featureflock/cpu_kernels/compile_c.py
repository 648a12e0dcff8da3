"""What the kernels share: a C file compiled for this processor when it is first asked for."""

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
def compiled(name: str, pointers: int, numbers: int) -> Any:
    """The function `name` in the C file `name`, of so many pointers, then so many longs; 0 means that all is well.

    The last of the longs is how many threads it may use.

    None where there is no C compiler that can make it.
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
    function.argtypes = [ctypes.c_void_p] * pointers + [ctypes.c_long] * numbers
    return function


def call(function: Any, *args: int | None) -> None:
    """On as many threads as PyTorch has in this thread of Python; other threads of Python run meanwhile."""
    if function(*args, torch.get_num_threads()):
        raise MemoryError("Not enough memory for a convolution.")
