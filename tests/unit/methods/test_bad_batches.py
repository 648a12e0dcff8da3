"""Batches that cannot be right are refused in one sentence: by every method's loss, for every task, and by predictions.

On a GPU nothing is read. PyTorch's "meta" device, whose tensors have no values, stands in for it here.
"""

import math
import re
import sys
from contextlib import nullcontext

import pytest
import torch
from helpers.short_runs import METHODS
from torch import nn
from torch.testing import assert_close

import featureflock as ff
from featureflock.core import value_checks
from featureflock.core.transport import NonFiniteError
from featureflock.methods import ADP, DICE, DeepEnsembles, FeatureWGD, Single
from featureflock.tasks import Classification, HeteroscedasticRegression, MultiLabel, Regression

B, D, H, C = 8, 6, 4, 3


class Pixels(nn.Module):
    """A head with one output for each of 2 × 2 pixels."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(H, 4 * C)

    def forward(self, h):
        return self.linear(h).unflatten(-1, (C, 2, 2))


LABELS = torch.arange(B) % C
TASKS = {
    "classes": (Classification(), lambda: nn.Linear(H, C), LABELS),
    "pixels": (Classification(ignore_index=255), Pixels, LABELS[:, None, None].expand(B, 2, 2).contiguous()),
    "labels": (MultiLabel(), lambda: nn.Linear(H, C), (torch.arange(B * C).view(B, C) % 2).float()),
    "numbers": (Regression(), lambda: nn.Linear(H, 1), torch.linspace(-1, 1, B)),
    "noisy numbers": (HeteroscedasticRegression(), lambda: nn.Linear(H, 2), torch.linspace(-1, 1, B)),
}


def build(method, task="classes"):
    likelihood, head, _ = TASKS[task]
    members = 1 if isinstance(method, Single) else 3
    extractor = lambda: nn.Sequential(nn.Linear(D, H), nn.Tanh())  # noqa: E731
    return method.build(extractor, head, members=members, train_size=B, task=likelihood)


def inputs():
    return torch.randn(B, D, generator=torch.Generator().manual_seed(0))


def one(x, value):
    x = x.clone()
    x.view(-1)[1] = value
    return x


BAD_INPUTS = {
    "NaN": (one(inputs(), math.nan), "The inputs contain NaN or infinity"),
    "infinity": (one(inputs(), -math.inf), "The inputs contain NaN or infinity"),
    "empty": (inputs()[:0], r"at least one example; got a tensor of shape \(0, 6\)"),
    "scalar": (torch.tensor(1.0), r"at least one example; got a tensor of shape \(\)"),
    "list": (inputs().tolist(), "takes tensors; got a list. Convert it with torch.as_tensor"),
    "tensors": ([*inputs()], "The extractor cannot compute a list of 8 tensors: "),
    "array": (inputs().numpy(), "takes tensors; got a NumPy array"),
    "none": (None, "takes tensors; got None"),
    "number": (3.0, "takes tensors; got a float"),
    "integers": (inputs().long(), r"cannot compute a int64 tensor of shape \(8, 6\) on cpu: "),
    "double": (inputs().double(), r"cannot compute a float64 tensor of shape \(8, 6\) on cpu: "),
    "wide": (torch.ones(B, D + 1), r"cannot compute a float32 tensor of shape \(8, 7\) on cpu: "),
}
ANY_TASK = {
    "list": (lambda y: y.tolist(), "targets as a tensor; got list"),
    "array": (lambda y: y.numpy(), "targets as a tensor; got ndarray"),
    "none": (lambda y: None, "targets as a tensor; got NoneType"),
    "empty": (lambda y: y[:0], "of at least one; got shape"),
    "scalar": (lambda y: y.flatten()[0], r"of at least one; got shape \(\)"),
    "short": (lambda y: y[:-1], "Outputs must have shape"),
    "complex": (lambda y: y + 0j, "needs"),
}
CLASSES = {
    "-100": (lambda y: one(y, -100), r"must be 0 to 2 for 3 outputs; got -100"),
    "3": (lambda y: one(y, 3), "must be 0 to 2 for 3 outputs; got 3"),
    "float": (lambda y: y.float(), "integer class indices"),
    "bool": (lambda y: y > 0, "integer class indices"),
}
NUMBERS = {
    "NaN": (lambda y: one(y, math.nan), "finite targets"),
    "infinity": (lambda y: one(y, math.inf), "finite targets"),
    "overflow": (lambda y: one(y.double(), 1e200), "finite targets"),
    "bool": (lambda y: y > 0, "real numbers"),
}
BAD_TARGETS = {
    "classes": ANY_TASK | CLASSES,
    "pixels": ANY_TASK | CLASSES,
    "labels": ANY_TASK
    | {
        "NaN": (lambda y: one(y, math.nan), r"outside of \[0, 1\]"),
        "-100": (lambda y: one(y, -100), r"outside of \[0, 1\]"),
        "2": (lambda y: one(y.long(), 2), r"outside of \[0, 1\]"),
    },
    "numbers": ANY_TASK | NUMBERS,
    "noisy numbers": ANY_TASK | NUMBERS,
}


def refused(message, function, *args):
    with pytest.raises(ValueError, match=message) as caught:
        function(*args)
    text = str(caught.value)
    assert "\n" not in text
    assert re.search(r"[.]$", text)


def methods_of(task):
    return [m for m in METHODS if not m.needs_classes or task == "classes"]


@pytest.mark.parametrize("task", TASKS)
def test_every_loss_refuses_bad_inputs_and_targets(task):
    for method in methods_of(task):
        ens, (_, _, y) = build(method, task), TASKS[task]
        before = {name: t.clone() for name, t in ens.state_dict().items()}
        for x, message in BAD_INPUTS.values():
            refused(message, method.loss, ens, x, y)
        for change, message in BAD_TARGETS[task].values():
            refused(message, method.loss, ens, inputs(), change(y))
        for name, tensor in ens.state_dict().items():
            assert torch.equal(tensor, before[name]), (method, name)
        assert method.loss(ens, inputs(), y).loss.isfinite()


@pytest.mark.parametrize("task", TASKS)
def test_predictions_and_calls_refuse_bad_inputs(task):
    ens = build(FeatureWGD(), task)
    for function in (ens, ens.features, ens.member_predictions, ens.predict, ens.uncertainty):
        for x, message in BAD_INPUTS.values():
            refused(message, function, x)
    mixed = ens.predict(inputs())
    assert all(part.isfinite().all() for part in (mixed if isinstance(mixed, tuple) else (mixed,)))


def test_keyword_inputs_are_checked_too_but_may_be_infinite():
    class Biased(nn.Linear):
        def forward(self, x, bias=None, scale=1):
            return super().forward(x) + (0 if bias is None else bias.clamp_min(-1e3)) * scale

    ens = ff.Ensemble([Biased(D, H) for _ in range(2)], nn.Linear(H, C))
    x, bias = inputs(), torch.full((B, 1), -math.inf)
    assert ens.predict(x, bias=bias, scale=2).isfinite().all()
    assert ens.predict({"x": x, "bias": bias}).isfinite().all()
    refused("NaN", ens.predict, {"x": one(x, math.nan)})
    refused("x is a list. Convert it", ens.predict, {"x": x.tolist()})
    refused("x is a NumPy array", ens.features, {"x": x.numpy()})
    refused("at least one example", ens.predict, {"x": x[:0]})
    refused("The extractor cannot compute no input: ", ens.predict)
    refused("The extractor cannot compute bias: a float32 tensor of shape", lambda: ens.predict(bias=bias))


def test_mistakes_in_a_network_are_not_blamed_on_the_input():
    class Broken(nn.Linear):
        def forward(self, x):
            return self.no_such_layer(x)

    class OutOfMemory(nn.Linear):
        def forward(self, x):
            raise torch.OutOfMemoryError

    for network, error in ((Broken, AttributeError), (OutOfMemory, torch.OutOfMemoryError)):
        with pytest.raises(error):
            ff.Ensemble([network(D, H)], nn.Linear(H, C))(inputs())


def test_members_whose_predictions_are_nan_are_named():
    ens = build(FeatureWGD())
    with torch.no_grad():
        ens.extractors[1][0].bias.fill_(math.nan)
    for function in (ens.predict, ens.uncertainty):
        with pytest.raises(NonFiniteError, match="predictions of member 1 contain NaN") as caught:
            function(inputs())
        assert caught.value.members == [1]


def test_infinite_logits_are_a_prediction():
    """A head may exclude a class with a logit of −∞."""

    class Excludes(nn.Linear):
        def forward(self, h):
            return torch.cat([super().forward(h), torch.full((len(h), 1), -math.inf)], 1)

    ens = ff.Ensemble([nn.Linear(D, H)], Excludes(H, C - 1))
    probs = ens.predict(inputs())
    assert_close(probs.sum(1), torch.ones(B))
    assert probs[:, -1].eq(0).all()
    assert all(part.isfinite().all() for part in ens.uncertainty(inputs()))


def test_ignored_targets_are_left_out_and_others_are_refused():
    task, _, y = TASKS["pixels"]
    outputs = torch.randn(3, B, C, 2, 2)
    ignoring = one(y, 255)
    assert_close(
        task.loss(outputs, ignoring),
        nn.functional.cross_entropy(outputs.flatten(0, 1), ignoring.repeat(3, 1, 1), ignore_index=255),
    )
    refused("got 254", task.loss, outputs, one(y, 254))
    refused(r"use Classification\(ignore_index=-100\)", Classification().loss, outputs, one(y, -100))
    with pytest.raises(ValueError, match="not for targets that are ignored"):
        DICE().check_task(task)


@pytest.mark.parametrize("task", TASKS)
def test_losses_of_bad_batches_are_nan_where_nothing_is_read(task, monkeypatch):
    """The path of a GPU, on values: `readable` is what distinguishes it from a CPU."""
    for module in [module for name, module in sys.modules.items() if name.startswith("featureflock.")]:
        if hasattr(module, "readable"):
            monkeypatch.setattr(module, "readable", lambda x: False)
    for method in methods_of(task):
        ens, (_, _, y) = build(method, task), TASKS[task]
        assert method.loss(ens, inputs(), y).loss.isfinite()
        for name in ("-100", "3", "NaN", "infinity", "2", "overflow"):
            if name in BAD_TARGETS[task]:
                bad = BAD_TARGETS[task][name][0](y)
                assert method.loss(ens, inputs(), bad).loss.isnan(), (method, name)
                members = ens.task.member_predictions(ens(inputs()), ens.log_variance)
                assert ens.task.nll(members, bad).isnan().any()
                assert ens.task.score_terms(members, bad).isnan().any()
        assert method.loss(ens, one(inputs(), math.inf), y).loss.isnan(), method


def test_nothing_is_read_from_a_device(monkeypatch):
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # not available for this device
    for task, (likelihood, _, y) in TASKS.items():
        for method in methods_of(task):
            ens = build(method, task).to("meta")
            output = method.loss(ens, inputs().to("meta"), y.to("meta"))
            assert output.loss.is_meta
            ens.predict(inputs().to("meta"))
            ens.uncertainty(inputs().to("meta"))
            ens.logits(ens.features(inputs().to("meta")))
            likelihood.nll(likelihood.member_predictions(output.outputs, ens.log_variance), y.to("meta"))
    particles = torch.randn(3, 5, device="meta")
    assert ff.transport(particles, particles, prior=ff.Cauchy(), rank=2).is_meta


def test_what_a_gpu_refuses_is_raised_at_a_later_check(monkeypatch):
    arrived = []
    monkeypatch.setattr(value_checks, "_VERDICTS", value_checks._VERDICTS.__class__())
    monkeypatch.setattr(value_checks, "_copy_in_background", lambda x: (lambda: len(arrived) > 0, torch.tensor(True)))

    class OnGPU:
        device = torch.device("cuda")

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    value_checks.refuse_later(OnGPU(), "The inputs contain NaN.")
    value_checks.raise_refused()  # the copy is still on its way
    arrived.append(True)
    refused("The inputs contain NaN. This was found in an earlier batch.", value_checks.raise_refused)
    value_checks.raise_refused()  # once


def test_targets_on_another_device_are_refused():
    refused("targets on cpu; move one", Classification().loss, torch.zeros(3, B, C, device="meta"), LABELS)


def test_checks_work_inside_vmap():
    ens = build(DeepEnsembles()).eval()
    x = inputs()
    each = torch.func.vmap(lambda row: ens(row[None])[:, 0], out_dims=1)(x)
    assert_close(each, ens(x))


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ([[1.0]], "takes a tensor"),
        (torch.zeros(3, 0, 2, requires_grad=True), "at least one member and one data point"),
        (torch.zeros(3, requires_grad=True), "at least one member and one data point"),
        (torch.full((2, 2, 2), math.nan, requires_grad=True), "features of members 0, 1 contain NaN"),
        (torch.zeros(2, 2, 2, dtype=torch.complex64, requires_grad=True), "real numbers"),
    ],
    ids=["list", "empty", "flat", "NaN", "complex"],
)
def test_the_layer_refuses(features, message):
    layer = ff.ParticleLayer()
    refused(message, layer, features)
    refused(message, lambda: ff.particle_loss(features, lambda h: h.real.mean(), layer))


def test_particle_loss_refuses_what_is_no_mean_loss():
    features = torch.randn(3, B, H, requires_grad=True)
    refused("a function of them and a ParticleLayer", ff.particle_loss, features, lambda h: h.mean(), nn.Identity())
    refused("a function of them and a ParticleLayer", ff.particle_loss, features, 1.0, ff.ParticleLayer())
    refused("one number; got shape", ff.particle_loss, features, lambda h: h, ff.ParticleLayer())
    refused("one number; got float", ff.particle_loss, features, lambda h: 1.0, ff.ParticleLayer())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_transport_refuses_values(bad):
    h = torch.randn(3, 5)
    refused("particles of member 0 contain NaN", lambda: ff.transport(one(h, bad), h, prior=ff.Cauchy()))
    refused("loglik_grad of member 0 contain NaN", lambda: ff.transport(h, one(h, bad), prior=ff.Cauchy(), rank=2))


def test_adp_and_dice_refuse_labels_before_they_use_them():
    for method in (ADP(), DICE()):
        for training in (True, False):
            ens = build(method).train(training)
            refused("got -100", method.loss, ens, inputs(), one(LABELS, -100))
            if isinstance(method, DICE):
                assert ens.layer.seen == 0
