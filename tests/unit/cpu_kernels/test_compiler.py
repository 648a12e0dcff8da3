"""Compilers that are missing, fail, hang or write garbage: one clause that says so, and nothing else happens."""

import os
import re
import stat
import time
import warnings
from pathlib import Path

import pytest

from featureflock.cpu_kernels import compile_c, compiler

pytestmark = pytest.mark.skipif(os.name == "nt", reason="The compilers here are shell scripts.")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """An empty cache folder, and no memory of earlier probes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for variable in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CC", "CXX"):
        monkeypatch.setenv(variable, "")  # so that the value of before is restored
        monkeypatch.delenv(variable)
    cached = compiler.compiled_code_folder, compiler.compiler_problem, compile_c._load
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


def script(tmp_path, body, name="g++"):
    path = tmp_path / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


# The file after -o is the output.
OUTPUT = 'for a; do [ "$last" = -o ] && out="$a"; last="$a"; done'
BROKEN = {
    "fails": ("exit 1", "failed: exit status 1"),
    "message": ("echo 'fatal error: vector: No such file' >&2; exit 1", "failed: fatal error: vector: No such file"),
    "writes nothing": ("exit 0", "failed: it wrote nothing"),
    "garbage": (f'{OUTPUT}; seq 1 10000 > "$out"', "compiles cannot be executed in .*: OSError: .*invalid ELF header"),
    "empty": (f'{OUTPUT}; : > "$out"', "compiles cannot be executed in .*: OSError"),
    "hangs": ("sleep 1000 & wait", "did not finish within 0.3 seconds"),
    "crashes": ("kill -SEGV $$", "failed: exit status -11"),
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize(("device", "variable"), [("cpu", "CXX"), ("cuda", "CC")])
def test_broken_compilers(name, device, variable, tmp_path, monkeypatch):
    body, message = BROKEN[name]
    if name == "hangs":
        monkeypatch.setattr(compiler, "TIME_OUT", 0.3)
    monkeypatch.setenv(variable, script(tmp_path, body))
    problem = compiler.compiler_problem(device)
    assert problem is not None
    assert "\n" not in problem
    assert re.search(message, problem), problem
    if variable == "CC":
        assert compile_c.load_kernel("winograd", 4, 6) is None


def test_nothing_that_a_hanging_compiler_started_survives(tmp_path, monkeypatch):
    monkeypatch.setattr(compiler, "TIME_OUT", 1.5)
    child = tmp_path / "child"
    monkeypatch.setenv("CXX", script(tmp_path, f"sleep 1000 &\necho $! > {child}\nwait"))
    assert "did not finish" in compiler.compiler_problem("cpu")
    for _ in range(100):
        if not _is_alive(int(child.read_text())):
            break
        time.sleep(0.05)
    else:
        pytest.fail("The child of the compiler still runs.")


def _is_alive(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_missing_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert compiler.compiler_problem("cpu") == "no C++ compiler was found (g++)"
    assert compiler.compiler_problem("cuda") == "no C compiler was found (cc, gcc, clang)"
    monkeypatch.setenv("CXX", "no-such-compiler")
    compiler.compiler_problem.cache_clear()
    assert compiler.compiler_problem("cpu") == "no C++ compiler was found (no-such-compiler)"


def test_missing_headers(monkeypatch):
    monkeypatch.setattr(compiler.sysconfig, "get_paths", lambda: {"include": "no-such-folder"})
    compiler.find_compiler("cpp")
    assert "Python.h" in compiler.compiler_problem("cpu")


def test_a_working_compiler_leaves_nothing_but_a_private_folder(tmp_path):
    assert compiler.compiler_problem("cpu") is None
    folder = compiler.compiled_code_folder()
    assert folder.is_relative_to(tmp_path / "cache" / "featureflock" / "compiled")
    for each in (folder, folder.parent):
        assert stat.S_IMODE(each.stat().st_mode) == 0o700
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(folder / "torch")
    assert [*(folder / "torch").iterdir()] == []


def test_a_folder_that_the_user_has_chosen_is_used(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "mine"))
    assert compiler.set_cache_folders() == tmp_path / "mine"
    default = Path(compiler.tempfile.gettempdir(), "torchinductor_somebody")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(default))  # PyTorch sets it itself
    assert compiler.set_cache_folders() == compiler.compiled_code_folder() / "torch"


def test_a_folder_that_others_can_write_to_is_not_used(tmp_path):
    planted = tmp_path / "cache" / "featureflock" / "compiled"
    planted.mkdir(parents=True)
    planted.chmod(0o777)
    with pytest.warns(UserWarning, match=r"is not cached, because .*compiled is not private: other users can write"):
        folder = compiler.compiled_code_folder()
    assert not folder.is_relative_to(planted)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compiler.set_cache_folders().parent == folder  # reported once


def test_a_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "cache").write_text("a file")
    with pytest.warns(UserWarning, match="is not cached, because .*cannot be used"):
        assert compiler.compiled_code_folder().is_dir()
    assert compiler.compiler_problem("cpu") is None
