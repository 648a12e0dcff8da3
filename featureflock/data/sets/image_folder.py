"""Image files in one folder per class, such as ImageNet."""

from dataclasses import dataclass
from os import cpu_count
from pathlib import Path

from featureflock.data.image_files import class_names, read_classes
from featureflock.data.sets.base import DATA_SETS, DataSet, Splits
from featureflock.data.streaming import check_workers

_MAX_SIZE = 4096


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
        if not 1 <= self.size <= _MAX_SIZE:
            raise ValueError(f"size must be 1 to {_MAX_SIZE:,} pixels; got {self.size:,}.")
        check_workers(0 if self.workers is None else self.workers)

    def load(self) -> Splits:
        workers = max(1, (cpu_count() or 1) - 1) if self.workers is None else self.workers
        if not self.folder.is_dir():
            raise FileNotFoundError(
                f"There is no folder {self.folder}; it must contain train/<class>/ and val/<class>/."
            )
        parts = []
        for names in (("train", "training"), ("val", "valid", "validation", "test")):
            part = next((self.folder / name for name in names if (self.folder / name).is_dir()), None)
            if part is None:
                raise FileNotFoundError(f"{self.folder} contains none of the folders {', '.join(names)}; add one.")
            parts.append(part)
        classes = class_names(parts[0])
        if unknown := sorted(set(class_names(parts[1])) - set(classes)):
            raise ValueError(f"{parts[1]} has the class {unknown[0]}, which is not in {parts[0]}.")
        train, test = (read_classes(part, classes, size=self.size, workers=workers) for part in parts)
        if missing := sorted(set(range(len(classes))) - set(train.labels.tolist())):
            raise ValueError(f"{parts[0] / classes[missing[0]]} contains no images; add some or remove the folder.")
        return Splits(train, test, len(classes), class_names=tuple(classes))
