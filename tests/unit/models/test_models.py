"""Extractors: published sizes, initial weights, architecture, and every execution mode of an ensemble."""

import dataclasses
import itertools
import math
import re

import pytest
import torch
import torch.nn.functional as F
import tyro
from torch import nn
from torch.testing import assert_close

import featureflock as ff
from featureflock import models
from featureflock.models import (
    CifarResNetConfig,
    CNNConfig,
    FastCNNConfig,
    MLPConfig,
    ResNetConfig,
    WideResNetConfig,
    linear_head,
)
from featureflock.models.cifar_resnet import Subsampling
from featureflock.models.resnet import BasicBlock, Bottleneck
from featureflock.models.wide_resnet import PreactivationBlock

SHAPE = (3, 16, 16)
SMALL = [
    WideResNetConfig(10, 2),
    CifarResNetConfig(8),
    ResNetConfig(18),
    MLPConfig((16, 8)),
    CNNConfig(4),
    FastCNNConfig((32, 40)),
]
every_small = pytest.mark.parametrize("arch", SMALL, ids=lambda a: type(a).__name__)


def images(batch: int = 4, shape: tuple[int, ...] = SHAPE, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(batch, *shape, dtype=dtype, generator=torch.Generator().manual_seed(batch))


def make(arch: models.ModelConfig, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return arch.extractor(SHAPE)


def randomise_batchnorm(module: nn.Module) -> None:
    """Give BatchNorm weights and statistics that differ from the initial ones."""
    for m in module.modules():
        if isinstance(m, nn.BatchNorm2d):
            for tensor in (m.weight, m.bias, m.running_mean, m.running_var):
                nn.init.uniform_(tensor, 0.5, 1.5)


@pytest.mark.parametrize(
    ("arch", "classes", "count"),
    [
        (WideResNetConfig(16, 2), 10, 691_674),
        (WideResNetConfig(16, 4), 10, 2_748_890),
        (WideResNetConfig(16, 8), 10, 10_961_370),
        (WideResNetConfig(28, 2), 10, 1_467_610),
        (WideResNetConfig(28, 10), 10, 36_479_194),
        (WideResNetConfig(40, 4), 10, 8_949_210),
        (CifarResNetConfig(20), 10, 269_722),
        (CifarResNetConfig(32), 10, 464_154),
        (CifarResNetConfig(44), 10, 658_586),
        (ResNetConfig(18), 1000, 11_689_512),
        (ResNetConfig(34), 1000, 21_797_672),
        (ResNetConfig(50), 1000, 25_557_032),
        (ResNetConfig(101), 1000, 44_549_160),
        (ResNetConfig(152), 1000, 60_192_808),
        # A stem of 3×3 has 64·3·(7² − 3²) fewer.
        (ResNetConfig(18, "cifar"), 1000, 11_689_512 - 64 * 3 * 40),
        (MLPConfig((128, 64, 32)), 10, (3 * 256 + 1) * 128 + 129 * 64 + 65 * 32 + 33 * 10),
        (CNNConfig(32), 10, 9 * (3 * 32 + 32 * 64 + 64 * 128) + 2 * (32 + 64 + 128) + 129 * 10),
        # The 24 of the first layer's bias, and of each stage two convolutions with BatchNorm; whitening is not trained.
        (FastCNNConfig((32, 64)), 10, 24 + 9 * (24 * 32 + 32 * 32 + 32 * 64 + 64 * 64) + 2 * 2 * (32 + 64) + 65 * 10),
    ],
    ids=str,
)
def test_has_the_published_number_of_parameters(arch, classes, count):
    with torch.device("meta"):
        extractor = arch.extractor(SHAPE)
        network = nn.Sequential(extractor, linear_head(extractor.feature_dim, classes))
    assert sum(p.numel() for p in network.parameters()) == count


@pytest.mark.parametrize(
    ("arch", "shape", "features"),
    [
        (WideResNetConfig(10, 2), (3, 32, 32), 128),
        (WideResNetConfig(10, 1), (3, 224, 224), 64),
        (CifarResNetConfig(8), (3, 32, 32), 64),
        (CifarResNetConfig(8), (1, 224, 224), 64),
        (ResNetConfig(18), (3, 224, 224), 512),
        (ResNetConfig(18, "cifar"), (3, 32, 32), 512),
        (ResNetConfig(50), (3, 224, 224), 2048),
        (ResNetConfig(50), (3, 32, 32), 2048),
        (MLPConfig(), (1, 8, 16), 32),
        (CNNConfig(), (1, 8, 8), 128),
        (CNNConfig(), (1, 8, 16), 128),
        (CNNConfig(8), (1, 28, 28), 32),
    ],
    ids=str,
)
def test_features_have_the_size_feature_dim_and_are_non_negative(arch, shape, features):
    extractor = arch.extractor(shape)
    with torch.no_grad():
        h = extractor.train()(images(2, shape))
    assert h.shape == (2, extractor.feature_dim) == (2, features)
    assert (h >= 0).all()
    assert (h > 0).any()


@pytest.mark.parametrize(
    ("arch", "size", "maps"),
    [
        (WideResNetConfig(10, 1), 32, [32, 16, 8]),
        (CifarResNetConfig(8), 32, [32, 16, 8]),
        (ResNetConfig(18), 224, [56, 56, 28, 28, 14, 14, 7, 7]),
        (ResNetConfig(18, "cifar"), 32, [32, 32, 16, 16, 8, 8, 4, 4]),
    ],
    ids=str,
)
def test_feature_maps_are_halved_where_the_papers_halve_them(arch, size, maps):
    with torch.device("meta"):
        extractor, sizes = arch.extractor((3, size, size)), []
        for block in extractor.blocks:
            block.register_forward_hook(lambda *call: sizes.append(call[2].shape[-1]))
        extractor(torch.empty(2, 3, size, size))
    assert sizes == maps


@pytest.mark.parametrize(
    "arch", [WideResNetConfig(), CifarResNetConfig(20), ResNetConfig(50), MLPConfig((512, 256)), CNNConfig()], ids=str
)
def test_initial_weights_follow_he_et_al(arch):
    """The standard errors of mean, std and kurtosis of a normal sample of size N are std/√N, std/√2N and √(24/N)."""
    extractor = make(arch)
    for m in [*extractor.modules(), linear_head(extractor.feature_dim, 100)]:
        if isinstance(m, nn.Conv2d | nn.Linear):
            is_conv, w, n = isinstance(m, nn.Conv2d), m.weight.double(), m.weight.numel()
            std = math.sqrt(2 / (m.kernel_size[0] ** 2 * m.out_channels if is_conv else m.in_features))
            assert abs(w.mean()) < 5 * std / math.sqrt(n)
            assert abs(w.std() - std) < 5 * std / math.sqrt(2 * n)
            assert abs((w / std).pow(4).mean() - 3) < 10 * math.sqrt(24 / n)
            assert m.bias is None if is_conv else (m.bias == 0).all()
        elif isinstance(m, nn.BatchNorm2d):
            assert (m.weight == 1).all()
            assert (m.bias == 0).all()


@every_small
def test_no_weight_has_the_default_initialisation_of_pytorch(arch, monkeypatch):
    def spoil(m):
        for p in m.parameters(recurse=False):
            nn.init.constant_(p, math.nan)

    for layer in (nn.Conv2d, nn.Linear, nn.BatchNorm2d):
        monkeypatch.setattr(layer, "reset_parameters", spoil)
    extractor = make(arch)
    assert not any(p.isnan().any() for m in (extractor, linear_head(8, 3)) for p in m.parameters())
    again, other = make(arch), make(arch, seed=1)
    assert all(torch.equal(p, q) for p, q in zip(extractor.parameters(), again.parameters(), strict=True))
    a, b = (next(p for p in e.parameters() if p.ndim > 1) for e in (extractor, other))
    assert not torch.equal(a, b)


def test_an_mlp_preserves_the_second_moment_through_depth():
    """He et al. (2015), eq. (9): E[y_l²] = ½ n Var[w] E[y_{l−1}²], so 2/n gives a ratio of exactly 1 in expectation.

    One ratio of a layer of n units is off by √(5/n), as E[relu(y)⁴] = 3/2 for a normal y; there are 4·19 of them.
    """
    depth, n = 20, 512
    ratios = []
    for seed in range(4):
        torch.manual_seed(seed)
        h, moments = images(1, (n,)), []
        for layer in models.MLP(n, (n,) * depth).layers:
            h = layer(h).detach()
            if isinstance(layer, nn.Linear):
                moments.append(h.square().mean())
        assert abs(moments[0] / images(1, (n,)).square().mean() - 2) < 0.5  # the input was not rectified
        ratios += [b / a for a, b in itertools.pairwise(moments)]
    assert abs(torch.stack(ratios).mean() - 1) < 4 * math.sqrt(5 / n / len(ratios))


def test_the_residual_stream_grows_linearly_within_a_group():
    """In training, a block adds 1 to the second moment of the stream: E[conv₂(relu(u))²] = 9 C · 2/(9 C) · ½ E[u²] = 1.

    BatchNorm makes E[u²] = 1, a random sign of conv₁ makes relu halve it, and conv₂ is independent of the
    stream. The zeros beside the image take a little: with t taps of three inside it, in each direction, the factor
    is mean(t²) / (3 mean(t)), as a pixel that is used less has also got less. Where the channels grow r-fold, the
    group begins at C · 2/(r C) · ½ = 1/r from the shortcut, and as much as ever from the branch. A step varies from
    seed to seed by about 1/√C.
    """
    width, blocks, seeds, streams = 2, 4, 6, []
    for seed in range(seeds):
        torch.manual_seed(seed)
        extractor, x = models.WideResNet(6 * blocks + 4, width), images(8, (3, 32, 32))
        with torch.no_grad():
            x = extractor.conv(x)
            streams.append([(x := block(x)).square().mean() for block in extractor.blocks])
    moments = torch.tensor(streams).mean(0).view(3, blocks)
    for row, size, channels, r in zip(moments, (32, 16, 8), (16, 32, 64), (width, 2, 2), strict=True):
        taps = torch.tensor([2.0, *[3.0] * (size - 2), 2.0])
        step = (taps.square().mean() / (3 * taps.mean())) ** 2
        noise = 1 / math.sqrt(seeds * channels * width)
        assert_close(row[0], 1 / r + step, atol=4 * noise, rtol=0)
        assert_close(row.diff(), step.expand(blocks - 1), atol=4 * noise, rtol=0)
        assert_close(row.diff().mean(), step, atol=4 * noise / math.sqrt(blocks - 1), rtol=0)


def test_a_wide_block_computes_its_equation():
    for inputs, outputs, stride in ((6, 6, 1), (6, 8, 1), (6, 6, 2)):
        block = PreactivationBlock(inputs, outputs, stride, dropout=0.5).double().eval()
        randomise_batchnorm(block)
        x = images(2, (inputs, 8, 8), torch.float64)
        a = block.bn1(x).clamp_min(0)
        branch = F.conv2d(a, block.conv1.weight, stride=stride, padding=1)
        branch = F.conv2d(block.bn2(branch).clamp_min(0), block.conv2.weight, padding=1)
        same = (inputs, stride) == (outputs, 1)
        assert_close(block(x), branch + (x if same else F.conv2d(a, block.shortcut.weight, stride=stride)))
        if same:  # also a negative stream goes through a block whose branch is silent
            nn.init.zeros_(block.conv2.weight)
            assert torch.equal(block(x), x)


def test_shortcuts_of_cifar_resnet_subsample_and_add_zeros():
    extractor = make(CifarResNetConfig(14)).eval()
    for block in extractor.blocks:
        nn.init.zeros_(block.bn2.weight)
    x = images()
    expected = extractor.stem(x)[:, :, ::4, ::4].mean((2, 3))
    assert_close(extractor(x), F.pad(expected, (0, 48)))
    assert [type(b.shortcut) for b in extractor.blocks].count(Subsampling) == 2


@pytest.mark.parametrize("block", [BasicBlock(6, 6, 1), BasicBlock(6, 8, 2), Bottleneck(8, 2, 1), Bottleneck(6, 2, 2)])
def test_a_block_computes_its_equation(block):
    block = block.double().eval()
    randomise_batchnorm(block)
    x = images(2, (block.conv1.in_channels, 8, 8), torch.float64)
    last = block.bn3 if isinstance(block, Bottleneck) else block.bn2
    h = block.bn2(block.conv2(block.bn1(block.conv1(x)).clamp_min(0)))
    h = block.bn3(block.conv3(h.clamp_min(0))) if isinstance(block, Bottleneck) else h
    assert_close(block(x), (block.shortcut(x) + h).clamp_min(0))
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    shortcut = x if h.shape == x.shape else block.shortcut[1](block.shortcut[0](x))
    assert torch.equal(block(x), shortcut.clamp_min(0))


def test_every_pixel_reaches_a_bottleneck_with_stride():
    """The stride is in the 3×3 convolution; in the first 1×1, three of four pixels would be ignored."""
    block = Bottleneck(6, 4, 2).eval()
    x = images(2, (6, 8, 8)).requires_grad_()
    block.bn3(block.conv3(block.bn2(block.conv2(block.bn1(block.conv1(x)))))).square().sum().backward()
    assert (x.grad.abs().sum((0, 1)) > 0).all()


def test_dropout_acts_between_the_convolutions_in_training_only():
    drop, x = 0.4, images(8)
    with_dropout, without = make(WideResNetConfig(10, 2, drop)), make(WideResNetConfig(10, 2))
    seen = []
    with_dropout.blocks[1].conv2.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
    assert not torch.equal(with_dropout(x), with_dropout(x))
    assert torch.equal(without(x), without(x))
    zeros = (seen[0] == 0).double().mean()  # half of what is left was zero behind the ReLU
    assert zeros == pytest.approx(drop + (1 - drop) / 2, abs=0.02)
    assert seen[0].mean() == pytest.approx(1 / math.sqrt(2 * math.pi), abs=0.02)  # E[relu(u)], u normal
    without.load_state_dict(with_dropout.state_dict())
    assert torch.equal(with_dropout.eval()(x), without.eval()(x))


@every_small
def test_gradients_reach_every_parameter(arch):
    extractor = make(arch)
    linear_head(extractor.feature_dim, 3)(extractor(images(8))).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in extractor.parameters())


class SmallResNet(nn.Module):
    """The blocks of a ResNet with few channels, for speed."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.MaxPool2d(3, 2, padding=1))
        self.blocks = nn.Sequential(BasicBlock(4, 8, 1), Bottleneck(8, 4, 2), Bottleneck(16, 4, 1))
        self.feature_dim = 16

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(self.stem(x)).mean((-2, -1))


@dataclasses.dataclass(frozen=True)
class SmallResNetImageNet(models.ModelConfig):
    def extractor(self, shape: tuple[int, ...]) -> nn.Module:
        return SmallResNet()


QUICK = [
    WideResNetConfig(10, 1),
    CifarResNetConfig(8),
    SmallResNetImageNet(),
    MLPConfig((16, 8)),
    CNNConfig(4),
    FastCNNConfig((32, 40)),
]
every_quick = pytest.mark.parametrize("arch", QUICK, ids=lambda a: type(a).__name__)


def ensemble(arch: models.ModelConfig, dtype: torch.dtype = torch.float32) -> ff.Ensemble:
    extractors = [make(arch, seed) for seed in range(2)]
    return ff.Ensemble(extractors, linear_head(extractors[0].feature_dim, 5), ff.ParticleLayer(rank=2)).to(dtype)


@every_quick
def test_vectorised_execution_equals_sequential(arch):
    results = []
    for execution in ("sequential", "vectorised"):
        ens = ensemble(arch, torch.float64)
        ens.execution = execution
        logits = ens(images(dtype=torch.float64))
        logits.logsumexp(-1).mean().backward()
        results.append([logits, *[p.grad for p in ens.parameters()], *ens.buffers(), ens.predict(images().double())])
    for a, b in zip(*results, strict=True):
        assert_close(a, b, rtol=1e-6, atol=1e-9)


@every_small
def test_predictions_of_a_loaded_ensemble_are_bit_identical(arch, tmp_path):
    ens = ensemble(arch)
    randomise_batchnorm(ens)
    for layout in (torch.contiguous_format, torch.channels_last):
        ens, x = ens.to(memory_format=layout), images().to(memory_format=layout)
        ff.save(ens, tmp_path)
        assert torch.equal(ff.load(tmp_path).predict(x), ens.predict(x))


@every_quick
def test_channels_last_is_preserved_and_changes_nothing(arch):
    extractor, x = make(arch).double(), images(dtype=torch.float64)
    expected = extractor(x)
    extractor = extractor.to(memory_format=torch.channels_last)
    outputs = []
    for m in extractor.modules():
        if not isinstance(m, nn.Linear):
            m.register_forward_hook(lambda *call: outputs.append(call[2]))
    assert_close(extractor(x.to(memory_format=torch.channels_last)), expected)
    assert all(h.is_contiguous(memory_format=torch.channels_last) for h in outputs if h.ndim == 4)


@every_quick
def test_bfloat16_autocast_is_close(arch):
    extractor = make(arch)
    expected = extractor(images(8))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = extractor(images(8))
    h.float().square().sum().backward()
    assert h.dtype == torch.bfloat16
    assert (h.float() - expected).norm() < 0.05 * expected.norm()
    assert all(p.grad.isfinite().all() for p in extractor.parameters())


def test_a_method_builds_and_trains_a_model():
    method = ff.methods.FeatureWGD()
    ens = method.build(lambda: CNNConfig(4).extractor(SHAPE), lambda: linear_head(16, 5), members=3)
    method.loss(ens, images(), torch.arange(4)).loss.backward()
    assert all(p.grad.abs().sum() > 0 for p in ens.parameters())


@pytest.mark.parametrize(
    "cls", [WideResNetConfig, CifarResNetConfig, ResNetConfig, MLPConfig, CNNConfig, FastCNNConfig]
)
def test_every_field_is_a_flag_with_help(cls, capsys):
    with pytest.raises(SystemExit):
        tyro.cli(cls, args=["--help"])
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for field in dataclasses.fields(cls):
        assert re.search(rf"--{field.name} ((?!--).)*[.…] \(default: ", text), field.name


def test_tyro_builds_a_model_config():
    assert tyro.cli(WideResNetConfig, args=["--depth", "28", "--dropout", "0.3"]) == WideResNetConfig(28, 4, 0.3)
    assert tyro.cli(ResNetConfig, args=["--depth", "18", "--stem", "cifar"]) == ResNetConfig(18, "cifar")
    assert tyro.cli(MLPConfig, args=["--widths", "8", "4"]) == MLPConfig((8, 4))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: WideResNetConfig(depth=18), "6b \\+ 4 layers; use .* not 18"),
        (lambda: models.WideResNet(4, 4), "6b \\+ 4 layers; use .* not 4"),
        (lambda: WideResNetConfig(width=0), "width must be .* at least 1; got 0"),
        (lambda: WideResNetConfig(dropout=1.0), "dropout must be at least 0"),
        (lambda: CifarResNetConfig(18), "6b \\+ 2 layers; use .* not 18"),
        (lambda: models.CifarResNet(2), "6b \\+ 2 layers; use .* not 2"),
        (lambda: models.CifarResNet(20, channels=0), "channels must be"),
        (lambda: ResNetConfig(20), "no ResNet of depth 20; use 18, 34, 50, 101, 152"),
        (lambda: models.ResNet(18, "mnist"), 'stem must be "imagenet"'),
        (lambda: MLPConfig(()), "widths must contain at least one"),
        (lambda: MLPConfig((8, 0)), "widths must be"),
        (lambda: CNNConfig(0), "width must be"),
        (lambda: FastCNNConfig(()), "widths must contain at least one"),
        (lambda: models.FastCNN((8, 0)), "widths must be"),
        (lambda: models.FastCNN(channels=0), "channels must be"),
        (lambda: FastCNNConfig().extractor((64,)), "shape \\(channels, height, width\\); got \\(64,\\)"),
        (lambda: CNNConfig().extractor((64,)), "shape \\(channels, height, width\\); got \\(64,\\)"),
        (lambda: linear_head(8, 0), "classes must be"),
    ],
)
def test_invalid_sizes_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        wrong()
