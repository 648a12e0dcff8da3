"""Digests of files: correct, computed once, and computed again when the file changes."""

import hashlib
import os

import pytest

from featureflock.utils import digests
from featureflock.utils.digests import file_digest, json_digest, once_per_version


def test_the_digest_is_that_of_the_bytes(tmp_path):
    (tmp_path / "a").write_bytes(b"content" * 1000)
    assert file_digest(tmp_path / "a") == hashlib.sha256(b"content" * 1000).hexdigest()
    with pytest.raises(FileNotFoundError):
        file_digest(tmp_path / "b")


def test_a_file_is_read_once_and_again_after_every_change(tmp_path, monkeypatch):
    path, calls = tmp_path / "a", []
    path.write_bytes(b"one")

    def digest() -> str:
        return once_per_version(path, "test", lambda: calls.append(1) or path.read_text())

    assert [digest(), digest(), digest()] == ["one"] * 3
    assert len(calls) == 1
    path.write_bytes(b"two")  # the same size, in place
    assert digest() == "two"
    old = path.stat()
    path.write_bytes(b"six")
    os.utime(path, ns=(old.st_atime_ns, old.st_mtime_ns))  # the same size and modification time
    assert digest() == "six"
    other = tmp_path / "b"
    other.write_bytes(b"ten")
    os.replace(other, path)
    assert digest() == "ten"
    assert len(calls) == 4
    monkeypatch.setattr(digests, "_DIGESTS", {})
    assert digest() == "ten"
    assert len(calls) == 5


def test_kinds_of_digests_are_told_apart(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"x")
    assert once_per_version(path, "first", lambda: "1") == "1"
    assert once_per_version(path, "second", lambda: "2") == "2"


def test_the_digest_of_json_does_not_depend_on_the_order_of_keys():
    assert json_digest({"a": 1, "b": [2]}) == json_digest({"b": [2], "a": 1})
    assert json_digest({"a": 1}) != json_digest({"a": 1.5})
