"""Test sets: their content, whatever source they come from, and what is refused."""

import hashlib
import os
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch.testing import assert_close

from featureflock.corruptions import copy_set, corrupt, generate_set, open_set
from featureflock.data import (
    CIFAR10,
    CustomData,
    DataSet,
    Digits,
    Dominoes,
    HeldOut,
    Normalisation,
    Splits,
    TensorExamples,
)
from featureflock.data.image_files import IMAGENET_NORMALISATION
from featureflock.data.sources.cache import cache_folder
from featureflock.evaluation import EvaluationProtocol
from featureflock.evaluation import test_sets as sets
from featureflock.evaluation.images import OODImages, are_images, displayable, transformed

FOG = EvaluationProtocol(corruptions=("fog", "brightness"), severities=(2, 5))
SCALE = Normalisation((10.0, 20.0, 30.0), (2.0, 3.0, 4.0))


@pytest.fixture
def colour():
    """30 images of 32 × 32, three of each class."""
    g = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (30, 3, 32, 32), dtype=torch.uint8, generator=g)
    examples = TensorExamples(x, torch.arange(30) % 10, normalisation=SCALE)
    return Splits(examples, examples, 10)


@pytest.fixture
def grey():
    g = torch.Generator().manual_seed(0)
    x = torch.randint(0, 17, (12, 1, 8, 8), dtype=torch.uint8, generator=g)
    examples = TensorExamples(x, torch.arange(12) % 10, normalisation=Normalisation((0.0,), (16.0,)), white=16)
    return Splits(examples, examples, 10)


class Unpublished(DataSet):
    def load(self):
        raise NotImplementedError


OTHER = Unpublished()


def by_name(splits, protocol, data=OTHER, logged=None):
    log = (lambda text: None) if logged is None else logged.append
    return {test_set.name: test_set for test_set in sets.corrupted(splits, data, protocol, log)}


def bytes_of(examples):
    """What a reader returns, before it is scaled."""
    return torch.stack([examples.reader.read(int(index), None) for index in examples.indices])


def hwc(splits):
    return splits.test.x.permute(0, 2, 3, 1).contiguous().numpy()


def test_corruptions_generated_for_some_images_are_those_of_the_full_set(colour):
    logged = []
    found = by_name(colour, FOG, logged=logged)
    assert list(found) == ["fog-2", "fog-5", "brightness-2", "brightness-5"]
    full = corrupt(hwc(colour), "fog", 5, seed=0, indices=np.arange(30))
    chosen = torch.tensor([3, 17, 29])
    examples = found["fog-5"].load(chosen)
    assert torch.equal(examples.x, torch.from_numpy(full[chosen]).permute(0, 3, 1, 2))
    assert torch.equal(examples.labels, chosen % 10)
    assert examples.normalisation == SCALE
    assert logged == ["Corrupted test images are generated with seed 0."]


def test_a_set_in_the_cache_is_read_and_identified_by_its_content(colour, temp_cache):
    before = by_name(colour, FOG, CIFAR10())
    folder = cache_folder() / "cifar10-c"
    generate_set(
        hwc(colour), colour.test.labels.numpy(), folder, corruptions=("fog",), workers=1, log=lambda text: None
    )
    logged = []
    after = by_name(colour, FOG, CIFAR10(), logged)
    assert logged[0] == f"Corrupted test sets: made by featureflock, in {folder}."
    assert logged[1] == "Corrupted test images are generated with seed 0: brightness."
    digest = hashlib.sha256((folder / "fog.npy").read_bytes()).hexdigest()
    assert [digest in after[name].identity for name in before] == [True, True, False, False]
    for name, generated in before.items():
        assert (generated.identity == after[name].identity) == name.startswith("brightness")
        chosen = torch.tensor([1, 5])
        made, read = generated.load(chosen), after[name].load(chosen)
        assert torch.equal(made.x, read.x)
        assert (
            (made.labels.tolist(), made.normalisation) == (read.labels.tolist(), read.normalisation) == ([1, 5], SCALE)
        )


