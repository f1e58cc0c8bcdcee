"""How long and how wide the pages of the site are in a browser.

``python -m tests.support.screens build/site [page ...]`` prints it.
"""

import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from selenium.webdriver.chrome.webdriver import WebDriver

from tests.support.browser import a_window

WIDE = 1920, 1080
"""What most desktops show (StatCounter, 2025), in CSS pixels."""
NARROW = 360, 800
"""What the narrowest of common phones shows."""
_HEIGHT = "return document.querySelector('article').getBoundingClientRect().height"
_WIDTH = "return document.documentElement.scrollWidth"


@dataclass(frozen=True, slots=True)
class Size:
    """What a reader has of a page.

    Args:
        screens: How many screens of a desktop its text fills.
        width: How many CSS pixels of a phone it takes; more than it has: the whole page scrolls sideways.
    """

    screens: float
    width: int


def sizes(site: Path, pages: Iterable[str]) -> dict[str, Size]:
    """Of each page, by its address within the site."""
    with tempfile.TemporaryDirectory() as profile, a_window(Path(profile)) as browser:
        with _of_size(browser, WIDE):
            screens = {page: _read(browser, site / page, _HEIGHT) / WIDE[1] for page in pages}
        with _of_size(browser, NARROW):
            widths = {page: int(_read(browser, site / page, _WIDTH)) for page in screens}
    return {page: Size(screens[page], widths[page]) for page in screens}


@contextmanager
def _of_size(browser: WebDriver, size: tuple[int, int]) -> Iterator[None]:
    width, height = size
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    yield
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def _read(browser: WebDriver, page: Path, script: str) -> float:
    browser.get(page.as_uri())
    return float(browser.execute_script(script))


if __name__ == "__main__":
    folder = Path(sys.argv[1]).resolve()
    asked = sys.argv[2:] or sorted(str(each.relative_to(folder)) for each in folder.rglob("*.html"))
    for page, size in sorted(sizes(folder, asked).items(), key=lambda each: each[1].screens):
        sys.stdout.write(f"{size.screens:5.1f} screens {size.width:5} px  {page}\n")
