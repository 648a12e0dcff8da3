"""The repository as a whole: published tables, links, import order, size of modules, plain words."""

import ast
import importlib
import re
from pathlib import Path

import featureflock as ff

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "featureflock"
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()

BANNED_WORDS = (
    *(
        r"pictures?",
        r"beyond noise",
        r"within noise",
        r"unfamiliar",
        r"in few products",
        r"reckoned",
        r"there and then",
    ),
    *(r"whole or not at all", r"of one's own", r"set aside, said"),
)
"""Regular expressions of words that have a plainer equivalent; see the glossary in CONTRIBUTING.md."""
BANNED_NAMES = (
    *("contact", "looks", "describing", "making", "getting", "launched", "foreign", "measuring", "several", "board"),
    *("shown", "chance", "draw", "elsewhere", "say", "kept", "opinion"),
)
"""Names of modules and classes that say nothing to a newcomer."""
ALLOWED = {"docs/notes/decisions.md"}
"""The lab notebook may quote names of its time."""


def test_tables_in_the_docs_are_those_in_results(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "results"))
    tables = importlib.import_module("write_tables")
    assert tables.outdated() == []
    assert tables.unregistered() == []


def test_every_figure_in_the_docs_can_be_drawn_again(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "results"))
    figures = importlib.import_module("draw_figures")
    assert {path.name for path in (ROOT / "docs" / "images").iterdir()} == {*figures.FIGURES, "maps.png"}
    assert all((ROOT / "results" / source).is_file() for source, _ in figures.FIGURES.values())


def test_no_generated_page_is_in_the_repository():
    assert [str(path) for path in ROOT.glob("docs/**/*.html")] == []


def test_links_in_the_docs_lead_somewhere():
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#:]*)(#[\w-]+)?\)", page.read_text()):
            linked = page.parent / target if target else page
            assert linked.exists(), f"{page.name} links to {target}"
            if anchor:
                headings = re.findall(r"^#+ (.*)$", linked.read_text(), flags=re.M)
                anchors = [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
                assert anchor[1:] in anchors, f"{page.name} links to {target}{anchor}"


def test_paths_named_in_the_docs_exist():
    folders = "featureflock|tests|benchmarks|results|docs|examples"
    for page in [page for page in PAGES if page.relative_to(ROOT).as_posix() not in ALLOWED]:
        text = re.sub(r"\]\([^)]*\)", "]", page.read_text())  # links are relative to their page
        for path in re.findall(rf"(?<![\w/.-])(?:{folders})/[\w/.*-]+\.(?:py|md|json|toml|c|html)\b", text):
            assert list(ROOT.glob(path)) or _is_output(path), f"{page.name} names {path}"


def test_tests_named_in_the_equations_exist():
    text = (ROOT / "docs" / "equations.md").read_text()
    sources = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = re.findall(r"`(test_\w+)", text)
    assert len(named) > 30
    assert [name for name in named if f"def {name}" not in sources] == []


def test_functions_named_in_the_equations_exist():
    text = (ROOT / "docs" / "equations.md").read_text()
    named = re.findall(r"`((?:core|methods|tasks|evaluation)\.[\w.]+)", text)
    assert len(named) > 15
    for name in named:
        parts = name.split(".")
        for cut in range(len(parts), 0, -1):
            try:
                thing = importlib.import_module(".".join(["featureflock", *parts[:cut]]))
            except ModuleNotFoundError:
                continue
            break
        for part in parts[cut:]:
            thing = getattr(thing, part)


def test_modules_import_only_from_those_above_them():
    listed = re.search(r"imports only from those above it[^:]*:\n\n(.*?)\n\n", CONTRIBUTING, flags=re.S)[1]
    order = re.findall(r"`(\w+)`", listed)
    assert len(order) == len(set(order))
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts == ("__init__",):
            continue
        assert parts[0] in order, f"{path.name} has no place in the list of CONTRIBUTING.md"
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "featureflock":
                inner = node.module.split(".")[1:] or [alias.name for alias in node.names]
                for name in inner[:1] if node.module != "featureflock" else inner:
                    assert order.index(name) <= order.index(parts[0]), f"{path.relative_to(ROOT)} imports {name}"


def test_json_is_read_by_the_typed_reader_only():
    readers = [path.name for path in PACKAGE.rglob("*.py") if re.search(r"\bjson\.loads?\(", path.read_text())]
    assert readers == ["json_files.py"]


def test_no_module_is_longer_than_400_lines():
    for path in PACKAGE.rglob("*.py"):
        assert len(path.read_text().splitlines()) <= 400, path


def test_public_names_are_documented():
    for name in ff.__all__:
        thing = getattr(ff, name)
        assert isinstance(thing, str) or thing.__doc__, name


def test_plain_words():
    words = re.compile(rf"\b(?:{'|'.join(BANNED_WORDS)})\b", flags=re.I)
    used = [
        f"{path.relative_to(ROOT)}:{text[: match.start()].count(chr(10)) + 1}: {match[0]}"
        for path in _sources()
        for text in [path.read_text()]
        for match in words.finditer(text)
    ]
    assert used == []


def test_plain_names():
    names = {
        node.name.lower(): path
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    }
    names |= {path.stem: path for path in [*PACKAGE.rglob("*.py"), *(ROOT / "benchmarks").glob("*.py")]}
    assert {name: str(names[name]) for name in BANNED_NAMES if name in names} == {}


def test_no_path_of_a_machine_is_named():
    forbidden = re.compile(r"(?<![\w.~])/(home|root|Users|work|tmp)/\w+")
    folders = ("featureflock", "tests", "docs", "benchmarks", "results", "examples")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*") if ".hypothesis" not in path.parts]
    for path in [*paths, *ROOT.glob("[a-zA-Z]*"), ROOT / ".gitignore"]:
        if path.suffix in {".py", ".md", ".toml", ".txt", ".json", ".html", ".js", ".css", ""} and path.is_file():
            found = None if path == Path(__file__) else forbidden.search(path.read_text(errors="replace"))
            assert found is None, f"{path.relative_to(ROOT)} names {found[0]}"


def _sources() -> list[Path]:
    code = [*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.html"), *PACKAGE.rglob("*.js"), *PACKAGE.rglob("*.c")]
    scripts = [path for folder in ("benchmarks", "examples") for path in (ROOT / folder).glob("*.py")]
    return [*code, *scripts, *(page for page in PAGES if page.relative_to(ROOT).as_posix() not in ALLOWED)]


def _is_output(path: str) -> bool:
    """Whether a path in the docs is an example of a file to be written."""
    return path.startswith("results/") and path.endswith(".json")
