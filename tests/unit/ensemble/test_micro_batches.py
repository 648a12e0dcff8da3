"""A batch in parts gives the outputs and gradients of the whole batch.

Shapes: n members, B examples, T tokens, H features, C classes.
"""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import featureflock as ff
from featureflock.methods import ADP, DICE, DeepEnsembles, FeatureMAP, FeatureWGD, FunctionWGD, WeightWGD
from featureflock.tasks import Classification, Regression

N, B, T, H, C = 3, 12, 5, 6, 4
REPULSION = {"repulsion": 20.0, "rank": 2}
METHODS = [
    FeatureWGD(**REPULSION),
    FunctionWGD(**REPULSION),
    WeightWGD(repulsion=1e4, rank=2),
    FeatureMAP(),
    ADP(),
    DeepEnsembles(),
]


def build(method, execution="sequential", trunk=True, extractor=lambda: nn.Sequential(nn.Linear(H, H), nn.Tanh())):
    return method.build(
        extractor,
        lambda: nn.Linear(H, C),
        members=N,
        train_size=B,
        trunk=(lambda: nn.Linear(H, H)) if trunk else None,
        execution=execution,
    ).double()


def gradients(method, ens, x, y):
    torch.manual_seed(7)
    method.loss(ens, x, y).loss.backward()
    return {name: p.grad for name, p in ens.named_parameters()}


@pytest.fixture
def batch():
    torch.manual_seed(1)
    return torch.randn(B, H, dtype=torch.float64), torch.arange(B) % C


@pytest.mark.parametrize("execution", ["sequential", "vectorised", "low_memory"])
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.title)
def test_parts_are_the_whole(method, execution, batch):
    x, y = batch
    whole = gradients(method, build(method, execution), x, y)
    parts = gradients(method, build(method, execution), ff.MicroBatches(x.split([5, 4, 3])), y)
    for name, grad in whole.items():
        assert_close(parts[name], grad)


@pytest.mark.parametrize("method", METHODS[:3], ids=lambda method: method.title)
def test_accumulated_gradients_are_not_the_whole(method, batch):
    x, y = batch
    ens = build(method)
    for rows in torch.arange(B).chunk(3):
        (method.loss(ens, x[rows], y[rows]).loss / 3).backward()
    whole = gradients(method, build(method), x, y)
    name = "extractors.0.0.weight"
    assert not torch.allclose(dict(ens.named_parameters())[name].grad, whole[name], rtol=1e-3)


def test_negatives_of_dice_come_from_the_whole_batch(batch):
    x, y = batch
    method = DICE(ramp_epochs=0)
    whole = gradients(method, build(method, trunk=False), x, y)
    parts = gradients(method, build(method, trunk=False), ff.MicroBatches(x.split(4)), y)
    for name, grad in whole.items():
        assert_close(parts[name], grad)


@pytest.mark.parametrize("share", ["rank one", "LoRA"])
def test_members_in_one_network(share, batch):
    x, y = batch
    method = FeatureWGD(**REPULSION)

    def gradient(inputs):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(H, H), nn.Tanh())
        members = ff.rank_one(network, N, init=0.3) if share == "rank one" else ff.lora(network, N, 2, ["0"])
        for p in members.parameters():
            p.data.normal_(std=0.5)
        ens = ff.Ensemble(members, nn.Linear(H, C), method.layer(N)).double()
        return gradients(method, ens, inputs, y)

    whole, parts = gradient(x), gradient(ff.MicroBatches(x.split(5)))
    for name, grad in whole.items():
        assert_close(parts[name], grad)


