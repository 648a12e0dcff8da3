"""The command line: featureflock data | train | evaluate | report | tune | reproduce | predict | demo.

Commands are imported when they are called for, and PyTorch with them.
"""

import importlib
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from featureflock.distributed.env import is_rank_zero
from featureflock.utils.suggestions import unknown_name
from featureflock.version import __version__

COMMANDS = {
    "data": "which data sets there are, getting them, and corrupting them",
    "train": "train an ensemble by a recipe, resumable to the bit",
    "evaluate": "all metrics of trained runs, clean, corrupted and unfamiliar, and how they compare",
    "report": "one page about trained runs, with tables and figures",
    "tune": "choose prior precision and rank on held-out training examples",
    "reproduce": "a table or figure of the paper, trained, measured, and beside the paper's numbers",
    "predict": "what a trained run says of a picture, and how sure it is",
    "demo": "compare five ways to train an ensemble on embedded data, in about a minute",
}


def main() -> None:
    """A user's mistake gets one sentence, not a traceback."""
    words = sys.argv[1:]
    try:
        if not words or words[0] in ("-h", "--help"):
            print(_help())
        elif words[0] == "--version":
            print(f"featureflock {__version__}")
        else:
            _run(*words)
    except (ValueError, OSError, FloatingPointError) as error:
        who = "" if is_rank_zero() else f" (rank {os.environ['RANK']})"
        sys.exit(f"featureflock{who}: {error}")
    except KeyboardInterrupt as interrupt:
        if is_rank_zero():
            print(f"featureflock: {str(interrupt) or 'stopped.'}", file=sys.stderr)
        sys.exit(128 + getattr(interrupt, "by", signal.SIGINT))  # what a shell reports of a signal


def _run(command: str, *args: str) -> None:
    if command not in COMMANDS:
        raise unknown_name("command", command, COMMANDS)
    with _ending_at_once():
        module = importlib.import_module(f"featureflock.cli.{command}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that what is half done is cleared
    module.main(list(args))


@contextmanager
def _ending_at_once() -> Iterator[None]:
    """While modules are imported, which takes seconds, Ctrl-C ends the process there and then.

    An exception would not do: C code that is just importing something, as PyTorch's imports NumPy, would lose it.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # such as nohup's, which ignores it
        yield
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    os.write(2, b"featureflock: stopped.\n")
    os._exit(128 + number)


def _help() -> str:
    lines = [f"  featureflock {name:<9} {what}" for name, what in COMMANDS.items()]
    return "\n".join(
        [
            "featureflock: ensembles of neural networks whose members are kept apart in feature space.",
            "",
            *lines,
            "",
            "featureflock COMMAND --help says more; featureflock --version says which version this is.",
        ]
    )
