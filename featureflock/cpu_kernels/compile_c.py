"""Compile C kernels for this processor, once, and load them.

A library is stored in the private folder of compiled code (compiler.py) as NAME-KEY-DIGEST.so. KEY is a digest of the
source, the compiler and its flags; DIGEST is that of the library, which is checked before it is loaded. A library that
does not fit its name is compiled again. It is written under another name first and then renamed, so that processes
that compile at the same time do not disturb each other.
"""

import ctypes
import os
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from featureflock.cpu_kernels.compiler import CompilerError, compile_library, compiled_code_folder, find_compiler
from featureflock.utils.digests import file_version, sha256


def lanes() -> int:
    """Number of float32 values in a vector: 16 with AVX-512, otherwise 8."""
    return 16 if torch.backends.cpu.get_cpu_capability().startswith("AVX512") else 8


def load_kernel(name: str, pointers: int, integers: int) -> Any:
    """Return the C function `name` of the file `name`.c, or None if no C compiler can compile it.

    It takes pointers, then `long` integers, the last one the number of threads, and returns 1 if memory ran out.
    """
    function = _load(name, lanes())
    if function is not None:
        function.argtypes = [ctypes.c_void_p] * pointers + [ctypes.c_long] * integers
    return function


def call_kernel(function: Any, *args: int | None) -> None:
    """Call a kernel with PyTorch's number of threads. ctypes releases the GIL meanwhile."""
    if function(*args, torch.get_num_threads()):
        raise MemoryError("Not enough memory for a convolution.")


@lru_cache
def _load(name: str, lanes: int) -> Any:
    source = Path(__file__).with_name(f"{name}.c")
    try:
        compiler = find_compiler("c")
        flags = ["-O3", "-march=native", "-fopenmp", f"-DLANES={lanes}"]
        prefix = f"{name}-{_key(source, compiler, flags)}"
        library = _cached(prefix) or _compile(prefix, source, compiler, flags)
        return getattr(ctypes.CDLL(str(library)), name)
    except (CompilerError, OSError, AttributeError):  # no compiler, no space, or nothing that can be loaded
        return None


def _cached(prefix: str) -> Path | None:
    """The library, if it has been compiled before."""
    for library in compiled_code_folder().glob(f"{prefix}-*.so"):
        if not library.is_symlink() and library.stem.endswith(_digest(library.read_bytes())):
            return library
        library.unlink(missing_ok=True)
    return None


def _compile(prefix: str, source: Path, compiler: str, flags: list[str]) -> Path:
    folder = compiled_code_folder()
    with tempfile.TemporaryDirectory(dir=folder) as work:
        library = Path(work, "library.so")
        compile_library(compiler, source, library, flags)
        return library.rename(folder / f"{prefix}-{_digest(library.read_bytes())}.so")


def _key(source: Path, compiler: str, flags: list[str]) -> str:
    version = file_version(os.stat(compiler))  # of the program itself, behind links
    return _digest(b"\0".join([source.read_bytes(), f"{compiler} {version} {flags}".encode()]))


def _digest(content: bytes) -> str:
    return sha256(content)[:16]
