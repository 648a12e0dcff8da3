"""What is imported when: the command line and the package answer before PyTorch does."""

import ast
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import featureflock as ff
from featureflock.cli.main import COMMANDS

INIT = Path(ff.__file__)


def python(program, *words):
    """A fresh process, so that nothing is imported yet."""
    run = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    return run.stdout


def started(*words):
    """What the command line printed, its code, and whether it imported PyTorch."""
    program = (
        "import sys\n"
        "from featureflock.cli.main import main\n"
        "try:\n"
        "    main()\n"
        "    code = 0\n"
        "except SystemExit as end:\n"
        "    code = end.code\n"
        "print(repr((code, 'torch' in sys.modules)))"
    )
    *printed, last = python(program, *words).splitlines()
    return "\n".join(printed), *ast.literal_eval(last)


# ---- the command line


@pytest.mark.parametrize("words", [[], ["-h"], ["--help"]])
def test_help_does_without_pytorch(words):
    printed, code, slow = started(*words)
    assert (code, slow) == (0, False)
    assert "featureflock train " in printed


def test_version_and_an_unknown_command_do_without_pytorch():
    assert started("--version") == (f"featureflock {ff.__version__}", 0, False)
    complaint = "featureflock: There is no command 'trian'; did you mean train?"
    assert started("trian") == ("", complaint, False)


def test_help_of_a_command_does_without_what_takes_seconds_besides():
    commands = ", ".join(f"featureflock.cli.{command}" for command in COMMANDS)
    program = f"import sys, {commands}; print([m in sys.modules for m in sys.argv[1:]])"
    assert python(program, "scipy.stats", "sklearn", "matplotlib") == "[False, False, False]\n"


@pytest.mark.parametrize("module", ["numpy", "torch", "numpy.dtypes", "torch.nn", "featureflock.training"])
def test_an_interrupt_while_a_command_is_imported_gets_one_sentence(module):
    """Ctrl-C comes just when `module` is looked for: some are imported by C code, which would lose an exception."""
    program = (
        "import os, signal, sys, time\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == sys.argv[0]:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "            time.sleep(0.01)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from featureflock.cli.main import main\n"
        f"sys.argv = [{module!r}, 'train', '--help']\n"
        "main()"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=300,
        # Whoever runs the tests may ignore Ctrl-C, and processes inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert (run.returncode, run.stdout, run.stderr) == (130, "", "featureflock: stopped.\n")


def test_an_interrupt_from_outside_while_pytorch_is_imported():
    process = subprocess.Popen(
        [sys.executable, "-m", "featureflock", "evaluate", "nowhere"],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    maps = Path(f"/proc/{process.pid}/maps")
    deadline = time.monotonic() + 60
    while maps.exists() and "libtorch" not in maps.read_text() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, complaint = process.communicate(timeout=60)
    assert (process.returncode, complaint) == (130, "featureflock: stopped.\n")


def test_an_interrupt_that_is_ignored_stays_ignored():
    """As behind nohup, or in the background of a script."""
    program = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "from featureflock.cli.main import main\n"
        "main()\n"
        "print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)"
    )
    assert python(program, "train", "--help").endswith("\nTrue\n")


# ---- the package


def test_the_package_does_without_pytorch_until_a_name_is_asked_for():
    program = (
        "import sys, featureflock as ff\n"
        "assert not {'torch', 'numpy'} & {*sys.modules}\n"
        "assert {*ff.__all__} <= {*dir(ff)}\n"
        "assert not {'torch', 'numpy'} & {*sys.modules}\n"
        "ff.RBF\n"
        "assert 'torch' in sys.modules and 'featureflock.methods' not in sys.modules\n"
        "assert 'RBF' in vars(ff)\n"
    )
    python(program)


def test_public_names_are_found_in_whatever_way_they_are_asked_for():
    names = ", ".join(ff.__all__)
    python(f"from featureflock import {names}; import featureflock as ff; assert ff.Ensemble is Ensemble")
    python(f"from featureflock import *; {names}; assert evaluation.calibrate is calibrate")
    python("import featureflock.methods; featureflock.methods.FeatureWGD, featureflock.Ensemble")


def test_the_lists_of_public_names_agree():
    """Those of `__all__`, of what is found when it is asked for, and of what type checkers are shown."""
    shown = {}
    (block,) = (node for node in ast.parse(INIT.read_text()).body if isinstance(node, ast.If))
    for node in block.body:
        shown |= {alias.name: node.module.removeprefix("featureflock").removeprefix(".") for alias in node.names}
    assert shown == dict.fromkeys(ff._MODULES, "") | ff._HOMES
    assert {*ff.__all__} == {*shown, "__version__"}


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match="module 'featureflock' has no attribute 'Ensembel'"):
        ff.Ensembel  # noqa: B018
    assert not hasattr(ff, "os")


def test_pickles_and_saved_ensembles_are_read_before_anything_else_is_imported(tmp_path):
    kernel = pickle.dumps(ff.RBF(bandwidth=2.0))
    python(f"import pickle; assert repr(pickle.loads({kernel!r})).startswith('RBF(bandwidth=2.0')")
    ens = ff.methods.DICE().build(
        lambda: ff.models.MLP(4, (6, 6)), lambda: ff.models.linear_head(6, 3), members=2, seed=0, train_size=9
    )
    ff.save(ens, tmp_path / "dice")
    # Its classes are the library's own, which a program need not have imported.
    for way in ("import featureflock as ff; load = ff.load", "from featureflock.ensemble.saving import load"):
        python(f"import sys; {way}; assert len(load(sys.argv[1]).extractors) == 2", str(tmp_path / "dice"))
