"""Reading corrupted sets: CIFAR-10-C, ImageNet-C, and damaged files."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.corrupted_files import THREE, X, Y, manifest, published
from PIL import Image

from featureflock.corruptions import copy_set, generate_set, open_set, read_imagenet_c
from featureflock.utils import digests

CPU = torch.device("cpu")


def write_npz(path):
    with open(path, "wb") as file:
        np.savez(file, x=np.zeros(3))


def alter_manifest(folder):
    manifest(folder)
    path = folder / "featureflock.json"
    path.write_text(path.read_text().replace('"source": ""', '"source": "a"'))


def test_published_files_are_memory_mapped(tmp_path):
    arrays = published(tmp_path / "c")
    corrupted = open_set(tmp_path / "c")
    assert corrupted.corruptions == THREE
    assert corrupted.severities == (1, 2, 3, 4, 5)
    assert corrupted.labels.tolist() == [0, 1, 2, 3]
    third = corrupted.images("frost", 3)
    assert isinstance(third, np.memmap)
    assert np.array_equal(third, arrays["frost"][8:12])
    assert np.array_equal(corrupted.images("contrast", 5)[3], arrays["contrast"][19])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "labels.npy").unlink(), "labels.npy is missing, so the corrupted set"),
        (lambda f: (f / "labels.npy").write_bytes(b"x"), "labels.npy is truncated or damaged"),
        (lambda f: np.save(f / "labels.npy", np.arange(20)), "different labels for different severities"),
        (lambda f: np.save(f / "labels.npy", np.zeros(19, int)), "5 × N were expected"),
        (lambda f: np.save(f / "labels.npy", np.zeros(25, int)), "20 images; 5 × 5 are needed"),
        (lambda f: np.save(f / "fog.npy", np.zeros((20, 32, 32))), "contains float64 of shape"),
        (lambda f: (f / "fog.npy").write_bytes((f / "fog.npy").read_bytes()[:-1]), "fog.npy is truncated or damaged"),
        (lambda f: np.save(f / "fog.npy", np.array([{}]), allow_pickle=True), "fog.npy is truncated or damaged"),
        (lambda f: (f / "fog.npy").unlink(), "contains no corrupted images"),
        (lambda f: (f / "featureflock.json").write_text("{"), "featureflock.json is damaged: it is not valid JSON"),
        (lambda f: (f / "featureflock.json").write_text("[" * 50_000), "nested too deeply; remove the folder"),
        (
            lambda f: (f / "featureflock.json").write_text("[]"),
            r"content must be dict.*; got \[\]\); remove the folder",
        ),
        (lambda f: manifest(f, version=1), "this version of featureflock reads"),
        (lambda f: alter_manifest(f), "featureflock.json is damaged: its content has changed; remove the folder"),
        (lambda f: (f / "fog.npy").write_bytes(b""), "fog.npy is truncated or damaged"),
        (lambda f: write_npz(f / "fog.npy"), "fog.npy is truncated or damaged"),
        (lambda f: write_npz(f / "labels.npy"), "labels.npy is truncated or damaged"),
        (lambda f: manifest(f, severities=None), "content.severities must be"),
        (lambda f: manifest(f, severities=[]), r"its severities are \[\]"),
        (lambda f: manifest(f, files=[]), "content.files must be dict"),
        (lambda f: manifest(f, files={"fog.npy": {}}), "content.files.fog.npy has no 'from'"),
        (lambda f: manifest(f, source=None), "content.source must be str; got None"),
    ],
)
def test_damaged_sets_are_reported(tmp_path, damage, message):
    published(tmp_path / "c", names=["fog"])
    damage(tmp_path / "c")
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        open_set(tmp_path / "c").images("fog", 1)


@pytest.mark.parametrize("name", ["fog.npy", "labels.npy"])
def test_every_damaged_byte_of_a_set_with_a_manifest_is_noticed(tmp_path, name):
    generate_set(X, Y, tmp_path / "c", corruptions=["fog"], severities=(1, 4), workers=1)
    path = tmp_path / "c" / name
    intact, expected = path.read_bytes(), open_set(tmp_path / "c").images("fog", 4).copy()
    for position in sorted({0, 8, 60, 130, len(intact) // 2, len(intact) - 1}):
        path.write_bytes(intact[:position] + bytes([intact[position] ^ 1]) + intact[position + 1 :])
        with pytest.raises(
            ValueError, match=rf"{name} is damaged: its digest is not that in featureflock\.json; repeat"
        ):
            open_set(tmp_path / "c").images("fog", 4)
    for content in (intact[:-1], intact + b"x", b""):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"{name} is damaged"):
            open_set(tmp_path / "c").images("fog", 4)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        open_set(tmp_path / "c")
    generate_set(X, Y, tmp_path / "c", corruptions=["fog"], severities=(1, 4), workers=1)
    assert path.read_bytes() == intact
    assert np.array_equal(open_set(tmp_path / "c").images("fog", 4), expected)


def test_files_are_hashed_when_they_are_used_and_only_once(tmp_path, monkeypatch):
    generate_set(X, Y, tmp_path / "c", corruptions=THREE, severities=(1, 4), workers=1)
    hashed, digest = [], digests.hashlib.file_digest
    monkeypatch.setattr(digests.hashlib, "file_digest", lambda f, kind: hashed.append(f.name) or digest(f, kind))
    corrupted = open_set(tmp_path / "c")
    assert [corrupted.shape(name) for name in THREE] == [(14, 32, 32, 3)] * 3
    assert len({corrupted.digest(name) for name in THREE}) == 3
    assert {Path(name).name for name in hashed} == {"labels.npy"}
    for severity in (1, 4, 1):
        open_set(tmp_path / "c").images("frost", severity)
    assert [Path(name).name for name in hashed] == ["labels.npy", "frost.npy"]


def test_imported_files_get_a_digest(tmp_path):
    published(tmp_path / "theirs")
    theirs = open_set(tmp_path / "theirs")
    copy_set(theirs, theirs.labels.numpy(), tmp_path / "ours")
    ours = open_set(tmp_path / "ours")
    for name in THREE:
        digest = hashlib.sha256((tmp_path / "theirs" / f"{name}.npy").read_bytes()).hexdigest()
        assert ours.digest(name) == theirs.digest(name) == ours.manifest["files"][f"{name}.npy"]["sha256"] == digest
    path = tmp_path / "ours" / "frost.npy"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(ValueError, match=r"frost\.npy is damaged: its digest is not that in featureflock\.json"):
        ours.images("frost", 1)


def test_missing_files_and_severities_are_reported(tmp_path):
    with pytest.raises(FileNotFoundError, match="There is no folder"):
        open_set(tmp_path / "nowhere")
    published(tmp_path / "c")
    for arguments, message in ((("fog", 1), "has no fog.npy"), (("frost", 6), "severities 1, 2, 3, 4, 5; got 6")):
        with pytest.raises(ValueError, match=message):
            open_set(tmp_path / "c").images(*arguments)


@pytest.mark.parametrize("workers", [0, 2])
def test_imagenet_c_is_read_without_cropping_again(tmp_path, workers):
    rng = np.random.default_rng(0)
    for name in ("n01440764", "n01443537"):
        folder = tmp_path / "fog" / "2" / name
        folder.mkdir(parents=True)
        for k in range(3):
            Image.fromarray(rng.integers(0, 256, (224, 224, 3), dtype=np.uint8)).save(folder / f"{k}.JPEG")
    classes = ["n01440764", "n01443000", "n01443537"]
    examples = read_imagenet_c(tmp_path, "fog", 2, classes=classes, workers=workers)
    assert examples.labels.tolist() == [0, 0, 0, 2, 2, 2]
    assert read_imagenet_c(tmp_path, "fog", 2).labels.tolist() == [0, 0, 0, 1, 1, 1]
    x = next(examples.batches([torch.tensor([4])], CPU)).x[0]
    image = np.array(Image.open(tmp_path / "fog" / "2" / "n01443537" / "1.JPEG")).transpose(2, 0, 1)
    mean, std = (np.array(v)[:, None, None] for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    assert np.abs(x.numpy() - (image / 255 - mean) / std).max() < 1e-5
    for arguments, message in (
        (("fog", 3), "ImageNet-C is a tree"),
        (("fog", 7), "severity must be"),
        (("fogg", 2), "did you mean fog"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            read_imagenet_c(tmp_path, *arguments)
    with pytest.raises(ValueError, match="has the class n01443537, which is not one of the 1 classes"):
        read_imagenet_c(tmp_path, "fog", 2, classes=classes[:1])
