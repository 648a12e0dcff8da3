"""A training step reads nothing from the GPU, because reading blocks until the GPU is done.

Tensors on PyTorch's "meta" device have shapes but no values, so reading a value fails.
"""

from contextlib import nullcontext

import pytest
import torch
from helpers.short_runs import METHODS

from featureflock.data import EpochKey, Normalisation, TensorExamples
from featureflock.distributed.mesh import SINGLE_PROCESS
from featureflock.models import CNNConfig
from featureflock.training import Recipe
from featureflock.training.compute import ResolvedCompute
from featureflock.training.loop import _Loop
from featureflock.training.state import initial_state

META = torch.device("meta")


RESOLVED = ResolvedCompute("meta", "float32", True, False, "sequential", 1)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_a_training_step_of_every_method_reads_nothing(method, monkeypatch):
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # not available for this device
    recipe = Recipe(method=method, members=1 if type(method).__name__ == "Single" else 3, batch=8)
    network = CNNConfig()
    with META:
        ens = method.build(
            lambda: network.extractor((3, 16, 16)),
            lambda: network.head(network.extractor((3, 16, 16)), 4),
            members=recipe.members,
            seed=0,
            train_size=100,
        )
    loop = _Loop(recipe, None, RESOLVED, None, {}, None, initial_state(recipe, ens), None, None, SINGLE_PROCESS, None)
    images = torch.zeros(40, 3, 16, 16, dtype=torch.uint8)
    normalisation = Normalisation((0.5,) * 3, (0.2,) * 3)
    examples = TensorExamples(
        images, torch.zeros(40, dtype=torch.long), normalisation=normalisation, padding=2, flip=True
    )
    for batch in examples.batches(torch.arange(16).split(8), META, EpochKey(0, 0)):
        assert batch.x.device == META
        loop._step(batch)
    assert loop.state.optimisers[0].state  # the optimiser did step


def test_reading_a_value_would_be_noticed():
    with pytest.raises(RuntimeError, match="meta"):
        torch.empty(3, device=META).sum().item()
