"""Rank-one and LoRA members: exact against n separate networks, values and gradients, layer by layer."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.testing import assert_close

import featureflock as ff
from featureflock.ensemble.member_layers import LoRA, RankOne
from featureflock.models import CifarResNetConfig, CNNConfig, FastCNNConfig, MLPConfig, WideResNetConfig

N, B = 3, 4
EXACT = {"rtol": 1e-10, "atol": 1e-12}


@pytest.fixture(autouse=True)
def _float64():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


def tokens():
    return torch.randint(7, (B, 5))


LAYERS = {
    "linear": (lambda: nn.Linear(5, 6), lambda: torch.randn(B, 5)),
    "linear, no bias": (lambda: nn.Linear(5, 6, bias=False), lambda: torch.randn(B, 5)),
    "linear on tokens": (lambda: nn.Linear(5, 6), lambda: torch.randn(B, 3, 5)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, dilation=2), lambda: torch.randn(B, 4, 9)),
    "conv2d, stride": (lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1), lambda: torch.randn(B, 4, 7, 6)),
    "conv2d, groups": (lambda: nn.Conv2d(4, 6, 3, groups=2, padding="same"), lambda: torch.randn(B, 4, 5, 5)),
    "conv2d, depthwise": (lambda: nn.Conv2d(4, 8, 3, groups=4), lambda: torch.randn(B, 4, 5, 5)),
    "conv2d, reflect": (
        lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect", bias=False),
        lambda: torch.randn(B, 4, 5, 5),
    ),
    "conv3d": (lambda: nn.Conv3d(2, 4, (1, 2, 3), groups=2), lambda: torch.randn(B, 2, 3, 4, 4)),
    "embedding": (lambda: nn.Embedding(7, 4, padding_idx=0), tokens),
}
TRANSPOSED = {
    "transposed": (
        lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2),
        lambda: torch.randn(B, 4, 4, 4),
    ),
    "transposed 1d": (lambda: nn.ConvTranspose1d(4, 6, 2), lambda: torch.randn(B, 4, 5)),
}


def naive_rank_one(layer, r, s):
    """W ∘ (r sᵀ), entry by entry."""
    w = layer.base.weight
    rows = []
    for a in range(w.shape[0]):
        row = []
        for b in range(w.shape[1]):
            if isinstance(layer.base, nn.Embedding):
                factor = r[b] * s[a]
            elif isinstance(layer.base, nn.modules.conv._ConvTransposeNd):
                group = a // (w.shape[0] // layer.base.groups)
                factor = r[group * w.shape[1] + b] * s[a]
            else:
                group = a // (w.shape[0] // getattr(layer.base, "groups", 1))
                factor = r[a] * s[group * w.shape[1] + b]
            row.append(w[a, b] * factor)
        rows.append(torch.stack(row))
    return torch.stack(rows)


def naive_lora(layer, a, b):
    if isinstance(layer.base, nn.Embedding):
        return layer.base.weight + layer.scale * a @ b.T
    return layer.base.weight + layer.scale * (b @ a.flatten(1)).view_as(layer.base.weight)


def losses(outputs):
    """Different weights of the outputs of each member."""
    return sum((out * torch.linspace(-1, 2, out.numel()).view_as(out).sin() * (i + 1)).sum() for i, out in outputs)


@pytest.mark.parametrize("name", [*LAYERS, *TRANSPOSED])
@pytest.mark.parametrize(("init", "scales_weights"), [("signs", False), (0.5, False), (0.5, True)])
def test_rank_one_layers_are_those_of_n_networks(name, init, scales_weights, monkeypatch):
    if name not in TRANSPOSED:
        monkeypatch.setattr(RankOne, "_scales_weights", lambda self, x: scales_weights)
    make, data = (LAYERS | TRANSPOSED)[name]
    plain, x = make(), data()
    members = ff.rank_one(plain, N, init=init)
    layer = members.network
    assert isinstance(layer, RankOne)
    outputs = members(x)
    losses(enumerate(outputs)).backward()
    reference = []
    for i in range(N):
        weights = {"weight": naive_rank_one(layer, layer.r[i], layer.s[i])}
        if layer.bias is not None:
            weights["bias"] = layer.bias[i]
        reference.append(functional_call(plain, weights, (x,)))
        assert_close(outputs[i], reference[i], **EXACT)
        assert_close(members[i](x), reference[i], **EXACT)
        assert type(members[i]) is type(plain)
    own = [p for p in (layer.r, layer.s, layer.bias) if p is not None]
    *expected, shared = torch.autograd.grad(losses(enumerate(reference)), [*own, layer.base.weight])
    for parameter, grad in zip(own, expected, strict=True):
        assert_close(parameter.grad, grad, **EXACT)
    assert_close(layer.base.weight.grad, shared / N, **EXACT)


@pytest.mark.parametrize("name", LAYERS)
def test_lora_layers_are_those_of_n_networks(name):
    make, data = LAYERS[name]
    plain, x = make(), data()
    members = ff.lora(nn.Sequential(plain), N, rank=2, targets=["0"], alpha=3.0)
    layer = members.network[0]
    assert isinstance(layer, LoRA)
    assert_close(members(x), plain(x).expand(N, *plain(x).shape), **EXACT)  # B = 0 at first
    with torch.no_grad():
        layer.b.normal_()
    outputs = members(x)
    losses(enumerate(outputs)).backward()
    reference = []
    for i in range(N):
        reference.append(functional_call(plain, {"weight": naive_lora(layer, layer.a[i], layer.b[i])}, (x,)))
        assert_close(outputs[i], reference[i], **EXACT)
        assert_close(members[i](x), reference[i], **EXACT)
    grads = torch.autograd.grad(losses(enumerate(reference)), [layer.a, layer.b])
    assert_close((layer.a.grad, layer.b.grad), grads, **EXACT)
    assert {name for name, p in members.named_parameters() if p.requires_grad} == {"network.0.a", "network.0.b"}
    assert layer.base.weight.grad is None


class Everything(nn.Module):
    """All layers that `rank_one` converts, used one after another; the last linear layer is used twice."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.group, self.cumulative = nn.GroupNorm(2, 4), nn.BatchNorm1d(8, momentum=None)
        self.linear, self.layer_norm, self.rms = nn.Linear(4, 8), nn.LayerNorm((3, 8)), nn.RMSNorm(8)
        self.plain, self.square = nn.LayerNorm(8, elementwise_affine=False), nn.Linear(8, 8)
        self.no_statistics = nn.BatchNorm1d(8, affine=False, track_running_stats=False)
        for p in self.parameters():
            nn.init.normal_(p, 0.5, 0.5)

    def forward(self, x):
        h = self.group(F.relu(self.norm(self.conv(x)))).flatten(2).mT[:, :3]
        h = self.rms(self.layer_norm(self.linear(h)))
        h = self.square(torch.tanh(self.square(self.plain(h)))).mean(1)
        return self.no_statistics(self.cumulative(h))


