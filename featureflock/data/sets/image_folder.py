"""Image files in one folder per class, such as ImageNet."""

from dataclasses import dataclass
from os import cpu_count
from pathlib import Path

from featureflock.data.image_files import read_tree
from featureflock.data.sets.base import DATA_SETS, DataSet, Splits


@DATA_SETS.register("image-folder")
@dataclass(frozen=True)
class ImageFolder(DataSet):
    """Images of any size in train/<class>/ and val/<class>/, such as ImageNet."""

    folder: Path = Path("imagenet")
    """Folder that holds train/ and val/."""
    size: int = 224
    """Height and width of the network's inputs, in pixels."""
    workers: int | None = None
    """Processes that decode images; by default one per core, less one."""

    train_size, input_shape = 1_281_167, (3, 224, 224)  # ImageNet's

    def __post_init__(self) -> None:
        if self.size < 1 or (self.workers is not None and self.workers < 0):
            raise ValueError(f"ImageFolder needs size ≥ 1 and workers ≥ 0; got {self}.")

    def load(self) -> Splits:
        workers = max(1, (cpu_count() or 1) - 1) if self.workers is None else self.workers
        train, test, names = read_tree(self.folder, size=self.size, workers=workers)
        return Splits(train, test, len(names), class_names=tuple(names))
