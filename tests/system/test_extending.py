"""The "how to add" sections of CONTRIBUTING.md: their code, in a plug-in module, works on the command line."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

DRIVER = """
import json, shutil, sys
from pathlib import Path
from featureflock.cli.main import main

def run(*words):
    print("$", *words, flush=True)
    sys.argv = ["featureflock", *words]
    try:
        main()
    except SystemExit as end:
        assert not end.code, (words, end.code)

parts = ["--data", "moons", "--model", "fourier", "--model.features", "8", "--method", "smoothed-map"]
parts += ["--method.prior", "laplace", "--method.prior.precision", "0.01", "--members", "2", "--batch", "100"]
run("train", "digits", *parts, "--epochs", "3", "--out", "run")
Path("run/result.json").unlink()
for path in sorted(Path("run/checkpoints").iterdir())[1:]:
    shutil.rmtree(path)
run("train", "digits", *parts, "--epochs", "3", "--out", "run", "--resume")
run("evaluate", "run", "--out", "evaluation")
parts += ["--epochs", "1", "--held-out", "100", "--seeds", "1", "--space", "method.prior.precision=0.01,0.1"]
run("tune", "digits", *parts, "--by", "worst_member")

import featureflock as ff
ens = ff.load("run/ensemble")
print("loaded", type(ens.extractors[0]).__name__, type(ens.layer.prior).__name__)
"""


def test_components_of_a_plug_in_work_on_the_command_line(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.S)
    assert len(blocks) == 5
    (tmp_path / "my_parts.py").write_text("\n\n".join(blocks))
    paths = [str(tmp_path), str(ROOT)]
    environment = {**os.environ, "FEATUREFLOCK_PLUGINS": "my_parts", "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, "-c", DRIVER], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    output = done.stdout
    recipe = json.loads((tmp_path / "run" / "recipe.json").read_text())
    assert "Laplace" in json.dumps(recipe)
    starts = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert [start["from_step"] for start in starts] == [0, 8]  # 4 steps in each of 3 epochs; the last one is repeated
    evaluated = output.partition("$ evaluate")[2].partition("$ tune")[0]
    assert "smoothed MAP" in evaluated
    assert re.search(r"Worst member, % ↑ +\d", evaluated)
    results = json.loads((tmp_path / "evaluation" / "results.json").read_text())
    assert 0.5 < results["runs"][0]["summary"]["worst_member"] <= 1
    assert "smoothed MAP, best by worst_member: precision 0." in output
    assert "loaded Fourier Laplace" in output
