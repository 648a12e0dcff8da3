"""The JSON reader: typed values, or one sentence that names the file, whatever the file contains."""

import contextlib
import json
import os
import stat
from dataclasses import dataclass
from typing import Any, TypedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from featureflock.utils.files import read_regular
from featureflock.utils.json_files import parse_json, read_json


class Entry(TypedDict):
    epoch: int
    seconds: float


@dataclass(frozen=True)
class Point:
    x: float
    name: str = "origin"


@pytest.mark.parametrize(
    ("text", "hint", "value"),
    [
        ("[1, 2]", list[int], [1, 2]),
        ('{"a": 1}', dict[str, float], {"a": 1.0}),
        ('{"x": 1e-3}', Point, Point(1e-3)),
        ('{"epoch": 1, "seconds": 2, "loss": 0.5}', Entry, {"epoch": 1, "seconds": 2.0, "loss": 0.5}),
        ('"é"', str, "é"),
        ("-18446744073709551615", int, -(2**64) + 1),
        ("[" * 100 + "]" * 100, Any, json.loads("[" * 100 + "]" * 100)),
    ],
)
def test_values(tmp_path, text, hint, value):
    path = tmp_path / "a.json"
    path.write_text(text, encoding="utf-8")
    assert read_json(path, hint) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "it is not valid JSON"),
        (b'{"epoch": 1', "it is not valid JSON"),
        (b"\xff\xfe\x00", "it is not valid JSON"),
        (b"\x00" * 100, "it is not valid JSON"),
        (b"[" * 50_000, "its JSON is nested too deeply"),
        (b'{"a":' * 50_000, "its JSON is nested too deeply"),
        (b"[" * 300 + b"]" * 300, "its JSON is nested too deeply"),
        (b'{"epoch": NaN, "seconds": 1}', "JSON has no NaN"),
        (b'{"epoch": 1, "seconds": -Infinity}', "JSON has no -Infinity"),
        (b'{"epoch": 1, "seconds": 1e999}', "the number 1e999 is too large"),
        (b'{"epoch": ' + b"9" * 5_000 + b', "seconds": 1}', "the number 9{20}… is too large"),
        (b'{"epoch": 18446744073709551616, "seconds": 1}', "is too large"),
        (b"5", r"content must be .*Entry.*; got 5"),
        (b"[]", r"content must be .*Entry.*; got \[\]"),
        (b"{}", "content has no 'epoch'"),
        (b'{"epoch": 1}', "content has no 'seconds'"),
        (b'{"epoch": "1", "seconds": 1}', "content.epoch must be int; got '1'"),
        (b'{"epoch": 1, "seconds": [1]}', r"content.seconds must be float; got \[1\]"),
    ],
)
def test_anything_else_is_one_sentence(tmp_path, text, message):
    path = tmp_path / "a.json"
    path.write_bytes(text)
    with pytest.raises(ValueError, match=message) as caught:
        read_json(path, Entry, "train again")
    assert str(caught.value).startswith(f"{path} is damaged")
    assert str(caught.value).endswith("; train again.")
    assert "\n" not in str(caught.value)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda parts: st.lists(parts, max_size=3) | st.dictionaries(st.sampled_from("axy") | st.text(max_size=2), parts),
)


@given(st.binary(max_size=100) | VALUES.map(lambda value: json.dumps(value).encode()))
def test_no_content_leads_to_another_error(data):
    for hint in (Any, Point, Entry, dict[str, list[Point | int]], dict[int, Point] | None, tuple[str, ...]):
        with contextlib.suppress(ValueError):
            parse_json(data, "the file", hint)


def test_missing_and_special_files(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"gone.json is missing; train again\.$"):
        read_json(tmp_path / "gone.json", Any, "train again")
    with pytest.raises(OSError, match=r"cannot be read \(Is a directory\)\.$"):
        read_json(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe is not a regular file"):  # and does not block
        read_json(tmp_path / "pipe")
    (tmp_path / "endless").symlink_to("/dev/zero")
    with pytest.raises(ValueError, match="endless is not a regular file"):
        read_json(tmp_path / "endless")
    (tmp_path / "large.json").write_text("[1, 2, 3]")
    with pytest.raises(ValueError, match=r"large.json is damaged: it has more than 8 bytes\."):
        read_json(tmp_path / "large.json", max_bytes=8)
    assert read_json(tmp_path / "large.json", max_bytes=9) == [1, 2, 3]


def test_a_file_without_permission_is_not_called_damaged(tmp_path, monkeypatch):
    path = tmp_path / "secret.json"
    path.write_text("{}")

    def refuse(*args: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(PermissionError, match=r"secret.json cannot be read; change its permissions\.$"):
        read_json(path, Any, "train again")


def test_a_link_to_a_regular_file_is_followed(tmp_path):
    (tmp_path / "a").write_bytes(b"content")
    (tmp_path / "b").symlink_to("a")
    assert read_regular(tmp_path / "b") == b"content"
    assert stat.S_ISLNK((tmp_path / "b").lstat().st_mode)
