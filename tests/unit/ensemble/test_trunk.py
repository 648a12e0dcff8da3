"""Trunks, and members in one network, inside an ensemble: gradients of methods, saving, prediction, explanation."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import featureflock as ff
from featureflock.evaluation import class_activation_maps
from featureflock.methods import ADP, DICE, DeepEnsembles, FeatureMAP, FeatureWGD, FunctionWGD, WeightWGD

N, B, C = 3, 8, 4


def data(dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(B, 1, 6, 6, generator=generator, dtype=dtype)
    return x, torch.randint(C, (B,), generator=generator)


class Counting(nn.Sequential):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


def make_trunk():
    return Counting(nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Tanh()).double()


def make_extractor():
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.AvgPool2d(6), nn.Flatten()).double()


def make_head():
    return nn.Linear(4, C).double()


def build(method, **changes):
    arguments = {"trunk": make_trunk, "members": N, "train_size": 50} | changes
    return method.build(make_extractor, make_head, **arguments)


@pytest.mark.parametrize("method", [DeepEnsembles(), FeatureWGD(), FunctionWGD(), FeatureMAP(), ADP(), DICE()])
@pytest.mark.parametrize("execution", ["sequential", "vectorised", "low_memory"])
def test_a_trained_trunk_gets_the_mean_of_the_gradients_of_n_trunks(method, execution):
    x, y = data()
    ens = build(method, execution=execution).double()
    trunks = [copy.deepcopy(ens.trunk) for _ in range(N)]
    separate = copy.deepcopy(ens)
    separate.trunk = None
    separate.execution = "sequential"
    separate.extractors = nn.ModuleList(nn.Sequential(t, e) for t, e in zip(trunks, separate.extractors, strict=True))
    for each in (ens, separate):
        torch.manual_seed(0)
        (0.5 * method.loss(each, x, y).loss).backward()
    if not (isinstance(method, DICE) and execution != "sequential"):  # its samples differ
        assert ens.trunk.calls == 1
        for name, p in ens.trunk.named_parameters():
            mean = torch.stack([t.get_parameter(name).grad for t in trunks]).mean(0)
            assert_close(p.grad, mean, rtol=1e-8, atol=1e-12)
            assert mean.abs().max() > 0 or name == "0.bias"
        for e, (_, other) in zip(ens.extractors, separate.extractors, strict=True):
            for p, q in zip(e.parameters(), other.parameters(), strict=True):
                assert_close(p.grad, q.grad, rtol=1e-8, atol=1e-12)


def test_with_particles_in_weight_space_the_trunk_gets_the_mean_of_the_members_gradients():
    x, y = data()
    trunks = []
    for method in (WeightWGD(), DeepEnsembles()):
        ens = build(method)
        method.loss(ens, x, y).loss.backward()
        trunks.append(ens.trunk)
    for p, q in zip(*(t.parameters() for t in trunks), strict=True):
        assert_close(p.grad, q.grad, rtol=1e-8, atol=1e-12)


def test_the_gradient_of_the_input_is_the_ordinary_one():
    x, y = data()
    x.requires_grad_()
    ens = build(DeepEnsembles()).eval()
    F.cross_entropy(ens(x).mean(0), y).backward()
    got, x.grad = x.grad, None
    F.cross_entropy(torch.stack([ens.member(i)(x) for i in range(N)]).mean(0), y).backward()
    assert_close(got, x.grad)


def test_a_frozen_trunk_is_computed_once_in_evaluation_mode():
    x, y = data()
    trunk = make_trunk().requires_grad_(False)
    ens = ff.Ensemble([make_extractor() for _ in range(N)], make_head(), ff.ParticleLayer(rank=2), trunk=trunk)
    assert not trunk.training
    assert ens.extractors.training
    before = copy.deepcopy(trunk.state_dict())
    method = FeatureWGD()
    ens.train()
    method.loss(ens, x, y).loss.backward()
    assert trunk.calls == 1
    assert all(torch.equal(before[k], v) for k, v in trunk.state_dict().items())
    assert all(p.grad is None for p in trunk.parameters())
    assert all(p.grad is not None for p in ens.extractors.parameters())
    ens.eval()
    ens.predict(x)
    assert trunk.calls == 2


def test_an_extractor_must_not_overwrite_the_output_of_the_trunk():
    class Adding(nn.Module):
        def forward(self, x):
            return x.add_(1.0).flatten(1)[:, :4]

    ens = ff.Ensemble([Adding(), Adding()], make_head(), trunk=make_trunk()).eval()
    with pytest.raises(ValueError, match="modifies the output of the trunk in place"):
        ens.predict(data()[0])


def shared_ensembles():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), *make_extractor())
    network.double()
    layer = ff.ParticleLayer(rank=2)
    lora = ff.lora(network, N, 2, ["0", "3"])
    for name, p in lora.named_parameters():
        if name.endswith(".b"):
            nn.init.normal_(p)
    return {
        "trunk": ff.Ensemble([make_extractor() for _ in range(N)], make_head(), layer, trunk=make_trunk()),
        "rank one": ff.Ensemble(ff.rank_one(network, N), make_head(), layer),
        "rank one, heads": ff.Ensemble(ff.rank_one(network, N), [make_head() for _ in range(N)], layer, at="logits"),
        "LoRA": ff.Ensemble(lora, make_head(), layer),
        "trunk, rank one": ff.Ensemble(ff.rank_one(make_extractor(), N), make_head(), layer, trunk=make_trunk()),
    }


KINDS = ["trunk", "rank one", "rank one, heads", "LoRA", "trunk, rank one"]


def trained(kind):
    """An ensemble after two steps, so that statistics and weights are not those of its construction."""
    ens = shared_ensembles()[kind]
    x, y = data()
    optimiser = torch.optim.SGD([p for p in ens.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):
        optimiser.zero_grad()
        FeatureWGD().loss(ens, x, y).loss.backward()
        optimiser.step()
    return ens


@pytest.mark.parametrize("kind", KINDS)
def test_prediction_is_that_of_separate_networks(kind):
    ens, (x, _) = trained(kind), data()
    members = [copy.deepcopy(ens.member(i)).eval() for i in range(N)]
    log_probs = torch.stack([m(x).log_softmax(-1) for m in members])
    ens.train()
    assert_close(ens.member_predictions(x), log_probs)
    assert_close(ens.predict(x), log_probs.exp().mean(0))
    separate = ff.Ensemble([nn.Sequential(*list(m)[:-1]) for m in members], [m.head for m in members]).eval()
    assert_close(ens.uncertainty(x), separate.uncertainty(x))
    assert_close(ens.for_inference(compile=False).predict(x), ens.predict(x))


@pytest.mark.parametrize("kind", KINDS)
def test_the_three_modes_of_execution_agree(kind):
    x, y = data()
    results = []
    for execution in ("sequential", "vectorised", "low_memory"):
        ens = shared_ensembles()[kind]
        ens.execution = execution
        FeatureWGD().loss(ens, x, y).loss.backward()
        results.append({k: p.grad for k, p in ens.named_parameters() if p.grad is not None} | dict(ens.named_buffers()))
    assert_close(results[1], results[0])
    assert_close(results[2], results[0])


@pytest.mark.parametrize("kind", KINDS)
def test_saving_calibrating_and_exporting(kind, tmp_path):
    ens, (x, y) = trained(kind), data()
    ff.calibrate(ens, [(x, y)])
    assert ens.temperature is not None
    ff.save(ens, tmp_path / "saved")
    loaded = ff.load(tmp_path / "saved")
    assert torch.equal(loaded.predict(x), ens.predict(x))
    assert loaded.temperature == ens.temperature
    into = shared_ensembles()[kind]
    assert torch.equal(ff.load(tmp_path / "saved", into=into).predict(x), ens.predict(x))
    # the loaded ensemble can be trained on, with the same gradients
    for each in (ens, loaded):
        each.zero_grad()
        FeatureWGD().loss(each.train(), x, y).loss.backward()
    for p, q in zip(ens.parameters(), loaded.parameters(), strict=True):
        assert p.requires_grad == q.requires_grad
        assert_close(p.grad, q.grad)
    fast = ens.eval().for_inference(compile=False)
    exported = torch.export.export(fast, (x,)).module()
    assert_close(exported(x), ens(x))


@pytest.mark.parametrize("kind", KINDS)
def test_class_activation_maps_are_those_of_separate_networks(kind):
    ens, (x, _) = trained(kind), data()
    members = [copy.deepcopy(ens.member(i)) for i in range(N)]
    separate = ff.Ensemble([nn.Sequential(*list(m)[:-1]) for m in members], [m.head for m in members])
    ours, expected = class_activation_maps(ens, x), class_activation_maps(separate, x)
    assert_close(ours.maps, expected.maps, rtol=1e-5, atol=1e-6)
    assert torch.equal(ours.classes, expected.classes)
    assert ours.maps.abs().max() > 0


def test_methods_that_need_separate_weights_refuse_members_in_one_network():
    with pytest.raises(ValueError, match="weights of their own"):
        build(WeightWGD(), share=ff.rank_one, trunk=None)
    with pytest.raises(ValueError, match="DICE needs separate extractors"):
        build(DICE(), share=ff.rank_one, trunk=None)


@pytest.mark.parametrize("method", [DeepEnsembles(), FeatureWGD(), FunctionWGD(), FeatureMAP(), ADP()])
def test_every_method_trains_rank_one_members_by_the_mean_of_their_gradients(method):
    x, y = data()
    ens = method.build(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 4)).double(), make_head, members=N, share=ff.rank_one
    )
    separate = copy.deepcopy(ens)
    separate.extractors = nn.ModuleList(ens.extractors)
    for each in (ens, separate):
        method.loss(each, x, y).loss.backward()
    layer = ens.extractors.network[1]
    w = layer.base.weight.detach()
    mean = sum(e[1].weight.grad * (e[1].weight.detach() / w) for e in separate.extractors) / N
    assert_close(layer.base.weight.grad, mean)
    for i, e in enumerate(separate.extractors):
        assert_close(layer.bias.grad[i], e[1].bias.grad)


class Tokens(nn.Module):
    """A trunk with the inputs of a transformer."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)

    def forward(self, input_ids, attention_mask, token_type_ids=None):
        return self.embedding(input_ids) * attention_mask[..., None]


