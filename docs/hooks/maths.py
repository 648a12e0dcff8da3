"""Equations as MathML, written when the site is built, with a font of their own: no script, and nothing to download.

`$…$` and `$$…$$` in a page are LaTeX. The font is STIX Two Math, reduced to the characters that equations use.
"""

import html as entities
import importlib.util
import re
from pathlib import Path
from typing import Any

from fontTools import subset
from latex2mathml.converter import convert

INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', flags=re.S)
BLOCK = re.compile(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', flags=re.S)
FUNCTION = re.compile(r"(<mi>(?:log|exp|det|tanh|max|min)</mi>)(?=<m(?:i|n|frac|sub|sup|subsup|row|over)\b)")
CHARACTERS = (
    *(range(0x20, 0x7F), range(0xA0, 0x100), range(0x300, 0x340), range(0x370, 0x400), range(0x2000, 0x2070)),
    *(range(0x20D0, 0x20F0), range(0x2100, 0x2300), range(0x27E6, 0x27F0), range(0x1D400, 0x1D7FF)),
)


def on_page_content(html: str, **_: Any) -> str:
    html = BLOCK.sub(lambda match: f'<div class="equation">{mathml(match[1], "block")}</div>', html)
    return INLINE.sub(lambda match: mathml(match[1], "inline"), html)


def mathml(latex: str, display: str) -> str:
    """LaTeX, with HTML entities, as MathML."""
    text = convert(entities.unescape(latex).strip(), display=display)
    return FUNCTION.sub(r'\1<mspace width="0.17em"></mspace>', text)


def on_post_build(config: Any) -> None:
    package = importlib.util.find_spec("ziamath").submodule_search_locations[0]
    source = Path(package) / "fonts" / "STIXTwoMath-Regular.ttf"
    options = subset.Options(flavor="woff", layout_features=["ssty"], notdef_outline=True)
    font = subset.load_font(str(source), options)
    reduced = subset.Subsetter(options)
    reduced.populate(unicodes=[code for codes in CHARACTERS for code in codes])
    reduced.subset(font)
    subset.save_font(font, str(Path(config.site_dir) / "assets" / "maths.woff"), options)
