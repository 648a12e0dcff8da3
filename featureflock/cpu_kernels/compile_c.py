"""Compile a C kernel for this processor on first use."""

import ctypes
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from featureflock.cpu_kernels.compiler import CompilerError, compile_library, compiled_code_folder, find_compiler


@lru_cache
def load_kernel(name: str, pointers: int, integers: int) -> Any:
    """Return the C function `name` of the file `name`.c, or None if no C compiler can compile it.

    It takes pointers, then `long` integers, the last one the number of threads, and returns 1 if memory ran out.
    """
    source = Path(__file__).with_name(f"{name}.c")
    try:
        with tempfile.TemporaryDirectory(dir=compiled_code_folder()) as folder:
            library = Path(folder, f"{name}.so")
            compile_library(find_compiler("c"), source, library, ["-O3", "-march=native", "-fopenmp"])
            function = getattr(ctypes.CDLL(str(library)), name)
    except (CompilerError, OSError, AttributeError):  # no compiler, no space, or nothing that can be loaded
        return None
    function.argtypes = [ctypes.c_void_p] * pointers + [ctypes.c_long] * integers
    return function


def call_kernel(function: Any, *args: int | None) -> None:
    """Call a kernel with PyTorch's number of threads. ctypes releases the GIL meanwhile."""
    if function(*args, torch.get_num_threads()):
        raise MemoryError("Not enough memory for a convolution.")
