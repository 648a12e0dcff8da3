"""Test sets of an evaluation: clean, single views, 15 corruptions × 5 severities, and out-of-distribution inputs."""

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from featureflock.corruptions import CORRUPTIONS, SEVERITIES, CorruptedSet, check_corruption, corrupt, open_set
from featureflock.corruptions.files import read_imagenet_c
from featureflock.corruptions.frost import frost_source
from featureflock.corruptions.generate import ALGORITHM, source_digest
from featureflock.corruptions.manifest import MANIFEST
from featureflock.data import DataSet, Examples, Splits, Stream, StreamedExamples, TensorExamples, only_view
from featureflock.data.examples import stratified_split
from featureflock.data.sources.cache import cache_folder, look_up
from featureflock.data.sources.registry import PUBLISHED_SETS
from featureflock.evaluation.images import NOISE, are_images, ood_images, to_rgb, transformed
from featureflock.tasks import Classification

Kind = Literal["clean", "validation", "view", "corrupted", "ood"]
CalibrationChoice = Literal["auto", "cross-validation", "held-out"]
Log = Callable[[str], None]

_SEED, _MAX_OOD = 0, 10_000
"""Seed of the choice of examples and of generated corruptions, and the largest number of examples of an OOD set."""


@dataclass(frozen=True)
class EvaluationProtocol:
    """Choice of the test sets."""

    examples: int | None = None
    """Number of test examples, balanced over classes; by default all."""
    corruptions: tuple[str, ...] = CORRUPTIONS
    """Corruptions of the test set. Give the flag without a value for none."""
    severities: tuple[int, ...] = SEVERITIES
    """Severities of the corruptions, 1 to 5."""
    corrupted_examples: int | None = None
    """Number of examples of each corrupted test set; by default as many as of the clean test set."""
    corrupted: Path | None = None
    """Folder with the corrupted test set: the .npy files of CIFAR-10-C, or the tree of ImageNet-C. By default the files
    that `featureflock data corrupt` stored in the cache; without them, corruptions are generated on the fly."""
    ood: tuple[str, ...] | None = None
    """Out-of-distribution sets: noise, the name of a data set, or a folder of images; up to 10,000 inputs of each. By
    default noise and the data sets in the cache. Give the flag without a value for none."""
    maps: int = 500
    """Number of clean and of corrupted images whose class activation maps are compared; 0 for none."""
    calibration: CalibrationChoice = "auto"
    """Where temperatures are fitted: on halves of each test set, as in the paper, or on the validation examples of the
    runs, one temperature for all seeds and test sets. auto: cross-validation, unless half of a clean test set is
    predicted without error, so that its temperature is at its bound."""
    human_labels: Path | None = None
    """File of human labels of the test set, such as cifar10h-counts.npy: counts or probabilities (examples, classes) in
    the order of the test set. Predictions are then compared with them as well."""

    def __post_init__(self) -> None:
        for name in self.corruptions:
            check_corruption(name)
        for severity in self.severities:
            if severity not in SEVERITIES:
                raise ValueError(f"severities must be from 1 to 5; got {severity}.")
        for name, count in (("examples", self.examples), ("corrupted_examples", self.corrupted_examples)):
            if count is not None and count < 2:
                raise ValueError(f"{name} must be at least 2, so that temperatures can be fitted; got {count}.")
        if self.maps < 0:
            raise ValueError(f"maps must be at least 0; got {self.maps}.")

    @property
    def examples_per_corruption(self) -> int | None:
        """Number of examples of each corrupted test set; None for all."""
        return self.examples if self.corrupted_examples is None else self.corrupted_examples


@dataclass(frozen=True, eq=False)
class EvaluationSet:
    """One test set."""

    kind: Kind
    label: str
    """Name among its kind: clean, validation, the view that is left, fog-3, or the OOD set."""
    identity: str
    """Changes whenever inputs or labels change; cached predictions are valid for one identity."""
    positions: Tensor
    """Positions of the examples to use."""
    load: Callable[[Tensor], Examples]
    """The examples at some positions."""
    source: str = ""
    """Note on its origin, if it needs one."""

    @property
    def name(self) -> str:
        """Name of its file of predictions: clean, only-left, fog-3, ood-noise."""
        return {"view": "only-", "ood": "ood-"}.get(self.kind, "") + self.label


