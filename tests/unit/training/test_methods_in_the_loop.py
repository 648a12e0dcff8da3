"""Methods in the training loop: extra optimisers, data order, extra networks in checkpoints, LossOutput."""

import json
import os
import signal
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from helpers.short_runs import METHODS, SHORT, same, weights
from helpers.small_ensembles import train_small
from torch import Tensor, nn

import featureflock as ff
from featureflock.evaluation import EvaluationProtocol, evaluate_runs
from featureflock.evaluation.grad_cam import class_activation_maps
from featureflock.methods import ADP, DICE, DeepEnsembles, LossOutput, Method, Single
from featureflock.reports import write_report
from featureflock.training import Reporter, TrainingInterrupted, train
from featureflock.training.checkpoint import read_newest


@dataclass(frozen=True)
class Judged(Method):
    """A custom method with an extra network, its own optimiser, and batches balanced over classes."""

    rate: float = 1e-3

    def assemble(self, extractors: list[nn.Module], heads: list[nn.Module], train_size: int | None) -> ff.Ensemble:
        ens = ff.Ensemble(extractors, heads)
        ens.judge = nn.Linear(10, 1)
        return ens

    def loss(self, ens: ff.Ensemble, x: Tensor, y: Tensor) -> LossOutput:
        LABELS.append(y.clone())
        logits = ens(x)
        spread = ens.judge(logits.detach().softmax(-1)).var()
        return LossOutput(sum(F.cross_entropy(each, y) for each in logits) - spread, logits)

    def extra_optimisers(self, ens: ff.Ensemble) -> list[torch.optim.Optimizer]:
        return [torch.optim.Adam(ens.judge.parameters(), lr=self.rate)]

    def order(self, shuffled: Tensor, labels: Tensor) -> Tensor:
        """One example of each class in turn."""
        classes = [shuffled[labels[shuffled] == label] for label in labels.unique()]
        rounds = min(len(each) for each in classes)
        return torch.stack([each[:rounds] for each in classes], 1).flatten()


LABELS: list[Tensor] = []


def interrupt_at(*steps: int) -> Reporter:
    class Interrupt(Reporter):
        def step(self, step, averages):
            if step in steps:
                os.kill(os.getpid(), signal.SIGINT)

    return Interrupt()


def end_of(folder):
    """Metrics, result and last checkpoint of a finished run, without times."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        del line["seconds"], line["images_per_second"]
    return (
        lines,
        json.loads((folder / "result.json").read_text())["test"],
        read_newest(folder / "checkpoints")[0].tensors,
    )


@pytest.mark.parametrize("method", [ADP(), DICE(ramp_epochs=1.5), Judged()], ids=lambda m: type(m).__name__)
def test_an_interrupted_run_resumes_bit_identically(method, tmp_path):
    recipe = replace(SHORT, method=method, epochs=3, decay_epochs=(2,))
    train(recipe, tmp_path / "whole")
    for step in (2, 7, 13):  # in the first, second and third epoch
        with pytest.raises(TrainingInterrupted):
            train(recipe, tmp_path / "parts", resume=step > 2, reporter=interrupt_at(step))
    train(recipe, tmp_path / "parts", resume=True)
    *whole, tensors = end_of(tmp_path / "whole")
    *parts, others = end_of(tmp_path / "parts")
    assert whole == parts
    assert same(tensors, others)
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "parts"))


def test_a_checkpoint_contains_the_state_of_all_optimisers(tmp_path):
    train(replace(SHORT, method=DICE()), tmp_path)
    *_, tensors = end_of(tmp_path)
    of_discriminators = [name for name in tensors if name.startswith("optimiser/layer.discriminators.")]
    assert {name.rsplit("/", 1)[1] for name in of_discriminators} == {"square_avg", "step"}
    of_classes = [name for name in tensors if name.startswith("optimiser/layer.class_gaussians/")]
    assert {name.rsplit("/", 1)[1] for name in of_classes} == {"exp_avg", "exp_avg_sq", "step"}
    others = {name for name in tensors if name.startswith("optimiser/")} - {*of_discriminators, *of_classes}
    assert {name.rsplit("/", 1)[1] for name in others} == {"momentum_buffer"}
    assert int(tensors["ensemble/layer.seen"]) == 2 * 240


def test_the_recipe_does_not_optimise_parameters_with_an_extra_optimiser(tmp_path):
    """At a learning rate of 0 of the extra optimiser they do not change, despite the recipe's weight decay."""
    for rate in (0.0, 1e-3):
        recipe = replace(SHORT, method=Judged(rate), weight_decay=0.1)
        train(recipe, tmp_path / str(rate))
        trained = ff.load(tmp_path / str(rate) / "ensemble")
        fresh = recipe.method.build(lambda: nn.Linear(1, 1), lambda: nn.Linear(1, 1), members=3)
        assert torch.equal(trained.judge.weight, fresh.judge.weight) == (rate == 0)


