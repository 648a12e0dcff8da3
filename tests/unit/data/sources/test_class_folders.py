"""Published data sets as class folders of images."""

import shutil

import numpy as np
import pytest
from helpers.published_formats import (
    assert_cached,
    change_entry,
    digests,
    pickled_files,
    random_arrays,
    unordered,
    write_files,
)
from PIL import Image

from featureflock.data import CIFAR10, CIFAR100
from featureflock.data.sources import cache
from featureflock.data.sources.class_folders import sort_by_digest, unordered_digest
from featureflock.data.sources.class_names import CIFAR100_CLASSES
from featureflock.data.sources.fetch import get
from featureflock.data.sources.registry import PUBLISHED_SETS

pytestmark = pytest.mark.usefixtures("temp_cache")
SIZES = {"cifar10": (30, 20), "cifar100": (200, 100)}


def balanced(name):
    """Random images, the same number of each class, in random order."""
    arrays, rng = random_arrays(name, *SIZES[name]), np.random.default_rng(1)
    for split, size in zip(("train", "test"), SIZES[name], strict=True):
        arrays[f"{split}_y"] = rng.permutation(np.arange(size) % PUBLISHED_SETS[name].classes).astype(np.uint8)
    return arrays


def write_tree(folder, arrays, name, seed=0, test="test", suffix="png"):
    """Class folders of image files, whose names are in an order given by the seed."""
    names = PUBLISHED_SETS[name].class_names
    for split, part in (("train", "train"), ("test", test)):
        order = np.random.default_rng(seed).permutation(len(arrays[f"{split}_y"]))
        for i, (x, y) in enumerate(zip(arrays[f"{split}_x"][order], arrays[f"{split}_y"][order], strict=True)):
            path = folder / part / names[y].replace(" ", "_") / f"{i:05d}.{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(x).save(path, lossless=True)
    return folder


def publish(monkeypatch, name, arrays, **changes):
    """Let these arrays be the published ones."""
    train, test = SIZES[name]
    changes = {"sha256": digests(arrays) if name == "cifar10" else None, **changes}
    change_entry(monkeypatch, name, train=train, test=test, unordered_sha256=unordered(arrays, name), **changes)


@pytest.fixture
def published(monkeypatch):
    arrays = balanced("cifar10")
    publish(monkeypatch, "cifar10", arrays)
    return arrays


def quiet(name, folder):
    return get(name, folder, log=lambda text: None)


@pytest.mark.parametrize("data", [CIFAR10(), CIFAR100()], ids=str)
def test_the_cache_does_not_depend_on_the_names_of_files(tmp_path, monkeypatch, data):
    name = data.published
    arrays = balanced(name)
    publish(monkeypatch, name, arrays)
    messages, stored = [], []
    for seed, test, suffix in ((0, "test", "png"), (1, "val", "png"), (2, "test", "webp"), (3, "val", "bmp")):
        get(name, write_tree(tmp_path / f"{seed}", arrays, name, seed, test, suffix), log=messages.append)
        stored.append(cache.load(name))
    assert len({each.digest for each in stored}) == 1
    assert all(each.published for each in stored)
    assert "not in the official order; they are sorted" in messages[0]
    splits = data.load()
    for part, split in ((splits.train, "train"), (splits.test, "test")):
        found = {(x.tobytes(), int(y)) for x, y in zip(part.x.permute(0, 2, 3, 1).numpy(), part.labels, strict=True)}
        assert found == {(x.tobytes(), y) for x, y in zip(arrays[f"{split}_x"], arrays[f"{split}_y"], strict=True)}
    assert len(set(splits.train.labels[:10].tolist())) > 3  # classes are mixed


def test_official_files_are_stored_in_the_official_order(tmp_path, published):
    get("cifar10", write_files(tmp_path / "official", pickled_files("cifar10", published)), log=pytest.fail)
    official = assert_cached("cifar10", published)
    quiet("cifar10", write_tree(tmp_path / "tree", published, "cifar10"))
    assert_cached("cifar10", sort_by_digest(published, PUBLISHED_SETS["cifar10"].class_names))
    assert cache.load("cifar10").digest != official.digest


def test_official_files_in_another_order_are_sorted(tmp_path, published):
    order = np.arange(29, -1, -1)
    other = {**published, "train_x": published["train_x"][order], "train_y": published["train_y"][order]}
    quiet("cifar10", write_files(tmp_path / "other", pickled_files("cifar10", other)))
    assert_cached("cifar10", sort_by_digest(published, PUBLISHED_SETS["cifar10"].class_names))


def test_a_sorted_copy_with_other_content_is_damaged(tmp_path, published):
    """Also if the digests in its header fit."""
    quiet("cifar10", write_tree(tmp_path / "tree", published, "cifar10"))
    arrays = {key: np.ascontiguousarray(x) for key, x in published.items()}
    arrays["train_x"] = arrays["train_x"] ^ 1
    cache.store("cifar10", arrays, source="elsewhere", published=True)
    with pytest.raises(ValueError, match="is damaged"):
        cache.load("cifar10")


