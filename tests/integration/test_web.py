"""The page in a real browser, on real stores, one of them with 100,000 records: an incident is played through."""

import json
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import redis
from selenium.common.exceptions import WebDriverException
from selenium.webdriver.chrome.webdriver import WebDriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.expected_conditions import staleness_of
from selenium.webdriver.support.ui import Select, WebDriverWait

from celery_idempotent.protocol.codec import Encoded
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.steps import Begun, Finished, to_plain
from celery_idempotent.protocol.store import Store
from celery_idempotent.stores import open_store
from celery_idempotent.testing.contract import a_record
from lab import tether
from lab.embedded.server import HOST, accepts, free_port
from tests.support.browser import a_window
from tests.support.stores import a_store
from tests.support.waiting import wait_until

pytestmark = pytest.mark.browser

ON_A_SMALL_STORE = pytest.mark.parametrize("site", ["postgres"], indirect=True)
"""For what does not depend on the store: a search of Redis reads it all."""

TOKEN = "a token that nobody guesses"
MANY = 100_000
INCIDENT = 60
"""Operations that end UNKNOWN: more than a page."""

HOSTILE = "<script>document.title='owned'</script>\"><img src=x onerror=\"document.title='owned'\">\x1b[31m"


class Site:
    """The page's address, and the store behind it."""

    def __init__(self, store: Store, address: str, log: Path) -> None:
        self.store = store
        self.log = log
        self.address = address


def _written(store: Store, number: int, status: Status, minutes: float, **values: Any) -> Record:
    at = store.now() - round(minutes * 60_000)
    times = {"created_at": at - 4_000, "updated_at": at, "fencing_token": at - 4_000, "lease_until": at + 60_000}
    task = "shop.refund" if number < 400 and number % 3 == 0 else "shop.charge"
    names = {"label": f"acme/order-{number}", "worker": f"celery@worker-{number % 6 + 1}", "app": "shop", "trace": ""}
    key = f"{task}:1:{sha256(str(number).encode()).hexdigest()}"
    record = replace(a_record(), **{"key": key, "status": status, "task": task, **names, **times, **values})
    assert store.swap(record, None) == record
    return record


