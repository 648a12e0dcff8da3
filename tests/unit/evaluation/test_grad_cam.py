"""Grad-CAM against loops and closed forms, the similarity of maps by hand, and that an ensemble is left as it was."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import featureflock as ff
from featureflock import evaluation as ev
from featureflock.evaluation.cam_figure import overlaid
from featureflock.evaluation.grad_cam import empty_fraction
from featureflock.models import CNN, MLP, CifarResNet, ResNet, WideResNet

N, B, H, C, SIZE = 3, 5, 6, 4, 8


class Net(nn.Module):
    """A user's extractor. Its last ReLU is a function, in place; what it flattens weighs pixels differently."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 5, 3, 2, padding=1)
        self.norm, self.drop = nn.BatchNorm2d(5), nn.Dropout(0.5)
        self.out = nn.Linear(5 * 16, H)

    def maps(self, x):
        return F.relu(self.norm(self.second(F.relu(self.first(x)))), inplace=True)

    def rest(self, a):
        return torch.tanh(self.out(self.drop(a.flatten(1))))

    def forward(self, x):
        return self.rest(self.maps(x))


def build(head: str = "own", layer: str | None = None, execution: str = "sequential") -> ff.Ensemble:
    torch.manual_seed(0)
    extractors = [Net() for _ in range(N)]
    for e in extractors:
        nn.init.normal_(e.norm.running_mean, std=0.3)
        nn.init.normal_(e.norm.bias, mean=0.3)
    heads = [nn.Sequential(nn.Linear(H, H), nn.Tanh(), nn.Linear(H, C)) for _ in range(N)]
    particles = None if layer is None else ff.ParticleLayer(rank=2, count=100 if layer == "weights" else None)
    return ff.Ensemble(
        extractors, heads if head == "own" else heads[0], particles, at=layer or "features", execution=execution
    ).double()


