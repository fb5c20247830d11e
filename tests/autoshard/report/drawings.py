"""The drawings of reports as pictures, without their text: fonts differ from machine to machine.

    python -m tests.autoshard.report.drawings

writes them into `drawings/`, where `test_browser.py` finds them. Look at them before they are committed.
"""

import base64
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.autoshard.report.plans import one_program, pipeline

FOLDER = Path(__file__).parent / "drawings"
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
WIDTH = 1000

DRAWINGS = {
    "streams": (one_program, ".step > .lanes"),
    "memory": (one_program, ".step > .memory"),
    "roofline": (one_program, ".roof"),
    "tasks": (pipeline, ".schedule > .lanes >> nth=0"),
    "workers-memory": (pipeline, ".schedule > .lanes >> nth=1"),
}
"""By name: the plan, and the element of its page."""

SCHEMES = ("light", "dark")

WITHOUT_TEXT = """
* { color: transparent !important; font-family: monospace !important; }
.lane { height: 26px !important; } .lane.holds { height: 44px !important; }
.lane > span { visibility: hidden; height: 10px; overflow: hidden; }
.peak span, .cap span, .dot { display: none !important; }
"""

CHANNEL = 24
"""Of 255: a smaller difference of a colour is that of another version's blending."""

DIFFERING = """async ([one, other, least]) => {
  const pixels = async (url) => {
    const image = new Image(); image.src = url; await image.decode();
    const canvas = document.createElement("canvas"); canvas.width = image.width; canvas.height = image.height;
    const context = canvas.getContext("2d"); context.drawImage(image, 0, 0);
    return [image.width, image.height, context.getImageData(0, 0, image.width, image.height).data];
  };
  const [[w, h, a], [v, g, b]] = [await pixels(one), await pixels(other)];
  if (w !== v || h !== g) return `${v}x${g} pixels instead of ${w}x${h}`;
  let count = 0;
  for (let i = 0; i < a.length; i += 4)
    count += [0, 1, 2].some((c) => Math.abs(a[i + c] - b[i + c]) > least) ? 1 : 0;
  return count / (w * h);
}"""
"""The share of pixels of two pictures that differ by more than a channel's least difference; or how their sizes differ."""


def system_browser() -> str | None:
    """The path of the system's Chromium."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def picture(page: Any, name: str, scheme: str) -> bytes:
    """An element of a page that shows its plan."""
    page.emulate_media(color_scheme=scheme)
    page.add_style_tag(content=WITHOUT_TEXT)
    return page.locator(DRAWINGS[name][1]).screenshot(animations="disabled")


def differing(browser: Any, one: bytes, other: bytes) -> float | str:
    """The share of pixels that differ, or a sentence if the sizes do."""
    urls = [f"data:image/png;base64,{base64.b64encode(x).decode()}" for x in (one, other)]
    page = browser.new_page()  # a report's own page may load nothing, these pictures included
    try:
        return page.evaluate(DIFFERING, [*urls, CHANNEL])
    finally:
        page.close()


def path_of(name: str, scheme: str) -> Path:
    return FOLDER / f"{name}-{scheme}.png"


@contextmanager
def pages() -> Iterator[Any]:
    """A function that opens a plan's report."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started, TemporaryDirectory() as folder:
        browser = started.chromium.launch(
            executable_path=system_browser(), args=["--no-sandbox", "--disable-gpu"]
        )

        def opened(plan: Any) -> Any:
            plan.report(file := Path(folder) / "plan.html")
            page = browser.new_page(viewport={"width": WIDTH, "height": 900})
            page.goto(file.as_uri())
            return page

        yield opened
        browser.close()


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    with pages() as opened:
        for name, (make, _) in DRAWINGS.items():
            for scheme in SCHEMES:
                path_of(name, scheme).write_bytes(picture(opened(make()), name, scheme))


if __name__ == "__main__":
    main()
