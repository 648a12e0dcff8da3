"""Class activation maps of the members on some test images, computed once and cached in the run folder.

    RUN/predictions/maps-clean.safetensors        maps (n, B, h, w), classes (n, B), positions (B,)
    RUN/predictions/maps-corrupted.safetensors    the same for a few images of each corrupted test set

Shapes: n members, B images, h × w pixels of a map.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from featureflock.data import Examples
from featureflock.evaluation.grad_cam import class_activation_maps
from featureflock.evaluation.predictions import ExampleCallback, Predictor, read_cache, readable_batches, write_cache
from featureflock.evaluation.runs import TrainedRun
from featureflock.evaluation.test_sets import EvaluationProtocol, EvaluationSet

_BATCH = 100
MapKind = Literal["clean", "corrupted"]


class CachedMaps(NamedTuple):
    """Class activation maps of some images."""

    maps: Tensor
    """(n, B, h, w)."""
    classes: Tensor
    """The class that each map is for, (n, B): the ensemble's prediction."""
    positions: Tensor
    """Positions of the images in their test sets, (B,)."""


def images_to_map(
    test_sets: Sequence[EvaluationSet], protocol: EvaluationProtocol
) -> dict[MapKind, list[EvaluationSet]]:
    """The test sets, reduced to evenly spaced images whose maps are compared."""
    corrupted = [test_set for test_set in test_sets if test_set.kind == "corrupted"]
    chosen: dict[MapKind, list[EvaluationSet]] = {"clean": [_subset(test_sets[0], protocol.maps)]}
    if corrupted:
        chosen["corrupted"] = [_subset(each, -(-protocol.maps // len(corrupted))) for each in corrupted]
    return chosen if protocol.maps else {}


def has_convolutions(predictor: Predictor) -> bool:
    """Whether all members have convolutions, which Grad-CAM needs."""
    ens = predictor.ensemble
    members = ens.extractors if isinstance(ens.extractors, nn.ModuleList) and ens.trunk is None else [ens]
    return all(any(isinstance(m, nn.Conv2d) for m in member.modules()) for member in members)


def load_maps(run: TrainedRun, kind: MapKind, chosen: list[EvaluationSet]) -> CachedMaps | None:
    """The cached maps; None if there are none."""
    tensors = read_cache(run, f"maps-{kind}", _identity(chosen), CachedMaps._fields)
    if tensors is None:
        return None
    cached, n = CachedMaps(**tensors), run.first_members
    return cached._replace(maps=cached.maps[:n], classes=cached.classes[:n])


def store_maps(predictor: Predictor, kind: MapKind, chosen: list[EvaluationSet], tick: ExampleCallback) -> None:
    """Compute the maps of these images and cache them."""
    parts = []
    for test_set in chosen:
        computed = compute_maps(predictor, test_set.load(test_set.positions))
        parts.append(computed._replace(positions=test_set.positions[computed.positions]))
        tick(len(test_set.positions))
    write_cache(predictor.run, f"maps-{kind}", _identity(chosen), _concatenated(parts)._asdict())


def compute_maps(predictor: Predictor, examples: Examples) -> CachedMaps:
    """The maps of examples, on the CPU; unreadable examples are left out."""
    compute, parts = predictor.compute, []
    for positions, batch in readable_batches(examples, _BATCH, torch.device(compute.device)):
        if len(batch.y):
            computed = class_activation_maps(predictor.ensemble, compute.inputs(batch.x))
            parts.append(CachedMaps(computed.maps.cpu(), computed.classes.cpu(), positions))
    return _concatenated(parts)


def _identity(chosen: list[EvaluationSet]) -> str:
    """Changes whenever the images change."""
    texts = [f"{test_set.name} {test_set.identity} {test_set.positions.tolist()}" for test_set in chosen]
    return hashlib.sha256("".join(texts).encode()).hexdigest()


def _concatenated(parts: Sequence[CachedMaps]) -> CachedMaps:
    if not parts:
        raise OSError("None of the images could be read, so there are no class activation maps.")
    maps, classes, positions = zip(*parts, strict=True)
    return CachedMaps(torch.cat(maps, 1), torch.cat(classes, 1), torch.cat(positions))


def _subset(test_set: EvaluationSet, count: int) -> EvaluationSet:
    size = len(test_set.positions)
    places = torch.linspace(0, size - 1, min(count, size)).round().long()
    return replace(test_set, positions=test_set.positions[places])
