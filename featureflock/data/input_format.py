"""What a network's inputs look like, kept with a run, so that a picture of the user's can be made one of them."""

import dataclasses
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from featureflock.data.examples import Scale, TensorExamples, as_numbers
from featureflock.data.image_files import ImageFiles, centre, to_rgb_image
from featureflock.data.sets.sets import Splits
from featureflock.data.streaming import StreamedExamples

_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF", "PPM", "TGA", "ICO", "AVIF", "JPEG2000")
"""Those that Pillow reads without the help of another program."""
_NOTES = {"CMYK": "printing colours (CMYK) converted to RGB", "L": "grey", "LA": "grey"}
_TRANSPARENT = ("RGBA", "LA", "PA", "RGBa", "La")
_DEEP_GREY = "16 bits reduced to 8, grey"


@dataclass(frozen=True)
class InputFormat:
    shape: tuple[int, ...]
    """Of one input: (C, H, W) for pictures."""
    dtype: str
    """Of the numbers before they are scaled: uint8 for pictures."""
    scale: Scale | None
    white: int
    """The byte that is white."""
    margin: float
    """The shorter side of a picture is scaled to this many times the size of what is cut from its centre."""
    classes: int
    names: tuple[str, ...]

    @classmethod
    def of(cls, splits: Splits) -> Self:
        """Of a data set's test examples."""
        test, scale, white, margin, dtype = splits.test, None, 255, 1.0, "float32"
        if isinstance(test, TensorExamples):
            scale, white, dtype = test.scale, test.white, str(test.x.dtype).removeprefix("torch.")
        elif isinstance(test, StreamedExamples):
            scale = test.scale
            if isinstance(test.reader, ImageFiles):
                margin, dtype = test.reader.margin, "uint8"
        return cls(test.shape, dtype, scale, white, margin, splits.classes, splits.names)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        scale = value["scale"] and Scale(tuple(value["scale"]["mean"]), tuple(value["scale"]["deviation"]))
        return cls(**{**value, "shape": tuple(value["shape"]), "names": tuple(value["names"]), "scale": scale})

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def name(self, label: int) -> str:
        return self.names[label] if label < len(self.names) else f"class {label}"

    def check(self) -> None:
        """Say so if inputs are no pictures."""
        if self.dtype != "uint8" or len(self.shape) != 3 or self.shape[0] not in (1, 3):
            raise ValueError(
                f"This run's inputs are no pictures but {self.dtype} of shape {self.shape}; use "
                "featureflock.load(…) and predict in Python instead."
            )

    def read(self, path: Path) -> tuple[Image.Image, str]:
        """A picture file in the network's size and colours, and what was done to it, if anything, in words."""
        picture, note = _opened(path)
        channels, height, width = self.shape
        if picture.size != (width, height):
            note.append(f"of {picture.size[0]} × {picture.size[1]} pixels the centre, scaled to {width} × {height}")
            if width == height:
                picture = centre(picture, width, self.margin)
            else:
                picture = ImageOps.fit(picture, (width, height), Image.Resampling.BILINEAR)
        if channels == 1:
            picture = picture.convert("L")
        return picture, "; ".join(note)

    def batch(self, pictures: list[Image.Image]) -> Tensor:
        """What the network sees of pictures that `read` gave, (B, C, H, W)."""
        x = torch.from_numpy(np.stack([np.array(picture) for picture in pictures]))
        x = x[:, None] if x.ndim == 3 else x.permute(0, 3, 1, 2)
        if self.white != 255:
            x = (x.float() * (self.white / 255)).round().to(torch.uint8)
        return as_numbers(x, self.scale)


def _opened(path: Path) -> tuple[Image.Image, list[str]]:
    """The picture in RGB, upright, and notes on what had to be converted."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; give the pictures in it, such as {path}/*.png.")
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no ordinary file, so it cannot be a picture.")
    Image.init()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # odd metadata is no reason to speak: the pixels count
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path, formats=[kind for kind in _FORMATS if kind in Image.OPEN]) as file:
                words = _DEEP_GREY if file.mode.startswith("I;16") else _NOTES.get(file.mode)
                notes = [] if words is None else [words]
                frames = getattr(file, "n_frames", 1)
                if frames > 1:
                    notes.append(f"the first of {frames} frames")
                upright = ImageOps.exif_transpose(file)
                transparent = upright.mode in _TRANSPARENT or "transparency" in upright.info
                if transparent and not upright.mode.startswith("I"):
                    notes.append("what is transparent is white")
                    layer = upright.convert("RGBA")
                    upright = Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer)
                picture = to_rgb_image(upright)
    except FileNotFoundError:
        raise FileNotFoundError(f"There is no file {path}.") from None
    except UnidentifiedImageError:
        raise ValueError(f"{path} is no picture that can be read (PNG, JPEG, WebP, BMP, TIFF, GIF, …).") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise ValueError(f"{path} has too many pixels to be read safely; make it smaller first.") from None
    except PermissionError:
        raise PermissionError(f"{path} may not be read; change its permissions.") from None
    except (OSError, SyntaxError, ValueError) as error:
        raise ValueError(f"{path} is damaged, or no picture of a usual kind ({error}).") from error
    return picture, notes