class Pool(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, C)

    def forward(self, features, mask=None):
        return self.linear((features * mask[..., None]).sum(-2) / mask.sum(-1, keepdim=True))


class Recording(ff.ParticleLayer):
    mask = None

    def forward(self, features, mask=None):
        self.mask = mask
        return super().forward(features, mask)


@pytest.mark.parametrize("execution", ["sequential", "vectorised", "low_memory"])
@pytest.mark.parametrize("shared_head", [True, False])
def test_keyword_inputs_reach_the_trunk_and_the_mask_reaches_layer_and_head(execution, shared_head):
    torch.manual_seed(0)
    ids = torch.randint(11, (B, 7))
    mask = (torch.arange(7) < torch.randint(2, 8, (B, 1))).long()
    batch, y = {"input_ids": ids, "attention_mask": mask}, torch.randint(C, (B,))
    trunk, extractors = Tokens(), [nn.Linear(6, 5) for _ in range(N)]
    heads = Pool() if shared_head else [Pool() for _ in range(N)]
    layer = Recording(rank=2)
    ens = ff.Ensemble(extractors, heads, layer, trunk=trunk, execution=execution)
    logits = ens(**batch)
    assert layer.mask is mask
    each = heads if isinstance(heads, list) else [heads] * N
    expected = torch.stack([h(e(trunk(**batch)), mask) for h, e in zip(each, extractors, strict=True)])
    assert_close(logits, expected)
    assert_close(ens(batch), logits)
    assert_close(ens.logits(ens.features(**batch), mask), logits)
    assert_close(ens.predict(**batch), expected.softmax(-1).mean(0))
    assert_close(ens.uncertainty(**batch).total, ens.uncertainty(batch).total)
    FeatureWGD().loss(ens, batch, y).loss.backward()
    assert trunk.embedding.weight.grad is not None
    ff.calibrate(ens, [(batch, y)])
    with pytest.raises(ValueError, match="The trunk cannot compute input_ids: a int64 tensor of shape"):
        ens(input_ids=ids)


