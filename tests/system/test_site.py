"""The documentation site: builds strictly, every internal link has a target, and a browser shows it without errors."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest
from helpers.browser import launch_browser, new_page

import featureflock as ff

ROOT = Path(__file__).parents[2]
MAIN_PAGES = ("index", "get_started", "why_it_works", "when_to_use", "tutorials/own_loop", "commands/train")
MAIN_PAGES += ("equations", "reference/core", "results", "results/reproductions")
SCREENSHOTS = os.environ.get("FEATUREFLOCK_SCREENSHOTS")
"""Folder for the screenshots, if you want to look at them."""


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    offline = {f"{scheme}_proxy": "http://127.0.0.1:9" for scheme in ("http", "https")}
    environment = {**os.environ, **offline, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder


class Links(HTMLParser):
    """Targets of links, files that a page loads, and its anchors."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.targets, self.loaded, self.anchors, self.equations = [], [], {""}, 0
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        names = dict(attributes)
        self.anchors |= {names[key] for key in ("id", "name") if names.get(key)}
        self.equations += tag == "math"
        if tag == "a" and "href" in names:
            self.targets.append(names["href"])
        if tag == "link" and names.get("rel") in ("stylesheet", "icon", "preconnect"):
            self.loaded.append(names["href"])
        if tag in ("script", "img", "iframe") and "src" in names:
            self.loaded.append(names["src"])


@pytest.fixture(scope="module")
def pages(site) -> dict[Path, Links]:
    return {path.resolve(): Links(path) for path in site.rglob("*.html")}


def test_every_internal_link_has_a_target(site, pages):
    broken, followed = [], 0
    for path, page in pages.items():
        if path.name == "404.html":
            continue
        for link in [*page.targets, *page.loaded]:
            if re.match(r"https?:|mailto:|data:", link):
                continue
            target, anchor = urldefrag(unquote(link))
            linked = (path.parent / target).resolve() if target else path
            followed += 1
            if linked.is_dir():
                linked /= "index.html"
            known = linked in pages and anchor in pages[linked].anchors if linked.suffix == ".html" else linked.exists()
            if not known and not anchor.startswith("__"):  # anchors that scripts make
                broken.append(f"{path.relative_to(site.resolve())}: {link}")
    assert broken == []
    assert followed > 2000


def test_pages_load_nothing_from_other_hosts(pages):
    loaded = {link for page in pages.values() for link in page.loaded}
    assert [link for link in loaded if re.match(r"(https?:)?//", link)] == []


def test_every_public_name_is_in_the_reference(pages):
    anchors = set().union(*(page.anchors for page in pages.values()))
    described = {anchor.rpartition(".")[2] for anchor in anchors if anchor.startswith("featureflock.")}
    public = {name for name in ff.__all__ if not name.startswith("__")}
    packages = {name for name in public if (ROOT / "docs" / "reference" / f"{name}.md").exists()}
    missing = {name for name in public - packages if name not in described}
    for package in packages:
        missing |= {f"{package}.{name}" for name in getattr(ff, package).__all__ if name not in described}
    assert missing == set()


def test_equations_are_rendered(site, pages):
    equations = {path.relative_to(site.resolve()).as_posix(): page.equations for path, page in pages.items()}
    assert equations["equations.html"] > 60
    assert equations["reference/core.html"] > 20
    assert equations["why_it_works.html"] >= 5
    assert not any("arithmatex" in path.read_text() for path in pages)
    assert (site / "assets" / "maths.woff").stat().st_size > 50_000


@pytest.fixture(scope="module")
def browser():
    with launch_browser() as browser:
        yield browser


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390], ids=["desktop", "phone"])
def test_main_pages_in_a_browser(browser, site, tmp_path, width, dark):
    page, log = new_page(browser, width, dark=dark)
    for name in MAIN_PAGES:
        page.goto((site / f"{name}.html").as_uri(), wait_until="networkidle")  # the next page would abort the search
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
        assert page.evaluate("[...document.images].every(i => i.complete && i.naturalWidth && i.alt)"), name
        assert page.evaluate("document.querySelector('article').innerText.length") > 200, name
        if SCREENSHOTS:
            kind = f"{'phone' if width < 600 else 'desktop'}-{'dark' if dark else 'light'}"
            page.screenshot(path=Path(SCREENSHOTS, f"{name.replace('/', '-')}-{kind}.png"))
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", background)[:3])) < 300) == dark
    page.context.close()
    assert log.messages == []
    assert [url for url in log.requests if not url.startswith(("file:", "data:", "blob:"))] == []


def test_search_works_from_the_file_system(browser, site):
    page, log = new_page(browser, 1280)
    page.goto((site / "index.html").as_uri())
    page.click(".md-search__input")
    page.keyboard.type("ParticleLayer")
    page.wait_for_selector(".md-search-result__link", state="visible")
    assert "ParticleLayer" in page.inner_text(".md-search-result__list")
    page.context.close()
    assert log.messages == []
