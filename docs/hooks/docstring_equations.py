"""Griffe extension: the equations in docstrings, which are Unicode text, become LaTeX for the site.

A block of equations is indented, is no code, and contains mathematical symbols. A line of it is made of equations and
remarks, separated by two or more spaces:

    g_i = ∇_{h_i} log p(data | h_i)        data gradient

In running text, symbols with an index, such as z_i, are set as mathematics. Other indented blocks are code.
"""

import ast
import html
import re
import textwrap
from typing import Any

import griffe

SYMBOLS = re.compile("[∇Σ√‖Ψᵀ∂½∘≈∈∝στμβ−‖²←≥≤⟨∫]")
COMMANDS = {
    "∇": r"\nabla",
    "Σ": r"\sum",
    "∂": r"\partial",
    "∘": r"\circ",
    "≈": r"\approx",
    "∈": r"\in",
    "∝": r"\propto",
}
COMMANDS |= {
    "←": r"\leftarrow",
    "↦": r"\mapsto",
    "≥": r"\geq",
    "≤": r"\leq",
    "⟨": r"\langle",
    "⟩": r"\rangle",
    "∫": r"\int",
}
COMMANDS |= {"·": r"\cdot", "×": r"\times", "…": r"\ldots", "‖": r"\Vert", "−": "-", "½": r"\tfrac{1}{2}", "±": r"\pm"}
COMMANDS |= {"ᵀ": r"^{\top}", "²": "^{2}", "⁻¹": "^{-1}"}
FUNCTIONS = {"exp", "log", "max", "min", "tanh", "det", "diag", "argmax", "softmax", "softplus", "relu", "gelu"}
FUNCTIONS |= {"logit", "median", "sin", "cos", "Var", "KL", "CE"}
WORD_INDICES = {"pos", "neg", "ceb", "cr", "in", "out"}
TOKEN = re.compile(
    r"(?P<number>\d[\d.]*(?:e[-−]\d+)?)"
    r"|(?P<name>[A-Za-z]+|[Α-ωℓ])(?P<accent>[\u0304\u0303])?"
    r"|(?P<index>[_^])(?:\{(?P<braced>[^}]*)\}|\((?P<round>[^)]*)\)|(?P<plain>[A-Za-z0-9]+|[Α-ω]))"
    r"|(?P<root>√)|(?P<inverse>⁻¹)|(?P<brace>[{}])|(?P<space>\s+)|(?P<other>.)"
)

INDEXED = re.compile(
    r"(?<![\w.])[A-Za-zΑ-ω∇Σ∂][\u0304\u0303]?_(?:\{[^}]*\}|[A-Za-z0-9]{1,2}(?![\w(]))(?:\^\{[^}]*\})?[ᵀ²]?(?!:)"
)
"""A symbol of one letter with an index."""


