"""Test sets: what is in them, whatever they are made from, and what is refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch.testing import assert_close

from featureflock.corruptions import corrupt, generate_set
from featureflock.data import CustomData, Normalisation, Splits, TensorExamples
from featureflock.data.image_files import IMAGENET_NORMALISATION
from featureflock.data.sources.cache import cache_folder
from featureflock.evaluation import EvaluationProtocol
from featureflock.evaluation import test_sets as sets
from featureflock.evaluation.images import altered, are_pictures, to_show
from featureflock.evaluation.ood_sets import OODImages

FOG = EvaluationProtocol(corruptions=("fog", "brightness"), severities=(2, 5))
SCALE = Normalisation((10.0, 20.0, 30.0), (2.0, 3.0, 4.0))


@pytest.fixture
def colour():
    """30 pictures of 32 × 32, three of each class."""
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


def by_name(splits, protocol, name="Own", said=None):
    say = (lambda text: None) if said is None else said.append
    return {c.name: c for c in sets.corrupted(splits, name, protocol, say)}


def bytes_of(examples):
    """What a reader reads, before it is scaled."""
    return torch.stack([examples.reader.read(int(index), None) for index in examples.indices])


def hwc(splits):
    return splits.test.x.permute(0, 2, 3, 1).contiguous().numpy()


def test_corruptions_made_on_the_way_are_those_of_the_whole_set(colour):
    said = []
    found = by_name(colour, FOG, said=said)
    assert list(found) == ["fog-2", "fog-5", "brightness-2", "brightness-5"]
    whole = corrupt(hwc(colour), "fog", 5, seed=0, indices=np.arange(30))
    chosen = torch.tensor([3, 17, 29])
    examples = found["fog-5"].load(chosen)
    assert torch.equal(examples.x, torch.from_numpy(whole[chosen]).permute(0, 3, 1, 2))
    assert torch.equal(examples.labels, chosen % 10)
    assert examples.normalisation == SCALE
    assert said == ["Corruptions made on the way (seed 0): all."]


def test_a_set_in_the_cache_is_read_and_has_the_same_identity(colour, temp_cache):
    before = by_name(colour, FOG, "CIFAR10")
    folder = cache_folder() / "cifar10-c"
    generate_set(
        hwc(colour), colour.test.labels.numpy(), folder, corruptions=("fog",), workers=1, say=lambda text: None
    )
    said = []
    after = by_name(colour, FOG, "CIFAR10", said)
    assert said[0] == f"Corrupted test sets: made by featureflock, in {folder}."
    assert said[1] == "Corruptions made on the way (seed 0): brightness."
    for name, condition in before.items():
        assert condition.identity == after[name].identity
        chosen = torch.tensor([1, 5])
        made, read = condition.load(chosen), after[name].load(chosen)
        assert torch.equal(made.x, read.x)
        assert (
            (made.labels.tolist(), made.normalisation) == (read.labels.tolist(), read.normalisation) == ([1, 5], SCALE)
        )


def published(folder, labels):
    """Fog that is the same everywhere, 40 times its severity."""
    folder.mkdir(parents=True, exist_ok=True)
    blocks = np.stack([np.full((30, 32, 32, 3), 40 * s, np.uint8) for s in range(1, 6)]).reshape(-1, 32, 32, 3)
    np.save(folder / "fog.npy", blocks)
    np.save(folder / "labels.npy", np.tile(labels.numpy(), 5).astype(np.uint8))


def test_published_files_in_the_cache_go_before_made_ones(colour, temp_cache):
    labels = colour.test.labels
    generate_set(hwc(colour), labels.numpy(), temp_cache / "cifar10-c", corruptions=("fog", "brightness"), workers=1)
    published(temp_cache / "cifar10-c-published", labels)
    said = []
    found = by_name(colour, FOG, "CIFAR10", said)
    assert (found["fog-2"].load(torch.tensor([7])).x == 80).all()
    assert found["brightness-2"].source == "Corrupted pictures: made by featureflock."
    assert len(said) == 2


def test_a_set_in_the_cache_that_is_of_other_pictures_is_left_alone(colour, temp_cache):
    published(temp_cache / "cifar10-c-published", colour.test.labels.flip(0))
    said = []
    assert by_name(colour, FOG, "CIFAR10", said)["fog-2"].source == "Corrupted pictures: made with seed 0."
    assert said[0] == "Corruptions made on the way (seed 0): all."


def test_published_files_of_ones_own_have_an_identity_of_their_own(colour, tmp_path):
    published(tmp_path, colour.test.labels)
    protocol = EvaluationProtocol(corruptions=("fog",), severities=(2,), corrupted=tmp_path)
    found = by_name(colour, protocol)["fog-2"]
    assert (found.load(torch.tensor([7])).x == 80).all()
    assert found.identity != by_name(colour, FOG)["fog-2"].identity


def test_a_set_with_other_labels_or_other_pictures_is_refused(colour, tmp_path):
    blocks = np.zeros((5 * 30, 16, 16, 3), np.uint8)
    np.save(tmp_path / "fog.npy", blocks)
    np.save(tmp_path / "labels.npy", np.tile(colour.test.labels.numpy(), 5).astype(np.uint8))
    protocol = EvaluationProtocol(corruptions=("fog",), severities=(2,), corrupted=tmp_path)
    with pytest.raises(ValueError, match=r"holds pictures of shape \(3, 16, 16\), not \(3, 32, 32\)"):
        by_name(colour, protocol)["fog-2"].load(torch.tensor([0]))
    np.save(tmp_path / "labels.npy", np.zeros(150, np.uint8))
    with pytest.raises(ValueError, match="has not the labels of the test set"):
        by_name(colour, protocol)


def test_identities_differ_by_corruption_severity_and_data(colour, grey):
    identities = [c.identity for splits in (colour, grey) for c in by_name(splits, FOG).values()]
    assert len(set(identities)) == 8


def test_chosen_examples_are_as_many_of_each_class(colour):
    chosen = sets.clean(colour, EvaluationProtocol(examples=20))
    assert torch.bincount(colour.test.labels[chosen.positions]).tolist() == [2] * 10
    fewer = sets.clean(colour, EvaluationProtocol(examples=10)).positions
    assert set(fewer.tolist()) < set(chosen.positions.tolist())
    with pytest.raises(ValueError, match="examples must be at most 30, as many as there are; got 31"):
        sets.clean(colour, EvaluationProtocol(examples=31))


def test_corrupted_sets_can_have_fewer_examples_than_the_clean_one(colour):
    few = replace(FOG, corrupted_examples=10)
    assert len(sets.clean(colour, few).positions) == 30
    assert all(len(condition.positions) == 10 for condition in by_name(colour, few).values())
    assert len(sets.clean(colour, replace(few, examples=20)).positions) == 20
    same = replace(FOG, examples=20)
    assert all(len(condition.positions) == 20 for condition in by_name(colour, same).values())


def test_grey_pictures_that_are_small_are_enlarged_corrupted_and_averaged(grey):
    x = by_name(grey, FOG)["brightness-5"].load(torch.arange(12))
    large = np.rint(hwc(grey).repeat(3, 3).astype(np.float32) * 255 / 16).astype(np.uint8).repeat(4, 1).repeat(4, 2)
    corrupted = corrupt(large, "brightness", 5, seed=0, indices=np.arange(12))[..., 1].reshape(12, 8, 4, 8, 4)
    assert_close(x.x[:, 0], torch.from_numpy(corrupted.mean((2, 4)) * 16 / 255).float(), atol=1e-4, rtol=0)
    assert x.normalisation == grey.test.normalisation
    assert x.x.max() <= 16


def test_what_is_not_altered_stays_the_same(colour, grey):
    for splits in (colour, grey):
        same = altered(splits.test, lambda pictures: pictures)
        assert_close(same.x.float(), splits.test.x.float(), atol=0.04, rtol=0)  # bytes of 0 to 16, by way of 0 to 255


def test_noise_is_the_same_each_time_and_of_every_value(colour):
    found = {c.name: c for c in sets.unfamiliar(colour, "Own", EvaluationProtocol(unfamiliar=("noise",)))}
    condition = found["unfamiliar-noise"]
    x = bytes_of(condition.load(condition.positions))
    assert len(x) == 30
    assert torch.equal(x[[4, 9]], bytes_of(condition.load(torch.tensor([4, 9]))))
    assert not torch.equal(x[4], x[9])
    assert torch.bincount(x.flatten().long(), minlength=256).min() > 200
    assert condition.is_unfamiliar
    assert not condition.is_corrupted


def test_a_folder_of_pictures_is_unfamiliar(grey, tmp_path):
    for k in range(3):
        Image.new("RGB", (40, 20), (255, 255, 255) if k else (0, 0, 0)).save(tmp_path / f"{k}.png")
    (condition,) = sets.unfamiliar(grey, "Own", EvaluationProtocol(unfamiliar=(str(tmp_path),)))
    examples = condition.load(condition.positions)
    x = bytes_of(examples)
    assert x.shape == (3, 1, 8, 8)
    assert x.amax((1, 2, 3)).tolist() == [0, 16, 16]
    assert examples.normalisation == grey.test.normalisation
    Image.new("RGB", (8, 8)).save(tmp_path / "1.png")
    (changed,) = sets.unfamiliar(grey, "Own", EvaluationProtocol(unfamiliar=(str(tmp_path),)))
    assert changed.identity != condition.identity


def test_unfamiliar_folders_need_names_that_tell_them_apart(grey, tmp_path):
    for folder in ("a/photos", "b/photos", "noise"):
        (tmp_path / folder).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / folder / "x.png")
    a, b, noise = (str(tmp_path / name) for name in ("a/photos", "b/photos", "noise"))
    for pair, name in (((a, b), "photos"), (("noise", noise), "noise")):
        with pytest.raises(ValueError, match=f"Two sets of unfamiliar inputs are called {name}"):
            list(sets.unfamiliar(grey, "Own", EvaluationProtocol(unfamiliar=pair)))


def test_unknown_unfamiliar_inputs_are_refused(colour):
    with pytest.raises(ValueError, match="There are no unfamiliar inputs 'svhn': give noise, one of cifar10"):
        list(sets.unfamiliar(colour, "Own", EvaluationProtocol(unfamiliar=("svhn",))))


def test_foreign_pictures_get_the_size_and_the_colours(colour, grey):
    red = np.zeros((10, 10, 3), np.uint8)
    red[..., 0] = 255

    def read(picture, test):
        return OODImages.like(test, lambda index: picture, 1, "red").read(0, None)

    assert (read(red, colour.test) == torch.tensor([255, 0, 0]).view(3, 1, 1)).all()
    assert read(red, colour.test).shape == (3, 32, 32)
    assert (read(red, grey.test) == round(0.299 * 16)).all()
    assert (read(np.roll(red, 1, -1), grey.test) == round(0.587 * 16)).all()


def test_pictures_to_show(colour, grey):
    assert np.array_equal(to_show(colour.test), hwc(colour))
    shown = to_show(grey.test)
    assert shown.shape == (12, 8, 8, 3)
    assert shown[..., 0].max() == 255
    assert np.array_equal(shown[..., 0], shown[..., 2])
    numbers = TensorExamples(torch.linspace(-3, 5, 2 * 3 * 4 * 4).view(2, 3, 4, 4), torch.zeros(2, dtype=torch.int64))
    assert not are_pictures(numbers)
    assert (to_show(numbers).min(), to_show(numbers).max()) == (0, 255)
    with pytest.raises(ValueError, match="are no pictures"):
        to_show(TensorExamples(torch.rand(2, 5), torch.zeros(2, dtype=torch.int64)))


def test_data_that_are_no_pictures_have_neither_corruptions_nor_unfamiliar_inputs():
    x, y = torch.rand(20, 6), torch.arange(20) % 2
    splits = CustomData(train=(x, y), test=(x, y)).load()
    said = []
    assert by_name(splits, FOG, said=said) == {}
    assert said == ["Without corruptions: they are for pictures in bytes."]
    assert list(sets.unfamiliar(splits, "OwnData", EvaluationProtocol())) == []
    with pytest.raises(ValueError, match="for data of pictures"):
        list(sets.unfamiliar(splits, "OwnData", EvaluationProtocol(unfamiliar=("noise",))))


def test_imagenet_c_is_read_from_its_tree(tmp_path):
    from featureflock.data import ImageFolder

    for part in ("data/train", "data/val", "c/fog/2"):
        for k, name in enumerate(("cat", "dog")):
            (tmp_path / part / name).mkdir(parents=True)
            for i in range(2):
                Image.new("RGB", (16, 16), (100 * k + 10 * i, 0, 0)).save(tmp_path / part / name / f"{i}.png")
    splits = ImageFolder(tmp_path / "data", size=16, workers=0).load()
    assert splits.class_names == ("cat", "dog")
    said = []
    assert by_name(splits, FOG, said=said) == {}
    assert "--corrupted FOLDER" in said[0]
    protocol = EvaluationProtocol(corruptions=("fog",), severities=(2,), corrupted=tmp_path / "c")
    (condition,) = by_name(splits, protocol).values()
    examples = condition.load(condition.positions)
    assert examples.labels.tolist() == [0, 0, 1, 1]
    (batch,) = examples.batches([torch.arange(4)], torch.device("cpu"))
    red = torch.tensor([[[[0.0]]], [[[10.0]]], [[[100.0]]], [[[110.0]]]])
    expected = (red - IMAGENET_NORMALISATION.mean[0]) / IMAGENET_NORMALISATION.std[0]
    assert_close(batch.x[:, :1], expected.expand(-1, 1, 16, 16), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"corruptions": ("fogg",)}, "did you mean fog"),
        ({"severities": (0,)}, "severities must be among 1 to 5; got 0"),
        ({"examples": 1}, "examples must be at least 2"),
        ({"corrupted_examples": 1}, "corrupted_examples must be at least 2"),
        ({"maps": -1}, "maps must be at least 0"),
    ],
)
def test_a_wrong_protocol_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        EvaluationProtocol(**fields)
