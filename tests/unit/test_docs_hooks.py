"""docs/hooks: equations of docstrings become MathML, other blocks stay code, links that leave the site become text."""

import importlib
from pathlib import Path

import pytest

HOOKS = Path(__file__).parents[2] / "docs" / "hooks"


@pytest.fixture
def hook(monkeypatch):
    monkeypatch.syspath_prepend(str(HOOKS))
    return importlib.import_module


@pytest.mark.parametrize(
    ("text", "latex"),
    [
        ("v_i = g_i − τ s_i", r"v _{i}= g _{i}- τ s _{i}"),
        ("(1/n) Σ_j k_ij", r"\frac{1}{n} \sum _{j} k _{i j}"),
        ("√(2T/α) ξ", r"\sqrt{2T/α} ξ"),
        ("Λ_r^{−1/2}", r"Λ _{r}^{- 1/2}"),
        ("p̄ = softmax(log p̄ / T)", r"\bar{p} = \operatorname{softmax} (\operatorname{log} \bar{p} / T )"),
    ],
)
def test_equations_in_unicode_become_latex(hook, text, latex):
    found = hook("docstring_equations").latex(text)
    assert found.replace(" ", "") == latex.replace(" ", "")


def test_mathml_has_the_structure_of_the_equation(hook):
    text = hook("maths").mathml(r"\frac1n \sum_i p_i^2", "block")
    for element in ('display="block"', "<mfrac>", "<mo>&#x02211;</mo>", "<msubsup>"):
        assert element in text


def test_only_equations_are_set_as_mathematics(hook):
    docstring = "Update.\n\n    v_i = g_i − s_i        ascent\n\nThe score s_i of `h_i`.\n\n"
    docstring += "    with layer.scale(x=1):\n        pass\n"
    found = hook("docstring_equations").rewrite(docstring)
    equation, _, rest = found.partition("</div>")
    assert r"\(v _{i}" in equation
    assert "<small>ascent</small>" in equation
    assert r"score \(s _{i}\) of `h_i`" in rest
    assert "```python\nwith layer.scale(x=1):\n    pass\n```" in rest


def test_links_to_files_outside_the_site_become_text(hook):
    class Page:
        class file:
            src_uri = "guides/methods.md"

    text = "[a](../../featureflock/core/layer.py), [b](../equations.md), [c](../../CONTRIBUTING.md#a-method)"
    found = hook("repository").on_page_markdown(text, page=Page, files=None)
    assert found == "a, [b](../equations.md), [c](../contributing.md#a-method)"
