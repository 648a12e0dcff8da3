"""The report page in Chromium: complete, no errors, sortable, readable on a phone and in dark mode."""

import pytest
from helpers.browser import launch_browser, open_page
from helpers.chromium import find_chromium
from helpers.made_evaluations import BASELINE, make_images, make_results

from featureflock.corruptions import CORRUPTIONS
from featureflock.reports import write_report

HOSTILE = "</script><script>document.title='changed'</script><img src=x onerror=alert(1)>\"'`${1}"
METHODS = ["Deep Ensembles", "feature-WGD", "feature-WGD, with a very long name " * 4 + "x" * 150, HOSTILE, "Single"]
NUMBERS = """[...document.querySelectorAll("#table-%s tbody tr")].map(row => row.cells[%d].textContent.trim())"""


@pytest.fixture(scope="module")
def browser():
    with launch_browser() as browser:
        yield browser


@pytest.fixture
def show(browser, report):
    """Open the report in a context of its own, which is closed after the test."""
    yield lambda **view: open_page(browser, report, **view)
    for context in browser.contexts:
        context.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    names = (HOSTILE, "a cat", "owl " * 30, "ship")
    results = make_results(METHODS, seeds=(0, 1), corruptions=("fog", "snow"), severities=(3,), names=names)
    return write_report(results, make_images(results), tmp_path_factory.mktemp("report"))


