"""Standard output of the commands: any encoding, width and closed pipe; no control sequences of data."""

import io
import os
import re
import shutil
import sys
from dataclasses import replace

import numpy as np
import pytest
from helpers.limits import time_limit
from helpers.small_ensembles import SMALL, train_small
from PIL import Image
from rich.progress import Progress
from rich.table import Table

from featureflock.cli import main as cli
from featureflock.cli.output import Output, printable, safe_output
from featureflock.cli.terminal import make_console
from featureflock.methods import DeepEnsembles, FeatureWGD
from featureflock.studies import STUDIES, Row, Study

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
FEW = ["--corruptions", "contrast", "--severities", "5", "--ood", "--maps", "5"]
TINY = Study("Two methods", tuple(Row(m.title, replace(SMALL, method=m)) for m in (DeepEnsembles(), FeatureWGD())))
OUTPUTS = {
    "evaluate": (["RUN", *FEW, "--out", "evaluated"], ["evaluated/results.json", "evaluated/table.md"]),
    "report": (["RUN", *FEW, "--out", "page"], ["page/report.html", "page/results.json"]),
    "predict": (["RUN", "digit.png", "--explain", "--out", "why.png"], ["why.png"]),
    "tune": (
        [
            *("digits-cnn", "--members", "2", "--epochs", "1", "--subset", "100", "--held-out", "50"),
            *("--budget", "1", "--seeds", "1", "--out", "tuning"),
        ],
        ["tuning/tune-digits-cnn.json", "tuning/tune-digits-cnn.md"],
    ),
    "reproduce": (
        ["tiny", "--seeds", "1", "--out", "study"],
        ["study/smoke/tiny.json", "study/smoke/tiny.md", "study/smoke/tiny/report.html"],
    ),
    "demo": (
        ["--seeds", "1", "--members", "2", "--epochs", "1", "--workers", "1", "--out", "demo"],
        ["demo/demo.json", "demo/report.html"],
    ),
}
"""Arguments of a command, and files that it writes."""


def file_stream(path, encoding):
    return io.TextIOWrapper(open(path, "wb"), encoding=encoding, errors="strict")


def closed_pipe():
    """What a program writes to after `| true` has ended."""
    reader, writer = os.pipe()
    os.close(reader)
    return io.TextIOWrapper(os.fdopen(writer, "wb"), encoding="utf-8")


