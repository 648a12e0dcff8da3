"""ParticleLayer: its backward pass, when it is the identity, and its use in ordinary training loops."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import featureflock as ff

N, B, H, C = 4, 6, 5, 3
SETTINGS = {"prior": ff.Cauchy(0.2), "rank": 3}


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(len(shape)))


def head(dtype: torch.dtype = torch.float64) -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return nn.Linear(H, C).to(dtype)


LABELS = torch.arange(B) % C


def mean_loss(logits: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), LABELS.repeat(len(logits)))


def data_gradient(h: torch.Tensor, classifier: nn.Module) -> torch.Tensor:
    """g_i: the gradient of the summed log-likelihood of each member."""
    x = h.detach().clone().requires_grad_()
    log_p = classifier(x).log_softmax(-1)
    labels = LABELS.to(h.device).view(1, -1, 1).expand(len(h), -1, 1)
    return torch.autograd.grad(log_p.gather(-1, labels).sum(), x)[0]


def expected(h: torch.Tensor, classifier: nn.Module, **settings: object) -> torch.Tensor:
    """−v/B."""
    g = data_gradient(h, classifier)
    v = ff.transport(h.detach().flatten(1), g.flatten(1), **{**SETTINGS, **settings})
    return -v.view_as(h) / B


def test_turns_the_gradient_of_the_mean_loss_into_the_direction_of_the_paper():
    h, classifier = draw(N, B, H).requires_grad_(), head()
    mean_loss(classifier(ff.ParticleLayer(**SETTINGS)(h))).backward()
    assert_close(h.grad, expected(h, classifier))
    # The head, after the layer, gets the ordinary gradient.
    plain = head()
    mean_loss(plain(h.detach())).backward()
    assert_close(classifier.weight.grad, plain.weight.grad)


@pytest.mark.parametrize(
    "settings",
    [
        {"kernel": ff.RBF("official"), "subspace": "weakest"},
        {"rank": None, "rule": ff.SteinWGD()},
        {"rule": ff.SVGD(), "prior": ff.Normal(0.1)},
        {"rule": ff.MAP()},
    ],
)
def test_every_setting_reaches_the_backward_pass(settings):
    h, classifier = draw(N, B, H).requires_grad_(), head()
    mean_loss(classifier(ff.ParticleLayer(**{**SETTINGS, **settings})(h))).backward()
    assert_close(h.grad, expected(h, classifier, **settings))


def test_one_member_gets_the_prior_and_no_repulsion():
    h, classifier = draw(1, B, H).requires_grad_(), head()
    mean_loss(classifier(ff.ParticleLayer(prior=ff.Normal(0.2), rank=1)(h))).backward()
    assert_close(h.grad, -(data_gradient(h, classifier) - 0.2 * h.detach()) / B)


def test_is_the_identity_unless_training():
    layer = ff.ParticleLayer()
    h = draw(N, B, H).requires_grad_()
    assert torch.equal(layer(h), h)
    assert layer.eval()(h) is h
    layer.train()
    with torch.no_grad():
        assert layer(h) is h
    assert layer(h.detach()) is not None
    plain = draw(N, B, H)
    assert layer(plain) is plain
    impossible = ff.ParticleLayer(rank=9).eval()  # no checks where it is the identity
    assert impossible(h) is h


@pytest.mark.parametrize("scale", [1 / 4, 65536.0, torch.tensor(8.0)])
def test_a_scaled_loss_scales_the_result(scale):
    h, classifier = draw(N, B, H).requires_grad_(), head()
    layer = ff.ParticleLayer(**SETTINGS, scale=scale)
    (mean_loss(classifier(layer(h))) * scale).backward()
    assert_close(h.grad, expected(h, classifier) * scale)


def test_scale_can_change_between_steps():
    layer, classifier = ff.ParticleLayer(**SETTINGS), head()
    for scale in (2.0, 1024.0):
        layer.scale = scale
        h = draw(N, B, H).requires_grad_()
        (mean_loss(classifier(layer(h))) * scale).backward()
        assert_close(h.grad, expected(h, classifier) * scale)


def test_micro_batches_accumulate_to_the_mean_of_their_directions():
    classifier, k = head(), 3
    layer = ff.ParticleLayer(**SETTINGS, scale=1 / k)
    weight = torch.eye(H, dtype=torch.float64).requires_grad_()  # an "extractor" that all batches go through
    batches = [draw(N, B, H) + i for i in range(k)]
    for x in batches:
        (mean_loss(classifier(layer(x @ weight))) / k).backward()
    each = [torch.einsum("nbi,nbj->ij", x, expected(x, classifier)) for x in batches]
    assert_close(weight.grad, sum(each) / k)


def test_grad_scaler_unscales_to_the_right_update_and_skips_an_overflow():
    classifier = head(torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    layer = ff.ParticleLayer(**SETTINGS)
    h = nn.Parameter(draw(N, B, H, dtype=torch.float32))
    start = h.detach().clone()
    optimiser = torch.optim.SGD([h], lr=1.0)
    layer.scale = scaler.get_scale()
    scaler.scale(mean_loss(classifier(layer(h)))).backward()
    scaler.step(optimiser)
    scaler.update()
    assert_close(h.detach(), start - expected(start, classifier), rtol=1e-4, atol=1e-6)

    before = h.detach().clone()
    optimiser.zero_grad()
    layer.scale = scaler.get_scale()
    assert layer.scale == 2048.0
    scaler.scale(mean_loss(classifier(layer(h))) * torch.tensor(math.inf)).backward()
    scaler.step(optimiser)
    scaler.update()
    assert torch.equal(h.detach(), before)
    assert scaler.get_scale() == 1024.0


def test_a_non_finite_gradient_stays_non_finite():
    h = draw(N, B, H).requires_grad_()
    (ff.ParticleLayer(**SETTINGS)(h).sum() * math.nan).backward()
    assert h.grad.isnan().all()


def test_tokens_count_as_data_with_count():
    tokens = 2
    h = draw(N, B // tokens, tokens, H).requires_grad_()
    classifier = head()
    logits = classifier(ff.ParticleLayer(**SETTINGS, count=B)(h))
    mean_loss(logits.flatten(1, 2)).backward()
    flat = h.detach().flatten(1, 2)
    assert_close(h.grad.flatten(1, 2), expected(flat, classifier))


def test_feature_maps_channels_last_and_non_contiguous_input():
    maps = draw(N, B, H, 2, 2)
    variants = {
        "contiguous": maps,
        "channels_last": torch.stack([m.to(memory_format=torch.channels_last) for m in maps]),
        "members last": maps.movedim(0, -1).contiguous().movedim(-1, 0),
        "strided": torch.stack([maps, maps], dim=2)[:, :, 0],
    }
    layer, classifier = ff.ParticleLayer(**SETTINGS), head()
    grads = {}
    for name, x in variants.items():
        x = x.detach().requires_grad_()
        out = layer(x)
        assert torch.equal(out, x)
        mean_loss(classifier(out.mean((-2, -1)))).backward()
        grads[name] = x.grad
    g = data_gradient(maps.mean((-2, -1)), classifier)[..., None, None].expand_as(maps) / 4
    v = ff.transport(maps.flatten(1), g.flatten(1), **SETTINGS).view_as(maps)
    for grad in grads.values():
        assert_close(grad, -v / B)


def test_bfloat16_autocast():
    """Under autocast the features and their gradient are rounded to bfloat16, the n × n algebra is not."""
    x = draw(B, H, dtype=torch.float32)
    extractors = nn.ModuleList(nn.Linear(H, H) for _ in range(N))
    classifier, layer = head(torch.float32), ff.ParticleLayer(**SETTINGS)
    seen = []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = torch.stack([f(x) for f in extractors])
        h.register_hook(seen.append)
        out = layer(h)
        out.register_hook(seen.append)
        loss = mean_loss(classifier(out).float())
    loss.backward()
    arrived, handed_on = seen
    assert h.dtype == arrived.dtype == handed_on.dtype == torch.bfloat16
    g = -arrived.double() * N * B
    v = ff.transport(h.detach().double().flatten(1), g.flatten(1), **SETTINGS)
    assert_close(handed_on, (-v / B).view_as(h).bfloat16(), rtol=0, atol=0)


def test_the_next_module_can_work_in_place():
    h, classifier = draw(N, B, H).requires_grad_(), head()
    inplace = nn.Sequential(nn.ReLU(inplace=True), classifier)
    mean_loss(inplace(ff.ParticleLayer(**SETTINGS)(h))).backward()
    assert_close(h.grad, expected(h, nn.Sequential(nn.ReLU(), classifier)))


def test_rows_of_a_batch_interact_only_through_their_member():
    """Members are particles, data points are not: shuffling the batch shuffles the result."""
    h, classifier = draw(N, B, H), head()
    order = torch.randperm(B, generator=torch.Generator().manual_seed(0))
    grads = []
    for rows in (torch.arange(B), order):
        x = h[:, rows].clone().requires_grad_()
        F.cross_entropy(classifier(ff.ParticleLayer(**SETTINGS)(x)).flatten(0, 1), LABELS[rows].repeat(N)).backward()
        grads.append(x.grad)
    assert_close(grads[1], grads[0][:, order])


@pytest.mark.parametrize(
    ("layer", "shape", "words"),
    [
        (ff.ParticleLayer(rank=5), (4, 6, 5), "rank=5 exceeds the 4 members"),
        (ff.ParticleLayer(), (4,), "members, batch"),
        (ff.ParticleLayer(), (4, 0, 5), "at least one member and one data point"),
    ],
)
def test_error_messages(layer, shape, words):
    with pytest.raises(ValueError, match=words):
        layer(torch.zeros(shape, requires_grad=True))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_features_raise(bad):
    h = draw(N, B, H)
    h[2, 1, 0] = bad
    with pytest.raises(ValueError, match="features of member 2 contain NaN or infinity"):
        ff.ParticleLayer()(h.requires_grad_())


@pytest.mark.parametrize("options", [{"count": 0}, {"scale": 0.0}, {"scale": math.nan}])
def test_invalid_factors_raise(options):
    with pytest.raises(ValueError, match="positive finite"):
        ff.ParticleLayer(**options)
    layer = ff.ParticleLayer()
    vars(layer).update(options)
    with pytest.raises(ValueError, match="positive finite"):
        layer(draw(N, B, H).requires_grad_())


def test_repr():
    assert "rank=3" in repr(ff.ParticleLayer(**SETTINGS))
    assert "count=9" in repr(ff.ParticleLayer(count=9))


def test_torch_func_gives_the_same_gradient():
    h, classifier = draw(N, B, H), head()
    layer = ff.ParticleLayer(**SETTINGS)
    assert_close(torch.func.grad(lambda x: mean_loss(classifier(layer(x))))(h), expected(h, classifier))


def test_a_tensor_scale_is_read_in_the_forward_pass():
    h, classifier = draw(N, B, H).requires_grad_(), head()
    scale = torch.tensor(8.0)
    layer = ff.ParticleLayer(**SETTINGS, scale=scale)
    loss = mean_loss(classifier(layer(h))) * 8.0
    scale.fill_(1.0)
    loss.backward()
    assert_close(h.grad, 8 * expected(h, classifier))


def test_features_with_the_batch_first_are_refused_when_the_batch_size_changes():
    """(batch, members, H): the first dimension varies with the last batch of an epoch, the second does not."""
    layer, members = ff.ParticleLayer(), 3
    layer(torch.randn(8, members, 5, requires_grad=True))
    with pytest.raises(ValueError, match=r"features of 8 and then of 6 members.*transpose them"):
        layer(torch.randn(6, members, 5, requires_grad=True))
    for batch in (8, 6, 6, 1):
        ff.ParticleLayer()(torch.randn(members, batch, 5, requires_grad=True))
    layer = ff.ParticleLayer()
    for batch in (8, 6):
        layer(torch.randn(members, batch, 5, requires_grad=True))