def test_a_damaged_set_in_the_cache_is_refused_until_it_is_repaired(colour, temp_cache):
    folder, labels = cache_folder() / "cifar10-c", colour.test.labels.numpy()
    options = {"corruptions": ("fog",), "workers": 1, "log": lambda text: None}
    generate_set(hwc(colour), labels, folder, **options)
    before = by_name(colour, FOG, CIFAR10())["fog-5"]
    x = before.load(torch.arange(30)).x
    path = folder / "fog.npy"
    intact = path.read_bytes()
    path.write_bytes(intact[:-9] + bytes([intact[-9] ^ 64]) + intact[-8:])
    with pytest.raises(ValueError, match=r"fog\.npy is damaged: .*; repeat the `featureflock data corrupt` command"):
        by_name(colour, FOG, CIFAR10())["fog-5"].load(torch.arange(30))
    generate_set(hwc(colour), labels, folder, **options)
    after = by_name(colour, FOG, CIFAR10())["fog-5"]
    assert after.identity == before.identity
    assert torch.equal(after.load(torch.arange(30)).x, x)
    (folder / "labels.npy").write_bytes(intact[:200])
    with pytest.raises(ValueError, match=r"labels\.npy is damaged"):  # not silently generated instead
        by_name(colour, FOG, CIFAR10())


def test_a_cached_set_of_other_images_with_the_same_labels_is_not_used(colour, temp_cache):
    folder, labels = cache_folder() / "cifar10-c", colour.test.labels.numpy()
    generate_set(255 - hwc(colour), labels, folder, corruptions=("fog",), workers=1, log=lambda text: None)
    found = by_name(colour, FOG, CIFAR10())["fog-2"]
    assert found.source == "Corrupted images: generated with seed 0."
    full = corrupt(hwc(colour), "fog", 2, seed=0, indices=np.arange(30))
    assert torch.equal(found.load(torch.arange(30)).x, torch.from_numpy(full).permute(0, 3, 1, 2))


def test_a_cached_set_without_a_manifest_is_refused(colour, temp_cache):
    published(temp_cache / "cifar10-c-published", colour.test.labels)
    with pytest.raises(ValueError, match=r"has no featureflock\.json, so its files cannot be verified; move it away"):
        by_name(colour, FOG, CIFAR10())


def published(folder, labels):
    """Fog that is the same everywhere, 40 times its severity."""
    folder.mkdir(parents=True, exist_ok=True)
    blocks = np.stack([np.full((30, 32, 32, 3), 40 * s, np.uint8) for s in range(1, 6)]).reshape(-1, 32, 32, 3)
    np.save(folder / "fog.npy", blocks)
    np.save(folder / "labels.npy", np.tile(labels.numpy(), 5).astype(np.uint8))


def imported(folder, target, labels):
    """Published files that are copied into the cache."""
    published(folder, labels)
    copy_set(open_set(folder), labels.numpy(), target, log=lambda text: None)


def test_published_files_in_the_cache_take_precedence_over_generated_ones(colour, temp_cache, tmp_path):
    labels = colour.test.labels
    generate_set(hwc(colour), labels.numpy(), temp_cache / "cifar10-c", corruptions=("fog", "brightness"), workers=1)
    imported(tmp_path / "theirs", temp_cache / "cifar10-c-published", labels)
    logged = []
    found = by_name(colour, FOG, CIFAR10(), logged)
    assert (found["fog-2"].load(torch.tensor([7])).x == 80).all()
    assert found["brightness-2"].source == "Corrupted images: made by featureflock."
    assert len(logged) == 2


def test_a_cached_set_with_other_labels_is_not_used(colour, temp_cache, tmp_path):
    imported(tmp_path / "theirs", temp_cache / "cifar10-c-published", colour.test.labels.flip(0))
    logged = []
    assert by_name(colour, FOG, CIFAR10(), logged)["fog-2"].source == "Corrupted images: generated with seed 0."
    assert logged[0] == "Corrupted test images are generated with seed 0."


