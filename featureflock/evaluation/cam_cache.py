"""Class activation maps of a run's members on some of its test pictures, computed once and kept beside the run.

    RUN/predictions/maps-clean.safetensors        maps (n, B, h, w), classes (n, B), positions (B,)
    RUN/predictions/maps-corrupted.safetensors    the same, of a few pictures of each corrupted test set

Shapes: n members, B pictures, h × w pixels of a map.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from featureflock.data import Examples
from featureflock.evaluation.grad_cam import cam_similarity, class_activation_maps, empty_share
from featureflock.evaluation.predictions import Predictor, Tick, batches_of, keep, kept
from featureflock.evaluation.runs import TrainedRun
from featureflock.evaluation.test_sets import EvaluationProtocol, EvaluationSet

_BATCH = 100

Which = Literal["clean", "corrupted"]


class CachedMaps(NamedTuple):
    maps: Tensor
    """(n, B, h, w)."""
    classes: Tensor
    """(n, B), which class each is for: the one that the ensemble predicts."""
    positions: Tensor
    """Of the pictures in their test sets, (B,)."""


def pictures_to_map(
    conditions: Sequence[EvaluationSet], protocol: EvaluationProtocol
) -> dict[Which, list[EvaluationSet]]:
    """The conditions with only those pictures whose maps are compared."""
    clean, others = conditions[0], [c for c in conditions[1:] if c.is_corrupted]
    if not protocol.maps:
        return {}
    chosen: dict[Which, list[EvaluationSet]] = {"clean": [_thinned(clean, protocol.maps)]}
    if others:
        chosen["corrupted"] = [_thinned(other, -(-protocol.maps // len(others))) for other in others]
    return chosen


def has_maps(run: TrainedRun, which: Which, chosen: list[EvaluationSet]) -> bool:
    return kept(run, _file(which), _identity(chosen), ()) is not None


def can_map(predictor: Predictor) -> bool:
    """Whether all members have convolutions, as Grad-CAM needs."""
    return all(any(isinstance(m, nn.Conv2d) for m in member.modules()) for member in predictor.ensemble.extractors)


def map_pictures(predictor: Predictor, which: Which, chosen: list[EvaluationSet], tick: Tick) -> None:
    """Compute the maps of these pictures, and keep them."""
    parts = []
    for condition in chosen:
        found = maps_of(predictor, condition.load(condition.positions))
        parts.append(found._replace(positions=condition.positions[found.positions]))
        tick(len(condition.positions))
    keep(predictor.run, _file(which), _identity(chosen), concatenate_maps(parts)._asdict())


def maps_of(predictor: Predictor, examples: Examples) -> CachedMaps:
    """The maps of examples, on the CPU; those that cannot be read are left out."""
    ens, setup = predictor.ensemble, predictor.setup
    parts = []
    for positions, batch in batches_of(examples, _BATCH, torch.device(setup.device)):
        if len(batch.y):
            found = class_activation_maps(ens, setup.inputs(batch.x))
            parts.append(CachedMaps(found.maps.cpu(), found.classes.cpu(), positions))
    return concatenate_maps(parts)


def concatenate_maps(parts: Sequence[CachedMaps]) -> CachedMaps:
    if not parts:
        raise OSError("None of the pictures could be read, so there are no class activation maps.")
    maps, classes, positions = zip(*parts, strict=True)
    return CachedMaps(torch.cat(maps, 1), torch.cat(classes, 1), torch.cat(positions))


def read_maps(run: TrainedRun, which: Which, chosen: list[EvaluationSet]) -> CachedMaps | None:
    """The maps that were kept; None if there are none."""
    tensors = kept(run, _file(which), _identity(chosen), CachedMaps._fields)
    return None if tensors is None else CachedMaps(**tensors)


def likeness(maps: Tensor) -> dict[str, Any]:
    """How alike the members' maps are: the paper's measure."""
    return {"similarity": cam_similarity(maps), "empty": empty_share(maps), "pictures": maps.shape[1]}


def _thinned(condition: EvaluationSet, count: int) -> EvaluationSet:
    size = len(condition.positions)
    places = torch.linspace(0, size - 1, min(count, size)).round().long()
    return replace(condition, positions=condition.positions[places])


def _file(which: Which) -> str:
    return f"maps-{which}"


def _identity(chosen: list[EvaluationSet]) -> str:
    sha = hashlib.sha256()
    for condition in chosen:
        sha.update(f"{condition.name} {condition.identity} {condition.positions.tolist()}".encode())
    return sha.hexdigest()
