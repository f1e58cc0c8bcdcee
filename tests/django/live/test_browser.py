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
from selenium.webdriver.chrome.webdriver import WebDriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select

from celery_idempotent.contrib.django.store import DjangoStore
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.testing.contract import a_record
from lab.embedded.server import HOST, accepts, free_port
from tests.django.databases import migrated, sqlite
from tests.django.live.shop import Shop
from tests.support.browser import Person, a_window
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
        self.list = f"{address}celery_idempotent/idempotencyrecord/"
        self.store = DjangoStore(alias)

    def page(self, record: Record) -> str:
        return f"{self.list}{quote(record.key)}/change/"

    def status(self, record: Record) -> Status | None:
        found = self.store.get(record.key)
        return found.status if found else None

    def written(self, status: Status, **changes: Any) -> Record:
        """A record that a worker might have left."""
        now, key = self.store.now(), f"shop.refund:1:{uuid4().hex * 2}"
        times = {"created_at": now - 95_000, "updated_at": now - 61_000, "lease_until": now - 31_000}
        record = replace(a_record(), **{"key": key, "status": status, "task": "shop.refund", **times, **changes})
        assert self.store.swap(record, None) == record
        return record


class Colleague(Person):
    """Somebody who works here, logged in, with these permissions on records."""

    def __init__(self, browser: WebDriver, site: Site, pictures: Path, *permissions: str) -> None:
        super().__init__(browser, pictures)
        user = User(username=f"user-{uuid4().hex[:8]}", is_staff=True)
        user.set_password(PASSWORD)
        user.save(using=site.alias)
        for each in permissions:
            known = Permission.objects.using(site.alias)
            user.user_permissions.add(known.get(codename=f"{each}_idempotencyrecord"))
        browser.get(f"{site.address}login/")
        self.writes(username=user.username, password=PASSWORD)
        self.presses("Log in")
        assert user.username.upper() in self.sees("#user-tools")

    def runs(self, action: str, *records: Record) -> None:
        """An action of the list on some of its rows."""
        for each in records:
            self.chooses("_selected_action", each.key)
        Select(self.browser.find_element(By.NAME, "action")).select_by_visible_text(action)
        self.goes_on(By.CSS_SELECTOR, 'button[name="index"]')

    def lists(self) -> set[str]:
        """The keys of the records in the list, whole."""
        found = self.browser.find_elements(By.CSS_SELECTOR, "#result_list .field-short_key span")
        return {str(each.get_attribute("title")) for each in found}


def test_operator_finds_and_resolves_what_waits_for_him(site: Site, browser: WebDriver, tmp_path: Path) -> None:
    """From the front page to UNKNOWN alone, past a mistake in the result, to a record that is replayed."""
    operator = Colleague(browser, site, tmp_path, "view", "change")
    unknown = site.written(Status.UNKNOWN, error="attempt 1 ended without an outcome")
    outcome = {"result": json.dumps({"refund": "re_41"}), "content_type": "application/json", "expires_at": 2**40}
    done = site.written(Status.COMPLETED, **outcome)
    browser.get(site.address)
    operator.follows("Idempotency records")
    assert {unknown.key, done.key} <= operator.lists()
    operator.follows("UNKNOWN")
    assert operator.lists() == {unknown.key}
    operator.goes_on(By.CSS_SELECTOR, f'[title="{unknown.key}"]')
    assert "ended without an outcome" in operator.sees("#content", "unknown")

    operator.follows("RESOLVE")
    operator.chooses("verdict", "completed")
    operator.writes(result="re_42", reason="the provider shows re_42")
    browser.find_element(By.NAME, "checked").click()
    operator.presses("Give this verdict")
    assert "Write JSON" in operator.sees(".errorlist", "mistake")
    operator.writes(result='"re_42"')
    operator.presses("Give this verdict")

    assert "because: the provider shows re_42" in operator.sees(".field-shown_verdict", "resolved")
    assert '"re_42"' in operator.sees(".field-shown_result pre")
    assert "RESOLVE" not in operator.sees(".object-tools")
    assert site.status(unknown) is Status.COMPLETED
    operator.follows("HISTORY")
    assert "it happened" in operator.sees("#change-history")


def test_operator_releases_dead_claims(site: Site, browser: WebDriver, tmp_path: Path) -> None:
    """From the list, through the confirmation; a claim whose lease runs is not among them."""
    operator = Colleague(browser, site, tmp_path, "view", "change")
    records = [site.written(Status.IN_PROGRESS) for _ in range(2)]
    records.append(site.written(Status.IN_PROGRESS, lease_until=site.store.now() + 600_000))

    browser.get(f"{site.list}?status=IN_PROGRESS")
    operator.runs("Release selected claims whose lease is over", *records)
    operator.writes(reason="the machine is gone")
    browser.find_element(By.NAME, "checked").click()
    operator.presses("Release")

    assert operator.sees(".messagelist", "released").count("Released.") == 2
    assert [*map(site.status, records)] == [Status.RELEASED, Status.RELEASED, Status.IN_PROGRESS]
