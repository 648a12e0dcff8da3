"""The built wheel: installed outside the checkout, every command works."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]
COMMANDS = ("data", "train", "evaluate", "report", "tune", "reproduce", "predict", "export", "demo")
OUTSIDE = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}

DRIVER = """
import contextlib, io, json, sys
import featureflock
from featureflock.cli.main import main

results = []
for words in json.loads(sys.argv[1]):
    sys.argv = ["featureflock", *words]
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
    results.append([words, code, output.getvalue()])
editable = [str(finder) for finder in sys.meta_path if "editable" in str(finder)]
print(json.dumps({"package": featureflock.__file__, "editable": editable, "results": results}))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built from a copy so that no earlier build leaves files in it."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "featureflock", source / "featureflock", ignore=shutil.ignore_patterns("__pycache__"))
    run([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", source / "dist", source], source)
    (path,) = (source / "dist").glob("*.whl")
    return path


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory) -> Path:
    """A new virtual environment with the wheel in it. It sees the dependencies of the running environment through a
    path entry, which does not activate the editable install there."""
    folder = tmp_path_factory.mktemp("outside") / "env"
    run([sys.executable, "-m", "venv", "--without-pip", folder], folder.parent)
    python = folder / "bin" / "python"
    run([sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "-q", wheel], ROOT)
    site = run([python, "-I", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], folder.parent).strip()
    paths = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    Path(site, "dependencies.pth").write_text("\n".join(paths) + "\n")
    return folder


def run(command, cwd) -> str:
    done = subprocess.run(command, cwd=cwd, env=OUTSIDE, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_command_works_from_the_installed_wheel(environment):
    """One process runs them all, as importing PyTorch takes seconds."""
    work = environment.parent
    Image.effect_noise((32, 48), 60).convert("RGB").save(work / "image.png")
    train = ["train", "digits", "--members", "2", "--epochs", "2"]
    small = ["--examples", "50", "--corruptions", "contrast", "--severities", "3"]
    lines = [
        *([command, "--help"] for command in COMMANDS),
        ["reproduce", "--list"],
        ["reproduce", "feature-map", "--seeds", "1"],
        [*train, "--out", "runs/ours"],
        [*train, "--method", "deep-ensembles", "--out", "runs/baseline"],
        ["evaluate", "runs/ours", "runs/baseline", *small],
        ["report", "runs/ours", "runs/baseline", *small],
        ["predict", "runs/ours", "image.png", "--json"],
        ["export", "runs/ours", "--out", "model.pt2"],
    ]
    report = json.loads(run([environment / "bin" / "python", "-I", "-c", DRIVER, json.dumps(lines)], work))
    assert Path(report["package"]).is_relative_to(environment)
    assert report["editable"] == []
    output = {}
    for words, code, text in report["results"]:
        assert code == 0, f"{words}: {text}"
        output[tuple(words[:2])] = text
    assert all("featureflock" in output[command, "--help"] for command in COMMANDS)
    assert re.search(r"imagenet +Table 3 +ResNet-50", output["reproduce", "--list"])
    assert "feature-MAP" in (work / "reproductions" / "smoke" / "feature-map.md").read_text()
    assert "Deep Ensembles" in output["evaluate", "runs/ours"]
    assert json.loads((work / "featureflock-evaluation" / "results.json").read_text())
    assert "<html" in (work / "featureflock-report" / "report.html").read_text()
    assert "image.png" in output["predict", "runs/ours"]


def test_the_installed_script_starts(environment):
    assert run([environment / "bin" / "featureflock", "--version"], environment.parent).startswith("featureflock 0")


def test_every_imported_distribution_is_a_declared_dependency(environment):
    """Imports of the package against the metadata. Extras suffice for imports that are not at the top of a module."""
    (site,) = environment.glob("lib/python*/site-packages")
    (own,) = metadata.distributions(name="featureflock", path=[str(site)])
    declared = {True: set(), False: set()}
    for line in own.requires:
        declared["extra ==" in line].add(re.match(r"[\w.-]+", line)[0].lower())
    owners = metadata.packages_distributions()
    for path in sorted(site.glob("featureflock/**/*.py")):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                names = [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            allowed = declared[False] if node in tree.body else declared[False] | declared[True]
            for name in {name.partition(".")[0] for name in names} - {*sys.stdlib_module_names, "featureflock"}:
                found = {owner.lower() for owner in owners.get(name, [name])}
                assert found & allowed, f"{path.relative_to(site)} imports {name}, which pyproject.toml does not list"
