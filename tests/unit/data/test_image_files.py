"""Image files in class folders: crops, resizing, and files that cannot be read."""

import math
import os
import random

import numpy as np
import pytest
import torch
from helpers.hostile_files import black_png
from helpers.limits import within_memory
from PIL import Image
from torch.testing import assert_close

from featureflock.data import EpochKey, ImageFolder
from featureflock.data.image_files import centre_crop, random_resized_crop
from featureflock.data.rng import permutation

CPU = torch.device("cpu")


@pytest.fixture
def tree(tmp_path):
    generator = np.random.default_rng(0)
    for part, count in (("train", 12), ("val", 4)):
        for label, name in enumerate(("ant", "bee", "cat")):
            folder = tmp_path / part / name
            folder.mkdir(parents=True)
            for k in range(count):
                size = generator.integers(20, 60, 2)
                pixels = generator.integers(0, 60, (*size, 3)) + 80 * label  # classes differ in brightness
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{k}.JPEG", quality=95)
    return tmp_path


@pytest.mark.parametrize("workers", [0, 2])
def test_a_tree_of_jpegs_is_read(tree, workers):
    data = ImageFolder(tree, size=16, workers=workers).load()
    assert (len(data.train), len(data.test), data.classes) == (36, 12, 3)
    assert data.train.labels.tolist() == [0] * 12 + [1] * 12 + [2] * 12
    x, y, unreadable = next(data.train.batches([permutation(36, 0)], CPU, EpochKey(0, 0)))
    assert x.shape == (36, 3, 16, 16)
    assert not unreadable
    brightness = torch.stack([x[y == label].mean() for label in range(3)])
    assert brightness[0] < brightness[1] < brightness[2]
    again = torch.cat([batch.x for batch in data.train.batches(list(permutation(36, 0).split(5)), CPU, EpochKey(0, 0))])
    assert torch.equal(again, x)  # independent of the batches
    other = next(data.train.batches([permutation(36, 0)], CPU, EpochKey(0, 1))).x
    assert not torch.equal(other, x)


