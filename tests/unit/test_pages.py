"""README and docs as text: how long they are, and that their numbers are those in results/."""

import json
import re
from pathlib import Path

import pytest
import yaml

import featureflock as ff

ROOT = Path(__file__).parents[2]
GENERATED = re.compile(r"<!-- [\w-]+: from results/.*?<!-- end -->", flags=re.S)
CODE = re.compile(r"^```.*?^```$|^    [^\n]*$", flags=re.S | re.M)
FORMULA = re.compile(r"\$\$.+?\$\$|\$[^$\n]+\$", flags=re.S)
NUMBER = re.compile(r"(?<![\w.,/-])\d+(?:,\d{3})*(?:\.\d+)?(?![\w/-]|\.\d)")

MLP = "repulsion_headline.json/settings/Fashion-MNIST, MLP × 10/differences"
NUMBERS = {
    "README.md": {
        "0.011": (f"{MLP}/nll/mean", -1),
        "0.009": (f"{MLP}/nll/high", -1),
        "0.012": (f"{MLP}/nll/low", -1),
        "0.74": (f"{MLP}/corrupted_accuracy/mean", 100),
        "0.50": (f"{MLP}/corrupted_accuracy/low", 100),
        "0.99": (f"{MLP}/corrupted_accuracy/high", 100),
        "10": (f"{MLP}/nll/seeds", 1),
    },
    "docs/when_to_use.md": {
        "0.7": ("bench.json/rows/WRN-10-1 × 5: feature-WGD, method only/value", 100),
        "1.3": ("bench.json/rows/low_memory, n = 20: time relative to sequential/value", 1),
    },
}
"""Page -> number in its text -> path in results/ and factor."""
OTHER_NUMBERS = {
    "README.md": {"2022": "the paper", "95": "level of the intervals"},
    "docs/when_to_use.md": {
        "300": "epochs in the paper",
        "5,000": "images in the study's title",
        "20": "members of the measurement",
    },
}
"""Numbers that no measurement gave."""


def prose(path: Path) -> str:
    """A page without generated tables and code blocks; a formula is one word."""
    return FORMULA.sub("formula", CODE.sub("", GENERATED.sub("", path.read_text())))


def look_up(path: str) -> float:
    """A number in results/, by the names of its rows and entries."""
    file, *keys = path.split("/")
    value = json.loads((ROOT / "results" / file).read_text())
    for key in keys:
        if isinstance(value, list):
            names = ("title", "what", "name", "setting")
            (value,) = [row for row in value if key in [row.get(name) for name in names]]
        else:
            value = value[key]
    return value


def test_the_pages_for_users_have_at_most_12000_words():
    pages = [page for page in (ROOT / "docs").rglob("*.md") if "notes" not in page.parts]
    words = {str(page.relative_to(ROOT)): len(prose(page).split()) for page in pages}
    assert len(words) > 30
    assert sum(words.values()) <= 12_000, words


def test_the_readme_is_one_screen():
    assert len((ROOT / "README.md").read_text().split()) <= 600


@pytest.mark.parametrize("page", NUMBERS)
def test_numbers_are_those_in_results(page):
    text = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)", " ", (ROOT / page).read_text(), flags=re.S)
    found = set(NUMBER.findall(re.sub(r"^    .*$", " ", text, flags=re.M)))
    assert found == {*NUMBERS[page], *OTHER_NUMBERS[page]}
    for number, (path, factor) in NUMBERS[page].items():
        decimals = len(number.partition(".")[2])
        assert f"{factor * look_up(path):.{decimals}f}" == number, path


def test_the_version_is_the_same_everywhere():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    newest = re.search(r"^## ([\d.]+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.M)[1]
    assert citation["version"] == newest == ff.__version__


def test_templates_and_hooks_can_be_read():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [repo["repo"] for repo in hooks] == ["local"]
    names = {hook["id"] for repo in hooks for hook in repo["hooks"]}
    assert {"ruff-check", "ruff-format", "mypy"} <= names
    for template in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.md"):
        _, head, body = template.read_text().split("---\n", 2)
        assert {"name", "about"} <= yaml.safe_load(head).keys()
        assert body.strip()