def _filled(store: Store) -> None:
    """What a shop has after some days, and what an incident has left."""
    now = store.now()
    outcome = {"content_type": "application/json", "expires_at": now // 1000 + 500_000}
    for number in range(300):
        result = json.dumps({"charge": f"ch_{number}", "cents": 500 + number})
        _written(store, number, Status.COMPLETED, 3 + number * 17, result=result, **outcome)
    for number in range(300, 318):
        error = "CardDeclined: insufficient funds"
        _written(store, number, Status.FAILED, 3 + number, error=error, expires_at=now // 1000 + 500_000)
    for number in range(320, 327):
        _written(store, number, Status.IN_PROGRESS, 0.1, lease_until=now + 600_000)
    for number in range(400, 400 + INCIDENT):
        error = "attempt 1 on celery@worker-3 ended without an outcome"
        minutes = 40 + (number - 400) / 10
        steps = {
            "charge": to_plain(Finished(Encoded('"ch_1"', "application/json"))),
            "receipt": to_plain(Begun(now - round(minutes * 60_000) - 1_500, 1)),
        }
        _written(store, number, Status.UNKNOWN, minutes, error=error, steps=steps)
    for number in range(500, 503):
        _written(store, number, Status.IN_PROGRESS, 150, attempts=3, takeovers=2)
    _written(store, 600, Status.FAILED, 1, label=HOSTILE, error=HOSTILE, worker=HOSTILE)


def _multiplied(url: str) -> None:
    """Copies of what was completed, up to MANY records."""
    with redis.Redis.from_url(url) as client:
        (name,) = client.scan_iter(match=f"*{sha256(b'1').hexdigest()}")
        copies = MANY - client.dbsize()
        with client.pipeline(transaction=False) as pipeline:
            for number in range(copies):
                pipeline.copy(name, name[:-64] + sha256(b"copy %d" % number).hexdigest().encode())
            pipeline.execute()


@pytest.fixture(scope="module", params=["redis", "postgres"])
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The command serves the page; Redis has 100,000 records."""
    port = free_port()
    log = tmp_path_factory.mktemp("log") / "log"
    with a_store(request.param) as place, log.open("wb") as said:
        store = open_store(place.url)
        store.provision()
        _filled(store)
        if request.param == "redis":
            _multiplied(place.url)
        command = ("-A", "tests.integration.web_shop", "idempotency", "web", "--port", str(port), "--write")
        environment = {"SHOP_STORE": place.url, "IDEMPOTENCY_WEB_TOKEN": TOKEN}
        served = tether.start("celery", *command, log=said, env=environment)
        try:
            wait_until(lambda: accepts(port), "the page is served", timeout=60)
            yield Site(store, f"http://{HOST}:{port}/", log)
        finally:
            tether.stop(served)
            store.close()
    assert TOKEN not in log.read_text()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebDriver]:
    """Chromium without a screen."""
    with a_window(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


class Person:
    """Somebody in front of the browser, by the printed link."""

    def __init__(self, browser: WebDriver, site: Site, pictures: Path) -> None:
        self.browser = browser
        self._site = site
        self._pictures = pictures
        self.looks(1280, dark=False)
        browser.delete_all_cookies()
        browser.get_log("browser")
        browser.get(f"{site.address}?token={TOKEN.replace(' ', '+')}")
        assert TOKEN.split()[0] not in browser.current_url.partition("?")[2]

    def looks(self, width: int, *, dark: bool) -> None:
        """At a screen so wide, in the evening or not."""
        size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": width < 500}
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})

    def opens(self, path: str) -> None:
        self.browser.get(self._site.address + path)

    def follows(self, link: str) -> None:
        self._goes_on_by(By.PARTIAL_LINK_TEXT, link)

    def presses(self, button: str) -> None:
        self._goes_on_by(By.XPATH, f"//button[starts-with(normalize-space(), '{button}')]")

    def writes(self, field: str, text: str) -> None:
        element = self.browser.find_element(By.NAME, field)
        element.clear()
        element.send_keys(text)

    def chooses(self, field: str, value: str) -> None:
        self.browser.find_element(By.CSS_SELECTOR, f'input[name="{field}"][value="{value}"]').click()

    def sees(self, css: str = "main") -> str:
        return "\n".join(each.text for each in self.browser.find_elements(By.CSS_SELECTOR, css))

    def counts(self, css: str) -> int:
        return len(self.browser.find_elements(By.CSS_SELECTOR, css))

    def photographs(self, name: str) -> None:
        """Keep a picture, for whoever wants to see what went wrong."""
        self.browser.save_screenshot(str(self._pictures / f"{name}.png"))

    def complaints(self) -> list[Any]:
        """What the browser refused or missed; its advice on forms apart."""
        return [each for each in self.browser.get_log("browser") if each["level"] in ("SEVERE", "WARNING")]

    def _goes_on_by(self, kind: str, what: str) -> None:
        page = self.browser.find_element(By.TAG_NAME, "html")
        self.browser.find_element(kind, what).click()
        # Chromium may be asked for the page in the midst of its going, and calls that an unknown error.
        WebDriverWait(self.browser, 60, ignored_exceptions=(WebDriverException,)).until(staleness_of(page))


@pytest.fixture
def person(browser: WebDriver, site: Site, tmp_path: Path) -> Iterator[Person]:
    """Somebody who has come in; at the end the browser has complained of nothing."""
    person = Person(browser, site, tmp_path)
    yield person
    assert person.complaints() == []


def _is_counted(person: Person) -> bool:
    """Whether the overview has come back by itself with a count."""
    return "Waiting for a person" in person.browser.page_source


def test_incident_is_judged_in_bulk(site: Site, person: Person) -> None:
    """From the overview, to the label, to all of a page, to a verdict, to the record that keeps it."""
    wait_until(lambda: _is_counted(person), "the records are counted", timeout=60)
    person.photographs("overview")
    assert str(INCIDENT) in person.sees(".waiting .count")
    assert "acme/order-459" in person.sees(".waiting tbody tr:first-child")
    assert "3" in person.sees(".waiting:nth-of-type(2) .count")

    person.follows(f"Search all {INCIDENT}")
    person.writes("label", "acme/order-4*")
    person.presses("Search")
    assert person.counts(".records tbody tr") == 50
    assert person.counts('a[rel="next"]') == 1
    person.follows("Choose all 50")
    person.presses("Give a verdict")
    person.photographs("verdict")
    person.presses("Give this verdict")
    assert "Choose a verdict" in person.sees('[role="alert"]')
    assert ["status of 422" in each["message"] for each in person.complaints()] == [True]

    person.chooses("action", "completed")
    person.writes("result", '{"charge": "found by hand"}')
    person.writes("by", "Ann Lee")
    person.writes("reason", "PSP-1234: the provider has the charge")
    person.browser.find_element(By.NAME, "checked").click()
    person.presses("Give this verdict")
    person.photographs("judged")
    assert "50 of 50 judged" in person.sees("h1")

    judged = [each for each in site.store.scan(status=Status.COMPLETED) if each.verdict]
    assert len(judged) == 50
    assert {(each.result, each.verdict["by"]) for each in judged} == {('{"charge": "found by hand"}', "Ann Lee")}
    assert site.log.read_text().count("idempotency.verdict_given") == 50
    person.browser.find_element(By.CSS_SELECTOR, "section a").click()
    shown = person.sees(".timeline")
    person.looks(1280, dark=True)
    person.photographs("judged-record")
    assert "why: PSP-1234: the provider has the charge" in shown
    assert "its error: attempt 1 on celery@worker-3 ended without an outcome" in shown


def test_record_is_found_and_told(site: Site, person: Person) -> None:
    """By the beginning of its hash, as a log line has it; claims, steps, promise and outcome."""
    person.opens("records")
    person.writes("key", sha256(b"7").hexdigest()[:10])
    person.presses("Search")
    assert person.counts(".records tbody tr") == 1
    person.follows("acme/order-7")
    assert '"charge": "ch_7"' in person.sees("pre")
    assert "an outcome counts for 7 days" in person.sees()

    key = next(each.key for each in site.store.scan(status=Status.IN_PROGRESS) if each.takeovers)
    person.opens(f"record?key={key}")
    assert "took over: the 2 attempts before it never ended" in person.sees(".timeline")


@ON_A_SMALL_STORE
def test_hostile_record_is_text(site: Site, person: Person) -> None:
    """In the list and on its own page; nothing ran, and nothing was asked for."""
    person.opens("records?label=%3Cscript%3E*")
    assert "<script>document.title" in person.sees(".records tbody")
    person.browser.find_element(By.CSS_SELECTOR, ".what a").click()
    assert "<script>document.title='owned'</script>" in person.sees("h1")
    assert "\\x1b[31m" in person.sees("h1")
    assert person.browser.title != "owned"


@ON_A_SMALL_STORE
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280], ids=["phone", "wide"])
def test_pages_fit_any_screen(site: Site, person: Person, width: int, dark: bool) -> None:
    """Nothing runs out to the right, every field has a name, and what is written can be told from its ground."""
    person.looks(width, dark=dark)
    wait_until(lambda: _is_counted(person), "the records are counted", timeout=60)
    record = next(site.store.scan(status=Status.UNKNOWN))
    for name, path in (("overview", ""), ("records", "records?status=UNKNOWN"), ("record", f"record?key={record.key}")):
        person.opens(path)
        person.photographs(f"{name}-{width}-{'dark' if dark else 'light'}")
        assert person.browser.execute_script("return document.documentElement.scrollWidth") <= width
        assert person.browser.execute_script(_CONTRAST) == []
    person.opens("records?status=UNKNOWN&all=1")
    person.presses("Give a verdict")
    person.photographs(f"verdict-{width}-{'dark' if dark else 'light'}")
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


@ON_A_SMALL_STORE
def test_keyboard_is_enough(site: Site, person: Person) -> None:
    """The first key skips to the content; from there a search is sent."""
    person.opens("records")
    body = person.browser.find_element(By.TAG_NAME, "body")
    body.send_keys(Keys.TAB)
    focused = person.browser.switch_to.active_element
    assert focused.text == "Skip to the content"
    focused.send_keys(Keys.ENTER)
    person.browser.switch_to.active_element.send_keys(Keys.TAB)
    assert person.browser.switch_to.active_element.get_attribute("name") == "label"
    Select(person.browser.find_element(By.NAME, "status")).select_by_visible_text("FAILED")
    page = person.browser.find_element(By.TAG_NAME, "html")
    person.browser.find_element(By.NAME, "label").send_keys(Keys.ENTER)
    WebDriverWait(person.browser, 60, ignored_exceptions=(WebDriverException,)).until(staleness_of(page))
    assert "status=FAILED" in person.browser.current_url
    assert "UNKNOWN" not in person.sees(".records")
