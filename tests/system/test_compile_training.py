"""torch.compile of networks and of a training run."""

from dataclasses import replace

import pytest
import torch
from helpers.short_runs import SHORT
from torch.testing import assert_close
from unit.models.test_models import every_quick, images, make

from featureflock.models import MLPConfig
from featureflock.training import ComputeConfig, train


@every_quick
def test_compiles_in_one_graph(arch):
    extractor, x = make(arch), images()
    torch._dynamo.reset()
    compiled = torch.compile(extractor, fullgraph=True, backend="eager")
    expected = extractor(x)
    grads = torch.autograd.grad(expected.square().sum(), list(extractor.parameters()))
    assert_close(compiled(x), expected)
    for a, b in zip(torch.autograd.grad(compiled(x).square().sum(), list(extractor.parameters())), grads, strict=True):
        assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_one_compiled_graph_serves_all_members(tmp_path):
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    recipe = replace(SHORT, model=MLPConfig((16, 8)), epochs=1)
    result = train(recipe, tmp_path / "a", compute=ComputeConfig(compile="on"))
    assert counters["stats"]["unique_graphs"] == 2  # one to train, one to measure; none for each member
    train(recipe, tmp_path / "again", compute=ComputeConfig(compile="on"))
    assert counters["stats"]["unique_graphs"] == 2  # another run uses them too
    plain = train(recipe, tmp_path / "b", compute=ComputeConfig(compile="off"))
    assert result["train"]["cross_entropy"] == pytest.approx(plain["train"]["cross_entropy"], rel=1e-4)
