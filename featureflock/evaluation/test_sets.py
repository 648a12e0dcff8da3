"""What an ensemble is tested on: the clean test set, single views of it, its 15 corruptions × 5 severities, and
unfamiliar inputs."""

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

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
from featureflock.data import Examples, Splits, StreamedExamples, TensorExamples, View, only_view
from featureflock.data.examples import stratified_split
from featureflock.data.image_files import ImageFiles, read_classes
from featureflock.data.sources.cache import cache_folder, load, look_up
from featureflock.data.sources.registry import PUBLISHED_SETS
from featureflock.evaluation.images import altered, are_pictures
from featureflock.evaluation.ood_sets import Files, Noise, OODImages, Stored

CLEAN, VALIDATION = "clean", "validation"
_SEED = 0
"""Of the choice of examples, and of corruptions that are made here."""
_CHOICE = 3
"""Which random numbers are for what, as in data/datasets.py."""
NOISE = "noise"
_UNFAMILIAR = "unfamiliar-"
_ONLY = "only-"
_MOST_UNFAMILIAR = 10_000


@dataclass(frozen=True)
class EvaluationProtocol:
    """What to test on."""

    examples: int | None = None
    """So many examples of each test set only, as many of each class; by default all."""
    corruptions: tuple[str, ...] = CORRUPTIONS
    """Only these corruptions of the test set. The flag without a name: none."""
    severities: tuple[int, ...] = SEVERITIES
    """Only these severities, of 1 to 5."""
    corrupted_examples: int | None = None
    """So many examples of each corrupted test set only; by default as many as of the clean one."""
    corrupted: Path | None = None
    """Folder with the corrupted test set: the .npy files of CIFAR-10-C, or the tree of ImageNet-C. By default what
    `featureflock data corrupt` keeps in the cache, and else corruptions made on the way."""
    unfamiliar: tuple[str, ...] | None = None
    """Other inputs to tell from familiar ones: noise, the name of a data set, or a folder of pictures; up to 10,000 of
    each. By default noise and the data sets that are in the cache. The flag without a name: none."""
    maps: int = 500
    """Pictures whose class activation maps are compared, of the clean test set and of all corrupted ones together; 0
    for none."""

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
    def of_corrupted(self) -> int | None:
        """How many examples of each corrupted test set; None for all."""
        return self.examples if self.corrupted_examples is None else self.corrupted_examples


@dataclass(frozen=True, eq=False)
class EvaluationSet:
    """One test set."""

    name: str
    """As its file of predictions is called: clean, fog-3, unfamiliar-mnist, only-left."""
    identity: str
    """What tells whether two conditions of one name are the same."""
    positions: Tensor
    """Which examples of the set are used."""
    load: Callable[[Tensor], Examples]
    """The examples at these positions."""
    source: str = ""
    """Where it comes from, in words, if that is worth a note."""

    @property
    def is_unfamiliar(self) -> bool:
        return self.name.startswith(_UNFAMILIAR)

    @property
    def is_corrupted(self) -> bool:
        return self.name not in (CLEAN, VALIDATION) and not self.is_unfamiliar and self.view is None

    @property
    def view(self) -> str | None:
        """The only view that is left, where that is what it is about."""
        return self.name.removeprefix(_ONLY) if self.name.startswith(_ONLY) else None


def clean(splits: Splits, protocol: EvaluationProtocol = EvaluationProtocol()) -> EvaluationSet:
    return EvaluationSet(CLEAN, splits.test.identity(), _chosen(splits.test, protocol.examples), splits.test.select)


def validation(splits: Splits) -> EvaluationSet | None:
    """The examples that were held out of training, if any were."""
    held_out = splits.validation
    if held_out is None:
        return None
    return EvaluationSet(VALIDATION, held_out.identity(), torch.arange(len(held_out)), held_out.select)


def single_views(splits: Splits, protocol: EvaluationProtocol = EvaluationProtocol()) -> Iterator[EvaluationSet]:
    """The clean test set with everything blank but one view, for each of the views that the data have."""
    test = splits.test
    if not splits.views:
        return
    if not isinstance(test, TensorExamples) or len(test.shape) != 3:
        raise ValueError("Views are parts of pictures (C, H, W) in memory; these data say that they have some.")
    for view in splits.views:
        identity = f"{test.identity()} {view}"
        yield EvaluationSet(
            f"{_ONLY}{view.name}", identity, _chosen(test, protocol.examples), partial(_only, test, view)
        )