@pytest.fixture
def call(monkeypatch):
    """Run a command with these streams; returns its exit code."""

    def run(words, out, error=None):
        monkeypatch.setattr(sys, "argv", ["featureflock", *map(str, words)])
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", error or sys.stderr)
        try:
            with time_limit():
                cli.main()
        except SystemExit as end:
            return end.code
        finally:
            for stream in (out, error) if error else (out,):
                stream.close()
        return 0

    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run and an image; commands leave their own runs here, so that they compute everything once."""
    path = tmp_path_factory.mktemp("output")
    train_small(path, [FeatureWGD()], [0], epochs=1)[0].rename(path / "RUN")
    Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8)).save(path / "digit.png")
    return path


@pytest.mark.parametrize("command", OUTPUTS)
def test_files_are_written_whatever_happens_to_the_output(call, folder, monkeypatch, tmp_path, command):
    monkeypatch.chdir(folder)
    monkeypatch.setitem(STUDIES, "tiny", replace(TINY, smoke=lambda recipe: replace(recipe, epochs=1)))
    words, files = OUTPUTS[command]

    def check(stream, code=0, error=None):
        assert call([command, *words], stream, error) == code
        for name in files:
            assert os.path.getsize(name), name
            os.remove(name)

    check(file_stream(tmp_path / "ascii", "ascii"))
    assert len((tmp_path / "ascii").read_text("ascii")) > 200
    check(closed_pipe(), error=closed_pipe())
    if command == "evaluate":
        check(
            file_stream("/dev/full", "utf-8"),
            "featureflock: The output could not be printed (No space left on device).",
        )


def test_what_an_encoding_does_not_have_is_replaced(call, tmp_path):
    for encoding, sign in (("ascii", "?"), ("cp1252", "×"), ("utf-8", "×"), ("utf-16", "×")):
        assert call(["train", "digits", "--help"], file_stream(tmp_path / encoding, encoding)) == 0
        assert f"Built-in 8{sign}8 digits" in (tmp_path / encoding).read_text(encoding)


@pytest.mark.parametrize("command", [[], *([name] for name in cli.COMMANDS), ["train", "digits"], ["data", "get"]])
def test_help_in_one_column_and_ascii(call, monkeypatch, tmp_path, command):
    monkeypatch.setenv("COLUMNS", "1")
    assert call([*command, "--help"], file_stream(tmp_path / "help", "ascii")) == 0
    text = (tmp_path / "help").read_text("ascii")
    assert "featureflock" in text
    assert call([*command, "--help"], closed_pipe(), closed_pipe()) == 0


@pytest.mark.parametrize("columns", ["0", "2", "3", "4", "7", "-5", "abc", "", "²", "1e3", "9" * 5000, "100000000"])
def test_help_in_any_number_of_columns(call, monkeypatch, tmp_path, columns):
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("LINES", columns)
    assert call(["predict", "--help"], file_stream(tmp_path / "help", "utf-8")) == 0
    assert 1_000 < len((tmp_path / "help").read_text("utf-8")) < 1_000_000


def test_help_in_a_narrow_terminal(call, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "")
    monkeypatch.setattr(os, "get_terminal_size", lambda *_: os.terminal_size((2, 2)))
    assert call(["predict", "--help"], file_stream(tmp_path / "help", "utf-8")) == 0
    assert "RUN" in (tmp_path / "help").read_text("utf-8")


def test_an_output_that_is_closed_from_the_start(monkeypatch):
    """As after `featureflock --help >&-`, where Python has no sys.stdout."""
    monkeypatch.setattr(sys, "argv", ["featureflock", "--help"])
    monkeypatch.setattr(sys, "stdout", None)
    cli.main()
    assert sys.stdout is None


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_control_characters_are_replaced_except_colours_in_a_terminal(monkeypatch):
    hostile = "\x1b]0;title\x07\x1b[2J\x9b31m\x00\x7f\r\b"
    assert CONTROL.search(printable(f"a\tb\n{hostile}")) is None
    assert printable("a\tb\n×") == "a\tb\n×"
    for terminal in (True, False):
        stream = Terminal() if terminal else io.StringIO()
        Output(stream).write(f"\x1b[1mbold\x1b[0m {hostile}\n")
        shown = stream.getvalue()
        assert shown.startswith("\x1b[1mbold\x1b[0m" if terminal else "\ufffd[1mbold")
        assert CONTROL.search(re.sub(r"\x1b\[[01]m", "", shown)) is None


@pytest.mark.parametrize("terminal", [True, False])
def test_tables_and_progress_bars_show_no_control_sequences_of_names(monkeypatch, terminal):
    stream = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    hostile = "ant\x1b]0;title\x07\x1b[2J\x1b[1;31m\x9b2J"
    with safe_output():
        console = make_console()
        table = Table(hostile, title=hostile)
        table.add_row(hostile)
        console.print(table)
        console.print(hostile, soft_wrap=True)
        with Progress(console=console) as bars:
            bars.add_task(hostile, total=1)
    shown = stream.getvalue()
    assert "\x1b[?25l" in shown if terminal else "\x1b" not in shown  # rich itself hides the cursor
    assert "ant\ufffd" in shown
    for sequence in ("\x1b]", "\x1b[2J", "\x1b[1;31m", "\x9b", "\x07"):
        assert sequence not in shown.replace("\x1b[1;31m\x1b[", "") if not terminal else sequence not in shown


def test_class_and_file_names_with_control_sequences(call, tmp_path, monkeypatch):
    """From training to the report, with a file that cannot be read."""
    monkeypatch.chdir(tmp_path)
    names, generator = ("ant\x1b[2J\x9b31m", "bee\x07\x1b]0;x\x07"), np.random.default_rng(0)
    for part in ("train", "val"):
        for label, name in enumerate(names):
            (tmp_path / "net" / part / name).mkdir(parents=True)
            for k in range(8):
                pixels = generator.integers(0, 100, (8, 8, 3), dtype=np.uint8) + np.uint8(100 * label)
                Image.fromarray(pixels).save(tmp_path / "net" / part / name / f"{k}\x1b[31m.png")
    (tmp_path / "net" / "train" / names[0] / "0\x1b[31m.png").write_bytes(b"")
    data = ["--data", "image-folder", "--data.folder", "net", "--data.size", "8", "--data.workers", "0"]
    image = f"net/val/{names[1]}/1\x1b[31m.png"
    few = ["--corruptions", "--ood", "--maps", "0"]
    commands = [
        ["train", "digits-cnn", *data, "--members", "2", "--epochs", "1", "--batch", "4", "--out", "run\x1b[1m"],
        ["predict", "run\x1b[1m", image],
        ["predict", "run\x1b[1m", image, f"net/train/{names[0]}/0\x1b[31m.png"],
        ["evaluate", "run\x1b[1m", *few],
        ["report", "run\x1b[1m", *few],
        ["predict", "nothing\x1b[1m", image],
        ["\x1b[2Jtrain"],
        ["train", "digits", "--\x1b[2J"],
    ]
    for words in commands:
        shown = []
        for terminal in (False, True) if words[0] == "predict" else (False,):
            streams = [Terminal() if terminal else io.StringIO() for _ in range(2)]
            for stream in streams:
                monkeypatch.setattr(stream, "close", lambda: None)
            code = call(words, *streams)
            shown = [stream.getvalue() for stream in streams] + [code if isinstance(code, str) else ""]
            found = CONTROL.search("".join(re.sub(r"\x1b\[[\d;]*m", "", text) if terminal else text for text in shown))
            assert found is None, (words, shown)
        if words[0] in ("train", "predict"):
            assert "\ufffd" in "".join(shown)


def test_names_that_are_not_unicode(call, tmp_path, monkeypatch, folder):
    """File names are bytes, which need not be text in the encoding of the system."""
    monkeypatch.chdir(tmp_path)
    name = os.fsdecode(b"\xff")
    shutil.copy(folder / "digit.png", f"{name}.png")
    assert call(["predict", folder / "RUN", f"{name}.png"], file_stream(tmp_path / "text", "utf-8")) == 0
    assert "?.png" in (tmp_path / "text").read_text("utf-8")
    shutil.copytree(folder / "RUN", f"run{name}")
    for words in (["evaluate", f"run{name}"], ["train", "digits", "--epochs", "1", "--out", f"new{name}"]):
        sentence = f"featureflock: {words[-1]} is not a name in Unicode, which safetensors needs; rename the folder."
        assert call(words, file_stream(tmp_path / "text", "utf-8")) == sentence