@pytest.mark.parametrize("low_memory", [False, True])
def test_a_network_is_that_of_n_networks_in_training_and_evaluation(low_memory):
    network = Everything()
    ens = ff.Ensemble(ff.rank_one(network, N), nn.Identity(), execution="low_memory" if low_memory else "sequential")
    members = ens.extractors
    for _ in range(3):
        separate = [members[i] for i in range(N)]
        x = torch.randn(B, 2, 4, 5)
        members.zero_grad()
        outputs = ens(x)
        losses(enumerate(outputs)).backward()
        expected = [m(x) for m in separate]
        losses(enumerate(expected)).backward()
        for i, m in enumerate(separate):
            assert_close(outputs[i], expected[i], **EXACT)
            # own parameters, and the statistics after the step
            assert_close(members.network.conv.bias.grad[i], m.conv.bias.grad, **EXACT)
            assert_close(members.network.layer_norm.weight.grad[i], m.layer_norm.weight.grad, **EXACT)
            assert_close(members.network.group.bias.grad[i], m.group.bias.grad, **EXACT)
            assert_close(members.network.norm.weight.grad[i], m.norm.weight.grad, **EXACT)
            for name in ("norm", "cumulative"):
                for buffer in ("running_mean", "running_var", "num_batches_tracked"):
                    ours = getattr(getattr(members.network, name), buffer)[i]
                    assert_close(ours, getattr(getattr(m, name), buffer), **EXACT)
        w = members.network.square
        ratios = [m.square.weight.detach() / w.base.weight.detach() for m in separate]
        mean = sum(m.square.weight.grad * q for m, q in zip(separate, ratios, strict=True)) / N
        assert_close(w.base.weight.grad, mean, **EXACT)
    members.eval()
    x = torch.randn(B, 2, 4, 5)
    assert_close(ens(x), torch.stack([m(x) for m in members]), **EXACT)


def test_a_network_is_copied_and_random_vectors_follow_the_seed():
    network = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5))
    before = copy.deepcopy(network.state_dict())
    state = torch.get_rng_state()
    one, two, three = (ff.rank_one(network, N, seed=s) for s in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(v, before[k]) for k, v in network.state_dict().items())
    assert torch.equal(one.network[0].r, two.network[0].r)
    assert not torch.equal(one.network[0].r, three.network[0].r)
    assert {*one.network[0].r.flatten().tolist()} == {-1.0, 1.0}
    assert one.network[0].base.weight is not network[0].weight
    near = ff.rank_one(nn.Linear(400, 300), 2, init=0.1, seed=0).network
    assert near.s.mean().item() == pytest.approx(1, abs=0.02)
    assert near.s.std().item() == pytest.approx(0.1, abs=0.01)
    a, b = (ff.lora(network, N, 2, seed=3).network[0].a for _ in range(2))
    assert torch.equal(a, b)


class Positions(nn.Module):
    """Adds embeddings of positions, whose indices have no batch."""

    def __init__(self):
        super().__init__()
        self.embedding, self.linear = nn.Embedding(6, 4), nn.Linear(4, 4)

    def forward(self, x):
        return x + self.linear(self.embedding(torch.arange(6)[None]))


