"""Images for the report: disputed examples and class activation maps."""

import io

import pytest
import torch
from PIL import Image

from featureflock.data import TensorExamples
from featureflock.evaluation.cam_cache import CachedMaps
from featureflock.evaluation.gallery import CAM_FILE, MemberVotes, disputed_examples, draw_cam_figure
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


def test_examples_are_ordered_by_the_mean_over_groups(test_images):
    groups = {"a": votes((3, 0.8), (5, 0.9)), "b": votes((3, 0.8), (7, 0.9))}
    examples, images = disputed_examples(groups, test_images, count=2)
    assert [example.position for example in examples] == [3, 5]  # in both groups, then the first of two equal ones
    assert examples[0].label == 3
    assert examples[0].predictions["a"] == [(0, pytest.approx(0.9)), (1, pytest.approx(0.8))]
    assert list(images) == ["disputed-3.png", "disputed-5.png"]
    image = Image.open(io.BytesIO(images["disputed-5.png"]))
    assert image.size == (224, 149)  # 300 × 200, reduced
    assert image.getpixel((9, 9)) == (5, 5, 5)


def test_examples_that_one_group_could_not_read_are_left_out(test_images):
    some = torch.tensor([0, 1, 2, 4, 5])
    examples, _ = disputed_examples({"a": votes((3, 0.9), (5, 0.8)), "b": votes(positions=some)}, test_images, count=12)
    assert sorted(example.position for example in examples) == some.tolist()
    assert examples[0].position == 5


def test_inputs_that_are_not_images_have_no_image():
    test = TensorExamples(torch.rand(12, 6), torch.arange(12) % 4)
    examples, images = disputed_examples({"a": votes((3, 0.9))}, test, count=1)
    assert (examples[0].position, examples[0].image, images) == (3, None, {})


def test_nothing_is_disputed_without_ensembles(test_images):
    assert disputed_examples({}, test_images) == ([], {})
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
