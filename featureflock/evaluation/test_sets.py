"""Test sets of an evaluation: clean, single views, 15 corruptions × 5 severities, and out-of-distribution inputs."""

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from featureflock.corruptions import (
    CORRUPTIONS,
    SEVERITIES,
    check_corruption,
    corrupt,
    frost_source,
    open_set,
    read_imagenet_c,
)
from featureflock.corruptions.files import CorruptedSet, read_manifest
from featureflock.corruptions.generate import ALGORITHM
from featureflock.data import DataSet, Examples, Splits, Stream, StreamedExamples, TensorExamples, View, only_view
from featureflock.data.examples import stratified_split
from featureflock.data.image_files import ImageFiles, read_classes
from featureflock.data.sources.cache import cache_folder, load, look_up
from featureflock.data.sources.registry import PUBLISHED_SETS
from featureflock.evaluation.images import are_images, transformed
from featureflock.evaluation.ood_sets import ArrayImages, FolderImages, NoiseImages, OODImages

Kind = Literal["clean", "validation", "view", "corrupted", "ood"]
Log = Callable[[str], None]

NOISE = "noise"
_SEED = 0
"""Seed of the choice of examples, and of corruptions generated during the evaluation."""
_MAX_OOD = 10_000


@dataclass(frozen=True)
class EvaluationProtocol:
    """What to test on."""

    examples: int | None = None
    """Number of test examples, equally many of each class; by default all."""
    corruptions: tuple[str, ...] = CORRUPTIONS
    """Corruptions of the test set. Give the flag without a value for none."""
    severities: tuple[int, ...] = SEVERITIES
    """Severities of the corruptions, 1 to 5."""
    corrupted_examples: int | None = None
    """Number of examples of each corrupted test set; by default as many as of the clean one."""
    corrupted: Path | None = None
    """Folder with the corrupted test set: the .npy files of CIFAR-10-C, or the tree of ImageNet-C. By default the files
    that `featureflock data corrupt` stored in the cache; without them, corruptions are generated during the
    evaluation."""
    ood: tuple[str, ...] | None = None
    """Out-of-distribution sets: noise, the name of a data set, or a folder of images; up to 10,000 inputs of each. By
    default noise and the data sets in the cache. Give the flag without a value for none."""
    maps: int = 500
    """Number of images whose class activation maps are compared, of the clean test set and of all corrupted ones
    together; 0 for none."""

    def __post_init__(self) -> None:
        for name in self.corruptions:
            check_corruption(name)
        wrong = [severity for severity in self.severities if severity not in SEVERITIES]
        if wrong:
            raise ValueError(f"severities must be among 1 to 5; got {wrong[0]}.")
        for name in ("examples", "corrupted_examples"):
            count = getattr(self, name)
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
    """Where it comes from, if that is worth a note."""

    @property
    def name(self) -> str:
        """Name of its file of predictions: clean, only-left, fog-3, ood-noise."""
        return {"view": "only-", "ood": "ood-"}.get(self.kind, "") + self.label


def all_test_sets(splits: Splits, data: DataSet, protocol: EvaluationProtocol, log: Log) -> list[EvaluationSet]:
    """Everything that the protocol asks for, the clean test set first."""
    return [
        clean(splits, protocol),
        *single_views(splits, protocol),
        *corrupted(splits, data, protocol, log),
        *out_of_distribution(splits, data, protocol),
    ]


def clean(splits: Splits, protocol: EvaluationProtocol = EvaluationProtocol()) -> EvaluationSet:
    """The test set itself."""
    test = splits.test
    return EvaluationSet("clean", "clean", test.identity(), _choose(test, protocol.examples), test.select)


def validation(splits: Splits) -> EvaluationSet | None:
    """The examples held out of training; None if there are none."""
    examples = splits.validation
    if examples is None:
        return None
    positions = torch.arange(len(examples))
    return EvaluationSet("validation", "validation", examples.identity(), positions, examples.select)


