"""Class activation maps of each member as heat maps over the images, one band per ensemble: the paper's figure 1.

    heat = m / max m,    pixel = (1 − α) · 0.85 grey + α · colour(heat),    α = 0.35 + 0.4 heat

m is a map from `class_activation_maps`, enlarged by bicubic interpolation (bilinear shows creases). It is divided by
its maximum, so colours show where the evidence is, not how strong it is; zero stays zero.

Shapes: n members, B images of H × W pixels, h × w pixels of a map.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from featureflock.corruptions.images import Bytes
from featureflock.evaluation.grad_cam import checked_maps

Texts = Sequence[Sequence[str]]
MemberMaps = tuple[str, Tensor] | tuple[str, Tensor, Texts | None]

COLOUR_MAP, INK, PALE = "inferno", "#1f2328", "#6a737d"
CELLS = 12
"""Maximum number of cells in a row, unless one image with its members needs more."""


def cam_grid(images: Bytes | Tensor, groups: Sequence[MemberMaps], *, cell: int = 112) -> Image.Image:
    """One band per ensemble. In it, each image is followed by the heat map of every member.

    Args:
        images: (B, H, W, 3) uint8, RGB, before normalisation.
        groups: for each ensemble a title, maps (n, B, h, w) and optionally n sequences of B texts to write below the
            maps, such as the members' predicted classes.
        cell: width of an image in pixels.
    """
    if not groups:
        raise ValueError("A grid needs at least one group (title, maps).")
    p_bhwc = _checked_images(images)
    bands = [_checked_group(group, len(p_bhwc)) for group in groups]
    small, large, gap, margin = max(9, cell // 9), max(12, cell // 6), max(2, cell // 28), max(12, cell // 4)
    caption, heading, body = 2 * small, _font("DejaVuSans-Bold", large), _font("DejaVuSans", small)

    members = max(len(maps) for _, maps, _ in bands)
    across = max(1, min(len(p_bhwc), CELLS // (1 + members)))
    height = max(1, round(cell * p_bhwc.shape[1] / p_bhwc.shape[2]))
    block = cell + 2 * gap + members * (gap + cell)  # an image, a wider gap, its members
    rows = [height + (gap if texts is None else caption) for _, _, texts in bands]
    band_heights = [2 * large + caption + -(-len(p_bhwc) // across) * row for row in rows]
    widths = [across * (block + margin) - margin, *(round(heading.getlength(title)) for title, _, _ in bands)]
    card = Image.new("RGB", (2 * margin + max(widths), margin + sum(b + margin for b in band_heights)), "white")
    draw = ImageDraw.Draw(card)

    top = margin
    for (title, maps, texts), row, band_height in zip(bands, rows, band_heights, strict=True):
        draw.text((margin, top), title, INK, heading, "la")
        views_nb = [overlaid(p_bhwc, m_bhw, (height, cell)) for m_bhw in maps]
        for b, image in enumerate(p_bhwc):
            x, y = margin + (b % across) * (block + margin), top + 2 * large + caption + (b // across) * row
            card.paste(_enlarged(image, (height, cell)), (x, y))
            for i, views_b in enumerate(views_nb):
                left = x + cell + 3 * gap + i * (cell + gap)
                card.paste(Image.fromarray(views_b[b]), (left, y))
                if b < across:
                    draw.text((left + cell / 2, y - small / 2), f"member {i + 1}", PALE, body, "md")
                if texts is not None:
                    text = _truncated(texts[i][b], body, cell)
                    draw.text((left + cell / 2, y + height + small / 4), text, PALE, body, "ma")
        top += band_height + margin
    return card


def overlaid(images: Bytes | Tensor, maps: Tensor, size: tuple[int, int]) -> Bytes:
    """Images (B, H, W, 3) overlaid with heat maps (B, h, w), each of `size` = (height, width) pixels."""
    from matplotlib import colormaps

    p_bhwc, m_bhw = _checked_images(images), checked_maps(maps[None])[0].cpu()
    if len(p_bhwc) != len(m_bhw):
        raise ValueError(f"There must be one map per image; got {len(m_bhw)} maps and {len(p_bhwc)} images.")
    grey_bhw1 = np.stack([np.asarray(_enlarged(image, size).convert("L")) for image in p_bhwc])[..., None]
    m_bhw = F.interpolate(m_bhw[:, None], size, mode="bicubic")[:, 0].clamp_min(0)
    heat_bhw = (m_bhw / m_bhw.amax((-2, -1), keepdim=True).clamp_min(1e-300)).numpy()
    alpha_bhw1 = 0.35 + 0.4 * heat_bhw[..., None]
    colour_bhwc = 255 * colormaps[COLOUR_MAP](heat_bhw)[..., :3]
    blended: Bytes = ((1 - alpha_bhw1) * 0.85 * grey_bhw1 + alpha_bhw1 * colour_bhwc).round().astype(np.uint8)
    return blended


def _enlarged(image_hwc: Bytes, size: tuple[int, int]) -> Image.Image:
    return Image.fromarray(image_hwc).resize(size[::-1], Image.Resampling.LANCZOS)


def _font(name: str, size: int) -> ImageFont.FreeTypeFont:
    """A font that comes with matplotlib."""
    from matplotlib import get_data_path

    return ImageFont.truetype(str(Path(get_data_path(), "fonts", "ttf", f"{name}.ttf")), size)


def _truncated(text: str, font: ImageFont.FreeTypeFont, width: float) -> str:
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "…") > width:
        text = text[:-1]
    return text + "…"


def _checked_images(images: Any) -> Bytes:
    p: NDArray[Any] = np.ascontiguousarray(images.cpu() if isinstance(images, Tensor) else images)
    if p.dtype != np.uint8 or p.ndim != 4 or p.shape[-1] != 3 or 0 in p.shape:
        raise ValueError(f"images must be RGB bytes (B, H, W, 3); got {p.dtype} of shape {p.shape}.")
    return p


def _checked_group(group: MemberMaps, count: int) -> tuple[str, Tensor, Texts | None]:
    title, maps, texts = (*group, None)[:3]
    maps = checked_maps(maps)
    if maps.shape[1] != count:
        raise ValueError(f"The maps of {title!r} are for {maps.shape[1]} images; there are {count}.")
    if texts is not None and [len(row) for row in texts] != [count] * len(maps):
        raise ValueError(f"{title!r} needs {count} texts for each of its {len(maps)} members, or None.")
    return title, maps, texts