def test_inputs_of_a_layer_without_a_batch_are_repeated():
    x = torch.randn(B, 6, 4)
    for members in (ff.rank_one(Positions(), N), ff.lora(Positions(), N, 2, ["embedding", "linear"])):
        outputs = members(x)
        losses(enumerate(outputs)).backward()
        assert_close(outputs, torch.stack([m(x) for m in members]), **EXACT)


def test_a_network_whose_first_dimension_is_not_the_batch_is_refused():
    class Transposing(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(x.transpose(0, 1)).transpose(0, 1)

    with pytest.raises(ValueError, match="A Linear got 6 rows instead of 12"):
        ff.rank_one(Transposing(), N)(torch.randn(B, 6, 4))


def test_tied_weights_stay_tied():
    network = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    network[1].weight = network[0].weight
    members = ff.rank_one(network, N).network
    assert members[0].base.weight is members[1].base.weight


def test_n_members_have_about_the_parameters_of_one_network():
    network = WideResNetConfig(16, 4).extractor((3, 32, 32))
    size = sum(p.numel() for p in network.parameters())
    members = sum(p.numel() for p in ff.rank_one(network, 10).parameters())
    assert size < members < 1.1 * size


@pytest.mark.parametrize("config", [CNNConfig(4), MLPConfig((8, 4)), WideResNetConfig(10, 1), CifarResNetConfig(8)])
def test_the_networks_of_the_library_can_be_converted(config):
    network = config.extractor((1, 8, 8))
    members = ff.rank_one(network, 2)
    x = torch.randn(3, 1, 8, 8)
    members.eval()
    assert_close(members(x), torch.stack([m(x) for m in members]), **EXACT)


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


@pytest.mark.parametrize(
    ("network", "name"),
    [
        (nn.Sequential(nn.Linear(3, 3), Scale()), "1, a Scale"),
        (nn.Sequential(nn.GRU(3, 3)), "0, a GRU"),
        (nn.MultiheadAttention(4, 2), "the network, a MultiheadAttention"),
        (nn.Sequential(nn.PReLU()), "0, a PReLU"),
        (nn.Sequential(nn.SyncBatchNorm(3)), "0, a SyncBatchNorm"),
        (nn.Embedding(3, 3, max_norm=1.0), "the network, a Embedding"),
        (FastCNNConfig().extractor((3, 32, 32)), "whitening, a Whitening"),
    ],
)
def test_a_module_that_cannot_be_converted_is_named(network, name):
    with pytest.raises(ValueError, match=f"rank_one cannot convert {name}"):
        ff.rank_one(network, 2)


def test_lora_refuses_what_it_cannot_change():
    network = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.LayerNorm(3))
    with pytest.raises(ValueError, match="no module named 'query'"):
        ff.lora(network, 2, 1, ["query"])
    with pytest.raises(ValueError, match="lora cannot convert 2, a LayerNorm"):
        ff.lora(network, 2, 1, ["2"])
    with pytest.raises(ValueError, match="a string"):
        ff.lora(network, 2, 1, "0")
    with pytest.raises(ValueError, match="no layer to change"):
        ff.lora(nn.Sequential(nn.ReLU()), 2, 1)
    with pytest.raises(ValueError, match="rank must be"):
        ff.lora(network, 2, 0)
    with pytest.raises(ValueError, match="uses its weights without calling it"):
        ff.lora(nn.TransformerEncoderLayer(4, 2), 2, 1, ["linear1"])
    with pytest.raises(ValueError, match="without running statistics"):
        ff.lora(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, track_running_stats=False)), 2, 1)


@pytest.mark.parametrize("function", [ff.rank_one, ff.lora])
def test_wrong_arguments_are_refused(function):
    with pytest.raises(ValueError, match="at least one member"):
        function(nn.Linear(2, 2), 0)
    with pytest.raises(ValueError, match="takes a module"):
        function([nn.Linear(2, 2)], 2)
    with pytest.raises(ValueError, match="converted already"):
        function(ff.rank_one(nn.Linear(2, 2), 2), 2)
    with pytest.raises(ValueError, match="has no values yet"):
        function(nn.LazyLinear(2), 2)
    with pytest.raises(IndexError, match="There are 2 members"):
        function(nn.Linear(2, 2), 2)[2]
    with pytest.raises(ValueError, match="init must be"):
        ff.rank_one(nn.Linear(2, 2), 2, init="random")


def test_the_batch_norm_of_a_frozen_network_stays_in_evaluation_mode():
    network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    members = ff.lora(network, N, 1)
    members.train()(torch.randn(B, 3))
    assert_close(members.network[1].running_mean, torch.zeros(4))
    assert members.network[0].training
    assert not members.network[1].training


def test_bfloat16_autocast():
    torch.set_default_dtype(torch.float32)
    members = ff.rank_one(nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(36, 3)), N)
    x = torch.randn(B, 2, 5, 5)
    members.eval()
    with torch.autocast("cpu", torch.bfloat16):
        out = members(x)
    assert_close(out.float(), members(x), rtol=0.05, atol=0.1)