def test_published_files_in_a_folder_have_another_identity(colour, tmp_path):
    published(tmp_path, colour.test.labels)
    protocol = EvaluationProtocol(corruptions=("fog",), severities=(2,), corrupted=tmp_path)
    found = by_name(colour, protocol)["fog-2"]
    assert (found.load(torch.tensor([7])).x == 80).all()
    assert found.identity != by_name(colour, FOG)["fog-2"].identity
    path = tmp_path / "fog.npy"
    old, content = path.stat(), path.read_bytes()
    path.write_bytes(content[:-1] + b"x")
    os.utime(path, ns=(old.st_atime_ns, old.st_mtime_ns))  # the same size and modification time
    assert found.identity != by_name(colour, protocol)["fog-2"].identity
    path.write_bytes(content)
    assert found.identity == by_name(colour, protocol)["fog-2"].identity


def test_a_folder_with_other_labels_or_image_sizes_is_refused(colour, tmp_path):
    blocks = np.zeros((5 * 30, 16, 16, 3), np.uint8)
    np.save(tmp_path / "fog.npy", blocks)
    np.save(tmp_path / "labels.npy", np.tile(colour.test.labels.numpy(), 5).astype(np.uint8))
    protocol = EvaluationProtocol(corruptions=("fog",), severities=(2,), corrupted=tmp_path)
    with pytest.raises(ValueError, match=r"holds images of shape \(3, 16, 16\); the test set has \(3, 32, 32\)"):
        by_name(colour, protocol)["fog-2"].load(torch.tensor([0]))
    np.save(tmp_path / "labels.npy", np.zeros(150, np.uint8))
    with pytest.raises(ValueError, match="does not match the labels of the test set"):
        by_name(colour, protocol)


def test_identities_differ_by_corruption_severity_and_data(colour, grey):
    identities = [c.identity for splits in (colour, grey) for c in by_name(splits, FOG).values()]
    assert len(set(identities)) == 8


def test_a_subset_has_equally_many_examples_of_each_class(colour):
    chosen = sets.clean(colour, EvaluationProtocol(examples=20))
    assert torch.bincount(colour.test.labels[chosen.positions]).tolist() == [2] * 10
    fewer = sets.clean(colour, EvaluationProtocol(examples=10)).positions
    assert set(fewer.tolist()) < set(chosen.positions.tolist())
    with pytest.raises(ValueError, match="examples must be at most 30, the size of the test set; got 31"):
        sets.clean(colour, EvaluationProtocol(examples=31))


def test_corrupted_sets_can_have_fewer_examples_than_the_clean_one(colour):
    few = replace(FOG, corrupted_examples=10)
    assert len(sets.clean(colour, few).positions) == 30
    assert all(len(test_set.positions) == 10 for test_set in by_name(colour, few).values())
    assert len(sets.clean(colour, replace(few, examples=20)).positions) == 20
    same = replace(FOG, examples=20)
    assert all(len(test_set.positions) == 20 for test_set in by_name(colour, same).values())


def test_small_grey_images_are_enlarged_corrupted_and_averaged(grey):
    x = by_name(grey, FOG)["brightness-5"].load(torch.arange(12))
    large = np.rint(hwc(grey).repeat(3, 3).astype(np.float32) * 255 / 16).astype(np.uint8).repeat(4, 1).repeat(4, 2)
    corrupted = corrupt(large, "brightness", 5, seed=0, indices=np.arange(12))[..., 1].reshape(12, 8, 4, 8, 4)
    assert_close(x.x[:, 0], torch.from_numpy(corrupted.mean((2, 4)) * 16 / 255).float(), atol=1e-4, rtol=0)
    assert x.normalisation == grey.test.normalisation
    assert x.x.max() <= 16


def test_the_identity_transform_changes_nothing(colour, grey):
    for splits in (colour, grey):
        same = transformed(splits.test, lambda images: images)
        assert_close(same.x.float(), splits.test.x.float(), atol=0.04, rtol=0)  # bytes of 0 to 16, by way of 0 to 255