def corrupted(
    splits: Splits, name: str, protocol: EvaluationProtocol, say: Callable[[str], None]
) -> Iterator[EvaluationSet]:
    """The corrupted test sets; `name` is that of the data set's class. Says what they are made from."""
    test, names = splits.test, dict.fromkeys(map(check_corruption, protocol.corruptions))
    wanted = [(corruption, severity) for corruption in names for severity in sorted(set(protocol.severities))]
    if not wanted:
        return
    if isinstance(test, StreamedExamples):
        yield from _imagenet_c(splits, protocol, wanted, say)
        return
    if not isinstance(test, TensorExamples) or not are_pictures(test):
        say("Without corruptions: they are for pictures in bytes.")
        return
    positions, digest = _chosen(test, protocol.of_corrupted), test.identity()
    if protocol.corrupted is None:
        held = [one for one in _cached(name) if torch.equal(one.labels, test.labels)]
    else:
        held = [open_set(protocol.corrupted)]
        if not torch.equal(held[0].labels, test.labels):
            path = protocol.corrupted / "labels.npy"
            raise ValueError(f"{path} has not the labels of the test set; is it of another set?")
    made: list[str] = []
    for corruption, severity in wanted:
        label = f"{corruption}-{severity}"
        there = next((h for h in held if corruption in h.corruptions and severity in h.severities), None)
        if there is not None:
            identity = f"{digest} {_identity(there, corruption, severity)}"
            source = f"Corrupted pictures: {there.source}."
            yield EvaluationSet(label, identity, positions, partial(_read, there, corruption, severity, test), source)
        else:
            made.append(corruption)
            origin = frost_source() if corruption == "frost" else ""
            identity = f"{digest} {_recipe(corruption, severity, _SEED, ALGORITHM, origin)}"
            source = f"Frost is made from {origin}." if origin else f"Corrupted pictures: made with seed {_SEED}."
            yield EvaluationSet(label, identity, positions, partial(_made, test, corruption, severity), source)
    for one in held:
        say(f"Corrupted test sets: {one.source}, in {one.folder}.")
    if made:
        which = "all" if len(set(made)) == len(set(protocol.corruptions)) else ", ".join(dict.fromkeys(made))
        frost = f"; frost is made from {frost_source()}" if "frost" in made else ""
        say(f"Corruptions made on the way (seed {_SEED}): {which}{frost}.")
        if _published_name(name) in PUBLISHED_SETS and test.shape[0] == 3:
            say(f"To make them once for all runs: featureflock data corrupt {_published_name(name)}")


def unfamiliar(splits: Splits, name: str, protocol: EvaluationProtocol) -> Iterator[EvaluationSet]:
    """Inputs that are of no class; `name` is that of the data set's class."""
    test = splits.test
    if not isinstance(test, TensorExamples | StreamedExamples) or not are_pictures(test):
        if protocol.unfamiliar:
            raise ValueError("Unfamiliar inputs are for data of pictures; leave --unfamiliar out.")
        return
    count = min(len(test) if protocol.examples is None else protocol.examples, _MOST_UNFAMILIAR)
    if protocol.unfamiliar is not None:
        chosen = list(dict.fromkeys(protocol.unfamiliar))
    else:
        chosen = [NOISE, *(each for each in PUBLISHED_SETS if _is_cached(each) and each != _published_name(name))]
    seen: set[str] = set()
    for each in chosen:
        known, reader = _unfamiliar_reader(each, test, count)
        if known in seen:
            raise ValueError(f"Two sets of unfamiliar inputs are called {known}; give one of the folders another name.")
        seen.add(known)
        inputs = StreamedExamples(
            reader, torch.zeros(reader.count, dtype=torch.int64), normalisation=test.normalisation
        )
        positions = stratified_split(inputs, min(count, len(inputs)), _SEED, _CHOICE)[0]
        yield EvaluationSet(f"{_UNFAMILIAR}{known}", inputs.identity(), positions, inputs.select)


