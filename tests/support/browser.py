"""Chromium without a screen, and somebody in front of it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from selenium import webdriver
from selenium.common.exceptions import WebDriverException
from selenium.webdriver.chrome.webdriver import WebDriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.expected_conditions import staleness_of
from selenium.webdriver.support.ui import WebDriverWait

from tests.support.packages import program


@contextmanager
def a_window(profile: Path) -> Iterator[WebDriver]:
    """A window of a browser that knows nothing yet; without Chromium the test is skipped, or fails in CI."""
    options = webdriver.ChromeOptions()
    options.binary_location, driver_of_it = program("chromium"), program("chromedriver", "chromium-driver")
    for argument in (
        *("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1400,1000", "--hide-scrollbars"),
        *("--lang=en", f"--user-data-dir={profile}"),
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(driver_of_it))
    yield driver
    driver.quit()


class Person:
    """Somebody in front of the browser; pictures are for whoever wants to see what went wrong."""

    def __init__(self, browser: WebDriver, pictures: Path) -> None:
        self.browser = browser
        self._pictures = pictures
        browser.delete_all_cookies()

    def writes(self, **texts: str) -> None:
        """A text into each of these fields."""
        for field, text in texts.items():
            element = self.browser.find_element(By.NAME, field)
            element.clear()
            element.send_keys(text)

    def chooses(self, field: str, value: str) -> None:
        self.browser.find_element(By.CSS_SELECTOR, f'input[name="{field}"][value="{value}"]').click()

    def follows(self, link: str) -> None:
        self.goes_on(By.PARTIAL_LINK_TEXT, link)

    def presses(self, button: str) -> None:
        """A button, by the beginning of what stands on it."""
        on_it = f"starts-with(normalize-space(), '{button}')"
        self.goes_on(By.XPATH, f"//button[{on_it}] | //input[@type='submit' and @value='{button}']")

    def goes_on(self, kind: str, what: str, *keys: str) -> None:
        """Click or press a key on it, and wait for the next page."""
        page = self.browser.find_element(By.TAG_NAME, "html")
        element = self.browser.find_element(kind, what)
        element.send_keys(*keys) if keys else element.click()
        # Chromium may be asked for the page in the midst of its going, and calls that an unknown error.
        WebDriverWait(self.browser, 60, ignored_exceptions=(WebDriverException,)).until(staleness_of(page))

    def sees(self, css: str = "main", picture: str = "") -> str:
        """The text of everything that matches, as it is shown."""
        if picture:
            self.browser.save_screenshot(str(self._pictures / f"{picture}.png"))
        return "\n".join(each.text for each in self.browser.find_elements(By.CSS_SELECTOR, css))