class DocstringEquations(griffe.Extension):
    """Rewrite the docstrings of a package after it was read."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        self._visit(pkg)

    def _visit(self, obj: griffe.Object) -> None:
        if obj.docstring:
            obj.docstring.value = rewrite(obj.docstring.value)
        for member in obj.members.values():
            if not member.is_alias:
                self._visit(member)


def rewrite(docstring: str) -> str:
    """The docstring with every block of equations as HTML with LaTeX in it."""
    parts = re.split(r"\n\n((?: {4}.*\n?|\n(?= {4}))+)", docstring)
    for k in range(1, len(parts), 2):
        if is_equations(parts[k]):
            lines = [equation_line(line) for line in parts[k].splitlines() if line.strip()]
            parts[k] = '\n\n<div class="equations" markdown="span">\n' + "\n".join(lines) + "\n</div>\n\n"
        else:
            parts[k] = f"\n\n{fenced(textwrap.dedent(parts[k]).strip())}\n\n"
    parts[::2] = map(set_symbols, parts[::2])
    return "".join(parts)


def fenced(block: str) -> str:
    """A literal block with its language, so that a line that ends in a colon is not taken for a section."""
    try:
        ast.parse(block)
    except SyntaxError:
        return f"```text\n{block}\n```"
    return f"```python\n{block}\n```"


def set_symbols(text: str) -> str:
    """Symbols with an index, outside `code`, as LaTeX."""
    pieces = re.split(r"(`[^`]*`)", text)
    pieces[::2] = [INDEXED.sub(lambda match: _inline(match[0]), piece) for piece in pieces[::2]]
    return "".join(pieces)


def is_equations(block: str) -> bool:
    code = re.search(r"#|>>>|^\s*(from|import|featureflock) |\w\(\w+=|^\s+\w+: ", block, flags=re.M)
    return bool(SYMBOLS.search(block)) and not code


def equation_line(line: str) -> str:
    parts = re.split(r" {2,}(?!= )", re.sub(r" +(?=[=←≈] )", " ", line.strip()))
    return f'<span class="line">{"".join(map(_part, parts))}</span>'


def _part(text: str) -> str:
    words = [word for word in re.findall(r"(?<![\w_{])[A-Za-z]{3,}", text) if word not in FUNCTIONS]
    symbols = SYMBOLS.search(text) or re.search(r"[=_]|^\w$", text)
    if not symbols or len(words) > 2:
        return f"<small>{html.escape(text)}</small>"
    return _inline(text)


def _inline(text: str) -> str:
    return f"\\({latex(text)}\\)"


def latex(text: str) -> str:
    """An equation in Unicode as LaTeX."""
    text = re.sub(r"\((\d)/([A-Za-z]+)\)", r"⅟{\1}{\2}", text)
    out, k = [], 0
    while k < len(text):
        if fraction := re.match(r"⅟\{(\w+)\}\{(\w+)\}", text[k:]):
            out.append(rf"\frac{{{fraction[1]}}}{{{' '.join(fraction[2])}}}")
            k += fraction.end()
            continue
        token = TOKEN.match(text, k)
        k = token.end()
        if token["root"]:
            inner, k = _group(text, k)
            out.append(rf"\sqrt{{{latex(inner)}}}")
        else:
            out.append(_token(token))
    return re.sub(r" +", " ", "".join(out)).strip()


def _group(text: str, start: int) -> tuple[str, int]:
    """What a root covers: the text in the parentheses that start here, or one token."""
    if text[start] != "(":
        end = TOKEN.match(text, start).end()
        return text[start:end], end
    depth = 0
    for k in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[k], 0)
        if not depth:
            return text[start + 1 : k], k + 1
    return text[start + 1 :], len(text)


def _token(token: re.Match[str]) -> str:
    if name := token["name"]:
        base = COMMANDS.get(name) or (name if len(name) == 1 else _word(name))
        if base.startswith(r"\text") and token.string[token.end() : token.end() + 1] == " ":
            base += r"\ "
        accent = {"\u0304": r"\bar", "\u0303": r"\tilde"}.get(token["accent"] or "")
        return f"{accent}{{{base}}} " if accent else f"{base} "
    if token["index"]:
        inner = next(part for part in (token["braced"], token["round"], token["plain"]) if part is not None)
        plain = (
            rf"\mathrm{{{inner}}}" if inner in WORD_INDICES else latex(" ".join(inner) if inner.isalpha() else inner)
        )
        return f"{token['index']}{{{plain}}}"
    if token["brace"]:
        return "\\" + token["brace"]
    if token["inverse"]:
        return COMMANDS["⁻¹"]
    if token["space"]:
        return r"\quad " if len(token["space"]) > 2 else " "
    text = token[0]
    return COMMANDS.get(text, text) + (" " if text in COMMANDS else "")


def _word(name: str) -> str:
    if name in FUNCTIONS:
        return rf"\operatorname{{{name}}}"
    product = len(name) == 2 and name.islower() and name not in {"of", "is", "or"}
    return " ".join(name) if product else rf"\text{{{name}}}"
