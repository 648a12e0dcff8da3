"""The format of a network's inputs, stored with a run so that the user's image files can be converted to it."""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from featureflock.data.examples import Normalisation, TensorExamples, normalise
from featureflock.data.image_files import ImageFiles, centre_crop, open_image, to_rgb_image
from featureflock.data.sets.base import Splits
from featureflock.data.streaming import StreamedExamples
from featureflock.tasks import Task
from featureflock.tasks.regression import GaussianTask
from featureflock.utils import serialization
from featureflock.utils.files import open_regular

_NOTES = {"CMYK": "CMYK converted to RGB", "L": "grey", "LA": "grey"}
_TRANSPARENT = ("RGBA", "LA", "PA", "RGBa", "La")


@dataclass(frozen=True)
class InputFormat:
    """Shape, type and normalisation of the inputs, and the classes."""

    shape: tuple[int, ...]
    """Shape of one input: (C, H, W) for images."""
    dtype: str
    """Type of the inputs before normalisation: uint8 for images."""
    normalisation: Normalisation | None
    white: int
    """The byte value of white."""
    margin: float
    """Image files are resized to a shorter side of `margin` times the central crop."""
    classes: int
    class_names: tuple[str, ...]
    feature_names: tuple[str, ...] = ()
    """Names of the columns of tabular inputs."""
    target_mean: tuple[float, ...] = ()
    """Mean of the training targets of regression; predictions are in their unit."""
    target_std: tuple[float, ...] = ()

    @classmethod
    def of(cls, splits: Splits) -> Self:
        """Return the format of the test examples of a data set."""
        test, normalisation, white, margin, dtype = splits.test, None, 255, 1.0, "float32"
        if isinstance(test, TensorExamples):
            normalisation, white, dtype = test.normalisation, test.white, str(test.x.dtype).removeprefix("torch.")
        elif isinstance(test, StreamedExamples):
            normalisation = test.normalisation
            if isinstance(test.reader, ImageFiles):
                margin, dtype = test.reader.margin, "uint8"
        names, task = splits.feature_names, splits.task
        mean, std = (task.target_mean, task.target_std) if isinstance(task, GaussianTask) else ((), ())
        return cls(
            test.shape, dtype, normalisation, white, margin, splits.classes, splits.class_names, names, mean, std
        )

    def differences(self, other: "InputFormat") -> list[str]:
        """Names of the fields in which two formats differ. Names of classes and columns may be missing in one."""
        optional, fitted = ("class_names", "feature_names"), ("target_mean", "target_std")
        pairs = {f.name: (getattr(self, f.name), getattr(other, f.name)) for f in fields(self) if f.name not in fitted}
        return [name for name, (a, b) in pairs.items() if a != b and (name not in optional or (a and b))]

    def fitted(self, task: Task) -> Task:
        """The task of a data set, with the statistics of the training targets of the run."""
        if not isinstance(task, GaussianTask) or not self.target_std:
            return task
        return replace(task, target_mean=self.target_mean, target_std=self.target_std)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """Return the format that `to_json` wrote."""
        return serialization.from_json(cls, value, where="the input format")  # type: ignore[no-any-return]

    def to_json(self) -> dict[str, Any]:
        """Return the format as plain JSON types."""
        return serialization.to_json(self, tag=False)  # type: ignore[no-any-return]

    def name(self, label: int) -> str:
        """Return the name of a class."""
        return self.class_names[label] if label < len(self.class_names) else f"class {label}"

    def check(self) -> None:
        """Raise ValueError unless the inputs are images."""
        if self.dtype != "uint8" or len(self.shape) != 3 or self.shape[0] not in (1, 3):
            inputs = f"{self.dtype} of shape {self.shape}"
            advice = "give a CSV file" if self.target_std and self.feature_names else "predict in Python instead"
            raise ValueError(f"The inputs of this run are not images but {inputs}; {advice}.")

    def read(self, path: Path) -> tuple[Image.Image, str]:
        """Read an image file in the network's size and colours, with a note on any conversion."""
        image, notes = _open(path)
        channels, height, width = self.shape
        if image.size != (width, height):
            notes.append(f"centre of {image.size[0]} × {image.size[1]} pixels, resized to {width} × {height}")
            if width == height:
                image = centre_crop(image, width, self.margin)
            else:
                image = ImageOps.fit(image, (width, height), Image.Resampling.BILINEAR)
        return image.convert("L") if channels == 1 else image, "; ".join(notes)

    def batch(self, images: list[Image.Image]) -> Tensor:
        """Convert images returned by `read` to network inputs (B, C, H, W)."""
        x = torch.from_numpy(np.stack([np.array(image) for image in images]))
        return self.network_inputs(x[:, None] if x.ndim == 3 else x.permute(0, 3, 1, 2))

    def network_inputs(self, x: Tensor) -> Tensor:
        """Normalise inputs (B, …) of this format; images are bytes from 0 to 255, as in image files."""
        if self.white != 255:
            x = (x.float() * (self.white / 255)).round().to(torch.uint8)
        return normalise(x, self.normalisation)


def _open(path: Path) -> tuple[Image.Image, list[str]]:
    """Return the image in upright RGB, and notes on its conversion."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; give image files, such as {path}/*.png.")
    if not path.exists():
        raise FileNotFoundError(f"There is no file {path}.")
    with open_regular(path, "give an image file") as data:
        return _decode(data, path)


def _decode(data: BinaryIO, path: Path) -> tuple[Image.Image, list[str]]:
    try:
        with open_image(data) as file:
            note = "16 bits reduced to 8, grey" if file.mode.startswith("I;16") else _NOTES.get(file.mode)
            notes = [] if note is None else [note]
            if (frames := getattr(file, "n_frames", 1)) > 1:
                notes.append(f"first of {frames} frames")
            ImageOps.exif_transpose(file, in_place=True)
            upright: Image.Image = file
            if (file.mode in _TRANSPARENT or "transparency" in file.info) and not file.mode.startswith("I"):
                notes.append("transparent pixels shown as white")
                layer = file if file.mode == "RGBA" else file.convert("RGBA")
                upright = Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer)
            return to_rgb_image(upright), notes
    except UnidentifiedImageError:
        raise ValueError(f"{path} is not an image in a supported format (PNG, JPEG, WebP, TIFF, GIF, …).") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise ValueError(f"{path} has too many pixels to be decoded safely; make it smaller first.") from None
    except PermissionError:
        raise PermissionError(f"{path} cannot be read; change its permissions.") from None
    except MemoryError:
        raise
    except Exception as error:  # Pillow raises many kinds for damaged files
        raise ValueError(f"{path} is damaged or of an unsupported kind ({error}).") from error