def single_views(splits: Splits, protocol: EvaluationProtocol = EvaluationProtocol()) -> Iterator[EvaluationSet]:
    """For each view of the data, the clean test set with everything else blank."""
    test = splits.test
    if not splits.views:
        return
    if not isinstance(test, TensorExamples) or len(test.shape) != 3:
        raise ValueError("Views must be parts of images (C, H, W) held in memory.")
    for view in splits.views:
        positions, load = _choose(test, protocol.examples), partial(_only_view, test, view)
        yield EvaluationSet("view", view.name, f"{test.identity()} {view}", positions, load)


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
        log("No corruptions: they need images stored as bytes.")
        return
    positions, digest = _choose(test, protocol.examples_per_corruption), test.identity()
    published = getattr(data, "published", None)
    if protocol.corrupted is None:
        stored = [one for one in _cached_sets(published) if torch.equal(one.labels, test.labels)] if published else []
    else:
        stored = [open_set(protocol.corrupted)]
        if not torch.equal(stored[0].labels, test.labels):
            raise ValueError(f"{protocol.corrupted / 'labels.npy'} does not match the labels of the test set.")
    generated: list[str] = []
    for corruption, severity in wanted:
        label = f"{corruption}-{severity}"
        source = next((s for s in stored if corruption in s.corruptions and severity in s.severities), None)
        if source is not None:
            identity = f"{digest} {_stored_identity(source, corruption, severity)}"
            note = f"Corrupted images: {source.source}."
            load_images = partial(_load_stored, source, corruption, severity, test)
        else:
            generated.append(corruption)
            origin = frost_source() if corruption == "frost" else ""
            identity = f"{digest} {_identity(corruption, severity, _SEED, ALGORITHM, origin)}"
            note = f"Frost is generated from {origin}." if origin else f"Corrupted images: generated with seed {_SEED}."
            load_images = partial(_generate, test, corruption, severity)
        yield EvaluationSet("corrupted", label, identity, positions, load_images, note)
    for one in stored:
        log(f"Corrupted test sets: {one.source}, in {one.folder}.")
    if generated:
        names = dict.fromkeys(generated)
        which = "" if len(names) == len(set(protocol.corruptions)) else f": {', '.join(names)}"
        frost = f"; frost is generated from {frost_source()}" if "frost" in generated else ""
        log(f"Corrupted test images are generated with seed {_SEED}{which}{frost}.")
        if published and test.shape[0] == 3:
            log(f"To generate them once for all runs: featureflock data corrupt {published}")


def out_of_distribution(splits: Splits, data: DataSet, protocol: EvaluationProtocol) -> Iterator[EvaluationSet]:
    """The OOD sets. The data set of the runs, or the one that it wraps, is never among the default ones."""
    test = splits.test
    if not isinstance(test, TensorExamples | StreamedExamples) or not are_images(test):
        if protocol.ood:
            raise ValueError("Out-of-distribution sets need image data; leave --ood out.")
        return
    count = min(len(test) if protocol.examples is None else protocol.examples, _MAX_OOD)
    if protocol.ood is not None:
        chosen = list(dict.fromkeys(protocol.ood))
    else:
        own = published_sets(data)
        chosen = [NOISE, *(name for name in PUBLISHED_SETS if name not in own and _is_cached(name))]
    seen: set[str] = set()
    for name in chosen:
        label, reader = _ood_reader(name, test, count)
        if label in seen:
            raise ValueError(f"Two OOD sets are called {label}; rename one of the folders.")
        seen.add(label)
        inputs = StreamedExamples(
            reader, torch.zeros(reader.count, dtype=torch.int64), normalisation=test.normalisation
        )
        positions = stratified_split(inputs, min(count, len(inputs)), _SEED, Stream.TEST_SUBSET)[0]
        yield EvaluationSet("ood", label, inputs.identity(), positions, inputs.select)


def published_sets(data: DataSet) -> list[str]:
    """The published data set that `data` is or wraps: ["cifar10"] for CIFAR10() and for HeldOut(CIFAR10())."""
    name = getattr(data, "published", None)
    names = [] if name is None else [str(name)]
    parts = vars(data).values()
    return names + [each for part in parts if isinstance(part, DataSet) for each in published_sets(part)]


