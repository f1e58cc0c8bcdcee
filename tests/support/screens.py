"""How long and how wide the pages of the site are in a browser."""

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from selenium.webdriver.chrome.webdriver import WebDriver

from tests.support.browser import a_window

WIDE = 1920, 1080
"""What most desktops show (StatCounter, 2025), in CSS pixels."""
NARROW = 360, 800
"""What the narrowest of common phones shows."""


class Size(NamedTuple):
    """How many screens of a desktop a page's text fills, and how many CSS pixels of a phone its width takes."""

    screens: float
    width: int


def sizes(site: Path, pages: Iterable[str]) -> dict[str, Size]:
    """Of each page, by its address within the site."""
    height, width = "querySelector('article').getBoundingClientRect().height", "documentElement.scrollWidth"
    with tempfile.TemporaryDirectory() as profile, a_window(Path(profile)) as browser:
        heights = {page: _read(browser, site / page, WIDE, height) for page in pages}
        return {
            page: Size(heights[page] / WIDE[1], int(_read(browser, site / page, NARROW, width))) for page in heights
        }


def _read(browser: WebDriver, page: Path, size: tuple[int, int], what: str) -> float:
    metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get(page.as_uri())
    return float(browser.execute_script(f"return document.{what}"))
