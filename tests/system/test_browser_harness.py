"""The browser of the tests tells what goes wrong on a page, and does to it what a reader does."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.browser import Browser
from PIL import Image

PHONE = '<meta name="viewport" content="width=device-width">'


@pytest.fixture
def show(browser, tmp_path):
    def show(body, **view):
        (tmp_path / "a page.html").write_text(f"<!doctype html><title>α ± β</title>{body}")
        return browser.open(tmp_path / "a page.html", **view)

    return show


def test_a_clean_page_has_no_messages_and_asks_for_nothing_else(show, tmp_path):
    page = show('<img src="data:image/gif;base64,R0lGODlhAQABAAAAACw="><script>console.log("all is well")</script>')
    assert page.evaluate("document.title") == "α ± β"
    assert page.evaluate("Promise.resolve({a: [1, null]})") == {"a": [1, None]}
    assert page.messages == []
    own, *others = page.requests
    assert own == (tmp_path / "a page.html").as_uri()
    assert all(url.startswith("data:") for url in others)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("<script>nowhere()</script>", "ReferenceError: nowhere is not defined"),
        ("<script>const = 1</script>", "SyntaxError"),
        ("<script>Promise.reject(Error('lost'))</script>", "Error: lost"),
        ("<script>setTimeout(() => { throw 'a word' })</script>", "a word"),
        ("<script>console.error('bad', 3, {})</script>", "console.error: bad 3 Object"),
        ("<script>console.warn('hm')</script>", "console.warning: hm"),
        ("<script>console.assert(false, 'wrong')</script>", "console.assert: wrong"),
        ("<img src='missing.png'>", "missing.png: net::ERR_FILE_NOT_FOUND"),
        ("<link rel='stylesheet' href='missing.css'>", "missing.css: net::ERR_FILE_NOT_FOUND"),
        (
            "<script src='https://nowhere.invalid/a.js'></script>",
            "https://nowhere.invalid/a.js: net::ERR_NAME_NOT_RESOLVED",
        ),
        ("<script>fetch('http://192.0.2.1/').catch(() => 0)</script>", "http://192.0.2.1/: net::ERR"),
    ],
)
def test_what_goes_wrong_is_reported(show, body, words):
    page = show(body)
    assert words in "\n".join(page.messages)
    assert len(page.messages) == 1
    assert len(page.requests) == 1 + words.count(": net::")


def test_what_goes_wrong_later_is_reported(show):
    page = show("<button onclick='new Image().src = \"late.png\"'>picture</button>")
    assert page.messages == []
    page.click("button")
    assert len(page.messages) == 1
    assert "late.png" in page.requests[1]


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("head", [PHONE, ""])
def test_a_click_is_that_of_a_mouse(show, width, head):
    script = "onclick = event => document.title = `${event.target.dataset.key} ${event.isTrusted}`"
    cells = "".join(f"<th data-key={key}>{key}" for key in ("nll", "ece"))
    page = show(f"{head}<p style='height: 3000px'><table><tr>{cells}</table><script>{script}</script>", width=width)
    for key in ("nll", "ece"):
        page.click(f"th[data-key={key}]")
        assert page.evaluate("document.title") == f"{key} true"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("", "nothing matches b"),
        ("<b hidden>b</b>", "b is hidden"),
        ("<b>b</b><i style='position: fixed; inset: 0'></i>", "covered by <i style"),
    ],
)
def test_a_click_that_would_miss_is_refused(show, body, words):
    with pytest.raises(RuntimeError, match=words):
        show(body).click("b")


@pytest.mark.parametrize("dark", [False, True])
def test_a_page_sees_dark_mode(show, tmp_path, dark):
    page = show("<style>@media (prefers-color-scheme: dark) { html { background: #123456 } }</style>", dark=dark)
    assert page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches") is dark
    page.screenshot(tmp_path / "page.png")
    with Image.open(tmp_path / "page.png") as image:
        assert image.convert("RGB").getpixel((5, 5)) == ((0x12, 0x34, 0x56) if dark else (255, 255, 255))


@pytest.mark.parametrize(("width", "height"), [(390, 844), (1280, 900)])
def test_pictures_have_the_size_of_the_page_or_of_the_window(show, tmp_path, width, height):
    page = show(f"{PHONE}<style>body {{ margin: 0; height: 2345px }}</style>", width=width, height=height)
    assert page.evaluate("[innerWidth, innerHeight]") == [width, height]
    for full, size in ((True, (width, 2345)), (False, (width, height))):
        page.screenshot(tmp_path / "page.png", full=full)
        with Image.open(tmp_path / "page.png") as image:
            assert (image.format, image.size) == ("PNG", size)


def test_a_missing_file_is_an_error(browser, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.html"):
        browser.open(tmp_path / "nowhere.html")


def test_a_script_without_end_is_a_timeout(show, monkeypatch):
    page = show("")
    monkeypatch.setattr("browser.PATIENCE", 0.3)
    with pytest.raises(TimeoutError, match=r"no answer to Runtime.evaluate within 0.3 s"):
        page.evaluate("new Promise(() => 0)")


def group_ends(number):
    """Within 10 s, nothing of the group runs. (Orphans that have ended are for the first process to reap.)"""
    for _ in range(100):
        states = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):  # it ended meanwhile
                state, _, group = path.read_text().rpartition(")")[2].split()[:3]
                states += [state] * (int(group) == number)
        if not set(states) - {"Z", "X"}:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize("end", ["of the test", "of Chromium"])
def test_nothing_is_left(chromium, tmp_path, monkeypatch, end):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    error = KeyError if end == "of the test" else ChildProcessError
    with pytest.raises(error), Browser() as browser:  # noqa: PT012
        number = browser._process.pid
        assert [path.name for path in tmp_path.iterdir()] == [Path(browser._folder.name).name]
        if end == "of Chromium":
            os.kill(number, signal.SIGKILL)
            browser.call("Browser.getVersion")
        raise KeyError
    with pytest.raises(ProcessLookupError):  # reaped
        os.kill(number, 0)
    assert group_ends(number)
    assert not list(tmp_path.iterdir())


def test_it_ends_with_the_process_that_started_it(chromium, tmp_path):
    script = "import browser, time; b = browser.Browser().__enter__(); print(b._process.pid, flush=True); time.sleep(9)"
    place = {"cwd": Path(__file__).parent, "env": {**os.environ, "TMPDIR": str(tmp_path)}}
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, **place) as process:
        number = int(process.stdout.readline())
        os.killpg(number, 0)
        process.kill()
    assert group_ends(number)


def test_a_program_that_is_no_chromium_is_an_error_with_its_words(tmp_path, monkeypatch):
    program = tmp_path / "chromium"
    program.write_text("#!/bin/sh\necho please install the snap\n")
    program.chmod(0o755)
    monkeypatch.setenv("FEATUREFLOCK_CHROMIUM", str(program))
    with pytest.raises(ChildProcessError, match="please install the snap"):
        Browser().__enter__()


def test_without_chromium_and_npm_the_test_is_skipped(tmp_path, monkeypatch):
    monkeypatch.delenv("FEATUREFLOCK_CHROMIUM", raising=False)
    monkeypatch.setenv("FEATUREFLOCK_TEST_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(pytest.skip.Exception, match=r"install Chromium \(Debian package chromium\) or npm"):
        Browser().__enter__()