def all_test_sets(splits: Splits, data: DataSet, protocol: EvaluationProtocol, log: Log) -> list[EvaluationSet]:
    """Everything that the protocol asks for, the clean test set first."""
    if not has_one_class(splits):
        if protocol.ood or protocol.corrupted is not None:
            raise ValueError("Corrupted and OOD test sets are for data with one class per image; leave the flags out.")
        log("Corruptions and OOD detection are skipped: they are for data with one class per image.")
        return [clean(splits, protocol)]
    return [
        clean(splits, protocol),
        *single_views(splits, protocol),
        *corrupted(splits, data, protocol, log),
        *ood_test_sets(splits, data, protocol),
    ]


def has_one_class(splits: Splits) -> bool:
    """Whether every example has exactly one class: not for segmentation, multi-label data and regression."""
    return splits.task.kind == Classification.kind and splits.test.labels.ndim == 1


def clean(splits: Splits, protocol: EvaluationProtocol = EvaluationProtocol()) -> EvaluationSet:
    """The test set itself."""
    test = splits.test
    return EvaluationSet("clean", "clean", test.identity(), _choose(test, protocol.examples), test.select)


def validation(splits: Splits, recipe: dict[str, Any]) -> EvaluationSet | None:
    """The validation examples of a run: those held out of its training set, or else those of the data set, if any."""
    count = recipe["validation"]
    chosen = splits.split(validation=count, seed=recipe["split_seed"]) if count else splits
    if (held_out := chosen.validation) is None:
        return None
    return EvaluationSet("validation", "validation", held_out.identity(), _choose(held_out, None), held_out.select)


def single_views(splits: Splits, protocol: EvaluationProtocol = EvaluationProtocol()) -> Iterator[EvaluationSet]:
    """For each view of the data, the clean test set with everything else blank."""
    test = splits.test
    for view in splits.views:
        if not isinstance(test, TensorExamples) or len(test.shape) != 3:
            raise ValueError("Views must be parts of images (C, H, W) held in memory.")
        identity, positions = f"{test.identity()} {view}", _choose(test, protocol.examples)
        load = partial(lambda view, positions: only_view(test.select(positions), view), view)
        yield EvaluationSet("view", view.name, identity, positions, load)


def corrupted(splits: Splits, data: DataSet, protocol: EvaluationProtocol, log: Log) -> Iterator[EvaluationSet]:
    """The corrupted test sets: from the folder given, from the cache, or generated when they are loaded."""
    test, names = splits.test, dict.fromkeys(map(check_corruption, protocol.corruptions))
    wanted = [(corruption, severity) for corruption in names for severity in sorted(set(protocol.severities))]
    if not wanted:
        return
    if isinstance(test, StreamedExamples):
        yield from _imagenet_c(splits, protocol, wanted, log)
        return
    if not isinstance(test, TensorExamples) or not are_images(test):
        log("Corruptions are skipped: they need images stored as uint8.")
        return
    positions, digest = _choose(test, protocol.examples_per_corruption), test.identity()
    published = getattr(data, "published", None)
    if protocol.corrupted is None:
        stored = [one for one in _cached_sets(published) if _is_made_from(one, test)] if published else []
    else:
        stored = [open_set(protocol.corrupted)]
        if not torch.equal(stored[0].labels, test.labels):
            raise ValueError(f"{protocol.corrupted / 'labels.npy'} does not match the labels of the test set.")
    generated: list[str] = []
    for corruption, severity in wanted:
        source = next((s for s in stored if corruption in s.corruptions and severity in s.severities), None)
        if source is not None:
            identity = json.dumps([corruption, severity, source.digest(corruption)])
            note = f"Corrupted images: {source.source}."
        else:
            generated.append(corruption)
            origin = frost_source() if corruption == "frost" else ""
            identity = json.dumps([corruption, severity, _SEED, ALGORITHM, origin])
            note = f"Frost is generated from {origin}." if origin else f"Corrupted images: generated with seed {_SEED}."
        load = partial(_corrupted_images, test, source, corruption, severity)
        yield EvaluationSet("corrupted", f"{corruption}-{severity}", f"{digest} {identity}", positions, load, note)
    for one in stored:
        log(f"Corrupted test sets: {one.source}, in {one.folder}.")
    if generated:
        names = dict.fromkeys(generated)
        which = "" if len(names) == len(set(protocol.corruptions)) else f": {', '.join(names)}"
        frost = f"; frost is generated from {frost_source()}" if "frost" in generated else ""
        frost += " (for photographs: pip install featureflock[frost])" if "procedural" in frost else ""
        log(f"Corrupted test images are generated with seed {_SEED}{which}{frost}.")
        if published and test.shape[0] == 3:
            log(f"To generate them once for all runs: featureflock data corrupt {published}")