def batch(channels: int = 2) -> torch.Tensor:
    return torch.randn(B, channels, SIZE, SIZE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def heads_of(ens: ff.Ensemble) -> list[nn.Module]:
    return list(ens.head) if isinstance(ens.head, nn.ModuleList) else [ens.head] * len(ens)


def naive(ens: ff.Ensemble, x: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    """Member by member, image by image, channel by channel."""
    maps = []
    for e, head, row in zip(ens.eval().extractors, heads_of(ens), classes, strict=True):
        for image, c in zip(x, row, strict=True):
            a = e.maps(image[None]).detach().requires_grad_()
            head(e.rest(a))[0, c].backward()
            total = torch.zeros_like(a[0, 0])
            for k in range(a.shape[1]):
                total += a.grad[0, k].sum() / a[0, k].numel() * a.detach()[0, k]
            maps.append(total.clamp(min=0))
    ens.zero_grad()
    return torch.stack(maps).unflatten(0, (len(ens), len(x))).float()


@pytest.mark.parametrize("head", ["own", "shared"])
@pytest.mark.parametrize("classes", ["ensemble", "member", "given"])
def test_is_that_of_plain_loops(head, classes):
    ens, x = build(head), batch()
    given = torch.tensor([3, 0, 1, 1, 2])
    found = ev.class_activation_maps(ens, x, given if classes == "given" else classes)
    with torch.no_grad():
        probs = torch.stack([h(e(x)) for e, h in zip(ens.eval().extractors, heads_of(ens), strict=True)]).softmax(-1)
    own, joint = probs.argmax(-1), probs.mean(0).argmax(-1)
    assert (own != joint).any(), "the test would not tell them apart"
    expected = {"ensemble": joint.expand(N, B), "member": own, "given": given.expand(N, B)}[classes]
    assert torch.equal(found.classes, expected)
    assert_close(found.maps, naive(ens, x, expected), rtol=1e-5, atol=1e-7)
    assert found.maps.dtype == torch.float32
    assert found.maps.shape == (N, B, 4, 4)
    assert found.maps.amax((-2, -1)).gt(0).any()
    assert found.maps.eq(0).any(), "nothing was cut off at zero"


def test_the_class_of_the_ensemble_is_that_of_the_mean_probability():
    torch.manual_seed(0)
    extractors = [nn.Sequential(nn.Conv2d(2, H, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()) for _ in range(3)]
    heads = [nn.Linear(H, 2) for _ in range(3)]
    for head, logit in zip(heads, (0.0, 0.0, 30.0), strict=True):
        nn.init.zeros_(head.weight)
        head.bias.data = torch.tensor([logit, 2.0])
    found = ev.class_activation_maps(ff.Ensemble(extractors, heads).double(), batch())
    assert (found.classes == 1).all(), "by the mean of the logits it would be 0"
    assert empty_fraction(found.maps) == 1


LAST_MAPS = {
    "wide": (lambda: WideResNet(10, 1), lambda e, x: F.relu(e.bn(e.blocks(e.conv(x))))),
    "cifar": (lambda: CifarResNet(8), lambda e, x: e.blocks(e.stem(x))),
    "resnet": (lambda: ResNet(18, "cifar"), lambda e, x: e.blocks(e.stem(x))),
    "small": (lambda: CNN(3, 4), lambda e, x: e.layers(x)),
}


@pytest.mark.parametrize("name", LAST_MAPS)
def test_behind_pooling_and_a_linear_head_it_is_the_class_activation_map(name):
    make, last_map = LAST_MAPS[name]
    torch.manual_seed(0)
    size = 16 if name == "resnet" else SIZE
    x = torch.randn(B, 3, size, size)
    extractors = [make() for _ in range(2)]
    ens = ff.Ensemble(extractors, [nn.Linear(e.feature_dim, C) for e in extractors])
    found = ev.class_activation_maps(ens, x)
    ens.eval()
    with torch.no_grad():
        for i, (e, head) in enumerate(zip(ens.extractors, ens.head, strict=True)):
            a = last_map(e, x)
            pixels = a.shape[-1] * a.shape[-2]
            plain = torch.einsum("bk,bkhw->bhw", head.weight[found.classes[i]], a) / pixels
            assert_close(found.maps[i], plain.relu())
            y = head(e(x)).gather(-1, found.classes[i][:, None])[:, 0]
            assert_close(plain.mean((-2, -1)), (y - head.bias[found.classes[i]]) / pixels)


def test_members_and_images_are_independent():
    ens, x = build(), batch()
    found = ev.class_activation_maps(ens, x)
    order = [2, 0, 1]
    turned = ff.Ensemble([ens.extractors[i] for i in order], [ens.head[i] for i in order])
    assert_close(ev.class_activation_maps(turned, x).maps, found.maps[order])
    one_by_one = [ev.class_activation_maps(ens, x[b : b + 1]) for b in range(B)]
    assert_close(torch.cat([part.maps for part in one_by_one], 1), found.maps)
    assert torch.equal(torch.cat([part.classes for part in one_by_one], 1), found.classes)


@pytest.mark.parametrize("execution", ["sequential", "vectorised", "low_memory"])
@pytest.mark.parametrize("layer", [None, "features", "logits", "weights"])
def test_neither_the_layer_nor_the_execution_mode_matters(execution, layer):
    x = batch()
    found = ev.class_activation_maps(build(layer=layer, execution=execution).train(), x)
    assert torch.equal(found.maps, ev.class_activation_maps(build(), x).maps)


def snapshot(ens: ff.Ensemble) -> list[object]:
    hooks = [len(value) for m in ens.modules() for name, value in vars(m).items() if name.endswith("_hooks")]
    tensors = [(id(p), p.requires_grad, p.grad) for p in ens.parameters()]
    return [hooks, tensors, [m.training for m in ens.modules()], [b.tolist() for b in ens.buffers()]]


def test_the_ensemble_is_unchanged():
    ens, x = build("shared", "features").train(), batch()
    ens.extractors[1].eval()
    ens.extractors[2].first.weight.requires_grad_(False)
    values = [p.detach().clone() for p in ens.parameters()]
    before = snapshot(ens)
    for block in (None, lambda e: e.norm):
        ev.class_activation_maps(ens, x, block=block)
        assert snapshot(ens) == before
    for bad in ({"x": batch(channels=3)}, {"classes": torch.full((B,), C)}, {"block": lambda e: e.out}):
        for block in (None, lambda e: e.norm):
            with pytest.raises((ValueError, RuntimeError)):
                ev.class_activation_maps(ens, **{"x": x, "block": block} | bad)
            assert snapshot(ens) == before
    assert torch.is_grad_enabled()
    assert all(torch.equal(p, value) for p, value in zip(ens.parameters(), values, strict=True))


def test_works_under_no_grad_and_inference_mode():
    ens, x = build(), batch()
    expected = ev.class_activation_maps(ens, x).maps
    ens.requires_grad_(False)
    assert torch.equal(ev.class_activation_maps(ens, x).maps, expected)
    with torch.no_grad():
        found = ev.class_activation_maps(ens, x).maps
    assert torch.equal(found, expected)
    assert not found.requires_grad
    with torch.inference_mode():
        assert torch.equal(ev.class_activation_maps(ens, x.clone()).maps, expected)


def test_works_on_other_layouts_and_on_compiled_members():
    ens, x = build(), batch()
    expected = ev.class_activation_maps(ens, x).maps
    like_photos = build().to(memory_format=torch.channels_last)
    assert_close(ev.class_activation_maps(like_photos, x.to(memory_format=torch.channels_last)).maps, expected)
    for extractor in ens.extractors:
        extractor.compile(backend="eager", dynamic=False)
    ens.eval()(x)
    assert torch.equal(ev.class_activation_maps(ens, x).maps, expected)
    assert torch.equal(
        ev.class_activation_maps(ens, x, block=lambda e: e.norm).maps,
        ev.class_activation_maps(build(), x, block=lambda e: e.norm).maps,
    )


# ---- which map is the last


class Tricky(nn.Module):
    """Works on its input first, has a branch that leads nowhere, and normalises behind the pooling as ConvNeXt does."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.branch, self.norm = nn.Conv2d(2, H, 3), nn.Conv2d(H, H, 3), nn.LayerNorm(H)

    def forward(self, x):
        a = self.maps(x)
        self.branch(a).relu()
        pooled = a.mean((-2, -1), keepdim=True)
        return self.norm(pooled.permute(0, 2, 3, 1)).permute(0, 3, 1, 2).flatten(1)

    def maps(self, x):
        left, right = F.silu(self.conv(2 * x - 1)).chunk(2, dim=1)
        return torch.cat([right, left], dim=1)

    def rest(self, a):
        return self.norm(a.mean((-2, -1)))


def test_the_last_map_is_the_one_that_is_pooled():
    torch.manual_seed(0)
    ens, x = ff.Ensemble([Tricky(), Tricky()], nn.Linear(H, C)).double(), batch()
    found = ev.class_activation_maps(ens, x)
    assert_close(found.maps, naive(ens, x, found.classes), rtol=1e-5, atol=1e-7)


def test_a_shared_head_may_have_the_last_convolution():
    ens, x = build("shared"), batch()
    whole = ff.Ensemble([ens.extractors[0]], [ens.head])
    stem = nn.Sequential(ens.extractors[0].first, nn.ReLU())

    class Rest(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = ens.extractors[0], ens.head

        def forward(self, a):
            return self.head(self.body.rest(F.relu(self.body.norm(self.body.second(a)))))

    found = ev.class_activation_maps(ff.Ensemble([stem], Rest()), x)
    assert_close(found.maps, ev.class_activation_maps(whole, x).maps)


def test_a_block_can_be_chosen():
    ens, x = build(), batch()
    found = ev.class_activation_maps(ens, x, block=lambda e: e.norm)
    for e, head, row, maps in zip(ens.eval().extractors, ens.head, found.classes, found.maps, strict=True):
        a = e.norm(e.second(F.relu(e.first(x)))).detach().requires_grad_()
        (grad,) = torch.autograd.grad(head(e.rest(F.relu(a))).gather(1, row[:, None]).sum(), a)
        assert_close(maps, (grad.mean((2, 3), keepdim=True) * a).sum(1).relu().float().detach())
    assert ev.class_activation_maps(ens, x, block=lambda e: e.first).maps.shape == (N, B, SIZE, SIZE)


def test_invalid_arguments_are_refused():
    ens, x = build(), batch()
    perceptrons = ff.Ensemble([MLP(2 * SIZE * SIZE, (8, H)) for _ in range(2)], nn.Linear(H, C)).double()
    with pytest.raises(
        ValueError, match="needs convolutional members; the logits of member 0 do not depend on any convolut"
    ):
        ev.class_activation_maps(perceptrons, x)
    one_pixel = ff.Ensemble([nn.Sequential(nn.Conv2d(2, H, SIZE), nn.Flatten())], nn.Linear(H, C)).double()
    with pytest.raises(ValueError, match="of more than one pixel"):
        ev.class_activation_maps(one_pixel, x)
    with pytest.raises(ValueError, match="do not depend on any output of the block"):
        ev.class_activation_maps(ens, x, block=lambda e: nn.Conv2d(2, 2, 1))
    with pytest.raises(ValueError, match=r"The block must output .* member 0 outputs \(5, 6\)"):
        ev.class_activation_maps(ens, x, block=lambda e: e.out)
    with pytest.raises(
        ValueError, match="block must return a submodule of the extractor; for member 0 it returned 'norm'"
    ):
        ev.class_activation_maps(ens, x, block=lambda e: "norm")
    for classes in ("mine", None, torch.zeros(B), torch.zeros(N, B, dtype=torch.int64)):
        with pytest.raises(ValueError, match='classes must be "ensemble", "member" or a tensor of integers'):
            ev.class_activation_maps(ens, x, classes)
    for classes in (torch.tensor([0, 1, 2, 3, 4]), torch.tensor([0, 1, 2, 3, -1]), torch.tensor([0])):
        with pytest.raises(ValueError, match="classes must be 5 numbers from 0 to 3, one for each image"):
            ev.class_activation_maps(ens, x, classes)
    mixed = [nn.Sequential(nn.Conv2d(2, H, 3, stride), nn.AdaptiveAvgPool2d(1), nn.Flatten()) for stride in (1, 2)]
    with pytest.raises(ValueError, match="maps must have one size; got 6 × 6, 3 × 3"):
        ev.class_activation_maps(ff.Ensemble(mixed, nn.Linear(H, C)).double(), x)
    with pytest.raises(ValueError, match=r"needs logits \(examples, classes\)"):
        ev.class_activation_maps(ff.Ensemble([nn.Conv2d(2, 2, 3)], nn.Identity()).double(), x)


# ---- similarity


def test_similarity_is_that_of_loops():
    maps = torch.rand(4, 7, 3, 5, generator=torch.Generator().manual_seed(0)).sub(0.3).relu()
    matrix = ev.cam_similarity_matrix(maps)
    pairs = []
    for i in range(4):
        for j in range(4):
            cosines = [F.cosine_similarity(maps[i, b].flatten(), maps[j, b].flatten(), dim=0) for b in range(7)]
            assert matrix[i, j].item() == pytest.approx(sum(cosines).item() / 7, abs=1e-6)
            pairs += [sum(cosines).item() / 7] * (i < j)
    assert ev.cam_similarity(maps) == pytest.approx(sum(pairs) / 6, abs=1e-6)
    assert ev.cam_similarity(maps[[2, 0, 3, 1]]) == pytest.approx(ev.cam_similarity(maps), abs=1e-12)


def test_similarity_by_hand():
    a, b = torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    apart, nothing = torch.tensor([[0.0, 0.0], [5.0, 6.0]]), torch.zeros(2, 2)

    def similarity(first, second):
        return ev.cam_similarity(torch.stack([first, second])[:, None])

    assert similarity(a, a) == pytest.approx(1)
    assert similarity(a, 1e-20 * a) == pytest.approx(1)
    assert similarity(a, b) == pytest.approx(0.8)
    assert similarity(a, apart) == 0
    assert similarity(a, nothing) == 0
    maps = torch.stack([torch.stack([a, a]), torch.stack([b, nothing])])
    assert_close(ev.cam_similarity_matrix(maps), torch.tensor([[1, 0.4], [0.4, 0.5]], dtype=torch.float64))
    assert empty_fraction(maps) == 0.25
    assert empty_fraction(torch.stack([a, b])[:, None]) == 0


def test_similarity_refuses_invalid_maps():
    with pytest.raises(ValueError, match="there is only one"):
        ev.cam_similarity(torch.rand(1, 2, 3, 3))
    maps = torch.rand(2, 3, 4, 4)
    for bad in (math.nan, math.inf):
        maps[1, 2, 0, 0] = bad
        with pytest.raises(ValueError, match="the map of member 1 for image 2 holds NaN or infinity"):
            ev.cam_similarity(maps)
    for bad in (torch.rand(2, 4, 4), torch.rand(2, 0, 4, 4), torch.zeros(2, 3, 4, 4, dtype=torch.int64), "maps"):
        with pytest.raises(ValueError, match=r"maps must be floating-point numbers \(members, images"):
            ev.cam_similarity_matrix(bad)


# ---- the figure


def hottest(view: np.ndarray) -> tuple[float, float]:
    """The middle of what is brightest, in parts of height and width."""
    light = view.astype(float).sum(-1)
    y, x = np.nonzero(light >= light.max() - 1)
    return (y.mean() + 0.5) / view.shape[0], (x.mean() + 0.5) / view.shape[1]


def test_the_heat_is_where_the_map_is_largest():
    maps = torch.zeros(3, 4, 8)
    maps[0, 1, 6] = 1e-6
    maps[1, 2, 1] = 1e6
    views = overlaid(torch.full((3, 20, 40, 3), 120, dtype=torch.uint8), maps, (60, 120))
    assert views.shape == (3, 60, 120, 3)
    assert hottest(views[0]) == pytest.approx((1.5 / 4, 6.5 / 8), abs=0.02)
    assert hottest(views[1]) == pytest.approx((2.5 / 4, 1.5 / 8), abs=0.02)
    assert views[0].max() == views[1].max()
    assert (views[2] == views[2, 0, 0]).all(), "an empty map has no heat anywhere"
    assert views[2].max() < views[0].max()


def test_the_grid_shows_each_map_in_its_place():
    images = torch.randint(256, (3, 8, 8, 3), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    maps = torch.rand(5, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    groups = [("above", maps, [[f"class {b}" for b in range(3)]] * 5), ("below", maps[:2].flip(-1))]
    grid = np.asarray(ev.cam_grid(images.numpy(), groups, cell=48))

    def place(view: np.ndarray) -> tuple[int, int]:
        corners = np.argwhere((grid == view[0, 0]).all(-1)).tolist()
        (found,) = [(y, x) for y, x in corners if np.array_equal(grid[y : y + 48, x : x + 48], view)]
        return found

    assert (grid[[0, -1]] == 255).all()
    assert (grid[:, [0, -1]] == 255).all()
    above = np.array([[place(v) for v in overlaid(images, m, (48, 48))] for m in maps])
    below = np.array([[place(v) for v in overlaid(images, m, (48, 48))] for m in maps[:2].flip(-1)])
    assert (np.diff(above[:, :, 1], axis=0) > 48).all(), "members are beside each other"
    assert (above[:, :, 0] == above[:1, :, 0]).all()
    assert above[0, 1, 1] > above[4, 0, 1], "two images are beside each other"
    assert above[0, 2, 0] > above[0, 0, 0] + 48, "and the third below the first"
    assert (below[:, :, 1] == above[:2, :, 1]).all(), "a member has its column in each band"
    assert below[:, :, 0].min() > above[:, :, 0].max() + 48
    assert (grid[: above[0, 0, 0]].astype(int).sum(-1) < 200).any(), "there is a title"


def test_a_grid_refuses_arguments_that_do_not_match():
    images, maps = np.zeros((2, 8, 8, 3), np.uint8), torch.rand(3, 2, 4, 4)
    assert ev.cam_grid(images, [("a title that is far wider than the rest " * 3, maps)], cell=24).width > 700
    with pytest.raises(ValueError, match=r"images must be RGB bytes \(B, H, W, 3\); got float64"):
        ev.cam_grid(images / 255, [("a", maps)])
    with pytest.raises(ValueError, match=r"; got uint8 of shape \(2, 3, 8, 8\)"):
        ev.cam_grid(images.transpose(0, 3, 1, 2), [("a", maps)])
    with pytest.raises(ValueError, match="The maps of 'a' are for 1 images; there are 2"):
        ev.cam_grid(images, [("a", maps[:, :1])])
    with pytest.raises(ValueError, match="'a' needs 2 texts for each of its 3 members"):
        ev.cam_grid(images, [("a", maps, [["x", "y"], ["x"], ["x", "y"]])])
    with pytest.raises(ValueError, match="at least one group"):
        ev.cam_grid(images, [])
    with pytest.raises(ValueError, match="holds NaN"):
        ev.cam_grid(images, [("a", maps * math.nan)])
    with pytest.raises(ValueError, match="one map per image; got 1 maps and 2 images"):
        overlaid(images, maps[0, :1], (8, 8))
