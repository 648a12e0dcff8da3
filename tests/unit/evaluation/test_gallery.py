"""Images for the report: disputed examples and class activation maps."""

import io
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image

from featureflock.data import StreamedExamples, TensorExamples
from featureflock.evaluation import gallery
from featureflock.evaluation.cam_cache import CachedMaps
from featureflock.evaluation.gallery import CAM_FILE, MemberVotes, VotedSet, disputed_examples, draw_cam_figure
from featureflock.evaluation.images import OODImages, displayable
from featureflock.evaluation.predictions import Predictions


@pytest.fixture
def test_images():
    """12 images of 300 × 200 in 4 classes."""
    x = torch.arange(12, dtype=torch.uint8)[:, None, None, None].expand(-1, 3, 200, 300).contiguous()
    return TensorExamples(x, torch.arange(12) % 4)


def votes(*disputed, positions=None):
    """Two members, sure of class 0, except that the second is sure of class 1 at the disputed positions."""
    probs = torch.tensor([0.9, 0.1]).expand(2, 12, 2).clone()
    for position, top in disputed:
        probs[1, position] = torch.tensor([1 - top, top])
    positions = torch.arange(12) if positions is None else positions
    predictions = Predictions(probs.log()[:, positions], (torch.arange(12) % 4)[positions], positions)
    return MemberVotes.of(predictions)


def voted(groups, load=None, kind="clean", name="clean"):
    return VotedSet(kind, name, lambda: groups, load)


def test_examples_are_ordered_by_the_mean_over_groups(test_images):
    groups = {"a": votes((3, 0.8), (5, 0.9)), "b": votes((3, 0.8), (7, 0.9))}
    examples, images = disputed_examples([voted(groups, test_images.select)], count=2)
    assert [example.position for example in examples] == [3, 5]  # in both groups, then the first of two equal ones
    assert (examples[0].label, examples[0].kind, examples[0].test_set) == (3, "clean", "clean")
    assert examples[0].predictions["a"] == [(0, pytest.approx(0.9)), (1, pytest.approx(0.8))]
    assert list(images) == ["disputed-clean-1.png", "disputed-clean-2.png"] == [example.image for example in examples]
    image = Image.open(io.BytesIO(images["disputed-clean-2.png"]))
    assert image.size == (224, 149)  # 300 × 200, reduced
    assert image.getpixel((9, 9)) == (5, 5, 5)


def test_each_kind_of_test_set_has_its_own_examples(test_images):
    """Test sets take turns, an image appears once among the corrupted ones, and no label of OOD inputs."""
    darker = TensorExamples(test_images.x + 100, test_images.labels)
    sets = [
        voted({"a": votes((1, 0.8))}, test_images.select),
        voted({"a": votes((2, 0.9), (3, 0.85), (4, 0.8))}, darker.select, "corrupted", "fog-3"),
        voted({"a": votes((2, 0.8), (5, 0.6), (6, 0.55))}, darker.select, "corrupted", "snow-5"),
        voted({"a": votes((9, 0.9))}, None, "view", "left"),
        voted({"a": votes((2, 0.6))}, test_images.select, "ood", "noise"),
        voted({"a": votes((2, 0.9), (8, 0.8))}, test_images.select, "ood", "svhn"),
    ]
    examples, images = disputed_examples(sets, count=3)
    found = [(example.kind, example.test_set, example.position) for example in examples if example.kind != "clean"]
    assert found == [
        *(("corrupted", "fog-3", 2), ("corrupted", "snow-5", 5), ("corrupted", "fog-3", 3)),
        *(("ood", "svhn", 2), ("ood", "noise", 2), ("ood", "svhn", 8)),
    ]
    assert examples[0].position == 1
    assert [example.label for example in examples[3:]] == [2, 1, 3, None, None, None]
    assert Image.open(io.BytesIO(images["disputed-corrupted-2.png"])).getpixel((9, 9)) == (105, 105, 105)
    assert (examples, images) == disputed_examples(sets, count=3)


def test_one_test_set_is_read_at_a_time_and_only_chosen_images_are_loaded(test_images):
    log = []

    def test_sets():
        for k in range(4):
            log.append(f"set {k}")
            read = partial(lambda k: log.append(f"votes {k}") or {"a": votes((k, 0.9))}, k)
            yield VotedSet("corrupted", f"fog-{k}", read, lambda p: log.append(p.tolist()) or test_images.select(p))

    disputed_examples(test_sets(), count=2)
    assert log == [*(f"{what} {k}" for k in range(4) for what in ("set", "votes")), [0], [1]]


def test_votes_do_not_depend_on_the_batches(monkeypatch):
    log_probs = torch.randn(3, 11, 5, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    whole = MemberVotes.of(Predictions(log_probs, torch.zeros(11), torch.arange(11)))
    monkeypatch.setattr(gallery, "_BATCH", 4)
    for part, other in zip(
        whole, MemberVotes.of(Predictions(log_probs, torch.zeros(11), torch.arange(11))), strict=True
    ):
        torch.testing.assert_close(part, other)
    assert torch.equal(whole.classes, log_probs.argmax(-1))


def test_examples_that_one_group_could_not_read_are_left_out(test_images):
    some = torch.tensor([0, 1, 2, 4, 5])
    groups = {"a": votes((3, 0.9), (5, 0.8)), "b": votes(positions=some)}
    examples, _ = disputed_examples([voted(groups, test_images.select)], count=12)
    assert sorted(example.position for example in examples) == some.tolist()
    assert examples[0].position == 5


def test_inputs_that_are_not_images_have_no_image():
    test = TensorExamples(torch.rand(12, 6), torch.arange(12) % 4)
    for load in (test.select, None):
        examples, images = disputed_examples([voted({"a": votes((3, 0.9))}, load)], count=1)
        assert (examples[0].position, examples[0].image, images) == (3, None, {})


def test_ood_images_have_the_brightness_of_their_data_set():
    test = TensorExamples(torch.zeros(4, 1, 8, 8, dtype=torch.uint8), torch.arange(4), white=16)
    reader = OODImages(lambda index: np.full((8, 8, 3), 255, np.uint8), 4, "white", test.shape, test.white)
    shown = displayable(StreamedExamples(reader, torch.zeros(4, dtype=torch.int64)).select(torch.tensor([2])))
    assert shown.shape == (1, 8, 8, 3)
    assert (shown == 255).all()


def test_nothing_is_disputed_without_ensembles(test_images):
    assert disputed_examples([voted({}, test_images.select)]) == ([], {})
    assert draw_cam_figure([], test_images) == (None, {})


def test_maps_show_one_image_of_each_class_and_the_first_members(test_images):
    positions = torch.tensor([1, 2, 5, 6, 8, 9, 11])  # classes 1, 2, 1, 2, 0, 1, 3
    maps = CachedMaps(torch.rand(7, 7, 4, 4), torch.zeros(7, 7), positions)
    others = maps._replace(positions=positions + 1)
    figure, images = draw_cam_figure([("a", 0, maps), ("b", 4, maps), ("c", 0, others)], test_images)
    assert figure.labels == [0, 1, 2, 3, 1, 2]
    assert (figure.groups, figure.seeds, figure.members_shown) == (["a", "b"], [0, 4], 5)
    assert figure.image == CAM_FILE
    assert Image.open(io.BytesIO(images[CAM_FILE])).format == "PNG"
