"""Sets of corrupted pictures on disk: the published layout, going on after an interruption, and the command."""

import errno

import numpy as np
import pytest
import torch
from helpers.corrupted_files import THREE, X, Y, manifest, no_messages, published
from PIL import Image

from featureflock.corruptions import (
    CORRUPTIONS,
    corrupt,
    frost,
    frost_source,
    generate_set,
    open_set,
    read_imagenet_c,
)
from featureflock.corruptions import (
    generate as making,
)
from featureflock.corruptions import (
    writer as writing,
)
from featureflock.corruptions.frost import frost_views
from featureflock.data import Normalisation

pytestmark = pytest.mark.usefixtures("temp_cache")
CPU = torch.device("cpu")


def zipped(path):
    with open(path, "wb") as file:
        np.savez(file, x=np.zeros(3))


# ---- reading


def test_published_files_are_read_from_the_disk(tmp_path):
    arrays = published(tmp_path / "c")
    held = open_set(tmp_path / "c")
    assert held.corruptions == THREE
    assert held.severities == (1, 2, 3, 4, 5)
    assert held.labels.tolist() == [0, 1, 2, 3]
    third = held.images("frost", 3)
    assert isinstance(third, np.memmap)
    assert np.array_equal(third, arrays["frost"][8:12])
    examples = held.examples("contrast", 5, Normalisation.for_bytes((0.5,) * 3, (0.25,) * 3))
    x, y, _ = next(examples.batches([torch.tensor([3])], CPU))
    assert y.tolist() == [3]
    expected = (arrays["contrast"][19].transpose(2, 0, 1) / 255 - 0.5) / 0.25
    assert np.abs(x[0].numpy() - expected).max() < 1e-5


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: (f / "labels.npy").unlink(), "There is no .*labels.npy"),
        (lambda f: (f / "labels.npy").write_bytes(b"x"), "labels.npy is truncated or damaged"),
        (lambda f: np.save(f / "labels.npy", np.arange(20)), "other labels for some severities"),
        (lambda f: np.save(f / "labels.npy", np.zeros(19, int)), "5 × N were expected"),
        (lambda f: np.save(f / "labels.npy", np.zeros(25, int)), "20 pictures; 5 × 5 were expected"),
        (lambda f: np.save(f / "fog.npy", np.zeros((20, 32, 32))), "holds float64 of shape"),
        (lambda f: (f / "fog.npy").write_bytes((f / "fog.npy").read_bytes()[:-1]), "fog.npy is truncated or damaged"),
        (lambda f: np.save(f / "fog.npy", np.array([{}]), allow_pickle=True), "fog.npy is truncated or damaged"),
        (lambda f: (f / "fog.npy").unlink(), "holds no corrupted pictures"),
        (lambda f: (f / "featureflock.json").write_text("{"), "is no JSON"),
        (lambda f: (f / "featureflock.json").write_text("[]"), "this version of featureflock reads"),
        (lambda f: (f / "fog.npy").write_bytes(b""), "fog.npy is truncated or damaged"),
        (lambda f: zipped(f / "fog.npy"), "fog.npy is truncated or damaged"),
        (lambda f: zipped(f / "labels.npy"), "labels.npy is truncated or damaged"),
        (lambda f: manifest(f, severities=None), "something is missing in it"),
        (lambda f: manifest(f, severities=[]), "something is missing in it"),
        (lambda f: manifest(f, files=[]), "something is missing in it"),
        (lambda f: manifest(f, files={"fog.npy": {}}), "something is missing in it"),
        (lambda f: manifest(f, source=None), "something is missing in it"),
    ],
)
def test_damaged_sets_get_a_sentence(tmp_path, spoil, message):
    published(tmp_path / "c", names=["fog"])
    spoil(tmp_path / "c")
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        open_set(tmp_path / "c").images("fog", 1)


def test_what_is_not_there_gets_a_sentence(tmp_path):
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
    whole = np.array(Image.open(tmp_path / "fog" / "2" / "n01443537" / "1.JPEG")).transpose(2, 0, 1)
    mean, deviation = (np.array(v)[:, None, None] for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    assert np.abs(x.numpy() - (whole / 255 - mean) / deviation).max() < 1e-5
    for arguments, message in (
        (("fog", 3), "ImageNet-C is a tree"),
        (("fog", 7), "severity must be"),
        (("fogg", 2), "did you mean fog"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            read_imagenet_c(tmp_path, *arguments)
    with pytest.raises(ValueError, match="has the class n01443537, which is not one of the 1 classes"):
        read_imagenet_c(tmp_path, "fog", 2, classes=classes[:1])


# ---- making


def test_a_set_is_in_the_published_layout(tmp_path):
    generate_set(X, Y, tmp_path / "c", workers=1, seed=np.int64(5))
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == sorted(
        [*(f"{name}.npy" for name in CORRUPTIONS), "labels.npy", "featureflock.json"]
    )
    labels = np.load(tmp_path / "c" / "labels.npy")
    assert labels.dtype == np.uint8
    assert labels.tolist() == 5 * Y.tolist()
    for name in CORRUPTIONS:
        array = np.load(tmp_path / "c" / f"{name}.npy")
        blocks = [corrupt(X, name, severity, seed=5, indices=np.arange(7)) for severity in (1, 2, 3, 4, 5)]
        assert np.array_equal(array, np.concatenate(blocks))


def test_the_size_of_tasks_does_not_change_a_byte(tmp_path, monkeypatch):
    x, y = np.resize(X, (1100, 32, 32, 3)), np.resize(Y, 1100)
    options = {"corruptions": ["impulse_noise", "fog"], "severities": (5, 2), "workers": 1}
    seen = []
    generate_set(x, y, tmp_path / "a", progress=lambda *step: seen.append(step), **options)
    monkeypatch.setattr(making, "_TASK", 333)
    generate_set(x, y, tmp_path / "b", **options)
    for file in ("impulse_noise.npy", "fog.npy", "labels.npy", "featureflock.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    held = open_set(tmp_path / "a")
    assert held.severities == (2, 5)
    chosen = corrupt(x[1000:1002], "fog", 5, seed=0, indices=[1000, 1001])
    assert np.array_equal(held.images("fog", 5)[1000:1002], chosen)
    assert seen[0] == (0, 4400, "impulse_noise")
    assert seen[-1] == (4400, 4400, "fog")


def test_what_is_finished_is_not_made_again_and_what_is_damaged_is(tmp_path, monkeypatch):
    options = {"corruptions": THREE, "severities": (1,), "workers": 1}
    generate_set(X, Y, tmp_path / "c", **options)
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "c").glob("*noise.npy")}
    seen = []
    with monkeypatch.context() as patch:
        patch.setattr(making, "corrupt", lambda images, *_, **__: no_messages("made again") if len(images) else None)
        generate_set(X, Y, tmp_path / "c", progress=lambda *step: seen.append(step), log=no_messages, **options)
    assert seen == []
    path = tmp_path / "c" / "frost.npy"
    sound = path.read_bytes()
    path.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    (tmp_path / "c" / "contrast.npy").unlink()
    messages = []
    generate_set(X, Y, tmp_path / "c", progress=lambda *step: seen.append(step), log=messages.append, **options)
    assert messages == ["frost.npy is damaged; making it again."]
    assert {what for _, _, what in seen} == {"frost", "contrast"}
    assert seen[0][0] == 7
    assert path.read_bytes() == sound
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "c").glob("*noise.npy")} == before


