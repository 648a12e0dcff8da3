"""The command line: featureflock data | train | evaluate | report | predict | demo.

Commands are imported when they are called for. The package itself still imports PyTorch at once.
"""

import importlib
import signal
import sys

from featureflock.hints import unknown

COMMANDS = {
    "data": "which data sets there are, getting them, and corrupting them",
    "train": "train an ensemble by a recipe, resumable to the bit",
    "evaluate": "all metrics of trained runs, clean, corrupted and unfamiliar, and how they compare",
    "report": "one page about trained runs, with tables and figures",
    "predict": "what a trained run says of a picture, and how sure it is",
    "demo": "compare five ways to train an ensemble on embedded data, in about a minute",
}


def main() -> None:
    """A user's mistake gets one sentence, not a traceback."""
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help"):
        print(_help())
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that what is half done is cleared
    try:
        command, args = words[0], words[1:]
        if command not in COMMANDS:
            raise unknown("command", command, COMMANDS)
        importlib.import_module(f"featureflock.commands.{command}").main(args)
    except (ValueError, OSError, FloatingPointError) as error:
        sys.exit(f"featureflock: {error}")
    except KeyboardInterrupt as interrupt:
        print(f"featureflock: {str(interrupt) or 'stopped.'}", file=sys.stderr)
        sys.exit(128 + getattr(interrupt, "by", signal.SIGINT))  # what a shell reports of a signal


def _help() -> str:
    lines = [f"  featureflock {name:<8} {what}" for name, what in COMMANDS.items()]
    return "\n".join(
        [
            "featureflock: ensembles of neural networks whose members are kept apart in feature space.",
            "",
            *lines,
            "",
            "featureflock COMMAND --help says more.",
        ]
    )
