"""The page in a real browser, served by its command: an incident is played through."""

from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from celery import Celery
from selenium.webdriver.chrome.webdriver import WebDriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select

from celery_idempotent.protocol.codec import Encoded
from celery_idempotent.protocol.record import Status
from celery_idempotent.protocol.steps import Begun, Finished, to_plain
from celery_idempotent.protocol.store import Store
from lab import tether
from lab.embedded.server import HOST, accepts, free_port
from tests.support.browser import Person, a_window
from tests.support.waiting import wait_until
from tests.support.web import TOKEN, a_shop, a_written, store_of

pytestmark = pytest.mark.browser


INCIDENT = 60
"""Operations that end UNKNOWN: more than a page."""


class Site(NamedTuple):
    """The page's address, and the store behind it."""

    store: Store
    address: str
    log: Path


def _fill(shop: Celery) -> None:
    """What an incident leaves: operations that end UNKNOWN, and others that stand still."""
    now, minute = store_of(shop).now(), 60_000

    def write(number: int, status: Status, minutes: float, **values: Any) -> None:
        key = f"shop.charge:1:{sha256(str(number).encode()).hexdigest()}"
        names = {"key": key, "label": f"acme/order-{number}", "worker": f"celery@worker-{number % 6 + 1}"}
        a_written(shop, status, round(minutes * minute), **{**names, **values})

    write(1, Status.COMPLETED, 3, result='{"charge": "ch_1"}', content_type="application/json")
    for number in range(500, 503):
        write(number, Status.IN_PROGRESS, 150, attempts=3, takeovers=2)
    charged = to_plain(Finished(Encoded('"ch_1"', "application/json")))
    steps = {"charge": charged, "receipt": to_plain(Begun(now - 40 * minute, 1))}
    for number in range(400, 400 + INCIDENT):
        error = "attempt 1 on celery@worker-3 ended without an outcome"
        write(number, Status.UNKNOWN, 40 + (number - 400) / 10, error=error, steps=steps)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The command serves the page."""
    folder, port = tmp_path_factory.mktemp("shop"), free_port()
    shop = a_shop(idempotency_store=f"sqlite:///{folder}/records.sqlite")
    store_of(shop).provision()
    _fill(shop)
    command = ("-A", "tests.integration.web_shop", "idempotency", "web", "--port", str(port), "--write")
    environment = {"SHOP_STORE": shop.conf.idempotency_store, "IDEMPOTENCY_WEB_TOKEN": TOKEN}
    log = folder / "log"
    with log.open("wb") as output:
        served = tether.start("celery", *command, log=output, env=environment)
        try:
            wait_until(lambda: accepts(port), "the page is served", timeout=60)
            yield Site(store_of(shop), f"http://{HOST}:{port}/", log)
        finally:
            tether.stop(served)
    assert TOKEN not in log.read_text()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebDriver]:
    """Chromium without a screen."""
    with a_window(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


class Visitor(Person):
    """Somebody who has come by the printed link."""

    def __init__(self, browser: WebDriver, site: Site, pictures: Path) -> None:
        super().__init__(browser, pictures)
        self.looks(1280, dark=False)
        browser.get_log("browser")
        browser.get(f"{site.address}?token={TOKEN.replace(' ', '+')}")
        assert TOKEN.split()[0] not in browser.current_url.partition("?")[2]

    def looks(self, width: int, *, dark: bool) -> None:
        """At a screen so wide, in the evening or not."""
        size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": width < 500}
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})

    def counts(self, css: str) -> int:
        return len(self.browser.find_elements(By.CSS_SELECTOR, css))

    def is_counted(self) -> bool:
        """Whether the overview has come back by itself with a count."""
        return "Waiting for a person" in self.browser.page_source

    def complaints(self) -> list[Any]:
        """What the browser refused or missed; its advice on forms apart."""
        return [each for each in self.browser.get_log("browser") if each["level"] in ("SEVERE", "WARNING")]


@pytest.fixture
def person(browser: WebDriver, site: Site, tmp_path: Path) -> Iterator[Visitor]:
    """Somebody who has come in; at the end the browser has complained of nothing."""
    person = Visitor(browser, site, tmp_path)
    yield person
    assert person.complaints() == []


def test_incident_is_judged_in_bulk(site: Site, person: Visitor) -> None:
    """From the overview, to the label, to all of a page, to a verdict, to the record that keeps it."""
    wait_until(person.is_counted, "the records are counted", timeout=60)
    assert str(INCIDENT) in person.sees(".waiting .count", "overview")
    assert "acme/order-459" in person.sees(".waiting tbody tr:first-child")
    assert "3" in person.sees(".waiting:nth-of-type(2) .count")

    person.follows(f"Search all {INCIDENT}")
    person.writes(label="acme/order-4*")
    person.presses("Search")
    assert (person.counts(".records tbody tr"), person.counts('a[rel="next"]')) == (50, 1)
    person.follows("Choose all 50")
    person.presses("Give a verdict")
    person.presses("Give this verdict")
    assert "Choose a verdict" in person.sees('[role="alert"]', "verdict")
    assert ["status of 422" in each["message"] for each in person.complaints()] == [True]

    person.chooses("action", "completed")
    person.writes(result='{"charge": "found by hand"}', by="Ann Lee", reason="PSP-1234: the provider has the charge")
    person.browser.find_element(By.NAME, "checked").click()
    person.presses("Give this verdict")
    assert "50 of 50 judged" in person.sees("h1", "judged")
    judged = [each for each in site.store.scan(status=Status.COMPLETED) if each.verdict]
    assert len(judged) == 50
    assert {(each.result, each.verdict["by"]) for each in judged} == {('{"charge": "found by hand"}', "Ann Lee")}
    assert site.log.read_text().count("idempotency.verdict_given") == 50

    person.browser.find_element(By.CSS_SELECTOR, "section a").click()
    shown = person.sees(".timeline", "judged-record")
    assert "because: PSP-1234: the provider has the charge" in shown
    assert "it had said: attempt 1 on celery@worker-3 ended without an outcome" in shown


@pytest.mark.parametrize(("width", "dark"), [(360, True), (1280, False)], ids=["phone-dark", "wide-light"])
def test_pages_fit_any_screen(site: Site, person: Visitor, width: int, dark: bool) -> None:
    """Nothing runs out to the right, every field has a name, and what is written can be told from its ground."""
    person.looks(width, dark=dark)
    wait_until(person.is_counted, "the records are counted", timeout=60)
    key = next(site.store.scan(status=Status.UNKNOWN)).key
    pages = {"overview": "", "records": "records?status=UNKNOWN", "record": f"record?key={key}"}
    for name, path in {**pages, "verdict": "records?status=UNKNOWN&all=1"}.items():
        person.browser.get(site.address + path)
        if name == "verdict":
            person.presses("Give a verdict")
        assert person.sees(picture=f"{name}-{width}-{'dark' if dark else 'light'}")
        assert person.browser.execute_script("return document.documentElement.scrollWidth") <= width
        assert person.browser.execute_script(_CONTRAST) == []
        assert person.browser.execute_script(_NAMELESS) == 0


_NAMELESS = """
return [...document.querySelectorAll('input:not([type=hidden]), select, textarea')]
  .filter(e => !e.labels.length && !e.ariaLabel).length;
