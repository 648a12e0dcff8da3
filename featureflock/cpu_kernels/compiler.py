"""C and C++ compilers: where their output is cached, and whether they work.

    compiler_problem("cpu")        # None, or why torch.compile cannot be used: "the compiler … did not finish in 60 s"

Compiled code is executed, so it is stored where no other user of the machine can write: in `compiled` of the platform's
cache folder, with one subfolder for each kind of processor, because homes are shared between machines. The default of
PyTorch is a folder with a predictable name among temporary files, which anybody may create first. A folder that the
user has chosen with TORCHINDUCTOR_CACHE_DIR is used as it is.
"""

import hashlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from functools import cache
from pathlib import Path

from featureflock.utils.private_folder import check_private, temporary_private_folder

TIME_OUT = 60.0
"""Seconds for a compiler to translate a small file; a working one takes less than one."""

_CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
_PROBE = """
#include <Python.h>
{includes}
{linkage} int probe(int n) {{ {body} }}
"""
_PROBES = {
    "c": {"includes": "#include <stdlib.h>", "linkage": "", "body": "return 2 * n;"},
    "cpp": {
        "includes": "#include <cmath>\n#include <vector>" + "\n#include <omp.h>" * (sys.platform == "linux"),
        "linkage": 'extern "C"',
        "body": "std::vector<int> v(n, 2); int sum = 0; for (int x : v) sum += x; return sum;",
    },
}
_LOAD = "import ctypes, sys; sys.exit(ctypes.CDLL(sys.argv[1]).probe(21) != 42)"


class CompilerError(Exception):
    """A compiler is missing, fails, or does not finish; the message is a clause for a sentence."""


@cache
def compiled_code_folder() -> Path:
    """The private cache folder of compiled code; a temporary one, with a warning, if other users can write to it."""
    import pooch  # takes 20 ms

    folder = Path(pooch.os_cache("featureflock")).expanduser().absolute() / "compiled"
    try:
        check_private(folder)
        kind = folder / _processor()
        check_private(kind)
        with tempfile.TemporaryDirectory(dir=kind):  # writable, and not full
            return kind
    except OSError as error:
        reason = error if error.errno is None else f"{folder} cannot be used ({error.strerror})"
        warnings.warn(f"Compiled code is not cached, because {reason}.", stacklevel=2)
        return temporary_private_folder()


def set_cache_folders() -> Path:
    """Make torch.compile cache its code in the private folder, unless the user has chosen one; return the folder."""
    default = os.path.join(tempfile.gettempdir(), "torchinductor_")  # which PyTorch sets in the environment itself
    for variable in _CACHES:
        if os.environ.get(variable, default).startswith(default):
            part = "triton" if variable.startswith("TRITON") else "torch"
            os.environ[variable] = str(compiled_code_folder() / part)
    chosen = Path(os.environ[_CACHES[0]])
    chosen.mkdir(parents=True, exist_ok=True)
    return chosen


@cache
def compiler_problem(device: str) -> str | None:
    """Why torch.compile cannot work on a kind of device, "cpu" or "cuda", as a clause; None if it can.

    A small program is compiled, loaded and run where torch.compile would do so. It takes about a second, once.
    """
    language = "c" if device == "cuda" else "cpp"  # Triton compiles in C
    try:
        folder = set_cache_folders()
        compiler = find_compiler(language)
        if os.name == "nt":
            return None
        with tempfile.TemporaryDirectory(dir=folder) as work:
            source, library = Path(work, f"probe.{language}"), Path(work, "probe.so")
            source.write_text(_PROBE.format(**_PROBES[language]))
            openmp = ["-fopenmp"] * (language == "cpp" and sys.platform == "linux")
            compile_library(compiler, source, library, [*openmp, f"-I{sysconfig.get_paths()['include']}"])
            status, output = _run([sys.executable, "-I", "-c", _LOAD, str(library)])
            if status:
                reason = _last_line(output) or f"exit status {status}"
                raise CompilerError(f"what {compiler} compiles cannot be executed in {folder}: {reason}")
    except CompilerError as error:
        return str(error)
    except OSError as error:
        return f"nothing can be compiled: {error}"
    return None


def find_compiler(language: str) -> str:
    """The path of a compiler of "c" or "cpp": that of CC or CXX, or the usual one; CompilerError if there is none."""
    if language == "c":
        names = [os.environ["CC"]] if os.environ.get("CC") else ["cc", "gcc", "clang"]
    else:
        usual = {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")  # what PyTorch looks for
        names = [os.environ.get("CXX") or usual]
    for name in names:
        if path := shutil.which(name):
            return path
    raise CompilerError(f"no {'C' if language == 'c' else 'C++'} compiler was found ({', '.join(names)})")


def compile_library(compiler: str, source: Path, library: Path, flags: list[str]) -> None:
    """Compile a shared library; CompilerError if the compiler fails or does not finish."""
    status, output = _run([compiler, "-shared", "-fPIC", str(source), "-o", str(library), *flags])
    if status or not library.is_file():
        reason = _first_error(output) or (f"exit status {status}" if status else "it wrote nothing")
        raise CompilerError(f"the compiler {compiler} failed: {reason}")


def _run(command: list[str]) -> tuple[int, str]:
    """Exit status and output of a command; CompilerError if it does not finish, and then it is stopped."""
    with tempfile.TemporaryFile() as output:  # a pipe would stay open as long as a child of the command has it
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        except OSError as error:
            raise CompilerError(f"{command[0]} cannot be started: {error.strerror or error}") from error
        try:
            status = process.wait(TIME_OUT)
        except subprocess.TimeoutExpired as error:
            raise CompilerError(f"{command[0]} did not finish within {TIME_OUT:g} seconds") from error
        finally:
            if process.poll() is None:  # also after Ctrl-C
                os.killpg(process.pid, signal.SIGKILL) if hasattr(os, "killpg") else process.kill()  # and its children
                process.wait()
        output.seek(0)
        return status, output.read(20_000).decode(errors="replace")


def _first_error(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[0] if lines else "")[:300]


def _last_line(output: str) -> str:
    return ([line.strip() for line in output.splitlines() if line.strip()] or [""])[-1][:300]


def processor_info() -> dict[str, str]:
    """The entries of the first processor in /proc/cpuinfo; empty where the system does not have it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in reversed(lines))
    return {key.strip(): value.strip() for key, colon, value in pairs if colon}


def _processor() -> str:
    """A name for this kind of processor: code that is compiled for it may not run on another one."""
    info = processor_info() or {"processor": platform.processor()}
    kind = [info[key] for key in ("model name", "flags", "Features") if key in info]
    return hashlib.sha256("\n".join([platform.machine(), *(kind or info.values())]).encode()).hexdigest()[:16]