def test_frost_is_made_again_from_something_better(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(frost, "_photographs", lambda: None)
        frost_views.cache_clear()
        generate_set(X, Y, tmp_path / "c", corruptions=["frost"], severities=(1,), workers=1)
    frost_views.cache_clear()
    if "procedural" in frost_source():
        pytest.skip("the photographs are not installed")
    messages = []
    generate_set(X, Y, tmp_path / "c", corruptions=["frost"], severities=(1,), workers=1, log=messages.append)
    assert len(messages) == 1
    assert messages[0].startswith("frost.npy was made from procedural textures")
    assert "again from the photographs" in messages[0]


def test_other_sets_and_other_peoples_files_are_left_alone(tmp_path):
    options = {"corruptions": ["contrast"], "workers": 1}
    generate_set(X, Y, tmp_path / "c", severities=(1,), **options)
    before = (tmp_path / "c" / "contrast.npy").read_bytes()
    for changes, message in (
        ({"severities": (1, 2)}, r"holds another set \(severities: \[1\], not \[1, 2\]\)"),
        ({"severities": (1,), "seed": 1}, r"another set \(seed: 0, not 1\)"),
    ):
        with pytest.raises(ValueError, match=message):
            generate_set(X, Y, tmp_path / "c", **options, **changes)
    with pytest.raises(ValueError, match=r"another set \(data: "):
        generate_set(255 - X, Y, tmp_path / "c", severities=(1,), **options)
    published(tmp_path / "theirs")
    with pytest.raises(ValueError, match=r"contrast\.npy was not made by featureflock"):
        generate_set(X, Y, tmp_path / "theirs", **options)
    assert (tmp_path / "c" / "contrast.npy").read_bytes() == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"severities": (0, 1)}, "severities must be some of 1, 2, 3, 4 and 5; got 0, 1"),
        ({"severities": ()}, "severities must be"),
        ({"severities": (1.0,)}, "severities must be"),
        ({"workers": -1}, "workers must be at least 0; got -1"),
        ({"corruptions": ()}, "At least one corruption"),
        ({"corruptions": ("fogg",)}, "did you mean fog"),
        ({"labels": Y[:3]}, "a label for each of 7 pictures; got uint8 of shape"),
        ({"labels": Y.astype(int) + 300}, "from 0 to 255"),
        ({"images": X[..., :1]}, "must be a NumPy array of uint8"),
        ({"seed": 2**32}, "seed must be"),
    ],
)
def test_mistakes_leave_no_folder(tmp_path, changes, message):
    arguments = {"images": X, "labels": Y, "folder": tmp_path / "c"} | changes
    with pytest.raises(ValueError, match=message):
        generate_set(**arguments)
    assert not (tmp_path / "c").exists()


def test_a_folder_that_cannot_be_made_gets_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"cannot be used .*; give another folder"):
        generate_set(X, Y, tmp_path / "file" / "c", workers=1)


def test_a_folder_that_cannot_be_written_to_gets_a_sentence(tmp_path, monkeypatch):
    def refused(path, data):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(writing, "write_atomically", refused)  # root may write to folders that others may only read
    with pytest.raises(OSError, match=r"c cannot be used \(Permission denied\); give another folder"):
        generate_set(X, Y, tmp_path / "c", workers=1)


def test_workers_get_the_pictures_by_a_file_and_leave_none(tmp_path):
    """Sent to each process, they would keep the next from starting."""
    images = np.resize(X, (600, 32, 32, 3))
    made = making._made(images, [("contrast", 1, 0, 0), ("contrast", 1, 0, 500)], 2, tmp_path)
    first = next(made)
    (work,) = tmp_path.iterdir()
    assert [path.name for path in work.iterdir()] == ["clean.npy"]
    expected = corrupt(images, "contrast", 1, seed=0, indices=np.arange(600))
    assert first + next(made) == expected.tobytes()
    made.close()
    assert list(tmp_path.iterdir()) == []
