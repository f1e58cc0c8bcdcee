"""Chromium without a screen."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.webdriver import WebDriver

PROGRAMS = ("chromium", "chromedriver")


@contextmanager
def a_window(profile: Path) -> Iterator[WebDriver]:
    """A window of a browser that knows nothing yet; without Chromium the test is skipped, or fails in CI."""
    if missing := [each for each in PROGRAMS if shutil.which(each) is None]:
        verdict = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        verdict(f"not installed: {', '.join(missing)}; run: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for argument in (
        *("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1400,1000", "--hide-scrollbars"),
        *("--lang=en", f"--user-data-dir={profile}"),
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    yield driver
    driver.quit()
