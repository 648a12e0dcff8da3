"""FlockModel under the Trainer of transformers and under accelerate: every setting gives the update of the whole batch.

Shapes: n members, B examples, T tokens, H features, C classes.
"""

import subprocess
import sys
from functools import partial

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader

import featureflock as ff
from featureflock.methods import ADP, DICE, DeepEnsembles, FeatureMAP, FeatureWGD, FunctionWGD, WeightWGD
from featureflock.tasks import Classification, MultiLabel, Regression
from integrations.processes import run_in_two_processes

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed; run make test-integrations")
transformers = pytest.importorskip("transformers", reason="transformers is not installed; run make test-integrations")
from featureflock.integrations.transformers import FlockModel, SentenceFeatures, pretrained_members  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
N, H, C, TOKENS, EXAMPLES, BATCH = 3, 8, 3, 30, 32, 8
REPULSION = {"repulsion": 20.0, "rank": 2}
METHODS = [FeatureWGD(**REPULSION), FunctionWGD(**REPULSION), WeightWGD(repulsion=1e4, rank=2), ADP(), FeatureMAP()]


@pytest.fixture(autouse=True)
def new_state():
    """accelerate has one state per process."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def bert(dropout=0.0, seed=0):
    torch.manual_seed(seed)
    sizes = {"hidden_size": H, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(vocab_size=TOKENS, max_position_embeddings=16, **sizes)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = dropout
    return transformers.BertModel(config)


def rows(labels=None):
    """Sentences of 3 to 10 tokens, with a column that no model takes."""
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(1, TOKENS, (3 + 5 * i % 8,), generator=generator).tolist() for i in range(EXAMPLES)]
    return [{"input_ids": x, "labels": labels(x) if labels else sum(x) % C, "text": str(x)} for x in ids]


def collate(items):
    """Pads to the longest sentence of the batch."""
    length = max(len(item["input_ids"]) for item in items)
    ids = torch.tensor([item["input_ids"] + [0] * (length - len(item["input_ids"])) for item in items])
    return {
        "input_ids": ids,
        "attention_mask": (ids > 0).long(),
        "labels": torch.tensor([item["labels"] for item in items]),
    }


def build(method, dropout=0.0):
    """Members of one layer of BERT, with heads that the method needs."""
    shared = isinstance(method, FeatureWGD | FeatureMAP)
    torch.manual_seed(2)
    heads = [nn.Linear(H, C) for _ in range(N)]
    members = pretrained_members(bert(dropout), N, noise=0.3)
    return FlockModel(members, heads[0] if shared else heads, method=method, train_size=EXAMPLES).double()


def arguments(folder, batch=BATCH, **options):
    defaults = {"num_train_epochs": 2, "learning_rate": 0.1, "optim": "sgd", "lr_scheduler_type": "constant"}
    quiet = {"save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True, "max_grad_norm": 0.5}
    return transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=batch, **{**defaults, **quiet, **options}
    )


def train(method, folder, batch=BATCH, **options):
    """Weights after training with the Trainer."""
    model = build(method)
    sgd = model.optimiser(partial(torch.optim.SGD, lr=0.1))
    torch.manual_seed(3)
    trainer = transformers.Trainer(model, arguments(folder, batch, **options), collate, rows(), optimizers=(sgd, None))
    trainer.train()
    return dict(model.ensemble.named_parameters())


def train_by_accelerate(method, batch=BATCH, accumulate=1):
    """Weights after the loop of accelerate's documentation."""
    model = build(method)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    loader = DataLoader(rows(), batch, collate_fn=collate)
    prepared, optimiser, loader = accelerator.prepare(model, model.optimiser(partial(torch.optim.SGD, lr=0.1)), loader)
    prepared.train()
    torch.manual_seed(3)
    for _ in range(2):
        for step in loader:
            with accelerator.accumulate(prepared):
                accelerator.backward(prepared(**step).loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(prepared.parameters(), 0.5)
                optimiser.step()
                optimiser.zero_grad()
    return dict(model.ensemble.named_parameters())


def assert_same(actual, expected, **tolerance):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert_close(actual[name], value, **tolerance)


def loop(method):
    """Weights after an ordinary loop over the rows in order."""
    ens = build(method).ensemble
    optimiser = torch.optim.SGD(ens.parameters(), lr=0.1)
    for _ in range(2):
        for batch in DataLoader(rows(), BATCH, collate_fn=collate):
            y = batch.pop("labels")
            optimiser.zero_grad()
            method.loss(ens, batch, y).loss.backward()
            nn.utils.clip_grad_norm_(ens.parameters(), 0.5)
            optimiser.step()
    return dict(ens.named_parameters())


@pytest.mark.parametrize("method", [*METHODS, DICE(ramp_epochs=0)], ids=lambda method: method.title)
def test_accumulated_micro_batches_are_one_large_batch(method, tmp_path):
    """Each micro-batch is padded to its own length; the last step of an epoch has all of its micro-batches."""
    whole = train(method, tmp_path)
    assert_same(train(method, tmp_path, batch=2, gradient_accumulation_steps=4), whole)


def test_an_epoch_may_end_with_fewer_micro_batches(tmp_path):
    whole = train(METHODS[0], tmp_path, batch=12)
    assert_same(train(METHODS[0], tmp_path, batch=4, gradient_accumulation_steps=3), whole)


@pytest.mark.parametrize("method", METHODS[:2], ids=lambda method: method.title)
def test_accelerate_is_an_ordinary_loop_with_and_without_accumulation(method):
    expected = loop(method)
    assert_same(train_by_accelerate(method), expected)
    new = accelerate.state.GradientState._reset_state
    new()
    assert_same(train_by_accelerate(method, batch=2, accumulate=4), expected)


def train_in_processes(folder):
    results = {method.title: train(method, folder, BATCH // 2) for method in METHODS}
    results["accumulated"] = train(METHODS[0], folder, BATCH // 4, gradient_accumulation_steps=2)
    accelerate.state.AcceleratorState._reset_state()
    accelerate.state.GradientState._reset_state()
    results["accelerate"] = train_by_accelerate(METHODS[0], BATCH // 4, accumulate=2)
    with pytest.raises(ValueError, match="DICE cannot be split over a batch; train it with one process"):
        train(DICE(), folder, BATCH // 2)
    if torch.distributed.get_rank() == 0:
        torch.save(results, folder / "weights.pt")


def test_two_processes_are_one(tmp_path):
    run_in_two_processes(tmp_path, train_in_processes)
    weights = torch.load(tmp_path / "weights.pt")
    for method in METHODS:
        assert_same(weights[method.title], train(method, tmp_path))
    assert_same(weights["accumulated"], weights[METHODS[0].title])
    assert_same(weights["accelerate"], loop(METHODS[0]))


class Tokens(nn.Module):
    """Hidden states of each token."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask):
        return self.model(input_ids, attention_mask=attention_mask).last_hidden_state


class MaskedMean(nn.Linear):
    def forward(self, features, mask):
        return super().forward((features * mask[..., None]).sum(-2) / mask.sum(-1, keepdim=True))


@pytest.mark.parametrize(
    ("labels", "method"), [("of texts", METHODS[0]), ("of tokens", METHODS[0]), ("of tokens", FeatureMAP())]
)
def test_features_and_labels_of_tokens(labels, method, tmp_path):
    """Micro-batches of different lengths are one batch, in which padded tokens have no part."""
    of_tokens = labels == "of tokens"

    def fit(batch, accumulate):
        torch.manual_seed(2)
        members = [Tokens(bert(seed=i)) for i in range(N)]
        head = nn.Linear(H, C) if of_tokens else MaskedMean(H, C)
        task = Classification(dim=-1, ignore_index=-100) if of_tokens else None
        model = FlockModel(members, head, method=method, task=task).double()
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {"gradient_accumulation_steps": accumulate, "num_train_epochs": 1}
        transformers.Trainer(
            model, arguments(tmp_path, batch, **options), padded, rows(), optimizers=(optimiser, None)
        ).train()
        return dict(model.ensemble.named_parameters())

    def padded(items):
        batch = collate(items)
        if of_tokens:
            batch["labels"] = torch.where(batch["attention_mask"] > 0, batch["input_ids"] % C, -100)
        return batch

    assert_same(fit(2, 4), fit(8, 1))


def test_training_resumes_bit_identically(tmp_path):
    def fit(folder, epochs, checkpoint=None):
        torch.manual_seed(0 if checkpoint is None else 99)
        options = {"save_strategy": "epoch", "optim": "adamw_torch", "learning_rate": 1e-3, "num_train_epochs": 4}
        options |= {"gradient_accumulation_steps": 2, "max_steps": 4 * epochs}
        model = build(METHODS[0], dropout=0.5)
        trainer = transformers.Trainer(model, arguments(tmp_path / folder, 4, **options), collate, rows())
        trainer.train(resume_from_checkpoint=checkpoint)
        return model.state_dict()

    whole, half = fit("whole", 4), fit("half", 2)
    resumed = fit("resumed", 4, str(tmp_path / "half" / "checkpoint-8"))
    assert any(not torch.equal(value, whole[name]) for name, value in half.items())
    assert_same(resumed, whole, rtol=0, atol=0)


def test_predictions_are_calibrated_and_averaged(tmp_path):
    model = build(FeatureWGD())
    ens, batch = model.ensemble, collate(rows())
    y = batch.pop("labels")
    trainer = transformers.Trainer(
        model,
        arguments(tmp_path, per_device_eval_batch_size=5),
        collate,
        rows(),
        rows(),
        compute_metrics=lambda result: {"accuracy": (result.predictions.argmax(-1) == result.label_ids).mean()},
    )
    trainer.train()
    temperature = ff.calibrate(ens, trainer.get_eval_dataloader())
    assert ens.temperature == temperature != 1
    probs = ens.predict(**batch)
    result = trainer.predict(rows())
    assert_close(torch.from_numpy(result.predictions).exp(), probs)
    assert result.label_ids.tolist() == y.tolist()
    metrics = trainer.evaluate()
    assert metrics["eval_accuracy"] == (probs.argmax(-1) == y).double().mean()
    assert metrics["eval_loss"] == pytest.approx(float(nn.functional.nll_loss(probs.log(), y)), rel=1e-5)


@pytest.mark.parametrize(
    ("task", "labels"),
    [(Regression(), lambda x: float(sum(x))), (MultiLabel(), lambda x: [float(t in x) for t in range(C)])],
    ids=["regression", "multi-label"],
)
def test_other_tasks(task, labels, tmp_path):
    outputs = 1 if isinstance(task, Regression) else C
    model = FlockModel(pretrained_members(bert(), N), nn.Linear(H, outputs), task=task)
    trainer = transformers.Trainer(model, arguments(tmp_path, learning_rate=1e-3), collate, rows(labels), rows(labels))
    trainer.train()
    batch = collate(rows(labels))
    y = batch.pop("labels")
    output = model.eval()(**batch, labels=y)
    prediction = model.ensemble.predict(**batch)
    if isinstance(task, Regression):
        assert_close((output.logits, output.variance), (prediction.mean, prediction.variance))
    else:
        assert_close(output.logits.sigmoid(), prediction)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(float(output.loss), rel=1e-4)


def test_mixed_precision_is_that_of_an_ordinary_loop():
    def start():
        model = build(FeatureWGD(**REPULSION)).float()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    model, optimiser = start()
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    prepared, optimiser = accelerator.prepare(model, optimiser)
    batch = collate(rows())
    accelerator.backward(prepared.train()(**batch).loss)
    optimiser.step()
    ours, optimiser = start()
    y = batch.pop("labels")
    with torch.autocast("cpu", torch.bfloat16):
        loss = ours.method.loss(ours.ensemble, batch, y).loss
    loss.backward()
    optimiser.step()
    assert_same(dict(model.ensemble.named_parameters()), dict(ours.ensemble.named_parameters()))


LOAD = """
import sys, torch
from featureflock.integrations import FlockModel
for folder in sys.argv[1:]:
    model = FlockModel.from_pretrained(folder)
    batch = torch.load(folder + "/batch.pt")
    torch.save((model(**batch).logits, str(model.method)), folder + "/prediction.pt")
"""


def test_a_saved_folder_is_all_that_another_program_needs(tmp_path):
    batch = collate(rows())
    del batch["labels"]
    lora = ff.lora(SentenceFeatures(bert()), N, 2, ["query", "value"], seed=0)
    trunk = bert().requires_grad_(False)
    method = FunctionWGD(prior=ff.Normal(0.5), repulsion=3.0)
    models = {
        "copies": build(method),
        "lora": FlockModel(lora, nn.Linear(H, C), method=FeatureMAP()),
        "trunk": FlockModel(
            [FirstToken() for _ in range(N)], [nn.Linear(H, C) for _ in range(N)], method=ADP(), trunk=trunk
        ),
    }
    for name, model in models.items():
        model.ensemble.temperature = 1.7
        for p in model.parameters():
            p.data.add_(0.1)
        model.eval().save_pretrained(tmp_path / name)
        torch.save(batch, tmp_path / name / "batch.pt")
    folders = [str(tmp_path / name) for name in models if name != "trunk"]
    run = subprocess.run([sys.executable, "-c", LOAD, *folders], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    for folder, model in zip(folders, models.values(), strict=False):
        logits, name = torch.load(f"{folder}/prediction.pt")
        assert torch.equal(logits, model(**batch).logits)
        assert name == str(model.method)
    loaded = FlockModel.from_pretrained(tmp_path / "trunk")
    assert torch.equal(loaded(**batch).logits, models["trunk"](**batch).logits)
    assert not any(p.requires_grad for p in loaded.ensemble.trunk.parameters())


class FirstToken(nn.Module):
    """An extractor of a trunk's output."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(H, H)

    def forward(self, output):
        return self.linear(output.last_hidden_state[:, 0]).tanh()


def test_what_cannot_be_right_is_refused(tmp_path, monkeypatch):
    batch = collate(rows())
    labels = batch.pop("labels")
    model = build(FeatureWGD())
    with pytest.raises(ValueError, match='from targets under "labels"; leave out Trainer\'s compute_loss_func'):
        transformers.Trainer(model, arguments(tmp_path), collate, rows(), compute_loss_func=print).train()
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    accelerator = accelerate.Accelerator(
        cpu=True,
        gradient_accumulation_plugin=accelerate.utils.GradientAccumulationPlugin(num_steps=2, sync_each_batch=True),
    )
    with accelerator.accumulate(model), pytest.raises(ValueError, match="leave out sync_each_batch"):
        model(**batch, labels=labels)
    model._is_replica = True
    with pytest.raises(ValueError, match=r"support nn.DataParallel; start one process per GPU with torchrun"):
        model(**batch, labels=labels)
    del model._is_replica
    kind = accelerate.DistributedType.FSDP
    monkeypatch.setitem(accelerate.PartialState._shared_state, "distributed_type", kind)
    with pytest.raises(ValueError, match="support FSDP; use DistributedDataParallel, accelerate's default"):
        model(**batch, labels=labels)
    ff.save(model.ensemble, tmp_path)
    with pytest.raises(ValueError, match=r"has no method.json, because FlockModel did not write it; pass method="):
        FlockModel.from_pretrained(tmp_path)
    loaded = FlockModel.from_pretrained(tmp_path, method=FeatureWGD())
    assert torch.equal(loaded(**batch).logits, model.eval()(**batch).logits)
    with pytest.raises(ValueError, match="Deep Ensembles has one head per member; give a list of 3"):
        FlockModel(pretrained_members(bert(), N), nn.Linear(H, C), method=DeepEnsembles())


def test_members_differ_and_the_pooler_is_not_trained():
    model = bert()
    first, second = pretrained_members(model, 2, noise=0.1)
    weight, other = (m.model.encoder.layer[0].output.dense.weight for m in (first, second))
    original = model.encoder.layer[0].output.dense.weight
    assert 0.05 < (weight - original).std() / original.std() < 0.2
    assert not torch.equal(weight, other)
    assert not any(p.requires_grad for p in first.model.pooler.parameters())
    batch = collate(rows()[:2])
    short = {name: batch[name][:1, : int(batch["attention_mask"][0].sum())] for name in ("input_ids", "attention_mask")}
    first.eval()
    features = first(batch["input_ids"], batch["attention_mask"])
    assert_close(first(**short), features[:1])
    assert_close(first(short["input_ids"]), features[:1])
