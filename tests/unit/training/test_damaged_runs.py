"""Resuming a run whose files were damaged or whose data were replaced: one sentence, before anything is written."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.short_runs import SHORT, RecordingReporter, same, weights
from PIL import Image

from featureflock.data import ImageFolder
from featureflock.methods import DeepEnsembles
from featureflock.models import MLPConfig
from featureflock.training import ComputeConfig, Recipe, Reporter, train
from featureflock.training.checkpoint import read_newest, write
from featureflock.training.run_folder import RunFolder

RECIPE = replace(SHORT, model=MLPConfig((4,)), method=DeepEnsembles(), members=2, epochs=3, batch=30, subset=60)
BRACKETS = "[" * 50_000


class Stop(Reporter):
    """Ends the process, as it were, after an epoch."""

    def __init__(self, epoch: int) -> None:
        self.last = epoch

    def epoch(self, line):
        if line["epoch"] == self.last:
            raise KeyboardInterrupt


def interrupted(recipe: Recipe, folder: Path) -> Path:
    """A run that was stopped at the end of its second epoch of three."""
    with pytest.raises(KeyboardInterrupt):
        train(recipe, folder, compute=ComputeConfig(checkpoint_minutes=0), reporter=Stop(2))
    return folder


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    return interrupted(RECIPE, tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture
def run(stopped, tmp_path):
    shutil.copytree(stopped, tmp_path / "run")
    return tmp_path / "run"


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


LINE = '{"epoch": 1, "step": 2, "seconds": 0.1}\n'


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("recipe.json", "{", r"recipe\.json is damaged: it is not valid JSON"),
        ("recipe.json", BRACKETS, r"recipe\.json is damaged: its JSON is nested too deeply"),
        ("recipe.json", "[]", r"recipe\.json is damaged or was modified \(content must be RecipeJSON; got \[\]\)"),
        ("recipe.json", "{}", r"recipe\.json is damaged or was modified \(content has no 'data'\)"),
        ("environment.json", "{}", r"environment\.json is damaged or was modified \(content must be list"),
        ("environment.json", "[5]", r"environment\.json is damaged or was modified \(content\[0\] must be dict"),
        ("environment.json", BRACKETS, r"environment\.json is damaged: its JSON is nested too deeply"),
        ("metrics.jsonl", BRACKETS + "\n", r"Line 1 of .*metrics\.jsonl is damaged: its JSON is nested too deeply"),
        ("metrics.jsonl", "5\n" + LINE, r"Line 1 of .*metrics\.jsonl is damaged or was modified"),
        ("metrics.jsonl", LINE + '{"epoch": 2}\n', r"Line 2 of .*metrics\.jsonl .*content has no 'seconds'"),
        ("metrics.jsonl", LINE.replace("0.1", "[0.1]"), r"Line 1 .*content\.seconds must be float; got \[0\.1\]"),
        ("metrics.jsonl", LINE.replace("0.1", "1e999"), r"Line 1 .*the number 1e999 is too large"),
        ("metrics.jsonl", LINE + LINE, r"metrics\.jsonl does not have exactly one line for each finished epoch"),
        ("metrics.jsonl", "", r"metrics\.jsonl does not have exactly one line for each finished epoch"),
    ],
)
def test_a_damaged_file_is_one_sentence_and_nothing_is_written(run, name, text, message):
    (run / name).write_text(text)
    before = content(run)
    with pytest.raises(ValueError, match=message) as caught:
        train(RECIPE, run, resume=True)
    assert str(caught.value).endswith("; restore it, or train the run again in another folder.")
    assert "\n" not in str(caught.value)
    assert content(run) == before


@pytest.mark.parametrize(("name", "key"), [("metrics.jsonl", "loss"), ("environment.json", "date")])
def test_a_changed_value_is_noticed_on_resume(run, name, key):
    path = run / name
    text = path.read_text()
    place = text.index(key) + len(key) + 6  # in the first value of this key
    path.write_text(text[:place] + chr(ord(text[place]) ^ 1) + text[place + 1 :])
    with pytest.raises(ValueError, match=f"{name} does not belong to this run: modified, damaged or copied"):
        train(RECIPE, run, resume=True)
    path.write_text(text)
    train(RECIPE, run, resume=True)


def test_part_of_a_line_that_a_killed_process_left_is_dropped(run, tmp_path):
    with open(run / "metrics.jsonl", "ab") as file:
        file.write(b'{"epoch": 3, "st')
    assert train(RECIPE, run, resume=True)["test"] == train(RECIPE, tmp_path / "reference")["test"]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2, 3]
    assert same(weights(run), weights(tmp_path / "reference"))
    RunFolder(run).verify()


def test_a_run_killed_before_its_manifest_is_not_finished_and_is_finished_again(run):
    first = train(RECIPE, run, resume=True)
    before, old = content(run), weights(run)
    (run / "manifest.json").unlink()
    assert not RunFolder(run).is_finished
    assert train(RECIPE, run, resume=True)["test"] == first["test"]
    assert same(weights(run), old)
    after = content(run)
    assert after["metrics.jsonl"].count(b"\n") == 3
    assert all(after[name] == before[name] for name in ("recipe.json", "inputs.json"))
    RunFolder(run).verify()


def test_a_finished_run_with_a_changed_result_is_not_reported_as_finished(run):
    train(RECIPE, run, resume=True)
    path = run / "result.json"
    path.write_text(path.read_text().replace('"members": 2', '"members": 3'))
    with pytest.raises(ValueError, match=r"result\.json does not belong to this run"):
        train(RECIPE, run, resume=True)


def test_an_empty_newest_checkpoint_costs_only_time(run, tmp_path):
    newest = max((run / "checkpoints").iterdir())
    (newest / "0.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    reporter = RecordingReporter()
    train(RECIPE, run, resume=True, reporter=reporter)
    assert reporter.notes[0] == f"{newest} is damaged and was renamed; using the previous checkpoint."
    train(RECIPE, tmp_path / "reference")
    assert same(weights(run), weights(tmp_path / "reference"))


def test_a_checkpoint_of_other_networks_is_one_sentence(run):
    checkpoint, _ = read_newest(run / "checkpoints")
    tensors = {name: t.flatten()[:0] if name.startswith("ensemble/") else t for name, t in checkpoint.tensors.items()}
    for changed in (tensors, {"totals": tensors["totals"]}, {"a": tensors["totals"]}):
        write(run / "checkpoints", 999, replace(checkpoint, tensors=changed))
        with pytest.raises(
            ValueError, match="does not fit the networks of its recipe; it was written by another"
        ) as end:
            train(RECIPE, run, resume=True)
        assert "\n" not in str(end.value)


def tree(folder: Path) -> Path:
    for part in ("train", "val"):
        for k, name in enumerate(("ant", "bee")):
            (folder / part / name).mkdir(parents=True)
            for i in range(3):
                Image.new("RGB", (8, 8), (100 * k + 20 * i, 30, 0)).save(folder / part / name / f"{i}.bmp")
    return folder


def on_images(folder: Path) -> Recipe:
    data = ImageFolder(folder, size=8, workers=0)
    return Recipe(data, MLPConfig((4,)), DeepEnsembles(), members=2, epochs=3, batch=3)


@pytest.mark.parametrize(("part", "what"), [("train", "training data"), ("val", "test or validation data")])
def test_images_replaced_under_the_same_names_are_noticed(tmp_path, part, what):
    folder = tree(tmp_path / "images")
    run = interrupted(on_images(folder), tmp_path / "run")
    path = folder / part / "bee" / "2.bmp"
    old = path.stat()
    intact = path.read_bytes()
    Image.new("RGB", (8, 8), (255, 0, 0)).save(path)
    os.utime(path, ns=(old.st_atime_ns, old.st_mtime_ns))
    assert path.stat().st_size == old.st_size
    with pytest.raises(ValueError, match=f"The {what} have changed since .*run was started; restore them"):
        train(on_images(folder), run, resume=True)
    path.write_bytes(intact)
    shutil.copytree(folder, tmp_path / "elsewhere")  # with other times
    train(on_images(tmp_path / "elsewhere"), run, resume=True)
    RunFolder(run).verify()