def test_noise_is_reproducible_and_takes_every_value(colour):
    found = {c.name: c for c in sets.ood_test_sets(colour, OTHER, EvaluationProtocol(ood=("noise",)))}
    test_set = found["ood-noise"]
    x = bytes_of(test_set.load(test_set.positions))
    assert len(x) == 30
    assert torch.equal(x[[4, 9]], bytes_of(test_set.load(torch.tensor([4, 9]))))
    assert not torch.equal(x[4], x[9])
    assert torch.bincount(x.flatten().long(), minlength=256).min() > 200
    assert test_set.kind == "ood"


def test_the_data_set_of_the_runs_is_not_an_ood_set(colour, monkeypatch):
    """Nor is the one that it wraps: a run on held-out CIFAR-10 is familiar with CIFAR-10's test set."""
    arrays = SimpleNamespace(test_x=torch.zeros(4, 3, 32, 32, dtype=torch.uint8), digest="made up")
    monkeypatch.setattr(sets, "look_up", lambda name: name if name in ("cifar10", "mnist") else None)
    monkeypatch.setattr("featureflock.evaluation.images.load", lambda name: arrays)

    def default_sets(data):
        return [test_set.label for test_set in sets.ood_test_sets(colour, data, EvaluationProtocol())]

    assert default_sets(OTHER) == default_sets(HeldOut(Digits())) == ["noise", "cifar10", "mnist"]
    assert default_sets(CIFAR10()) == default_sets(HeldOut(CIFAR10())) == ["noise", "mnist"]
    assert default_sets(HeldOut(HeldOut(CIFAR10()))) == ["noise", "mnist"]
    assert default_sets(Dominoes()) == default_sets(HeldOut(Dominoes())) == ["noise"]  # made from both


def test_a_folder_of_images_is_an_ood_set(grey, tmp_path):
    for k in range(3):
        Image.new("RGB", (40, 20), (255, 255, 255) if k else (0, 0, 0)).save(tmp_path / f"{k}.png")
    (test_set,) = sets.ood_test_sets(grey, OTHER, EvaluationProtocol(ood=(str(tmp_path),)))
    examples = test_set.load(test_set.positions)
    x = bytes_of(examples)
    assert x.shape == (3, 1, 8, 8)
    assert x.amax((1, 2, 3)).tolist() == [0, 16, 16]
    assert examples.normalisation == grey.test.normalisation
    Image.new("RGB", (8, 8)).save(tmp_path / "1.png")
    (changed,) = sets.ood_test_sets(grey, OTHER, EvaluationProtocol(ood=(str(tmp_path),)))
    assert changed.identity != test_set.identity


def test_ood_folders_need_distinct_names(grey, tmp_path):
    for folder in ("a/photos", "b/photos", "noise"):
        (tmp_path / folder).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / folder / "x.png")
    a, b, noise = (str(tmp_path / name) for name in ("a/photos", "b/photos", "noise"))
    for pair, name in (((a, b), "photos"), (("noise", noise), "noise")):
        with pytest.raises(ValueError, match=f"Two OOD sets are called {name}"):
            list(sets.ood_test_sets(grey, OTHER, EvaluationProtocol(ood=pair)))


def test_an_unknown_ood_set_is_refused(colour):
    with pytest.raises(ValueError, match="No OOD set 'svhn': give noise, one of cifar10"):
        list(sets.ood_test_sets(colour, OTHER, EvaluationProtocol(ood=("svhn",))))


def test_ood_images_get_the_size_and_the_colours_of_the_data():
    red = np.zeros((10, 10, 3), np.uint8)
    red[..., 0] = 255

    def read(image, shape, white):
        return OODImages(lambda index: image, 1, "red", shape, white).read(0, None)

    assert (read(red, (3, 32, 32), 255) == torch.tensor([255, 0, 0]).view(3, 1, 1)).all()
    assert read(red, (3, 32, 32), 255).shape == (3, 32, 32)
    assert (read(red, (1, 8, 8), 16) == round(0.299 * 16)).all()
    assert (read(np.roll(red, 1, -1), (1, 8, 8), 16) == round(0.587 * 16)).all()


