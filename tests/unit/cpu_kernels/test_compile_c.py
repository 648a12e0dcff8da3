"""Compiled kernels are cached in a private folder, and checked before they are loaded."""

import multiprocessing
import stat

import pytest

from featureflock.cpu_kernels import compile_c, winograd
from featureflock.cpu_kernels.compile_c import load_kernel

pytestmark = pytest.mark.skipif(load_kernel(*winograd.KERNEL) is None, reason="The kernel needs a C compiler.")


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setattr(compile_c, "compiled_code_folder", lambda: tmp_path)
    compile_c._load.cache_clear()
    yield tmp_path
    compile_c._load.cache_clear()


def reload():
    compile_c._load.cache_clear()
    return load_kernel(*winograd.KERNEL)


def compile_calls(monkeypatch):
    calls = []
    original = compile_c.compile_library
    monkeypatch.setattr(compile_c, "compile_library", lambda *args: (calls.append(args), original(*args)))
    return calls


def test_compiled_once(folder, monkeypatch):
    calls = compile_calls(monkeypatch)
    assert reload() is not None
    assert reload() is not None
    assert len(calls) == 1
    (library,) = folder.iterdir()  # and no temporary files
    assert library.name.startswith("winograd-")
    assert not library.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def test_compiled_again_for_other_flags(folder, monkeypatch):
    reload()
    monkeypatch.setattr(compile_c, "lanes", lambda: 4)
    assert reload() is not None
    assert len(list(folder.iterdir())) == 2


def test_a_damaged_library_is_compiled_again(folder, monkeypatch):
    reload()
    (library,) = folder.iterdir()
    content = library.read_bytes()
    library.unlink()  # a loaded library must not be overwritten
    library.write_bytes(content[: len(content) // 2])
    calls = compile_calls(monkeypatch)
    assert reload() is not None
    assert len(calls) == 1
    (library,) = folder.iterdir()
    assert library.read_bytes() == content


def test_a_link_is_not_followed(folder, monkeypatch, tmp_path_factory):
    reload()
    (library,) = folder.iterdir()
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "library.so"
    library.rename(elsewhere)
    library.symlink_to(elsewhere)
    calls = compile_calls(monkeypatch)
    assert reload() is not None
    assert len(calls) == 1
    assert not library.is_symlink()


def load_in_process(folder, barrier, results):
    compile_c.compiled_code_folder = lambda: folder
    compile_c._load.cache_clear()
    barrier.wait()
    results.put(load_kernel(*winograd.KERNEL) is not None)


def test_two_processes_at_once(folder):
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(2), context.Queue()
    processes = [context.Process(target=load_in_process, args=(folder, barrier, results)) for _ in range(2)]
    for process in processes:
        process.start()
    assert [results.get(timeout=60) for _ in processes] == [True, True]
    for process in processes:
        process.join()
    assert all(path.suffix == ".so" for path in folder.iterdir())
    assert reload() is not None


def test_without_space_nothing_is_loaded(folder, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(compile_c, "compile_library", full)
    assert reload() is None
    assert list(folder.iterdir()) == []
