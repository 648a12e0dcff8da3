"""What is imported when: the command line and the package answer without importing PyTorch."""

import ast
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import featureflock as ff

INIT = Path(ff.__file__)

CHECKS = """
import contextlib, io, json, os, sys

def fresh(code, *words):
    '''Run code in a forked copy of this process, which has imported nothing of the package; return its output.'''
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        output = io.StringIO()
        sys.argv = ["featureflock", *words]
        try:
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                exec(code, {"__name__": "__main__"})
        except BaseException as error:
            output.write(f"{type(error).__name__}: {error}")
        with os.fdopen(writer, "w") as pipe:
            pipe.write(output.getvalue())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return text

bare, with_torch = json.load(sys.stdin)
output = [fresh(code, *words) for code, *words in bare]
import torch  # takes seconds: once for all checks that do not care
print(json.dumps(output + [fresh(code, *words) for code, *words in with_torch]))
"""
COMMAND_LINE = """
import sys
from featureflock.cli.main import main
try:
    main()
finally:
    print("torch" in sys.modules)
"""
HEAVY = """
import sys, importlib
from featureflock.cli.main import COMMANDS
for command in COMMANDS:
    importlib.import_module(f"featureflock.cli.{command}")
print([name in sys.modules for name in ("scipy.stats", "sklearn", "matplotlib")])
"""
IGNORED_INTERRUPT = """
import signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
from featureflock.cli.main import main
main()
print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)
"""
LAZY_PACKAGE = """
import sys, featureflock as ff
assert not {"torch", "numpy"} & {*sys.modules}
assert {*ff.__all__} <= {*dir(ff)}
assert not {"torch", "numpy"} & {*sys.modules}
ff.RBF
assert "torch" in sys.modules and "featureflock.methods" not in sys.modules
assert "RBF" in vars(ff)
"""


def test_imports(tmp_path):
    """Every check runs in its own fork of one process, which has imported nothing of the package."""
    names = ", ".join(ff.__all__)
    kernel = pickle.dumps(ff.RBF(bandwidth=2.0))
    ens = ff.methods.DICE().build(
        lambda: ff.models.MLP(4, (6, 6)), lambda: ff.models.linear_head(6, 3), members=2, seed=0, train_size=9
    )
    ff.save(ens, tmp_path / "dice")
    load = "assert len(load(sys.argv[1]).extractors) == 2"
    bare = {
        "no arguments": (COMMAND_LINE,),
        "-h": (COMMAND_LINE, "-h"),
        "--help": (COMMAND_LINE, "--help"),
        "--version": (COMMAND_LINE, "--version"),
        "unknown command": (COMMAND_LINE, "trian"),
        "lazy package": (LAZY_PACKAGE,),
    }
    with_torch = {
        "heavy modules": (HEAVY,),
        "ignored interrupt": (IGNORED_INTERRUPT, "train", "--help"),
        "from import": (
            f"from featureflock import {names}; import featureflock as ff; assert ff.Ensemble is Ensemble",
        ),
        "star import": (f"from featureflock import *; {names}; assert evaluation.calibrate is calibrate",),
        "submodule": ("import featureflock.methods; featureflock.methods.FeatureWGD, featureflock.Ensemble",),
        "unpickle": (f"import pickle; assert repr(pickle.loads({kernel!r})).startswith('RBF(bandwidth=2.0')",),
        "load": (f"import sys, featureflock as ff; load = ff.load; {load}", str(tmp_path / "dice")),
        "load by module": (
            f"import sys; from featureflock.ensemble.saving import load; {load}",
            str(tmp_path / "dice"),
        ),
    }
    run = subprocess.run(
        [sys.executable, "-c", CHECKS],
        input=json.dumps([[*bare.values()], [*with_torch.values()]]),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    output = dict(zip([*bare, *with_torch], json.loads(run.stdout), strict=True))
    for name in ("no arguments", "-h", "--help"):
        assert "featureflock train " in output.get(name, "")
        assert output.pop(name).endswith("\nFalse\n")
    assert output.pop("--version") == f"featureflock {ff.__version__}\nFalse\n"
    message = "SystemExit: featureflock: There is no command 'trian'; did you mean train?"
    assert output.pop("unknown command") == f"False\n{message}"
    assert output.pop("heavy modules") == "[False, False, False]\n"
    assert output.pop("ignored interrupt").endswith("\nTrue\n")
    assert output == dict.fromkeys(output, "")


# ---- Ctrl-C while modules are imported

INTERRUPTED = """
import os, signal, sys, time

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[0]:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)

sys.meta_path.insert(0, Finder())
from featureflock.cli.main import main
sys.argv = [{module!r}, "train", "--help"]
main()
"""


def catch_interrupts():
    """The test runner may ignore Ctrl-C, and child processes inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.parametrize("module", ["numpy", "torch", "numpy.dtypes", "torch.nn", "featureflock.training"])
def test_an_interrupt_during_an_import_gets_one_sentence(module):
    """Some modules are imported by C code, which would lose an exception."""
    run = subprocess.run(
        [sys.executable, "-c", INTERRUPTED.format(module=module)],
        capture_output=True,
        text=True,
        timeout=300,
        preexec_fn=catch_interrupts,
    )
    assert (run.returncode, run.stdout, run.stderr) == (130, "", "featureflock: stopped.\n")


def test_an_interrupt_from_outside_while_pytorch_is_imported():
    process = subprocess.Popen(
        [sys.executable, "-m", "featureflock", "evaluate", "nowhere"],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=catch_interrupts,
    )
    maps = Path(f"/proc/{process.pid}/maps")
    deadline = time.monotonic() + 60
    while maps.exists() and "libtorch" not in maps.read_text() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "featureflock: stopped.\n")


# ---- plug-ins


def test_a_plug_in_that_cannot_be_imported_gets_one_sentence():
    run = subprocess.run(
        [sys.executable, "-m", "featureflock", "train", "--help"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "FEATUREFLOCK_PLUGINS": "no_such_module"},
    )
    assert run.returncode == 1
    assert run.stderr.startswith("featureflock: The plug-in no_such_module named in FEATUREFLOCK_PLUGINS cannot be")
    assert "Traceback" not in run.stderr


# ---- public names


def test_the_lists_of_public_names_agree():
    """`__all__`, the lazily imported names, and the names that type checkers see."""
    shown = {}
    (block,) = (node for node in ast.parse(INIT.read_text()).body if isinstance(node, ast.If))
    for node in block.body:
        shown |= {alias.name: node.module.removeprefix("featureflock").removeprefix(".") for alias in node.names}
    assert {name: home for name, home in shown.items() if home} == ff._HOMES
    assert {*ff.__all__} == {*shown, "__version__"}


def test_an_unknown_name_raises_attribute_error():
    with pytest.raises(AttributeError, match="module 'featureflock' has no attribute 'Ensembel'"):
        ff.Ensembel  # noqa: B018
    assert not hasattr(ff, "os")
