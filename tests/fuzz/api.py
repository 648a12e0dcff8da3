"""Targets of the Python API: valid arguments, of which one or two are changed."""

import dataclasses
import math
from typing import get_args, get_type_hints

import torch
from helpers.short_runs import METHODS, SHORT
from hypothesis import strategies as st
from torch import nn

import featureflock as ff
from featureflock import evaluation
from featureflock.methods import Method, Single
from featureflock.tasks import Classification, HeteroscedasticRegression, MultiLabel, Regression
from fuzz.attempts import attempt, target
from fuzz.mutations import damaged_argument

N, B, D, H, C = 3, 8, 6, 4, 3
LABELS = torch.arange(B) % C
TASKS = {
    "classes": (Classification(), C, LABELS),
    "tokens": (Classification(dim=-1, ignore_index=-100), C, torch.stack([LABELS, LABELS.flip(0)], 1)),
    "labels": (MultiLabel(), C, (torch.arange(B * C).view(B, C) % 2).float()),
    "numbers": (Regression(), 1, torch.linspace(-1, 1, B)[:, None]),
    "noisy numbers": (HeteroscedasticRegression(), 2, torch.linspace(-1, 1, B)[:, None]),
}


def _inputs(tokens: bool = False) -> torch.Tensor:
    x = torch.randn(B, D, generator=torch.Generator().manual_seed(1))
    return torch.stack([x, -x], 1) if tokens else x


def _build(method, task):
    likelihood, outputs, _ = TASKS[task]
    extractor = lambda: nn.Sequential(nn.Linear(D, H), nn.Tanh())  # noqa: E731
    members = 1 if isinstance(method, Single) else N
    return method.build(extractor, lambda: nn.Linear(H, outputs), members=members, train_size=B, task=likelihood)


def _damaged(data, **valid):
    """The arguments, with one or two of them changed."""
    names = data.draw(st.lists(st.sampled_from(sorted(valid)), min_size=1, max_size=2, unique=True))
    return valid | {name: data.draw(damaged_argument(valid[name])) for name in names}


@target("losses of all methods")
def losses(data) -> None:
    task = data.draw(st.sampled_from(sorted(TASKS)))
    method = data.draw(st.sampled_from([m for m in METHODS if not m.needs_classes or task == "classes"]))
    ens = _build(method, task)
    arguments = _damaged(data, x=_inputs(task == "tokens"), y=TASKS[task][2])

    def step():
        loss = method.loss(ens, arguments["x"], arguments["y"]).loss
        loss.backward()
        return loss

    attempt(step)


@target("predictions")
def predictions(data) -> None:
    task = data.draw(st.sampled_from(sorted(TASKS)))
    ens = _build(METHODS[2], task)
    x = _damaged(data, x=_inputs(task == "tokens"))["x"]
    execution = data.draw(st.sampled_from(["sequential", "vectorised", "low_memory"]))
    ens.execution = execution
    for function in (ens.predict, ens.uncertainty, ens.features):
        attempt(lambda function=function: function(x))


@target("transport and ParticleLayer")
def transport(data) -> None:
    h = torch.randn(N, 5, generator=torch.Generator().manual_seed(2))
    rank = data.draw(st.sampled_from([None, 1, 2, 3, 4, 0, -1, 1.5, True, "2"]))
    repulsion = data.draw(st.sampled_from([1.0, 0.0, 10.0, -1.0, math.nan, math.inf, "1"]))
    arguments = _damaged(data, particles=h, loglik_grad=h.flip(0))
    attempt(lambda: ff.transport(**arguments, prior=ff.Cauchy(), rank=rank, repulsion=repulsion))
    features = data.draw(damaged_argument(torch.randn(N, B, H)))
    if isinstance(features, torch.Tensor) and features.is_floating_point():
        features = features.detach().clone().requires_grad_()

    def layer():
        loss = ff.particle_loss(features, lambda z: z.float().square().mean(), ff.ParticleLayer(rank=rank))
        if loss.requires_grad:
            loss.backward()
        return loss

    attempt(layer, nan_allowed=isinstance(features, torch.Tensor) and not features.requires_grad)  # the loss is ours


def _probs(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3)).double().softmax(-1)


