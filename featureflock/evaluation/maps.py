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
from featureflock.evaluation.conditions import Condition, Protocol
from featureflock.evaluation.grad_cam import cam_similarity, class_activation_maps, empty_share
from featureflock.evaluation.predictions import Predictor, Tick, keep, kept
from featureflock.evaluation.runs import TrainedRun

_BATCH = 100

Which = Literal["clean", "corrupted"]


class KeptMaps(NamedTuple):
    maps: Tensor
    """(n, B, h, w)."""
    classes: Tensor
    """(n, B), which class each is for: the one that the ensemble predicts."""
    positions: Tensor
    """Of the pictures in their test sets, (B,)."""


def pictures_to_map(conditions: Sequence[Condition], protocol: Protocol) -> dict[Which, list[Condition]]:
    """The conditions with only those pictures whose maps are compared."""
    clean, others = conditions[0], [c for c in conditions[1:] if c.is_corrupted]
    if not protocol.maps:
        return {}
    chosen: dict[Which, list[Condition]] = {"clean": [_thinned(clean, protocol.maps)]}
    if others:
        chosen["corrupted"] = [_thinned(other, -(-protocol.maps // len(others))) for other in others]
    return chosen


def has_maps(run: TrainedRun, which: Which, chosen: list[Condition]) -> bool:
    return kept(run, _file(which), _identity(chosen), ()) is not None


def can_map(predictor: Predictor) -> bool:
    """Whether all members have convolutions, as Grad-CAM needs."""
    return all(any(isinstance(m, nn.Conv2d) for m in member.modules()) for member in predictor.ensemble.extractors)


def map_pictures(predictor: Predictor, which: Which, chosen: list[Condition], tick: Tick) -> None:
    """Compute the maps of these pictures, and keep them."""
    parts = []
    for condition in chosen:
        parts.append(maps_of(predictor, condition.load(condition.positions)))
        tick(len(condition.positions))
    maps, classes = (torch.cat(part, 1) for part in zip(*parts, strict=True))
    positions = torch.cat([condition.positions for condition in chosen])
    keep(predictor.run, _file(which), _identity(chosen), KeptMaps(maps, classes, positions)._asdict())


def maps_of(predictor: Predictor, examples: Examples) -> tuple[Tensor, Tensor]:
    """Maps (n, B, h, w) and classes (n, B) of examples, on the CPU."""
    ens, setup = predictor.ensemble, predictor.setup
    order = list(torch.arange(len(examples)).split(_BATCH))
    batches = examples.batches(order, torch.device(setup.device))
    found = [class_activation_maps(ens, setup.inputs(batch.x)) for batch in batches if len(batch.y)]
    return torch.cat([part.maps.cpu() for part in found], 1), torch.cat([part.classes.cpu() for part in found], 1)


def read_maps(run: TrainedRun, which: Which, chosen: list[Condition]) -> KeptMaps | None:
    """The maps that were kept; None if there are none."""
    tensors = kept(run, _file(which), _identity(chosen), KeptMaps._fields)
    return None if tensors is None else KeptMaps(**tensors)


def likeness(maps: Tensor) -> dict[str, Any]:
    """How alike the members' maps are: the paper's measure."""
    return {"similarity": cam_similarity(maps), "empty": empty_share(maps), "pictures": maps.shape[1]}


def _thinned(condition: Condition, count: int) -> Condition:
    size = len(condition.positions)
    places = torch.linspace(0, size - 1, min(count, size)).round().long()
    return replace(condition, positions=condition.positions[places])


def _file(which: Which) -> str:
    return f"maps-{which}"


def _identity(chosen: list[Condition]) -> str:
    sha = hashlib.sha256()
    for condition in chosen:
        sha.update(f"{condition.name} {condition.identity} {condition.positions.tolist()}".encode())
    return sha.hexdigest()
