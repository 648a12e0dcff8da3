"""FlockModule under Lightning's own Trainer: every flag gives the update of the whole batch.

Shapes: n members, B examples, H features, C classes.
"""

import os
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import featureflock as ff
from featureflock.methods import ADP, DICE, DeepEnsembles, FeatureMAP, FeatureWGD, FunctionWGD, WeightWGD
from featureflock.tasks import Regression
from integrations.processes import run_in_two_processes

lightning = pytest.importorskip("lightning.pytorch", reason="Lightning is not installed; run make test-integrations")
from featureflock.integrations import FlockModule  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
N, H, C, EXAMPLES, BATCH = 3, 6, 4, 48, 12
REPULSION = {"repulsion": 20.0, "rank": 2}
METHODS = [FeatureWGD(**REPULSION), FunctionWGD(**REPULSION), WeightWGD(repulsion=1e4, rank=2), ADP(), FeatureMAP()]


def data():
    x = torch.randn(EXAMPLES, H, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, torch.arange(EXAMPLES) % C)


def build(method, dropout=0.0, seed=0):
    def extractor():
        return nn.Sequential(nn.Linear(H, H), nn.Tanh(), nn.Dropout(dropout))

    return method.build(extractor, lambda: nn.Linear(H, C), members=N, seed=seed, train_size=EXAMPLES)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def trainer(**options):
    quiet = ("enable_progress_bar", "enable_model_summary", "logger", "enable_checkpointing")
    defaults = {"accelerator": "cpu", "max_epochs": 2, "num_sanity_val_steps": 0, **dict.fromkeys(quiet, False)}
    return lightning.Trainer(**{**defaults, **options})


def train(method, batch=BATCH, sampler=None, batches=None, **options):
    """Weights after training with flags of the Trainer."""
    torch.manual_seed(3)
    module = FlockModule(build(method), method=method, optimiser=sgd)
    order = {"batch_size": batch, "sampler": sampler} if batches is None else {"batch_sampler": batches}
    trainer(**options).fit(module, DataLoader(data(), **order))
    return dict(module.ensemble.named_parameters())


def loop(method, context=None, scaler=None, clip=None):
    """Weights after an ordinary loop."""
    ens = build(method)
    optimiser = sgd(ens.parameters())
    for _ in range(2):
        for x, y in DataLoader(data(), batch_size=BATCH):
            optimiser.zero_grad()
            with context or torch.enable_grad():
                loss = method.loss(ens, x, y).loss
            (loss if scaler is None else scaler.scale(loss)).backward()
            if scaler is not None:
                scaler.unscale_(optimiser)
            if clip is not None:
                nn.utils.clip_grad_norm_(ens.parameters(), clip)
            optimiser.step() if scaler is None else scaler.step(optimiser)
            scaler and scaler.update()
    return dict(ens.named_parameters())


def assert_same(actual, expected, **tolerance):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert_close(actual[name], value, **tolerance)


@pytest.mark.parametrize("method", [*METHODS, DICE(ramp_epochs=0)], ids=lambda method: method.title)
def test_accumulated_micro_batches_are_one_large_batch(method):
    whole = train(method, precision="64-true")
    parts = train(method, batch=BATCH // 3, accumulate_grad_batches=3, precision="64-true")
    assert_same(parts, whole)


def test_a_group_of_fewer_micro_batches_ends_an_epoch():
    """Lightning divides by the number of micro-batches of a full group: the last, of one, has a third of the step."""
    method = FeatureWGD(**REPULSION)
    rows = TensorDataset(*data()[:16])
    module = FlockModule(build(method), method=method, optimiser=lambda p: torch.optim.SGD(p, lr=0.1))
    trainer(max_epochs=1, accumulate_grad_batches=3).fit(module, DataLoader(rows, batch_size=4))
    ens = build(method)
    optimiser = torch.optim.SGD(ens.parameters(), lr=0.1)
    for part, factor in ((slice(0, 12), 1.0), (slice(12, 16), 1 / 3)):
        optimiser.zero_grad()
        (factor * method.loss(ens, *rows[part]).loss).backward()
        optimiser.step()
    assert_same(dict(module.ensemble.named_parameters()), dict(ens.named_parameters()))


def test_clipping_of_gradients():
    method = FeatureWGD(**REPULSION)
    clipped = train(method, gradient_clip_val=0.1)
    assert_same(clipped, loop(method, clip=0.1))
    assert not torch.allclose(clipped["head.weight"], loop(method)["head.weight"])


def test_mixed_precision():
    method = FeatureWGD(**REPULSION)
    autocast = torch.autocast("cpu", torch.bfloat16, cache_enabled=False)
    assert_same(train(method, precision="bf16-mixed"), loop(method, autocast))


def test_a_scaled_loss_with_clipping():
    """16-mixed scales the loss by a factor that changes; Lightning replaces it on CPUs unless it is passed as here."""
    from lightning.pytorch.plugins import MixedPrecision

    method = FeatureWGD(**REPULSION)
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2))
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    autocast = torch.autocast("cpu", torch.float16, cache_enabled=False)
    actual = train(method, plugins=[plugin], gradient_clip_val=0.5)
    assert plugin.scaler.get_scale() > 2.0**10
    assert_same(actual, loop(method, autocast, scaler, clip=0.5), rtol=5e-3, atol=1e-3)


