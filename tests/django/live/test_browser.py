"""The admin page in a real browser: a person logs in, looks, and gives verdicts."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from django.contrib.admin.utils import quote
from django.contrib.auth.models import Permission, User
from selenium.common.exceptions import WebDriverException
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.expected_conditions import staleness_of
from selenium.webdriver.support.ui import Select, WebDriverWait

from celery_idempotent.contrib.django.store import DjangoStore
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.testing.contract import a_record
from lab.embedded.server import HOST, accepts, free_port
from tests.django.databases import migrated, sqlite
from tests.django.live.shop import Shop
from tests.support.browser import a_window
from tests.support.waiting import wait_until

PASSWORD = "for a shop that sells nothing"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebDriver]:
    """Chromium without a screen."""
    with a_window(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator["Site"]:
    """The shop's web server, on a database with all tables."""
    folder = tmp_path_factory.mktemp("site")
    shop = Shop(sqlite(folder / "shop.sqlite3"), "memory://", "shop", folder)
    port = free_port()
    # --insecure: serve the admin's style sheets although DEBUG is off
    server = ("django", "runserver", "--noreload", "--insecure", f"{HOST}:{port}")
    with migrated("site", shop.database) as alias, shop.running(*server):
        wait_until(lambda: accepts(port), "the site is there")
        yield Site(alias, f"http://{HOST}:{port}/admin/")


class Site:
    """The admin's address, and the store behind it."""

    def __init__(self, alias: str, address: str) -> None:
        self.alias = alias
        self.address = address
        self.store = DjangoStore(alias)

    @property
    def list(self) -> str:
        return f"{self.address}celery_idempotent/idempotencyrecord/"

    def page(self, record: Record) -> str:
        return f"{self.list}{quote(record.key)}/change/"

    def written(self, status: Status, **changes: Any) -> Record:
        """A record that a worker might have left."""
        now = self.store.now()
        record = replace(
            a_record(),
            **{
                "key": f"shop.refund:1:{uuid4().hex * 2}",
                "status": status,
                "task": "shop.refund",
                "worker": "celery@worker-3",
                "created_at": now - 95_000,
                "updated_at": now - 61_000,
                "lease_until": now - 31_000,
                **changes,
            },
        )
        assert self.store.swap(record, None) == record
        return record

    def user(self, *permissions: str) -> str:
        """The name of somebody who works here."""
        name = f"user-{uuid4().hex[:8]}"
        user = User(username=name, is_staff=True)
        user.set_password(PASSWORD)
        user.save(using=self.alias)
        for each in permissions:
            permission = Permission.objects.using(self.alias).get(codename=f"{each}_idempotencyrecord")
            user.user_permissions.add(permission)
        return name


class Person:
    """Somebody in front of the browser."""

    def __init__(self, browser: WebDriver, site: Site, name: str, pictures: Path) -> None:
        self._browser = browser
        self._pictures = pictures
        browser.delete_all_cookies()
        browser.get(f"{site.address}login/")
        self.write("username", name)
        self.write("password", PASSWORD)
        self.press("Log in")
        assert name.upper() in self.sees("#user-tools")

    def opens(self, address: str) -> None:
        self._browser.get(address)

    def follows(self, link: str) -> None:
        self._goes_on_by(By.LINK_TEXT, link)

    def follows_key(self, record: Record) -> None:
        self._goes_on_by(By.CSS_SELECTOR, f'[title="{record.key}"]')

    def write(self, field: str, text: str) -> None:
        element = self._named(field)
        element.clear()
        element.send_keys(text)

    def chooses(self, field: str, value: str) -> None:
        self._browser.find_element(By.CSS_SELECTOR, f'input[name="{field}"][value="{value}"]').click()

    def checks(self, field: str) -> None:
        self._named(field).click()

    def press(self, button: str) -> None:
        self._goes_on_by(By.CSS_SELECTOR, f'input[type="submit"][value="{button}"]')

    def runs(self, action: str, *records: Record) -> None:
        """An action of the list on some of its rows."""
        for each in records:
            self.chooses("_selected_action", each.key)
        Select(self._named("action")).select_by_visible_text(action)
        self._goes_on_by(By.CSS_SELECTOR, 'button[name="index"]')

    def sees(self, css: str = "body") -> str:
        """The text of everything that matches, as it is shown."""
        return "\n".join(each.text for each in self._browser.find_elements(By.CSS_SELECTOR, css))

    def photographs(self, name: str) -> None:
        """Keep a picture, for whoever wants to see what went wrong."""
        self._browser.save_screenshot(str(self._pictures / f"{name}.png"))

    def lists(self) -> set[str]:
        """The keys of the records in the list, whole."""
        found = self._browser.find_elements(By.CSS_SELECTOR, "#result_list .field-short_key span")
        return {str(each.get_attribute("title")) for each in found}

    def _goes_on_by(self, kind: str, what: str) -> None:
        """Click, and wait for the next page."""
        page = self._browser.find_element(By.TAG_NAME, "html")
        self._browser.find_element(kind, what).click()
        # Chromium may say of the page that goes that it has none of its nodes; asked again, it says that it is stale.
        WebDriverWait(self._browser, 30, ignored_exceptions=(WebDriverException,)).until(staleness_of(page))

    def _named(self, field: str) -> WebElement:
        return self._browser.find_element(By.NAME, field)


