"""The API reference: `<!-- package: core -->` in a page becomes every name of the package's `__all__`, under the module
that defines it, and `<!-- names -->` the names of `featureflock` itself with links.
"""

import functools
import importlib
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import griffe

DIRECT = {"integrations": ["export.export"], "distributed": ["mesh.Mesh", "shape.MeshShape", "mesh.join_mesh"]}
"""Public names of a package that its `__all__` does not have."""
FIRST = {"core": ["layer", "transport"], "data": ["sets.base", "sets.custom"], "training": ["recipe", "loop"]}
"""Modules that a page begins with."""


def on_page_markdown(markdown: str, files: Any, **_: Any) -> str:
    if "<!-- names -->" in markdown:
        return markdown.replace("<!-- names -->", names_table(source(), {file.src_uri for file in files}))
    return re.sub(r"<!-- package: (\w+) -->", lambda match: package_reference(source(), match[1]), markdown)


@functools.cache
def source() -> griffe.Module:
    """The package as it is written."""
    return griffe.load("featureflock", search_paths=[Path(__file__).parents[2]])


def public_names(package: griffe.Module, name: str) -> dict[str, list[str]]:
    """Module -> its public names, in the order of the package's imports."""
    found: dict[str, list[str]] = defaultdict(list)
    module = package[name]
    exported = {str(getattr(export, "name", export)) for export in module.exports or ()}
    for member in module.members:
        if member in exported:
            home, _, last = definition(module, member).rpartition(".")
            found[home].append(last)
    for path in DIRECT.get(name, ()):
        home, _, last = path.rpartition(".")
        found[f"{module.path}.{home}"].append(last)
    first = [f"{module.path}.{name}" for name in FIRST.get(name, ())]
    return {home: found[home] for home in dict.fromkeys([*first, *found])}


def definition(module: griffe.Module, name: str) -> str:
    """Path of the definition of a public name: that of the object or, for a constant, of its import."""
    try:
        value = getattr(importlib.import_module(module.path), name)
    except ImportError:  # an integration whose library is not installed
        value = None
    if isinstance(value, type) or callable(value):
        home, qualified = getattr(value, "__module__", ""), getattr(value, "__qualname__", "")
        if home.startswith("featureflock.") and qualified == name:
            return f"{home}.{qualified}"
    item = module.members[name]
    return item.target_path if item.is_alias else item.path


def package_reference(package: griffe.Module, name: str) -> str:
    module = package[name]
    lines = [f"`featureflock.{name}`", "", module.docstring.value if module.docstring else "", ""]
    for home, names in public_names(package, name).items():
        lines += [
            f"::: {home}",
            "    options:",
            f"      members: [{', '.join(names)}]",
            "      show_root_full_path: true",
            "",
        ]
    return "\n".join(lines)


def names_table(package: griffe.Module, pages: set[str]) -> str:
    rows = []
    for name in sorted({str(getattr(export, "name", export)) for export in package.exports or ()}, key=str.lower):
        if name.startswith("_"):
            continue
        if f"reference/{name}.md" in pages:
            link, target = f"[`ff.{name}`]({name}.md)", package[name]
        else:
            path = definition(package, name)
            link, target = f"[`ff.{name}`][{path}]", package[path.removeprefix("featureflock.")]
        summary = target.docstring.value.splitlines()[0] if target.docstring else ""
        rows.append(f"| {link} | {summary.replace('|', chr(92) + '|')} |")
    return "\n".join(["| name | |", "|---|---|", *rows])