def test_learning_rates_of_extra_optimisers_are_not_decayed(tmp_path, monkeypatch):
    rates: list[tuple[float, float]] = []
    step = torch.optim.Adam.step
    monkeypatch.setattr(torch.optim.Adam, "step", lambda self: (rates.append(self.param_groups[0]["lr"]), step(self)))
    train(replace(SHORT, method=Judged(0.007), epochs=3, decay_epochs=(1, 2)), tmp_path)
    assert set(rates) == {0.007}


def test_batches_follow_the_order_of_the_method(tmp_path):
    LABELS.clear()
    train(replace(SHORT, method=Judged(), batch=20, epochs=2), tmp_path)
    assert len(LABELS) == 24
    for y in LABELS:
        assert torch.bincount(y, minlength=10).tolist() == [2] * 10
    first, second = torch.cat(LABELS[:12]), torch.cat(LABELS[12:])
    assert torch.equal(first, second)  # classes alternate in the same way in both epochs
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [12, 24]


@pytest.mark.parametrize(
    ("result", "got"),
    [
        (lambda loss, outputs: loss, "got Tensor"),
        (lambda loss, outputs: LossOutput(loss, outputs[0]), r"got shapes \(\) and \(50, 10\)"),
        (lambda loss, outputs: LossOutput(outputs.mean(0), outputs), r"got shapes \(50, 10\) and \(3, 50, 10\)"),
    ],
)
def test_a_loss_that_is_not_a_loss_output_is_refused(result, got, tmp_path):
    class Wrong(DeepEnsembles):
        def loss(self, ens, x, y):
            return result(*super().loss(ens, x, y))

    with pytest.raises(ValueError, match=rf"Wrong.loss must return LossOutput\(loss, outputs\).*{got}"):
        train(replace(SHORT, method=Wrong()), tmp_path)


def test_all_eight_methods_appear_in_one_table(tmp_path):
    methods = [method for method in METHODS if not isinstance(method, Single)]
    tiny = {"epochs": 1, "subset": 60, "validation": 40}
    folders = train_small(tmp_path / "runs", methods, [0], members=2, **tiny)
    folders += train_small(tmp_path / "runs", [Single()], [0], members=1, **tiny)
    evaluation = evaluate_runs(folders, EvaluationProtocol(corruptions=("fog",), severities=(3,), maps=4))
    write_report(evaluation.results, evaluation.images, tmp_path / "report")
    table = (tmp_path / "report" / "table.md").read_text()
    for method in METHODS:
        assert f"| {method.title} " in table
    results = json.loads((tmp_path / "report" / "results.json").read_text())
    assert len(results["runs"]) == 8


def test_activation_maps_of_dice_use_the_means(tmp_path):
    (folder,) = train_small(tmp_path, [DICE()], [0], epochs=1)
    ens = ff.load(folder / "ensemble").train()
    x = torch.rand(3, 1, 8, 8)
    result = class_activation_maps(ens, x)
    assert torch.equal(result.maps, class_activation_maps(ens, x).maps)  # without sampling noise
    assert torch.equal(result.classes[0], ens.predict(x).argmax(-1))
