"""Pages from files of the repository, links to files that are not part of the site, and confidence intervals.

CONTRIBUTING.md and CHANGELOG.md are pages. A link to any other file of the repository is shown as its text.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
INTERVAL = re.compile(r"\[−?[\d.]+, −?[\d.]+\](?: [▲▼])?")
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|`[^`]*`)+)\]\(([^)#:\s]+)(#[\w-]+)?\)")


def on_files(files: Files, config: Any) -> Files:
    for source, page in PAGES.items():
        text = LINK.sub(lambda match: _in_site(match), (ROOT / source).read_text())
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, files: Files, **_: Any) -> str:
    folder = posixpath.dirname(page.file.src_uri)

    def rewrite(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        path = posixpath.normpath(posixpath.join("docs", folder, target))
        if path in PAGES:
            return f"[{text}]({posixpath.relpath(PAGES[path], folder or '.')}{anchor})"
        outside = not path.startswith("docs/") and (ROOT / path).exists()
        return text if outside else match[0]

    return LINK.sub(rewrite, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Confidence intervals, and ± with its number, do not break over lines."""
    return INTERVAL.sub(lambda match: match[0].replace(" ", "&nbsp;"), html).replace(" ± ", " ±&nbsp;")


def _in_site(match: re.Match[str]) -> str:
    """A link of a file in the root as a link of a page of the site."""
    text, target, anchor = match[1], match[2], match[3] or ""
    if target.startswith("docs/") and target.endswith(".md"):
        return f"[{text}]({target.removeprefix('docs/')}{anchor})"
    return f"[{text}]({PAGES[target]}{anchor})" if target in PAGES else text