def test_displayable_images(colour, grey):
    assert np.array_equal(displayable(colour.test), hwc(colour))
    shown = displayable(grey.test)
    assert shown.shape == (12, 8, 8, 3)
    assert shown[..., 0].max() == 255
    assert np.array_equal(shown[..., 0], shown[..., 2])
    numbers = TensorExamples(torch.linspace(-3, 5, 2 * 3 * 4 * 4).view(2, 3, 4, 4), torch.zeros(2, dtype=torch.int64))
    assert not are_images(numbers)
    assert (displayable(numbers).min(), displayable(numbers).max()) == (0, 255)
    with pytest.raises(ValueError, match="are not images"):
        displayable(TensorExamples(torch.rand(2, 5), torch.zeros(2, dtype=torch.int64)))


def test_data_that_are_not_images_have_neither_corruptions_nor_ood_sets():
    x, y = torch.rand(20, 6), torch.arange(20) % 2
    splits = CustomData(train=(x, y), test=(x, y)).load()
    logged = []
    assert by_name(splits, FOG, logged=logged) == {}
    assert logged == ["Corruptions are skipped: they need images stored as uint8."]
    assert list(sets.ood_test_sets(splits, OTHER, EvaluationProtocol())) == []
    with pytest.raises(ValueError, match="need image data"):
        list(sets.ood_test_sets(splits, OTHER, EvaluationProtocol(ood=("noise",))))


def test_imagenet_c_is_read_from_its_tree(tmp_path):
    from featureflock.data import ImageFolder

    for part in ("data/train", "data/val", "c/fog/2"):
        for k, name in enumerate(("cat", "dog")):
            (tmp_path / part / name).mkdir(parents=True)
            for i in range(2):
                Image.new("RGB", (16, 16), (100 * k + 10 * i, 0, 0)).save(tmp_path / part / name / f"{i}.png")
    splits = ImageFolder(tmp_path / "data", size=16, workers=0).load()
    assert splits.class_names == ("cat", "dog")
    logged = []
    assert by_name(splits, FOG, logged=logged) == {}
    assert "--corrupted FOLDER" in logged[0]
    protocol = EvaluationProtocol(corruptions=("fog",), severities=(2,), corrupted=tmp_path / "c")
    (test_set,) = by_name(splits, protocol).values()
    examples = test_set.load(test_set.positions)
    assert examples.labels.tolist() == [0, 0, 1, 1]
    (batch,) = examples.batches([torch.arange(4)], torch.device("cpu"))
    red = torch.tensor([[[[0.0]]], [[[10.0]]], [[[100.0]]], [[[110.0]]]])
    expected = (red - IMAGENET_NORMALISATION.mean[0]) / IMAGENET_NORMALISATION.std[0]
    assert_close(batch.x[:, :1], expected.expand(-1, 1, 16, 16), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"corruptions": ("fogg",)}, "did you mean fog"),
        ({"severities": (0,)}, "severities must be from 1 to 5; got 0"),
        ({"examples": 1}, "examples must be at least 2"),
        ({"corrupted_examples": 1}, "corrupted_examples must be at least 2"),
        ({"maps": -1}, "maps must be at least 0"),
    ],
)
def test_a_wrong_protocol_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        EvaluationProtocol(**fields)


def test_without_photographs_of_frost_the_command_that_installs_them_is_logged(grey, monkeypatch):
    logged = []
    monkeypatch.setattr(sets, "frost_source", lambda: "procedural textures")
    by_name(grey, EvaluationProtocol(corruptions=("frost",), severities=(1,)), logged=logged)
    assert "procedural textures (for photographs: pip install featureflock[frost])." in logged[0]