def test_the_digest_depends_on_labels_and_pixels_only():
    arrays = random_arrays("cifar100", 50, 4)
    x, y = arrays["train_x"], arrays["train_y"]
    digest, order = unordered_digest(x, y, CIFAR100_CLASSES), np.random.default_rng(0).permutation(50)
    assert digest == unordered(arrays, "cifar100")["train"]
    assert unordered_digest(x[order], y[order], CIFAR100_CLASSES) == digest
    assert unordered_digest(x, y[order], CIFAR100_CLASSES) != digest
    assert (
        unordered_digest(x ^ (np.arange(50) == 7).astype(np.uint8)[:, None, None, None], y, CIFAR100_CLASSES) != digest
    )


def test_class_names_are_in_alphabetical_order():
    for name in ("cifar10", "cifar100"):
        names = [each.replace(" ", "_") for each in PUBLISHED_SETS[name].class_names]
        assert names == sorted(names)


def first_image(tree, split="train", name="cat"):
    return sorted((tree / split / name).iterdir())[0]


def altered(tree):
    pixels = np.array(Image.open(path := first_image(tree)))
    pixels[3, 4, 1] ^= 1
    Image.fromarray(pixels).save(path)


def swapped(tree):
    a, b = first_image(tree), first_image(tree, name="dog")
    shutil.copy(a, tree / "a")
    shutil.copy(b, a)
    (tree / "a").rename(b)


def emptied(folder):
    shutil.rmtree(folder)
    folder.mkdir()


WRONG = {
    "no class": (lambda t: shutil.rmtree(t / "test" / "ship"), "test is incomplete: the class folder ship of CIFAR-10"),
    "another class": (lambda t: (t / "train" / "apple").mkdir(), "train/apple is not a class of CIFAR-10"),
    "an empty class": (lambda t: emptied(t / "test" / "ship"), "test/ship has 0 images instead of the 2 of CIFAR-10"),
    "an image less": (
        lambda t: first_image(t).unlink(),
        "train/cat has 2 images instead of the 3 of CIFAR-10: 1 missing",
    ),
    "an image more": (
        lambda t: shutil.copy(first_image(t), t / "train/cat/copy.png"),
        "train/cat has 4 images .* 1 too many",
    ),
    "altered": (altered, r"is damaged: it has the size of CIFAR-10, but different content \(train\)"),
    "wrong class": (swapped, r"different content \(train\)"),
    "another size": (
        lambda t: Image.new("RGB", (8, 32)).save(first_image(t)),
        r"\.png has 32 × 8 pixels; 32 × 32 were",
    ),
    "unreadable": (lambda t: first_image(t).write_bytes(b"no image"), r"\.png is truncated or damaged"),
    "truncated": (lambda t: first_image(t).write_bytes(first_image(t).read_bytes()[:90]), r"\.png is truncated or"),
    "a folder": (lambda t: (first_image(t).unlink(), (t / "train/cat/0.png").mkdir()), r"0\.png cannot be read \(Is a"),
    "JPEG": (lambda t: Image.open(first_image(t)).save(t / "train/cat/0.jpg"), r"0\.jpg is in a lossy format"),
    "no test": (lambda t: shutil.rmtree(t / "test"), "has no folder test or val"),
    "no classes": (lambda t: emptied(t / "train"), "train has no class folders; CIFAR-10 needs 10, such as .*airplane"),
    "empty": (emptied, "tree does not contain CIFAR-10; give the folder that contains .* class folders of PNG files"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_tree_is_refused_in_one_sentence(tmp_path, temp_cache, published, case):
    tree = write_tree(tmp_path / "tree", published, "cifar10")
    change, message = WRONG[case]
    change(tree)
    with pytest.raises(ValueError, match=message) as caught:
        get("cifar10", tree)
    assert "\n" not in str(caught.value)
    assert str(tree) in str(caught.value)
    assert list(temp_cache.glob("*")) == []


def test_a_refused_tree_leaves_the_cache_as_it_was(tmp_path, published):
    tree = write_tree(tmp_path / "tree", published, "cifar10")
    quiet("cifar10", tree)
    before = cache.path_of("cifar10").read_bytes()
    altered(tree)
    with pytest.raises(ValueError, match="different content"):
        get("cifar10", tree)
    assert cache.path_of("cifar10").read_bytes() == before


def test_palettes_grey_images_and_other_files_are_accepted(tmp_path, monkeypatch):
    """Tools that make PNG files smaller change the mode and not the pixels."""
    arrays = balanced("cifar10")
    arrays["train_x"][:] = arrays["train_x"][..., :1]  # grey
    publish(monkeypatch, "cifar10", arrays)
    tree = write_tree(tmp_path / "tree", arrays, "cifar10")
    for path in (tree / "train").rglob("*.png"):
        Image.open(path).convert("L").save(path)
    (tree / "train" / "cat" / "notes.txt").write_text("mine")
    (tree / "train" / "cat" / ".DS_Store").write_bytes(b"x")
    quiet("cifar10", tree)
    assert cache.load("cifar10").published


def test_grey_data_sets_take_no_class_folders(tmp_path):
    (tmp_path / "train" / "0").mkdir(parents=True)
    with pytest.raises(ValueError, match="does not contain MNIST; give the folder that contains the four idx files"):
        get("mnist", tmp_path)