def _ood_reader(name: str, test: TensorExamples | StreamedExamples, count: int) -> tuple[str, OODImages]:
    """The label and the reader of an OOD set."""
    folder = Path(name).expanduser()
    if name == NOISE:
        return name, OODImages.like(test, NoiseImages((*test.shape[1:], 3)), count, f"noise {test.shape}")
    if name in PUBLISHED_SETS:
        arrays = load(name)
        return name, OODImages.like(test, ArrayImages(arrays.test_x), len(arrays.test_x), arrays.digest)
    if folder.is_dir():
        files = read_classes(folder, [""], size=max(test.shape[1:]), workers=0, margin=1.0).reader
        assert isinstance(files, ImageFiles)
        return folder.resolve().name, OODImages.like(test, FolderImages(files), len(files.paths), files.identity())
    raise ValueError(f"No OOD set {name!r}: give {NOISE}, one of {', '.join(PUBLISHED_SETS)}, or a folder.")


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
        log("No corruptions: for images in files, give the folder of ImageNet-C by --corrupted FOLDER.")
        return
    assert isinstance(test, StreamedExamples)
    for corruption, severity in wanted:
        examples = read_imagenet_c(
            protocol.corrupted,
            corruption,
            severity,
            classes=splits.class_names,
            size=test.shape[-1],
            workers=test.workers,
        )
        examples.normalisation = test.normalisation
        identity = f"{protocol.corrupted.absolute()} {corruption} {severity} {examples.identity()}"
        positions, note = _choose(examples, protocol.examples_per_corruption), "Corrupted images: files of ImageNet-C."
        yield EvaluationSet("corrupted", f"{corruption}-{severity}", identity, positions, examples.select, note)
    log(f"Corrupted test sets: ImageNet-C in {protocol.corrupted}.")


def _only_view(test: TensorExamples, view: View, positions: Tensor) -> TensorExamples:
    return only_view(test.select(positions), view)


def _generate(test: TensorExamples, corruption: str, severity: int, positions: Tensor) -> TensorExamples:
    indices = test.indices[positions].numpy()
    return transformed(
        test.select(positions), lambda images: corrupt(images, corruption, severity, seed=_SEED, indices=indices)
    )


def _load_stored(
    stored: CorruptedSet, corruption: str, severity: int, test: TensorExamples, positions: Tensor
) -> TensorExamples:
    x = torch.from_numpy(stored.images(corruption, severity)[positions.numpy()]).permute(0, 3, 1, 2)
    if x.shape[1:] != test.x.shape[1:]:
        raise ValueError(
            f"{stored.folder} holds images of shape {tuple(x.shape[1:])}; the test set has {tuple(test.x.shape[1:])}."
        )
    return TensorExamples(x, test.labels[positions], normalisation=test.normalisation)


def _cached_sets(name: str) -> Iterator[CorruptedSet]:
    """Corrupted sets in the cache, the published files before generated ones."""
    for ending in ("-c-published", "-c"):
        with contextlib.suppress(FileNotFoundError):
            yield open_set(cache_folder() / f"{name}{ending}")


def _is_cached(name: str) -> bool:
    try:
        return look_up(name) is not None
    except ValueError:  # damaged
        return False


def _stored_identity(stored: CorruptedSet, corruption: str, severity: int) -> str:
    """Equal for a generated set in the cache and for the same set generated during the evaluation."""
    manifest = read_manifest(stored.folder)
    if manifest is not None and "algorithm" in manifest:
        origin = manifest["files"][f"{corruption}.npy"]["from"]
        return _identity(corruption, severity, manifest["seed"], manifest["algorithm"], origin)
    stat = (stored.folder / f"{corruption}.npy").stat()
    return json.dumps([corruption, severity, stat.st_size, stat.st_mtime_ns])


def _identity(corruption: str, severity: int, seed: int, algorithm: int, origin: str) -> str:
    return json.dumps([corruption, severity, seed, algorithm, origin])