def resumable(folder, epochs, start, sampler):
    """Weights of two processes with dropout of their own, from the beginning or resumed."""
    torch.manual_seed((10 if start is None else 20) + torch.distributed.get_rank())
    module = FlockModule(build(METHODS[0], dropout=0.5), optimiser=sgd)
    run = trainer(max_epochs=epochs, devices=2, strategy="ddp", use_distributed_sampler=False)
    checkpoint = None if start is None else folder / f"{start}.ckpt"
    run.fit(module, DataLoader(data(), batch_size=BATCH // 2, sampler=sampler), ckpt_path=checkpoint)
    run.save_checkpoint(folder / f"{epochs}.ckpt")
    return dict(module.ensemble.named_parameters())


def train_in_processes(folder):
    halves = DistributedSampler(data(), 2, int(os.environ["RANK"]), shuffle=False)  # Lightning's would shuffle
    options = {"devices": 2, "strategy": "ddp", "use_distributed_sampler": False, "precision": "64-true"}
    results = {method.title: train(method, BATCH // 2, halves, **options) for method in METHODS}
    accumulated = train(METHODS[0], BATCH // 4, halves, accumulate_grad_batches=2, **options)
    rows = slice(0, 9) if int(os.environ["RANK"]) == 0 else slice(9, 12)
    unequal = [part[rows].tolist() for part in torch.arange(EXAMPLES).split(BATCH)]
    results |= {f"{method.title}, unequal": train(method, batches=unequal, **options) for method in METHODS}
    whole, _, resumed = (resumable(folder, epochs, start, halves) for epochs, start in ((2, None), (1, None), (2, 1)))
    assert_same(resumed, whole, rtol=0, atol=0)
    module = FlockModule(build(DICE()), method=DICE())
    with pytest.raises(ValueError, match="DICE cannot be split over a batch; train it with one process"):
        trainer(devices=2, strategy="ddp").fit(module, DataLoader(data(), batch_size=6))
    if torch.distributed.get_rank() == 0:
        torch.save({**results, "accumulated": accumulated}, folder / "weights.pt")


def test_two_processes_are_one(tmp_path):
    """Each has half of every batch, or half of every micro-batch, or unequal parts of every batch."""
    run_in_two_processes(tmp_path, train_in_processes)
    weights = torch.load(tmp_path / "weights.pt")
    for method in METHODS:
        whole = train(method, precision="64-true")
        assert_same(weights[method.title], whole)
        assert_same(weights[f"{method.title}, unequal"], whole)
    assert_same(weights["accumulated"], weights[METHODS[0].title])


@pytest.mark.parametrize("method", [FeatureWGD(**REPULSION), DICE()], ids=lambda method: method.title)
def test_training_resumes_bit_identically(method, tmp_path):
    """With dropout, shuffled batches, momentum, a schedule, accumulation and validation."""

    def fit(epochs, checkpoint=None):
        lightning.seed_everything(5 if checkpoint is None else 99)
        module = FlockModule(
            build(method, dropout=0.5),
            method=method,
            optimiser=sgd,
            scheduler=lambda optimiser: torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, 4),
        )
        saving = lightning.callbacks.ModelCheckpoint(tmp_path / f"{epochs}", save_top_k=-1, filename="{epoch}")
        options = {"enable_checkpointing": True, "callbacks": [saving], "num_sanity_val_steps": 2}
        run = trainer(max_epochs=epochs, accumulate_grad_batches=2, **options)
        loaders = DataLoader(data(), batch_size=6, shuffle=True), DataLoader(data(), batch_size=6)
        run.fit(module, *loaders, ckpt_path=checkpoint)
        return module.state_dict(), run.optimizers[0].state_dict(), (torch.rand(1), random.random(), np.random.rand())  # noqa: NPY002

    whole, half = fit(4), fit(2)
    resumed = fit(4, tmp_path / "2" / "epoch=1.ckpt")
    assert any(not torch.equal(value, whole[0][name]) for name, value in half[0].items())
    assert_same(resumed[0], whole[0], rtol=0, atol=0)
    assert str(resumed[1]) == str(whole[1])
    assert resumed[2] == whole[2]


def test_predictions_are_calibrated_and_averaged():
    torch.manual_seed(0)
    x, y = torch.randn(10, H), torch.arange(10) % C
    module = FlockModule([nn.Linear(H, 8) for _ in range(N)], nn.Linear(8, C))
    trainer(max_epochs=1).fit(module, DataLoader(TensorDataset(x, y), batch_size=5))
    temperature = ff.calibrate(module.ensemble, [(x, y)])
    assert module.ensemble.temperature == temperature != 1
    expected = module.ensemble.predict(x)
    for dataset in (TensorDataset(x, y), TensorDataset(x), [{"input": x[i], "labels": y[i]} for i in range(10)]):
        loader = DataLoader(dataset, batch_size=4)
        actual = torch.cat(trainer().predict(module, loader))
        assert_close(actual, expected)
    assert_close(torch.cat(trainer().predict(module, DataLoader(x, batch_size=4))), expected)


def test_batches_are_mappings_and_scores_are_those_of_the_task():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(H, 8)

        def forward(self, first, second):
            return self.linear(first + second)

    torch.manual_seed(0)
    rows = [{"first": torch.randn(H), "second": torch.randn(H), "labels": torch.randn(1)} for _ in range(10)]
    module = FlockModule([Sum() for _ in range(N)], nn.Linear(8, 1), task=Regression())
    run = trainer(max_epochs=1)
    run.fit(module, DataLoader(rows, batch_size=5), DataLoader(rows, batch_size=4))
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    y = batch.pop("labels")
    mean, variance = module.ensemble.predict(**batch)
    members = module.ensemble.member_predictions(**batch)
    assert_close(run.callback_metrics["val_rmse"], (mean - y).square().mean().sqrt())
    assert_close(run.callback_metrics["val_loss"], module.ensemble.task.nll(members, y).mean())
    [first, _, _] = trainer().predict(module, DataLoader(rows, batch_size=4))
    assert_close(first.variance, variance[:4])
    metrics = trainer().test(module, DataLoader(rows, batch_size=3), verbose=False)
    assert_close(torch.tensor(metrics[0]["test_rmse"]), run.callback_metrics["val_rmse"].double(), check_dtype=False)


def test_methods_with_their_own_optimisers():
    """One epoch of DICE is that of an ordinary loop; the schedule leaves the rates of its own optimisers."""
    method = DICE()
    torch.manual_seed(3)
    module = FlockModule(
        build(method),
        method=method,
        optimiser=sgd,
        scheduler=lambda optimiser: torch.optim.lr_scheduler.StepLR(optimiser, 1, 0.1),
    )
    trainer(max_epochs=2).fit(module, DataLoader(data(), batch_size=BATCH))
    torch.manual_seed(3)
    ens = build(method)
    optimisers = method.optimisers(ens, sgd)
    for epoch in range(2):
        optimisers[0].param_groups[0]["lr"] = 0.1 ** (epoch + 1)
        for x, y in DataLoader(data(), batch_size=BATCH):
            for optimiser in optimisers:
                optimiser.zero_grad()
            method.loss(ens, x, y).loss.backward()
            for optimiser in optimisers:
                optimiser.step()
    assert_same(dict(module.ensemble.named_parameters()), dict(ens.named_parameters()))


def test_checkpoints_load_into_an_ensemble(tmp_path):
    module = FlockModule(build(FeatureWGD()))
    run = trainer(max_epochs=1)
    run.fit(module, DataLoader(data(), batch_size=BATCH))
    module.ensemble.temperature = 2.5
    run.save_checkpoint(tmp_path / "module.ckpt")
    loaded = FlockModule.load_from_checkpoint(tmp_path / "module.ckpt", members=build(FeatureWGD(), seed=1))
    x = data().tensors[0]
    assert torch.equal(loaded.ensemble.predict(x), module.ensemble.predict(x))
    ff.save(module.ensemble, tmp_path / "ensemble")
    assert torch.equal(ff.load(tmp_path / "ensemble").predict(x), module.ensemble.predict(x))


def test_what_cannot_be_trained_is_refused():
    module = FlockModule(build(DeepEnsembles()), method=DeepEnsembles())
    with pytest.raises(ValueError, match=r"Batches must be pairs .* got a Tensor"):
        trainer().fit(module, DataLoader(torch.randn(4, H)))
    run = trainer()
    run.strategy.__class__ = type("ShardedStrategy", (lightning.strategies.Strategy,), {})
    module._trainer = run
    with pytest.raises(ValueError, match=r'support ShardedStrategy; use one device, or Trainer\(strategy="ddp"\)'):
        module.on_fit_start()