def value(text):
    """The number at the start of a cell."""
    return float(text.split()[0].replace("−", "-"))


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1280, 360])
def test_page_is_complete_and_requests_nothing(show, report, width, dark):
    page, log = show(width=width, dark=dark)
    assert log.messages == []
    own, *others = log.requests
    assert own == report.as_uri()
    assert all(url.startswith("data:image/png;base64,") for url in others)
    assert page.evaluate("document.title") == "Evaluation on Digits · featureflock"
    page.evaluate("document.querySelectorAll('details').forEach(details => details.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate("[...document.images].every(image => image.complete && image.naturalWidth && image.alt)")


def test_names_are_escaped(show):
    page, _ = show()
    assert page.evaluate("document.querySelectorAll('script').length") == 1
    assert page.evaluate("document.querySelectorAll('img[onerror], img[src=x]').length") == 0
    names = page.evaluate(NUMBERS % ("comparison", 0))
    assert names[3] == HOSTILE
    assert page.evaluate("[...document.querySelectorAll('.card h4')].map(h => h.textContent)").count(HOSTILE) > 0
    label = "document.querySelectorAll('#figure-reliability .panel svg')[3].getAttribute('aria-label')"
    assert HOSTILE in page.evaluate(label)


def test_each_run_lists_its_provenance(show):
    page, _ = show()
    page.click(".source:nth-of-type(2) summary")
    shown = page.evaluate("document.querySelector('.source:nth-of-type(2)').innerText")
    for words in ("seed 0", "seed 1", "featureflock train digits --seed 1", "cores", "torch", "commit", "3.5 s"):
        assert words in shown
    marked = page.evaluate("[...document.querySelectorAll('.source:nth-of-type(2) .differs')].map(d => d.innerText)")
    assert [text.split() for text in marked] == [["method", "feature-WGD"], ["method", "rank", "1"], ["members", "3"]]


def test_figures_have_labels_and_captions_and_links_have_targets(show):
    page, _ = show()
    labels = page.evaluate("[...document.querySelectorAll('svg[role=img]')].map(svg => svg.getAttribute('aria-label'))")
    assert len(labels) >= 15
    assert all(any(letter.isdigit() for letter in label) and len(label) > 40 for label in labels)
    assert page.evaluate(
        "[...document.querySelectorAll('svg:not([role=img])')].every(svg => svg.ariaHidden === 'true')"
    )
    assert page.evaluate(
        "[...document.querySelectorAll('figure')].every(f => f.querySelector('figcaption').textContent)"
    )
    links = page.evaluate("[...document.querySelectorAll('nav a')].map(a => !!document.querySelector(a.hash))")
    assert len(links) >= 10
    assert all(links)


def test_clicking_a_header_sorts_by_value_in_both_directions(show):
    page, _ = show()
    heading = "#table-comparison th:nth-child(4)"
    given = page.evaluate(NUMBERS % ("comparison", 3))
    assert all("±" in text for text in given)
    for order in ("descending", "ascending"):  # higher is better: the best first
        page.click(f"{heading} button")
        shown = page.evaluate(NUMBERS % ("comparison", 3))
        assert shown == sorted(shown, key=value, reverse=order == "descending")
        assert sorted(shown) == sorted(given)
        assert page.evaluate(f"document.querySelector('{heading}').ariaSort") == order
    page.click("#table-comparison th:nth-child(1) button")
    names = page.evaluate(NUMBERS % ("comparison", 0))
    assert names.index("Deep Ensembles") < names.index("Single")
    states = page.evaluate("[...document.querySelectorAll('#table-comparison th[aria-sort]')].map(h => h.ariaSort)")
    assert states == ["ascending", *["none"] * (len(states) - 1)]


def test_more_than_the_largest_size_sorts_above_every_number(show):
    page, _ = show()
    page.click("#table-comparison thead th:last-child button")
    shown = page.evaluate(NUMBERS % ("comparison", 11))
    more = [text for text in shown if text.startswith(">")]
    assert 0 < len(more) < len(shown)
    assert shown[: len(more)] == more


def test_negative_numbers_sort_as_numbers(show):
    page, _ = show(width=360)
    for descending in (False, True):
        page.click("#table-differences th:nth-child(3) button")
        shown = [value(text) for text in page.evaluate(NUMBERS % ("differences", 2))]
        assert sum(number < 0 for number in shown) >= 2
        assert shown == sorted(shown, reverse=descending)


def test_rows_without_a_number_come_last(show):
    page, _ = show()
    for _ in range(2):
        page.click("#table-members th:nth-child(3) button")
        assert page.evaluate(NUMBERS % ("members", 0))[-1] == "Single"


def test_headers_sort_from_the_keyboard(show):
    page, _ = show()
    page.evaluate("document.querySelector('#table-comparison th:nth-child(5) button').focus()")
    page.keyboard.press("Enter")
    shown = [value(text) for text in page.evaluate(NUMBERS % ("comparison", 4))]
    assert shown == sorted(shown)


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    """A page with eight metrics, nine methods, differences with intervals and p-values, and 15 corruptions."""
    methods = [BASELINE, "Single", "feature-WGD, τ = 1", "feature-WGD, tuned", "feature-MAP", *"ABC", "weight-WGD"]
    results = make_results(methods, seeds=(0, 1, 2), corruptions=CORRUPTIONS, severities=(1, 3, 5))
    return write_report(results, make_images(results), tmp_path_factory.mktemp("comparison"))


def test_nothing_is_cut_off(browser, comparison):
    """At 1200 pixels no table scrolls; on a phone they scroll in their own boxes, and the page fits."""
    for width in (1200, 390):
        page, _ = open_page(browser, comparison, width=width)
        page.evaluate("document.querySelectorAll('details').forEach(details => details.open = true)")
        assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        right = page.evaluate(
            "Math.max(...[...document.querySelectorAll('#figure-improvements svg')]"
            ".map(s => s.getBoundingClientRect().right))"
        )
        assert right <= width
        if width == 1200:
            boxes = "[...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth)"
            assert set(page.evaluate(f"{boxes}.map(e => e.ariaLabel)")) <= {"Class activation maps"}  # an image
            cells = (
                "[...document.querySelectorAll('#table-differences tbody tr:first-child > *')].map(c => c.innerText)"
            )
            texts = page.evaluate(cells)
            assert len(texts) == 9
            assert all("[" in text and "p " in text for text in texts[1:])
        page.context.close()


def test_the_verdict_is_at_the_top(browser, comparison):
    page, _ = open_page(browser, comparison, width=1200)
    sentence = page.inner_text("#verdict")
    assert sentence.startswith("Over 3 seeds, feature-WGD (tuned) is more accurate")
    assert page.evaluate("document.querySelector('#verdict').getBoundingClientRect().bottom") < 300
    markers = "document.querySelectorAll('#figure-improvements .panel:first-child :is(.mark, .hollow)').length"
    assert page.evaluate(markers) == 8 * 4  # methods × accuracy, NLL, Brier score and ECE
    titles = page.evaluate("[...document.querySelectorAll('#disagreement h3')].map(h => h.textContent)")
    assert titles == ["Clean test set", "Corrupted test sets", "OOD sets"]
    page.context.close()


CONTRAST = """(() => {
    const linear = v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    const numbers = colour => colour.match(/[\\d.]+/g).map(Number);
    const light = colour => numbers(colour).map(linear).reduce((sum, v, k) => sum + v * [0.2126, 0.7152, 0.0722][k], 0);
    const paper = element => {
        const colour = getComputedStyle(element).backgroundColor;
        return numbers(colour).length === 3 ? colour : paper(element.parentElement);
    };
    const ratio = element => {
        const style = getComputedStyle(element), ink = element.closest("svg") ? style.fill : style.color;
        const [dark, bright] = [light(ink), light(paper(element))].sort((a, b) => a - b);
        return (bright + 0.05) / (dark + 0.05);
    };
    return Math.min(...[...document.querySelectorAll(
        "h1, h2, h3, h4, p, a, b, li, td, th, span, small, button, dt, dd, figcaption, mark, svg text")].map(ratio));
})()"""


def test_light_and_dark_mode_differ_and_both_have_contrast(show):
    papers = []
    for dark in (False, True):
        page, _ = show(dark=dark)
        papers.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert page.evaluate(CONTRAST) >= 4.5  # WCAG AA
    assert papers == ["rgb(255, 255, 255)", "rgb(18, 22, 28)"]


def test_wide_tables_scroll_sideways_and_names_stay_visible(show):
    page, _ = show(width=360)
    box = "document.querySelector('#table-comparison .scroll')"
    assert page.evaluate(f"{box}.scrollWidth > {box}.clientWidth && {box}.tabIndex === 0")
    page.evaluate(f"{box}.scrollLeft = 200")
    at = page.evaluate("document.querySelector('#table-comparison tbody th').getBoundingClientRect().left")
    assert at == page.evaluate(f"{box}.getBoundingClientRect().left")


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("<script>undefined_name()</script>", "undefined_name is not defined"),
        ("<script>Promise.reject(Error('unhandled'))</script>", "unhandled"),
        ("<script>console.warn('deprecated')</script>", "console.warning: deprecated"),
        ("<img src='missing.png'>", "missing.png: net::ERR_FILE_NOT_FOUND"),
        ("<script src='https://host.invalid/a.js'></script>", "https://host.invalid/a.js: net::ERR_NAME_NOT_RESOLVED"),
    ],
)
def test_log_has_errors_warnings_and_failed_requests(browser, tmp_path, body, expected):
    (tmp_path / "page.html").write_text(f"<!doctype html>{body}")
    page, log = open_page(browser, tmp_path / "page.html")
    page.context.close()
    assert expected in "\n".join(log.messages)
    assert len(log.requests) == 1 + expected.count(": net::")


def test_without_chromium_and_npm_the_test_is_skipped(tmp_path, monkeypatch):
    monkeypatch.delenv("FEATUREFLOCK_CHROMIUM", raising=False)
    monkeypatch.setenv("FEATUREFLOCK_TEST_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(pytest.skip.Exception, match=r"install Chromium \(Debian package chromium\) or npm"):
        find_chromium()