@pytest.mark.parametrize("execution", ["sequential", "low_memory"])
def test_the_backward_pass_repeats_dropout_and_leaves_running_statistics(execution):
    """Every part is computed twice, with the same masks, and counted once."""

    def extractor():
        return nn.Sequential(nn.Linear(H, H), nn.BatchNorm1d(H), nn.Dropout(0.5))

    torch.manual_seed(1)
    x, y = torch.randn(B, H, dtype=torch.float64), torch.arange(B) % C
    method = FeatureWGD(**REPULSION)
    ens, copy = (build(method, execution, extractor=extractor) for _ in range(2))
    torch.manual_seed(7)
    features = torch.cat([copy.features(part) for part in x.split(4)], 1)
    with copy.layer.loss_scale() as scalable:
        scalable(copy.task.loss(copy.logits(copy.layer(features)), y)).backward()
    grads = gradients(method, ens, ff.MicroBatches(x.split(4)), y)
    for (name, p), q in zip(copy.named_parameters(), ens.parameters(), strict=True):
        assert_close(grads[name], p.grad)
        assert_close(q, p)
    for a, b in zip(copy.buffers(), ens.buffers(), strict=True):
        assert_close(a, b)
    assert int(ens.extractors[0][1].num_batches_tracked) == 3


class Tokens(nn.Module):
    """Features of tokens, which padded tokens do not change."""

    def __init__(self):
        super().__init__()
        self.embedding, self.linear = nn.Embedding(9, H), nn.Linear(H, H)

    def forward(self, input_ids, attention_mask):
        h = self.embedding(input_ids) * attention_mask[..., None]
        return torch.tanh(self.linear(h + h.sum(1, keepdim=True))) + (1 - attention_mask[..., None])


class Mean(nn.Linear):
    def forward(self, features, mask):
        return super().forward((features * mask[..., None]).sum(-2) / mask.sum(-1, keepdim=True))


def sentences(lengths, width):
    ids = torch.arange(len(lengths) * width).view(-1, width) % 9
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def test_parts_may_be_padded_to_different_lengths():
    torch.manual_seed(0)
    method, lengths, y = FeatureWGD(**REPULSION), [3, 2, 5, 4], torch.tensor([0, 1, 1, 0])
    whole = sentences(lengths, T)
    parts = ff.MicroBatches([{k: v[:2, :3] for k, v in whole.items()}, {k: v[2:] for k, v in whole.items()}])
    ens = ff.Ensemble([Tokens() for _ in range(N)], Mean(H, 2), method.layer(N)).double()
    expected = gradients(method, ens, whole, y)
    expected = {name: grad.clone() for name, grad in expected.items()}
    ens.zero_grad()
    actual = gradients(method, ens, parts, y)
    for name, grad in expected.items():
        assert_close(actual[name], grad)
    assert_close(ens.predict(parts), ens.predict(whole))


def test_tokens_without_a_mask_need_one_length():
    class Embedded(nn.Embedding):
        pass

    ens = ff.Ensemble([Embedded(9, H) for _ in range(N)], nn.Linear(H, 2), task=Classification(dim=-1))
    parts = ff.MicroBatches([torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, 4, dtype=torch.long)])
    with pytest.raises(ValueError, match=r"features of shapes \(3, 6\) and \(4, 6\); pad inputs to one length"):
        ens(parts)
    with pytest.raises(ValueError, match="at least one part"):
        ff.MicroBatches([])


def test_a_learnt_variance_and_prediction(batch):
    x = batch[0]
    method = FeatureWGD(**REPULSION)
    ens = method.build(lambda: nn.Linear(H, H), lambda: nn.Linear(H, 1), members=N, task=Regression()).double()
    y = x.sum(1, keepdim=True)
    whole = {name: grad.clone() for name, grad in gradients(method, ens, x, y).items()}
    ens.zero_grad()
    parts = gradients(method, ens, ff.MicroBatches(x.split(5)), y)
    for name, grad in whole.items():
        assert_close(parts[name], grad)
    assert_close(ens.predict(ff.MicroBatches(x.split(5))), ens.predict(x))


def test_activations_of_parts_are_not_stored(batch):
    """The hidden layers of the extractors are wide; what is stored for the backward pass is not."""
    x, y = batch
    method = DeepEnsembles()

    def stored(inputs):
        ens = build(method, extractor=lambda: nn.Sequential(nn.Linear(H, 500), nn.Tanh(), nn.Linear(500, H)))
        parameters, sizes = {p.data_ptr() for p in ens.parameters()}, []

        def pack(t):
            sizes.append(0 if t.data_ptr() in parameters else t.numel())
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            method.loss(ens, inputs, y)
        return sum(sizes)

    assert stored(x) > N * B * 500
    assert stored(ff.MicroBatches(x.split(4))) < N * B * 100