def _unfamiliar_reader(name: str, test: TensorExamples | StreamedExamples, count: int) -> tuple[str, OODImages]:
    """What a set of unfamiliar inputs is called, and what reads it."""
    folder = Path(name).expanduser()
    if name == NOISE:
        return name, OODImages.like(test, Noise((*test.shape[1:], 3)), count, f"noise {test.shape}")
    if name in PUBLISHED_SETS:
        arrays = load(name)
        return name, OODImages.like(test, Stored(arrays.test_x), len(arrays.test_x), arrays.digest)
    if folder.is_dir():
        files = read_classes(folder, [""], size=max(test.shape[1:]), workers=0, margin=1.0).reader
        assert isinstance(files, ImageFiles)
        return folder.resolve().name, OODImages.like(test, Files(files), len(files.paths), files.identity())
    raise ValueError(f"No OOD set {name!r}: give {NOISE}, one of {', '.join(PUBLISHED_SETS)}, or a folder.")


def _chosen(examples: Examples, count: int | None) -> Tensor:
    if count is None:
        return torch.arange(len(examples))
    if count > len(examples):
        raise ValueError(f"examples must be at most {len(examples)}, as many as there are; got {count}.")
    return stratified_split(examples, count, _SEED, _CHOICE)[0]


def _imagenet_c(
    splits: Splits, protocol: EvaluationProtocol, wanted: list[tuple[str, int]], say: Callable[[str], None]
) -> Iterator[EvaluationSet]:
    test = splits.test
    if protocol.corrupted is None:
        say("Without corruptions: for pictures in files give the folder of ImageNet-C, --corrupted FOLDER.")
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
        source = "Corrupted pictures: files in the tree of ImageNet-C."
        yield EvaluationSet(
            f"{corruption}-{severity}", identity, _chosen(examples, protocol.of_corrupted), examples.select, source
        )
    say(f"Corrupted test sets: the tree in {protocol.corrupted}.")


def _only(test: TensorExamples, view: View, positions: Tensor) -> TensorExamples:
    return only_view(test.select(positions), view)


def _made(test: TensorExamples, corruption: str, severity: int, positions: Tensor) -> TensorExamples:
    indices = test.indices[positions].numpy()
    return altered(
        test.select(positions), lambda pictures: corrupt(pictures, corruption, severity, seed=_SEED, indices=indices)
    )


def _read(
    held: CorruptedSet, corruption: str, severity: int, test: TensorExamples, positions: Tensor
) -> TensorExamples:
    x = torch.from_numpy(held.images(corruption, severity)[positions.numpy()]).permute(0, 3, 1, 2)
    if x.shape[1:] != test.x.shape[1:]:
        raise ValueError(f"{held.folder} holds pictures of shape {tuple(x.shape[1:])}, not {tuple(test.x.shape[1:])}.")
    return TensorExamples(x, test.labels[positions], normalisation=test.normalisation)


def _cached(name: str) -> Iterator[CorruptedSet]:
    """Corrupted sets in the cache: the published one, if it was copied there, goes first."""
    for ending in ("-c-published", "-c"):
        with contextlib.suppress(FileNotFoundError):
            yield open_set(cache_folder() / f"{_published_name(name)}{ending}")


def _is_cached(name: str) -> bool:
    try:
        return look_up(name) is not None
    except ValueError:  # damaged
        return False


def _published_name(name: str) -> str:
    """CIFAR10 → cifar10."""
    return {"FashionMNIST": "fashion-mnist"}.get(name, name.lower())


def _identity(held: CorruptedSet, corruption: str, severity: int) -> str:
    """The same for a set that was made beforehand and for one that would be made now."""
    manifest = read_manifest(held.folder)
    if manifest is not None and "algorithm" in manifest:
        origin = manifest["files"][f"{corruption}.npy"]["from"]
        return _recipe(corruption, severity, manifest["seed"], manifest["algorithm"], origin)
    stat = (held.folder / f"{corruption}.npy").stat()
    return json.dumps([corruption, severity, stat.st_size, stat.st_mtime_ns])


def _recipe(corruption: str, severity: int, seed: int, algorithm: int, origin: str) -> str:
    return json.dumps([corruption, severity, seed, algorithm, origin])