"""
"""Fields of which a screen reader could not say what they are."""

_CONTRAST = """
const rgb = text => text.match(/[\\d.]+/g).map(Number);
const light = ([r, g, b]) => [r, g, b].map(v => v / 255).map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
  .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
const ground = e => { for (; e; e = e.parentElement) { const c = rgb(getComputedStyle(e).backgroundColor);
  if (c.length < 4 || c[3] > 0) return c; } return [255, 255, 255]; };
return [...document.querySelectorAll('main *, header *')]
  .filter(e => [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()) && e.checkVisibility())
  .map(e => { const [a, b] = [light(rgb(getComputedStyle(e).color)), light(ground(e))].sort((x, y) => y - x);
    return [(a + .05) / (b + .05), e.className, e.textContent.trim().slice(0, 40)]; })
  .filter(([ratio]) => ratio < 4.5);
"""
"""By WCAG 2.2: the texts whose contrast is under 4.5."""


def test_keyboard_is_enough(site: Site, person: Visitor) -> None:
    """The first key skips to the content; from there a search is sent."""
    person.browser.get(f"{site.address}records")
    person.browser.find_element(By.TAG_NAME, "body").send_keys(Keys.TAB)
    person.browser.switch_to.active_element.send_keys(Keys.ENTER)
    person.browser.switch_to.active_element.send_keys(Keys.TAB)
    assert person.browser.switch_to.active_element.get_attribute("name") == "label"
    Select(person.browser.find_element(By.NAME, "status")).select_by_visible_text("FAILED")
    person.goes_on(By.NAME, "label", Keys.ENTER)
    assert "status=FAILED" in person.browser.current_url