def test_keyword_inputs_reach_extractors_without_a_trunk():
    batch = {"input_ids": torch.randint(11, (B, 7)), "attention_mask": torch.ones(B, 7, dtype=torch.long)}
    extractors = [Tokens() for _ in range(N)]
    ens = ff.Ensemble(extractors, nn.Linear(6, C))
    expected = torch.stack([ens.head(e(**batch)) for e in extractors])
    for execution in ("sequential", "vectorised", "low_memory"):
        ens.execution = execution
        assert_close(ens(**batch), expected)
    members = ff.rank_one(Tokens(), N)
    ens = ff.Ensemble(members, nn.Linear(6, C))
    assert_close(ens(**batch), torch.stack([ens.head(m(**batch)) for m in members]))


def test_wrong_trunks_are_refused():
    with pytest.raises(ValueError, match="trunk must be a module"):
        ff.Ensemble([make_extractor()], make_head(), trunk="resnet")


@pytest.mark.parametrize("sharing", ["trunk", "LoRA", "rank one"])
def test_export_with_torch(sharing):
    """With any batch size."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.BatchNorm1d(4), nn.Tanh())
    shared = {"trunk": None, "LoRA": ff.lora(network, N, 2, ["0"]), "rank one": ff.rank_one(network, N)}[sharing]
    extractors = [copy.deepcopy(network) for _ in range(N)] if shared is None else shared
    trunk = nn.Linear(5, 5) if shared is None else None
    ens = ff.Ensemble(extractors, nn.Linear(4, C), ff.ParticleLayer(), trunk=trunk).eval()
    x = torch.randn(B, 5)
    exported = torch.export.export(ens, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},)).module()
    for batch in (x, x[:3], x[:1]):
        assert_close(exported(batch), ens(batch))
