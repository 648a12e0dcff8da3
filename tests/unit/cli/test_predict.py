"""featureflock predict: image files of every kind."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.hostile_files import SPECIAL, black_png
from helpers.limits import time_limit, within_memory
from helpers.small_ensembles import train_small
from PIL import Image

import featureflock as ff
from featureflock import evaluation as ev
from featureflock.cli import main as cli
from featureflock.data import Digits, InputFormat
from featureflock.evaluation.classify import ClassProbability, ImagePrediction
from featureflock.methods import DeepEnsembles, FeatureWGD
from featureflock.models import MLPConfig


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train_small(tmp_path_factory.mktemp("runs"), [FeatureWGD()], [0], epochs=6)[0]


@pytest.fixture
def run(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture(scope="module")
def digit():
    """A test scan (8, 8) in 0 to 16."""
    return Digits().load().test.x[0, 0].numpy()


@pytest.fixture
def image(digit, tmp_path):
    path = tmp_path / "digit.png"
    Image.fromarray(np.rint(digit * np.float32(255 / 16)).astype(np.uint8)).save(path)
    return path


@pytest.fixture
def command(monkeypatch, capsys):
    """Run the command; returns stdout, stderr with the error message, and the exit code."""

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["featureflock", "predict", *map(str, words)])
        try:
            cli.main()
        except SystemExit as end:
            out, err = capsys.readouterr()
            return out, err + (end.code if isinstance(end.code, str) else ""), end.code
        return *capsys.readouterr(), 0

    return call


def as_json(command, *words):
    out, _, code = command(*words, "--json")
    assert code == 0
    return json.loads(out)


def test_predictions_are_those_of_the_calibrated_ensemble(command, run, image, digit):
    (answer,) = as_json(command, run, image)
    ens = ff.load(run / "ensemble")
    held_out = Digits().load().split(validation=100).validation
    temperature = ff.calibrate(ens, [(held_out.x / 16, held_out.labels)])
    assert answer["temperature"] == pytest.approx(temperature, rel=1e-4)
    p = ens.predict(torch.from_numpy(digit)[None, None] / 16)[0]
    assert answer["label"] == str(int(p.argmax()))
    assert answer["probability"] == pytest.approx(p.max().item(), abs=1e-5)
    assert [guess["probability"] for guess in answer["top"]] == pytest.approx(p.topk(3).values.tolist(), abs=1e-5)
    members = ens.member_predictions(torch.from_numpy(digit)[None, None] / 16)[:, 0].exp()
    assert [guess["label"] for guess in answer["members"]] == members.argmax(-1).tolist()
    assert answer["members_agreeing"] == int((members.argmax(-1) == p.argmax()).sum())
    assert answer["mutual_information"] == pytest.approx(ev.mutual_information(members[:, None]).item(), abs=1e-5)
    assert answer["note"] == "grey"


def test_agreement_counts_the_members_that_predict_the_top_class():
    seven, one = ClassProbability(7, "7", 0.6), ClassProbability(1, "1", 0.5)
    answer = ImagePrediction(Path("x.png"), (seven, one), (one, seven, seven, one, seven), 0.1, "")
    assert answer.agreeing == 3
    assert answer._replace(members=(one, one, one)).agreeing == 0


def test_the_table_shows_class_probability_agreement_and_uncertainty(command, run, image):
    out, err, code = command(run, image)
    assert code == 0
    assert "digit.png" in out
    assert " of 3" in out
    assert "members agreeing" in out
    assert "Epistemic uncertainty is 0 where all members predict the same" in out
    assert "calibrated on 100 validation examples" in out
    assert "Calibrating on 100 validation examples; the result is cached." in err
    assert "Calibrating" not in command(run, image)[1]


def test_a_stored_temperature_takes_precedence(command, run, image):
    ens = ff.load(run / "ensemble")
    ens.temperature = 3.25
    ff.save(ens, run / "ensemble")
    (answer,) = as_json(command, run, image)
    assert answer["temperature"] == 3.25


def test_without_validation_it_is_calibrated_on_the_test_set(command, image, tmp_path):
    (run,) = train_small(tmp_path / "plain", [DeepEnsembles()], [0], epochs=1, validation=0)
    out, _, code = command(run, image)
    assert code == 0
    assert "calibrated on 597 test examples" in out


def test_all_kinds_of_image_files_give_the_same_prediction(command, run, image, tmp_path):
    grey = Image.open(image)
    (expected,) = as_json(command, run, image)
    kinds = {
        "rgb.png": grey.convert("RGB"),
        "rgba.png": grey.convert("RGBA"),
        "palette.png": grey.convert("P"),
        "cmyk.tif": grey.convert("CMYK"),
        "sixteen.png": Image.fromarray((np.array(grey).astype(np.uint16) << 8) + 7),
        "bitmap.bmp": grey,
    }
    for name, kind in kinds.items():
        kind.save(tmp_path / name)
    for answer in as_json(command, run, *(tmp_path / name for name in kinds)):
        assert answer["label"] == expected["label"], answer["image"]
        assert answer["probability"] == pytest.approx(expected["probability"], abs=0.05), answer["image"]


def test_a_large_image_is_scaled(command, run, image, tmp_path):
    Image.open(image).resize((80, 80), Image.Resampling.NEAREST).save(tmp_path / "large.png")
    small, large = as_json(command, run, image, tmp_path / "large.png")
    assert large["label"] == small["label"]
    assert large["note"] == "grey; centre of 80 × 80 pixels, resized to 8 × 8"


def test_conversions_are_reported(command, run, tmp_path):
    Image.new("CMYK", (30, 20)).save(tmp_path / "cmyk.jpg")
    out, _, code = command(run, tmp_path / "cmyk.jpg")
    assert code == 0
    assert "CMYK converted to RGB; centre of 30 × 20 pixels, resized to 8 × 8" in out


def test_colours_by_lightness_are_not_grey_nor_transparent(command, run, tmp_path):
    Image.new("LAB", (8, 8)).save(tmp_path / "lab.tiff")
    (answer,) = json.loads(command(run, tmp_path / "lab.tiff", "--json")[0])
    assert answer["note"] == ""


def test_of_several_frames_the_first_is_used(command, run, image, tmp_path):
    with Image.open(image) as first:
        first.save(tmp_path / "moving.gif", save_all=True, append_images=[Image.new("L", (8, 8), k) for k in (9, 99)])
    still, moving = json.loads(command(run, image, tmp_path / "moving.gif", "--json")[0])
    assert moving["probability"] == pytest.approx(still["probability"], abs=1e-3)
    assert "first of 3 frames" in moving["note"]


def test_transparent_pixels_are_white(command, run, tmp_path):
    Image.new("RGBA", (8, 8), (0, 0, 0, 0)).save(tmp_path / "clear.png")
    Image.new("RGB", (8, 8), "white").save(tmp_path / "white.png")
    clear, white = as_json(command, run, tmp_path / "clear.png", tmp_path / "white.png")
    assert clear["probability"] == white["probability"]


def test_the_exif_orientation_is_applied(command, run, image, tmp_path):
    turned = Image.open(image).convert("RGB").transpose(Image.Transpose.ROTATE_90)
    exif = turned.getexif()
    exif[0x0112] = 6  # to be turned clockwise
    turned.save(tmp_path / "turned.png", exif=exif)
    (expected,), (answer,) = as_json(command, run, image), as_json(command, run, tmp_path / "turned.png")
    assert answer["probability"] == pytest.approx(expected["probability"], abs=1e-6)


def test_unreadable_files_are_named_and_the_others_classified(command, run, image, tmp_path):
    (tmp_path / "letter.txt").write_text("not an image")
    (tmp_path / "cut.png").write_bytes(image.read_bytes()[:60])
    (tmp_path / "folder").mkdir()
    words = [tmp_path / "letter.txt", image, tmp_path / "cut.png", tmp_path / "folder", tmp_path / "nothing.png"]
    out, err, code = command(run, *words)
    assert "digit.png" in out
    assert "letter.txt is not an image in a supported format" in err
    assert "cut.png is damaged or of an unsupported kind" in err
    assert "folder is a folder; give image files" in err
    assert "There is no file" in err
    assert "Traceback" not in err
    assert code != 0


def test_a_read_only_run_still_classifies(command, run, image, monkeypatch):
    (expected,) = as_json(command, run, image)
    shutil.rmtree(run / "predictions")
    monkeypatch.setattr("featureflock.evaluation.predictions.write_atomically", _full_disk)
    out, err, code = command(run, image, "--json")
    assert code == 0
    assert json.loads(out) == [expected]
    assert "The predictions could not be cached" in err


def _full_disk(path, data):
    raise OSError(28, "No space left on device")


def test_sixteen_bits_with_a_transparent_colour(command, run, image, tmp_path):
    with Image.open(image) as grey:
        sixteen = Image.fromarray((np.array(grey).astype(np.uint16) << 8) + 7)
    sixteen.save(tmp_path / "plain.png")
    sixteen.save(tmp_path / "transparent.png", transparency=1)
    plain, transparent = as_json(command, run, tmp_path / "plain.png", tmp_path / "transparent.png")
    assert plain["probability"] == transparent["probability"]
    assert plain["note"] == "16 bits reduced to 8, grey"


@pytest.mark.parametrize("kind", SPECIAL)
def test_special_files_are_refused(command, run, tmp_path, kind):
    SPECIAL[kind](tmp_path / "special.png")
    with time_limit():
        assert "special.png is not a regular file; give an image file." in command(run, tmp_path / "special.png")[1]


def test_a_line_of_a_million_pixels_takes_little_memory(trained, tmp_path):
    Image.new("L", (1, 1_000_000), 255).save(tmp_path / "line.png")
    assert (tmp_path / "line.png").stat().st_size < 3_000
    inputs = InputFormat.from_json(json.loads((trained / "inputs.json").read_text()))

    def read(shape):
        image, note = replace(inputs, shape=shape).read(tmp_path / "line.png")
        assert image.size == shape[:0:-1]
        assert "centre of 1 × 1000000 pixels, resized" in note

    for shape in ((1, 8, 8), (3, 224, 224), (3, 224, 112)):
        assert within_memory(150, lambda shape=shape: read(shape)) == ""


def test_an_image_that_expands_to_gigabytes_is_refused(trained, tmp_path):
    (tmp_path / "bomb.png").write_bytes(black_png(10_000, 10_000))
    inputs = InputFormat.from_json(json.loads((trained / "inputs.json").read_text()))
    message = f"{tmp_path}/bomb.png has too many pixels to be decoded safely; make it smaller first."
    assert within_memory(150, lambda: inputs.read(tmp_path / "bomb.png")) == message


def test_networks_without_convolutions_cannot_be_explained(command, image, tmp_path):
    (run,) = train_small(tmp_path / "flat", [DeepEnsembles()], [0], epochs=1, model=MLPConfig((8,)))
    out, err, code = command(run, image, "--explain")
    assert code
    assert "--explain needs convolutional networks" in err
    assert not out
    _, err, _ = command(run, image, "--explain", "--out", tmp_path / "why.txt")
    assert "why.txt must end in .png, .jpg or .webp" in err


def test_explain_draws_a_figure(command, run, image, tmp_path):
    out = tmp_path / "why.png"
    _, err, code = command(run, image, image, "--explain", "--out", out)
    assert code == 0
    assert f"wrote {out}" in err
    with Image.open(out) as drawn:
        assert drawn.size[0] > 300


def test_an_unwritable_figure_is_refused_before_the_work(command, run, image, tmp_path):
    _, err, code = command(run, image, "--explain", "--out", tmp_path / "no" / "why.png")
    assert code
    assert "cannot be written; give a file in a folder that exists" in err
    assert not (run / "predictions").exists()


def test_a_figure_too_large_for_its_format_leaves_no_file(command, run, image, tmp_path, monkeypatch):
    """WebP images have at most 16,383 pixels on each side."""
    monkeypatch.setattr("featureflock.evaluation.cam_figure.CELLS", 4)  # one image in each row
    _, err, code = command(run, *[image] * 125, "--explain", "--out", tmp_path / "why.webp")
    assert code
    assert "pixels cannot be written to" in err
    assert "give another --out, such as a .png, or fewer images." in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["digit.png", "run"]


def test_without_the_data_probabilities_are_not_calibrated(command, run, image):
    recipe = json.loads((run / "recipe.json").read_text())
    recipe["data"] = {"class": "CustomData"}
    (run / "recipe.json").write_text(json.dumps(recipe))
    out, err, code = command(run, image)
    assert code == 0
    assert "Probabilities are not calibrated, because the data are not available" in err
    assert "calibrated on" not in out


def test_runs_on_other_inputs_than_images_are_refused(command, run, image):
    inputs = json.loads((run / "inputs.json").read_text())
    (run / "inputs.json").write_text(json.dumps({**inputs, "shape": [6], "dtype": "float32"}))
    _, err, code = command(run, image)
    assert code
    assert "The inputs of this run are not images but float32 of shape (6,)" in err
    (run / "inputs.json").write_text("{}")
    assert "inputs.json is damaged" in command(run, image)[1]


def test_invalid_arguments_are_refused(command, run, image, tmp_path):
    assert "does not exist; give the folder of a run" in command(tmp_path / "nothing", image)[1]
    assert "Give at least one image" in command(run)[1]
    assert "--top must be at least 1; got 0" in command(run, image, "--top", "0")[1]
    assert "is not available" in command(run, image, "--device", "quantum")[1]