def test_evaluation_resizes_and_crops_the_centre(tree):
    data = ImageFolder(tree, size=16, workers=0).load()
    path = tree / "val" / "ant" / "0.JPEG"
    with Image.open(path) as image:
        width, height = image.size
        short = min(width, height)
        scaled = image.resize((width * 18 // short, height * 18 // short), Image.Resampling.BILINEAR)
        left, top = round((scaled.width - 16) / 2), round((scaled.height - 16) / 2)
        expected = np.array(scaled.crop((left, top, left + 16, top + 16))).transpose(2, 0, 1)
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    expected = (expected / 255 - mean[:, None, None]) / std[:, None, None]
    got = next(data.test.batches([torch.tensor([0])], CPU)).x[0]
    assert_close(got, torch.from_numpy(expected).float(), atol=1e-5, rtol=1e-5)


def test_the_shorter_side_is_256_for_a_crop_of_224():
    assert centre_crop(Image.new("RGB", (500, 375)), 224).size == (224, 224)
    ramp = Image.fromarray(np.tile(np.linspace(0, 255, 256, dtype=np.uint8)[:, None, None], (1, 341, 3)))
    rows = np.array(centre_crop(ramp, 224))[:, 0, 0]  # the middle 224 of 256 rows
    assert (rows[0], rows[-1]) == (16, 239)


def test_random_crops_have_the_published_areas_and_aspect_ratios():
    boxes = np.array([random_resized_crop(400, 300, 0, 0, i) for i in range(4000)])
    width, height = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    assert (boxes[:, :2] >= 0).all()
    assert (boxes[:, 2] <= 400).all()
    assert (boxes[:, 3] <= 300).all()
    fraction, ratio = width * height / 120_000, width / height
    assert 0.078 < fraction.min() < 0.1
    assert fraction.max() > 0.9
    assert ratio.min() > 0.74
    assert ratio.max() < 1.35
    square = np.array([random_resized_crop(1000, 1000, 1, 0, i) for i in range(4000)])
    width, height = square[:, 2] - square[:, 0], square[:, 3] - square[:, 1]
    fits = width * height < 0.7e6  # below 3/4 of the area every aspect ratio fits at the first attempt
    area, log_ratio = (width * height)[fits] / 1e6, np.log(width / height)[fits]
    assert abs(area.mean() - (0.08 + 0.7) / 2) < 5 * (0.7 - 0.08) / math.sqrt(12 * fits.sum())
    assert abs(log_ratio.mean()) < 5 * log_ratio.std() / math.sqrt(fits.sum())
    assert abs(log_ratio.std() - 2 * math.log(4 / 3) / math.sqrt(12)) < 0.01
    left = (square[:, 0] / np.maximum(1000 - width, 1))[fits]
    assert abs(left.mean() - 0.5) < 5 / math.sqrt(12 * fits.sum())
    generator = random.Random(0)
    sampled = [
        (w * h / 1e6, area)
        for area, log_ratio in ((generator.uniform(0.08, 1), generator.uniform(-1, 1)) for _ in range(20_000))
        for w, h in [(1e3 * math.sqrt(area * (4 / 3) ** log_ratio), 1e3 * math.sqrt(area / (4 / 3) ** log_ratio))]
        if w <= 1000 and h <= 1000
    ]
    areas = (width * height) / 1e6
    assert abs(np.median(areas) - np.median([area for area, _ in sampled])) < 0.02
    assert random_resized_crop(1000, 10, 0, 0, 0) == (
        493,
        0,
        506,
        10,
    )  # the central window of ratio 4/3


@pytest.mark.parametrize("workers", [0, 2])
def test_damaged_images_are_reported_and_skipped(tree, workers):
    intact = (tree / "train" / "bee" / "3.JPEG").read_bytes()
    (tree / "train" / "bee" / "3.JPEG").write_bytes(intact[: len(intact) // 2])
    (tree / "train" / "cat" / "5.JPEG").write_bytes(b"not an image")
    (tree / "train" / "ant" / "0.JPEG").unlink()
    (tree / "train" / "ant" / "0.JPEG").symlink_to(tree / "nowhere")
    data = ImageFolder(tree, size=16, workers=workers).load()
    batches = list(data.train.batches(list(torch.arange(36).split(12)), CPU, EpochKey(0, 0)))
    assert [len(batch.y) for batch in batches] == [11, 11, 11]
    reported = " ".join(" ".join(batch.unreadable) for batch in batches)
    assert all(name in reported for name in ("bee/3.JPEG", "cat/5.JPEG", "ant/0.JPEG"))
    assert [batch.y.unique().tolist() for batch in batches] == [[0], [1], [2]]  # labels stay with their images


def test_a_pipe_does_not_block(tree):
    os.mkfifo(tree / "val" / "bee" / "pipe.png")
    test = ImageFolder(tree, size=16, workers=0).load().test
    (batch,) = test.batches([torch.arange(13)], CPU)
    assert len(batch.y) == 12
    assert batch.unreadable == (f"{tree}/val/bee/pipe.png (it is not a regular file)",)


def test_thin_images_take_little_memory(tmp_path):
    """Scaled to 256 pixels on its shorter side, a line of 20,000 pixels would have 1.3 billion."""
    for part in ("train", "val"):
        for name, size in (("ant", (1, 20_000)), ("bee", (1_000_000, 1))):
            (tmp_path / part / name).mkdir(parents=True)
            Image.new("RGB", size, (200, 100, 50)).save(tmp_path / part / name / "0.png")

    def read():
        data = ImageFolder(tmp_path, size=224, workers=0).load()
        for examples, key in ((data.train, EpochKey(0, 0)), (data.test, None)):
            (batch,) = examples.batches([torch.arange(2)], CPU, key)
            assert batch.x.shape == (2, 3, 224, 224)
            assert batch.unreadable == ()

    assert within_memory(200, read) == ""


def test_only_the_middle_of_a_thin_image_is_used():
    strip = np.zeros((1000, 10, 3), np.uint8)
    strip[484:516] = 255
    assert np.array(centre_crop(Image.fromarray(strip), 8, 1.0)).min() > 200
    assert centre_crop(Image.fromarray(strip.transpose(1, 0, 2)), 224).size == (224, 224)


def test_images_that_expand_to_gigabytes_are_skipped(tree):
    """A PNG of 10,000 × 20,000 black pixels has 25 kB, and would have 800 MB in RGB."""
    (tree / "val" / "bee" / "bomb.png").write_bytes(black_png(10_000, 20_000))
    test = ImageFolder(tree, size=16, workers=0).load().test

    def read():
        (batch,) = test.batches([torch.arange(13)], CPU)
        (skipped,) = batch.unreadable
        assert skipped.startswith(f"{tree}/val/bee/bomb.png (Image size (200000000 pixels) exceeds limit")

    assert within_memory(200, read) == ""


def test_a_program_is_not_started_to_decode_an_image(tree):
    """Pillow decodes PostScript with Ghostscript, whatever the name of the file."""
    Image.new("RGB", (20, 20)).save(tree / "val" / "bee" / "page.png", "EPS")
    (batch,) = ImageFolder(tree, size=16, workers=0).load().test.batches([torch.arange(13)], CPU)
    assert "page.png (cannot identify image file" in batch.unreadable[0]


def test_16_bit_images_keep_their_range_and_hidden_folders_are_ignored(tree):
    ramp = np.linspace(0, 65535, 256).astype(np.uint16)
    Image.fromarray(np.tile(ramp, (256, 1))).save(tree / "train" / "ant" / "deep.png")
    (tree / "train" / "ant" / "more").mkdir()
    Image.new("RGB", (20, 20)).save(tree / "train" / "ant" / "more" / "one.png")
    (tree / "train" / ".ipynb_checkpoints").mkdir()
    train = ImageFolder(tree, size=224, workers=0).load().train
    assert train.reader.paths[12:14] == ("ant/deep.png", "ant/more/one.png")
    row = train.reader.read(12, None)[0, 0].int()
    assert (int(row[0]), int(row[-1])) == (16, 239)


def test_too_many_unreadable_images_stop_the_run(tree, monkeypatch):
    monkeypatch.setattr("featureflock.data.streaming._MAX_UNREADABLE", 3)
    data = ImageFolder(tree, size=16, workers=0).load()
    for path in (tree / "train").rglob("*.JPEG"):
        path.unlink()
    with pytest.raises(OSError, match="More than 3 of 36 examples cannot be read"):
        list(data.train.batches(list(torch.arange(36).split(5)), CPU, EpochKey(0, 0)))


def test_incomplete_folder_trees_are_refused(tmp_path, tree):
    for folder, message in ((tmp_path / "nowhere", "no folder"), (tree / "train", "none of the folders train")):
        with pytest.raises(FileNotFoundError, match=message):
            ImageFolder(folder).load()
    (tree / "val" / "dog").mkdir()
    with pytest.raises(ValueError, match="has the class dog, which is not in"):
        ImageFolder(tree).load()
    (tree / "train" / "dog").mkdir()
    with pytest.raises(ValueError, match="dog contains no images"):
        ImageFolder(tree).load()


def test_grey_palette_and_transparent_images_become_rgb(tree):
    image = Image.new("L", (30, 30), 200)
    image.save(tree / "train" / "ant" / "grey.png")
    image.convert("P").save(tree / "train" / "ant" / "palette.gif")
    image.convert("RGBA").save(tree / "train" / "ant" / "alpha.png")
    train = ImageFolder(tree, size=8, workers=0).load().train
    batch = next(train.batches([torch.arange(len(train))], CPU))
    assert not batch.unreadable
    assert batch.x.shape[1] == 3
