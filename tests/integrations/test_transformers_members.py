"""Models of transformers as trunks, and as networks of rank-one and LoRA members. Skipped if it is not installed."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import featureflock as ff
from featureflock.methods import FeatureWGD

transformers = pytest.importorskip("transformers", reason="transformers is not installed; run make test-integrations")
N, B, T = 3, 4, 6


@pytest.fixture
def bert():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(vocab_size=50, max_position_embeddings=T, **sizes)
    return transformers.BertModel(config, add_pooling_layer=False).eval()


@pytest.fixture
def batch():
    torch.manual_seed(1)
    mask = (torch.arange(T) < torch.tensor([6, 3, 4, 2])[:, None]).long()
    return {"input_ids": torch.randint(50, (B, T)), "attention_mask": mask, "token_type_ids": torch.zeros_like(mask)}


class Features(nn.Module):
    """Hidden states of each token."""

    def __init__(self, bert):
        super().__init__()
        self.bert = bert

    def forward(self, input_ids, attention_mask, token_type_ids=None):
        return self.bert(input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids).last_hidden_state


class Pooled(nn.Linear):
    def forward(self, features, mask):
        return super().forward((features * mask[..., None]).sum(-2) / mask.sum(-1, keepdim=True))


@pytest.mark.parametrize("execution", ["sequential", "low_memory"])
@pytest.mark.parametrize("kind", ["rank one", "LoRA"])
def test_members_are_those_of_separate_models(bert, batch, kind, execution):
    network = Features(bert)
    if kind == "rank one":
        members = ff.rank_one(network, N, init=0.3, seed=0)
    else:
        members = ff.lora(network, N, 2, ["query", "value", "word_embeddings"], seed=0)
        for name, p in members.named_parameters():
            if name.endswith(".b"):
                nn.init.normal_(p, std=0.3)
    ens = ff.Ensemble(members, Pooled(16, 2), ff.ParticleLayer(rank=2), execution=execution)
    members.eval()  # without dropout
    expected = torch.stack([m(**batch) for m in members])
    assert_close(ens.features(**batch), expected, rtol=1e-4, atol=1e-5)
    assert (expected[0] - expected[1]).abs().max() > 0.01
    FeatureWGD().loss(ens, batch, torch.arange(B) % 2).loss.backward()
    grads = [p.grad for p in members.parameters() if p.requires_grad and p.grad is not None]
    assert grads
    assert all(g.isfinite().all() for g in grads)


class OfOutput(nn.Module):
    """An extractor of a model's output object."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 5)

    def forward(self, output):
        return self.linear(output.last_hidden_state)


@pytest.mark.parametrize("execution", ["sequential", "vectorised", "low_memory"])
@pytest.mark.parametrize("frozen", [True, False])
def test_a_model_is_a_trunk(bert, batch, execution, frozen):
    bert.requires_grad_(not frozen)
    extractors = [OfOutput() for _ in range(N)]
    ens = ff.Ensemble(extractors, Pooled(5, 2), ff.ParticleLayer(rank=2), trunk=bert, execution=execution)
    hidden = bert(**batch)
    expected = torch.stack([ens.head(e(hidden), batch["attention_mask"]) for e in extractors])
    assert_close(ens.eval()(**batch), expected)
    ens.train()
    assert bert.training != frozen
    FeatureWGD().loss(ens, batch, torch.arange(B) % 2).loss.backward()
    assert all((p.grad is None) == frozen for name, p in bert.named_parameters() if "layer.1.output" in name)
