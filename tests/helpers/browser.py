"""A headless Chromium for tests, driven by Playwright and cut off from the network.

    with launch_browser() as browser:
        page, log = open_page(browser, path, width=390, dark=True)
        page.click("th button")
        assert log.messages == []

The test is skipped where no Chromium can be found or downloaded.
"""

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path

from playwright.sync_api import sync_playwright

from helpers.chromium import find_chromium

FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
NO_NETWORK = ["--no-proxy-server", "--host-resolver-rules=MAP * ~NOTFOUND"]
TIMEOUT = 30_000  # milliseconds


@dataclass(frozen=True)
class PageLog:
    """What a page did while it was open."""

    messages: list[str] = field(default_factory=list)
    """Console errors and warnings, uncaught exceptions and failed requests. Empty on a correct page."""
    requests: list[str] = field(default_factory=list)
    """Every requested URL, the page's own first."""


@contextlib.contextmanager
def launch_browser():
    """A Playwright `Browser`."""
    program, environment = find_chromium()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=program, args=[*FLAGS, *NO_NETWORK], env={**os.environ, **environment}, timeout=TIMEOUT
        )
        with browser:
            yield browser


def new_page(browser, width=1280, height=900, dark=False):
    """Return an empty Playwright `Page` in a new context, and its `PageLog`.

    A viewport less than 600 pixels wide is that of a phone.
    """
    scheme = "dark" if dark else "light"
    size = {"width": width, "height": height}
    context = browser.new_context(viewport=size, color_scheme=scheme, is_mobile=width < 600, has_touch=width < 600)
    context.set_default_timeout(TIMEOUT)
    page, log = context.new_page(), PageLog()
    page.on("request", lambda request: log.requests.append(request.url))
    page.on("requestfailed", lambda request: log.messages.append(f"{request.url}: {request.failure}"))
    page.on("pageerror", lambda error: log.messages.append(str(error)))
    page.on("console", lambda message: _record(log, message))
    return page, log


def open_page(browser, path, width=1280, height=900, dark=False):
    """Open a file in a new context and return the loaded `Page` and its `PageLog`."""
    page, log = new_page(browser, width, height, dark)
    page.goto(Path(path).absolute().as_uri())
    page.wait_for_load_state("networkidle")
    return page, log


def _record(log, message):
    if message.type in ("error", "warning", "assert"):
        log.messages.append(f"console.{message.type}: {message.text}")
