"""Reports in a browser: they fit any width, read well in both colour schemes, and answer the keyboard."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.autoshard.report.drawings import (
    DRAWINGS,
    SCHEMES,
    WIDTH,
    differing,
    path_of,
    picture,
    system_browser,
)
from tests.autoshard.report.plans import one_program, pipeline

playwright = pytest.importorskip("playwright.sync_api")

pytestmark = [pytest.mark.devices, pytest.mark.browser]

MAX_DIFFERING = 0.005
"""Share of a drawing's pixels that may differ from its picture: edges, which versions of Chromium blend otherwise."""

LEAST_CONTRAST = 4.5
"""Of text on its background, by WCAG 2.2, success criterion 1.4.3."""

CONTRASTS = """() => {
  const channels = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const linear = (c) => c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4;
  const luminance = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const behind = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const colour = channels(getComputedStyle(at).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), found = [];
  while (texts.nextNode()) {
    const node = texts.currentNode.parentElement;
    if (!texts.currentNode.textContent.trim() || node.matches("script, style, option")) continue;
    const [a, b] = [channels(getComputedStyle(node).color), behind(node)].map(luminance).sort((x, y) => y - x);
    found.push([(a + 0.05) / (b + 0.05), texts.currentNode.textContent.trim()]);
  }
  return found;
}"""


@pytest.fixture(scope="module")
def browser():
    """Headless Chromium: the system's, or the one that Playwright has installed."""
    known = system_browser()
    with playwright.sync_playwright() as started:
        path = known or started.chromium.executable_path
        if not Path(path).exists():
            pytest.skip("there is no Chromium here")
        found = started.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield found
        found.close()


@pytest.fixture
def opened(browser, tmp_path):
    """Opens a plan's report; whatever its script complains about, or asks the network for, fails the test."""
    complaints, requests, pages = list[str](), list[str](), []

    def opener(plan, width=1000, scheme="light"):
        file = tmp_path / "plan.html"
        plan.report(file)
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(file.as_uri())
        pages.append(page)
        return page

    yield opener
    assert complaints == []
    assert {*requests} <= {(tmp_path / "plan.html").as_uri()}
    for page in pages:
        page.close()


@pytest.mark.parametrize("make", [one_program, pipeline])
def test_pages_fit_every_width_and_are_legible_in_both_schemes(opened, make):
    page, grounds = opened(make()), []
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        grounds.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        faint = [(ratio, text) for ratio, text in page.evaluate(CONTRASTS) if ratio < LEAST_CONTRAST]
        assert faint == []
        for width in (400, 720, 1000, 1920):
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert len({*grounds}) == 2


def test_the_slider_says_in_words_what_the_drawing_shows(opened):
    page = opened(one_program())
    slider, output = page.locator("#moment"), page.locator("output[for=moment]")
    at_peak = output.text_content()
    assert "residuals 3.81 GiB" in at_peak
    slider.focus()
    page.keyboard.press("Home")
    assert "forward 100%" in output.text_content()
    assert slider.get_attribute("aria-valuetext") == output.text_content() != at_peak
    page.keyboard.press("End")
    assert "backward 100%" in output.text_content()


def test_arguments_are_filtered_and_ordered(opened):
    page = opened(one_program())
    field, leaves = page.locator("#filter"), page.locator("#argument-tree .leaf:visible")
    field.fill("block_7")
    assert leaves.count() == 1
    assert page.locator(".tools output").text_content() == "1 of 3 lines"
    field.fill("block_12")
    assert leaves.count() == 0
    field.fill("")
    tops = page.locator("#argument-tree > *")
    assert "batch" in tops.nth(1).text_content()
    page.locator("#order").select_option("name")
    assert "batch" in tops.nth(0).text_content()
    page.locator("#order").select_option("bytes")
    assert "batch" in tops.nth(1).text_content()


def test_all_that_scrolls_or_opens_can_be_reached_by_keyboard(opened):
    page = opened(one_program(), width=400)
    cut_off = (
        "(e) => e.scrollWidth > e.clientWidth && getComputedStyle(e).overflowX === 'auto' && e.tabIndex < 0"
    )
    assert not any(page.locator("main *").evaluate_all(f"(all) => all.map({cut_off})"))
    summary = page.locator("summary", has_text="Table of the streams")
    summary.focus()
    page.keyboard.press("Enter")
    assert page.locator("caption", has_text="Streams of a device").is_visible()


@pytest.mark.parametrize("name", DRAWINGS)
def test_drawings_are_as_they_were_looked_at(browser, opened, name):
    """`python -m tests.autoshard.report.drawings` makes new pictures."""
    make, _ = DRAWINGS[name]
    for scheme in SCHEMES:
        page = opened(make(), width=WIDTH)
        share = differing(browser, path_of(name, scheme).read_bytes(), picture(page, name, scheme))
        assert isinstance(share, float | int), share
        assert share <= MAX_DIFFERING


def test_a_drawing_with_other_numbers_differs(browser, opened):
    """The comparison sees a lane that is a tenth shorter."""
    busy = one_program().estimates.profile.busy
    shorter = {name: tuple(0.0 if n < 12 else share for n, share in enumerate(s)) for name, s in busy.items()}
    plan = one_program(profile=replace(one_program().estimates.profile, busy=shorter))
    page = opened(plan, width=WIDTH)
    before = path_of("streams", "light").read_bytes()
    assert differing(browser, before, picture(page, "streams", "light")) > MAX_DIFFERING