@pytest.fixture
def operator(browser: WebDriver, site: Site, tmp_path: Path) -> Person:
    """Somebody who may give verdicts, logged in."""
    return Person(browser, site, site.user("view", "change"), tmp_path)


@pytest.fixture
def viewer(browser: WebDriver, site: Site, tmp_path: Path) -> Person:
    """Somebody who may look, logged in."""
    return Person(browser, site, site.user("view"), tmp_path)


def test_operator_finds_what_waits_for_him(site: Site, operator: Person) -> None:
    """From the front page to the list, to UNKNOWN alone, to one record."""
    unknown = site.written(Status.UNKNOWN, error="attempt 1 on celery@worker-3 ended without an outcome")
    done = site.written(
        Status.COMPLETED,
        result=json.dumps({"refund": "re_42", "cents": 500}),
        content_type="application/json",
        expires_at=site.store.now() // 1000 + 86_400,
        steps={"reserve": {"result": 7}},
    )

    operator.opens(site.address)
    operator.follows("Idempotency records")
    operator.photographs("list")
    assert {unknown.key, done.key} <= operator.lists()

    operator.follows("UNKNOWN")
    assert unknown.key in operator.lists()
    assert done.key not in operator.lists()

    operator.follows_key(unknown)
    operator.photographs("unknown")
    for shown in (unknown.task_id, "celery@worker-3", "ended without an outcome", " UTC"):
        assert shown in operator.sees("#content")
    operator.opens(site.page(done))
    operator.photographs("completed")
    assert '"refund": "re_42"' in operator.sees(".field-shown_result pre")


def test_operator_says_that_it_happened(site: Site, operator: Person) -> None:
    """Through the page that asks for the result, past a mistake, to a record that is replayed."""
    record = site.written(Status.UNKNOWN, error="killed")
    operator.opens(site.page(record))
    operator.follows("RESOLVE")
    operator.photographs("resolve")

    operator.chooses("verdict", "completed")
    operator.write("result", "re_42")
    operator.write("reason", "the provider shows re_42")
    operator.checks("checked")
    operator.press("Give this verdict")
    operator.photographs("mistake")
    assert "Write JSON" in operator.sees(".errorlist")
    assert site.store.get(record.key) == record

    operator.write("result", '"re_42"')
    operator.press("Give this verdict")
    operator.photographs("resolved")
    assert "because: the provider shows re_42" in operator.sees(".field-shown_verdict")
    assert "Resolved: it happened" in operator.sees(".messagelist")
    resolved = site.store.get(record.key)
    assert resolved is not None
    assert (resolved.status, resolved.result) == (Status.COMPLETED, '"re_42"')
    assert "RESOLVE" not in operator.sees(".object-tools")


def test_operator_says_that_it_did_not_happen(site: Site, operator: Person) -> None:
    """From the list, by the action, to a record that runs again; the history tells who said so."""
    record = site.written(Status.UNKNOWN)
    operator.opens(f"{site.list}?status=UNKNOWN")
    operator.runs("Resolve selected UNKNOWN outcomes", record)
    operator.chooses("verdict", "rerun")
    operator.write("reason", "nothing there")
    operator.checks("checked")
    operator.press("Give this verdict")

    assert "it did not happen" in operator.sees(".messagelist")
    resolved = site.store.get(record.key)
    assert resolved is not None
    assert resolved.status is Status.RELEASED
    operator.follows("HISTORY")
    operator.photographs("history")
    assert "it did not happen" in operator.sees("#change-history")


def test_operator_releases_dead_claims(site: Site, operator: Person) -> None:
    """From the list, through the confirmation; a claim whose lease runs is not among them."""
    dead = [site.written(Status.IN_PROGRESS) for _ in range(2)]
    alive = site.written(Status.IN_PROGRESS, lease_until=site.store.now() + 600_000)
    operator.opens(f"{site.list}?status=IN_PROGRESS")
    operator.photographs("in_progress")
    operator.runs("Release selected claims whose lease is over", *dead, alive)
    operator.photographs("release")
    operator.write("reason", "the machine is gone")
    operator.checks("checked")
    operator.press("Release")

    operator.photographs("released")
    assert operator.sees(".messagelist").count("Released.") == 2
    stored = [site.store.get(each.key) for each in (*dead, alive)]
    assert [each and each.status for each in stored] == [Status.RELEASED, Status.RELEASED, Status.IN_PROGRESS]


def test_viewer_sees_no_actions(site: Site, viewer: Person) -> None:
    """The list and the record, and nothing to press."""
    record = site.written(Status.UNKNOWN)
    viewer.opens(site.list)
    viewer.photographs("viewer")
    assert record.key in viewer.lists()
    assert viewer.sees(".actions") == ""

    viewer.opens(site.page(record))
    assert record.task_id in viewer.sees("#content")
    assert "RESOLVE" not in viewer.sees(".object-tools")
    assert viewer.sees(".submit-row input") == ""

    viewer.opens(site.page(record).replace("/change/", "/resolve/"))
    assert "403 Forbidden" in viewer.sees()
