"""The command line: featureflock data | train | evaluate | report | tune | reproduce | predict | export | demo.

A command is imported when it is called, and PyTorch and plug-ins with it.
"""

import importlib
import os
import re
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import NoReturn

from featureflock.cli.output import printable, safe_output
from featureflock.cpu_kernels.malloc import reuse_freed_memory
from featureflock.distributed.env import is_rank_zero
from featureflock.utils.registry import load_plugins, unknown_name
from featureflock.version import __version__

COMMANDS = {
    "data": "list, download and corrupt data sets",
    "train": "train an ensemble with a recipe; an interrupted run can be resumed exactly",
    "evaluate": "compute all metrics of trained runs: clean, corrupted and out-of-distribution",
    "report": "write a page with tables and figures that compares trained runs, or any predictions",
    "tune": "choose hyper-parameters on held-out examples, within a budget of runs",
    "reproduce": "train and evaluate a table or figure of the paper",
    "predict": "predict images, or rows of a table, with a trained run and its uncertainty",
    "export": "write the calibrated prediction of a trained run to an ONNX or torch.export file",
    "demo": "compare five methods on built-in data, in about a minute",
}


def main() -> None:
    """Run the command line. Errors that a user can fix are printed as one sentence, without a traceback."""
    words = sys.argv[1:]
    try:
        with safe_output():
            if not words or words[0] in ("-h", "--help"):
                print(_help())
            elif words[0] == "--version":
                print(f"featureflock {__version__}")
            else:
                _run(*words)
    except (ValueError, OSError, FloatingPointError, MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not _is_out_of_memory(error):
            raise
        rank = "" if is_rank_zero() else f" (rank {os.environ['RANK']})"
        sys.exit(printable(f"featureflock{rank}: {_sentence(error)}"))
    except KeyboardInterrupt as interrupt:
        if is_rank_zero():
            with safe_output():
                print(printable(f"featureflock: {str(interrupt) or 'stopped.'}"), file=sys.stderr)
        sys.exit(128 + getattr(interrupt, "by", signal.SIGINT))  # the exit status that shells use for signals


def _sentence(error: Exception) -> str:
    """The message of an error; that of the operating system without its number."""
    if isinstance(error, OSError) and error.errno is not None and error.strerror is not None:
        return f"{error.filename}: {error.strerror}." if error.filename else f"{error.strerror}."
    if isinstance(error, MemoryError | RuntimeError):
        asked = re.search(r"(?:allocate|needed) ([\d.]+ ?[KMGT]?i?B|\d+ bytes)", str(error))
        what = f"There is not enough memory{f' for another {asked[1]}' if asked else ''}"
        return f"{what}; use a smaller network, batch or data set, or fewer processes."
    return str(error)


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Whether PyTorch could not allocate memory on a GPU, or on the CPU, for which it has no exception of its own."""
    return type(error).__name__ == "OutOfMemoryError" or bool(
        re.search(r"you tried to allocate|out of memory", str(error))
    )


def _run(command: str, *args: str) -> None:
    if command not in COMMANDS:
        raise unknown_name("command", command, COMMANDS)
    if command != "data":
        reuse_freed_memory()
    # C code that imports modules, as when PyTorch imports NumPy, could lose a KeyboardInterrupt: Ctrl-C exits directly.
    handler = signal.getsignal(signal.SIGINT)
    catches = handler is signal.default_int_handler  # not if Ctrl-C is ignored, as under nohup
    if catches:
        signal.signal(signal.SIGINT, _exit)
    try:
        module = importlib.import_module(f"featureflock.cli.{command}")
        load_plugins()
    finally:
        if catches:
            signal.signal(signal.SIGINT, handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that temporary files are removed
    module.main(list(args))


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    with suppress(OSError):  # a closed pipe
        os.write(2, b"featureflock: stopped.\n")
    os._exit(128 + number)


def _help() -> str:
    about = "featureflock: ensembles of neural networks whose members are kept apart in feature space."
    commands = "\n".join(f"  featureflock {name:<9} {what}" for name, what in COMMANDS.items())
    more = "featureflock COMMAND --help shows the options of a command, featureflock --version the version."
    return f"{about}\n\n{commands}\n\n{more}"