METRICS = {
    "accuracy": ("probs", "labels"),
    "nll": ("probs", "labels"),
    "brier": ("probs", "labels"),
    "ece": ("probs", "labels"),
    "reliability": ("probs", "labels"),
    "risk_coverage": ("probs", "labels"),
    "aurc": ("probs", "labels"),
    "scores": ("log_probs", "labels"),
    "calibrated": ("log_probs", "labels"),
    "fit_temperature": ("log_probs", "labels"),
    "tempered": ("log_probs", "temperature"),
    "average": ("member_log_probs",),
    "member_accuracy": ("member_probs", "labels"),
    "disagreement": ("member_probs",),
    "member_diversity": ("member_probs",),
    "mutual_information": ("member_probs",),
    "predictive_variance": ("member_probs",),
    "out_of_distribution": ("member_probs", "other_probs"),
    "detection": ("uncertainty", "other_uncertainty"),
    "rmse": ("means", "targets"),
    "mixture_nll": ("means", "variances", "targets"),
    "crps": ("means", "variances", "targets"),
    "interval_coverage": ("means", "variances", "targets"),
    "regression_calibration_error": ("means", "variances", "targets"),
    "multilabel_scores": ("label_probs", "yes_or_no"),
    "mean_iou": ("pixel_probs", "pixels"),
}
"""Functions of `featureflock.evaluation`, with the names of valid arguments."""
VALID = {
    "probs": _probs(B, C),
    "log_probs": _probs(B, C).log(),
    "member_probs": _probs(N, B, C),
    "other_probs": _probs(N, B - 1, C),
    "member_log_probs": _probs(N, B, C).log(),
    "labels": LABELS,
    "temperature": 1.5,
    "uncertainty": torch.linspace(0, 1, B),
    "other_uncertainty": torch.linspace(0.5, 2, B + 1),
    "means": torch.linspace(-1, 1, N * B).view(N, B),
    "variances": torch.linspace(0.5, 1, N * B).view(N, B),
    "targets": torch.linspace(-1, 1, B),
    "label_probs": _probs(B, C),
    "yes_or_no": (torch.arange(B * C).view(B, C) % 2),
    "pixel_probs": _probs(B, 2, 2, C).movedim(-1, 1),
    "pixels": LABELS[:, None, None].expand(B, 2, 2).contiguous(),
}


@target("metrics")
def metrics(data) -> None:
    name = data.draw(st.sampled_from(sorted(METRICS)))
    names = METRICS[name]
    arguments = _damaged(data, **{each: VALID[each] for each in names})
    attempt(lambda: getattr(evaluation, name)(*(arguments[each] for each in names)), nan_allowed=name == "reliability")


@target("evaluate and calibrate")
def evaluate(data) -> None:
    task, predicted, targets = data.draw(
        st.sampled_from(
            [
                (Classification(), "member_probs", "labels"),
                (MultiLabel(), "member_probs", "yes_or_no"),
                (Regression(variance=1.0), "means", "targets"),
            ]
        )
    )
    arguments = _damaged(data, predictions=VALID[predicted], targets=VALID[targets])
    values = arguments["predictions"]
    values = (values, VALID["variances"]) if task.kind == "regression" else values
    attempt(lambda: ff.evaluate(values, arguments["targets"], task))
    ens = _build(METHODS[1], "classes")
    batch = _damaged(data, x=_inputs(), y=LABELS)
    attempt(lambda: ff.calibrate(ens, [(batch["x"], batch["y"])]))


SETTINGS = (0, 1, -1, 2.5, math.nan, math.inf, -math.inf, -0.0, 1e-300, 1e300, 10**30, 3, 0.5, 4_000_000)
COMPONENTS = [ff.Cauchy, ff.Normal, ff.RBF, ff.WGD, ff.SVGD, ff.SteinWGD, Regression, Classification]
COMPONENTS += [type(method) for method in METHODS]


def _numbers(data, component) -> dict[str, float]:
    """Any numbers for one or two of the fields that are numbers."""
    hints = get_type_hints(component)
    kinds = {field.name: {hints[field.name], *get_args(hints[field.name])} for field in dataclasses.fields(component)}
    names = [name for name, each in kinds.items() if {int, float} & each and ... not in each]
    chosen = data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=2, unique=True)) if names else []
    return {name: data.draw(st.sampled_from(SETTINGS)) for name in chosen}


@target("settings of components")
def components(data) -> None:
    """Priors, kernels, rules, tasks and methods with any numbers in their fields."""
    component = data.draw(st.sampled_from(COMPONENTS))
    values = _numbers(data, component)
    made = attempt(lambda: component(**values))
    if isinstance(made, Method):
        attempt(lambda: _build(made, "classes"))


@target("settings of a recipe")
def recipe(data) -> None:
    values = _numbers(data, type(SHORT))
    attempt(lambda: dataclasses.replace(SHORT, **values))