def ood_test_sets(splits: Splits, data: DataSet, protocol: EvaluationProtocol) -> Iterator[EvaluationSet]:
    """The OOD sets. The data set of the runs, and those it wraps or is made from, are never among the default ones."""
    test = splits.test
    if not isinstance(test, TensorExamples | StreamedExamples) or not are_images(test):
        if protocol.ood:
            raise ValueError("Out-of-distribution sets need image data; leave --ood out.")
        return
    count = min(len(test) if protocol.examples is None else protocol.examples, _MAX_OOD)
    in_distribution, seen, chosen = published_sets(data), set[str](), protocol.ood
    if chosen is None:
        chosen = (NOISE, *(name for name in PUBLISHED_SETS if name not in in_distribution and look_up(name)))
    for name in dict.fromkeys(chosen):
        label, reader = ood_images(name, test, count)
        if label in seen:
            raise ValueError(f"Two OOD sets are called {label}; rename one of the folders.")
        seen.add(label)
        labels = torch.zeros(reader.count, dtype=torch.int64)
        inputs = StreamedExamples(reader, labels, normalisation=test.normalisation)
        positions = stratified_split(inputs, min(count, len(inputs)), _SEED, Stream.TEST_SUBSET)[0]
        yield EvaluationSet("ood", label, inputs.identity(), positions, inputs.select)


def published_sets(data: DataSet) -> list[str]:
    """The published data sets that `data` is, wraps or is made from: ["cifar10"] for HeldOut(CIFAR10())."""
    names = [*data.made_from] if (name := getattr(data, "published", None)) is None else [str(name)]
    return names + [name for part in vars(data).values() if isinstance(part, DataSet) for name in published_sets(part)]


def _choose(examples: Examples, count: int | None) -> Tensor:
    if count is None:
        return torch.arange(len(examples))
    if count > len(examples):
        raise ValueError(f"examples must be at most {len(examples)}, the size of the test set; got {count}.")
    return stratified_split(examples, count, _SEED, Stream.TEST_SUBSET)[0]


def _imagenet_c(
    splits: Splits, protocol: EvaluationProtocol, wanted: list[tuple[str, int]], log: Log
) -> Iterator[EvaluationSet]:
    test = splits.test
    if protocol.corrupted is None:
        log("Corruptions are skipped: for image files, give the folder of ImageNet-C with --corrupted FOLDER.")
        return
    assert isinstance(test, StreamedExamples)
    names, size, workers = splits.class_names, test.shape[-1], test.workers
    for corruption, severity in wanted:
        examples = read_imagenet_c(protocol.corrupted, corruption, severity, classes=names, size=size, workers=workers)
        examples.normalisation = test.normalisation
        identity = f"{corruption} {severity} {examples.identity()}"
        positions, note = _choose(examples, protocol.examples_per_corruption), "Corrupted images: files of ImageNet-C."
        yield EvaluationSet("corrupted", f"{corruption}-{severity}", identity, positions, examples.select, note)
    log(f"Corrupted test sets: ImageNet-C in {protocol.corrupted}.")


def _corrupted_images(
    test: TensorExamples, stored: CorruptedSet | None, corruption: str, severity: int, positions: Tensor
) -> TensorExamples:
    if stored is None:
        part, indices = test.select(positions), test.indices[positions].numpy()
        return transformed(part, lambda images: corrupt(images, corruption, severity, seed=_SEED, indices=indices))
    x = torch.from_numpy(stored.images(corruption, severity)[positions.numpy()]).permute(0, 3, 1, 2)
    if (shape := tuple(x.shape[1:])) != test.shape:
        raise ValueError(f"{stored.folder} holds images of shape {shape}; the test set has {test.shape}.")
    return TensorExamples(x, test.labels[positions], normalisation=test.normalisation)


def _cached_sets(name: str) -> Iterator[CorruptedSet]:
    """Corrupted sets in the cache, the published files before generated ones."""
    for ending in ("-c-published", "-c"):
        with contextlib.suppress(FileNotFoundError):
            cached = open_set(cache_folder() / f"{name}{ending}")
            if cached.manifest is None:
                what = f"{cached.folder} has no {MANIFEST}, so its files cannot be verified"
                raise ValueError(f"{what}; move it away and run: featureflock data corrupt {name} --from FOLDER")
            yield cached


def _is_made_from(stored: CorruptedSet, test: TensorExamples) -> bool:
    """Whether a set has the labels of the test set and, if it was generated, was generated from its images."""
    if stored.manifest is None or not torch.equal(stored.labels, test.labels):
        return False
    data = stored.manifest.get("data")
    return data is None or data == source_digest(to_rgb(test.x, test.white), test.labels.numpy())
