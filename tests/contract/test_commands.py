"""What the commands find and judge is the same on every store."""
# mypy: allow-untyped-decorators

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from celery import Celery

from celery_idempotent import Status
from celery_idempotent.integration.settings import runtime_of
from celery_idempotent.stores import open_store
from celery_idempotent.testing.contract import a_record
from lab.proof.targets import ALL
from tests.support.commands import run
from tests.support.deliveries import an_app
from tests.support.stores import a_store

MINUTE = 60_000


@pytest.fixture(params=ALL)
def app(request: pytest.FixtureRequest) -> Iterator[Celery]:
    with a_store(request.param) as site:
        app = an_app()
        app.conf.idempotency_store = store = open_store(site.url)
        store.provision()
        yield app
        store.close()


def _run(app: Celery, *arguments: str) -> Any:
    return json.loads(run(app, *arguments, "--json").stdout)


def _keep(app: Celery, key: str, **values: Any) -> None:
    store = runtime_of(app).store
    common = {"worker": "w1", "updated_at": store.now(), "lease_until": 1, "fencing_token": 1}
    store.swap(replace(a_record(), key=key, **{**common, **values}), None)


def test_commands_find_and_judge_what_is_asked_for(app: Celery) -> None:
    """By status, task, label, worker and age; then all of one tenant is judged, erased, and gone from the lists."""
    now = runtime_of(app).store.now()
    _keep(app, "a", status=Status.UNKNOWN, label="acme/1", updated_at=now - 10 * MINUTE)
    _keep(app, "b", status=Status.UNKNOWN, label="acme/2", worker="w2")
    done = {"result": '"done"', "content_type": "application/json", "expires_at": now // 1000 + 600}
    _keep(app, "c", status=Status.COMPLETED, label="acme/3", **done)
    _keep(app, "d", status=Status.RELEASED, label="globex/1", task="shop.mail")
    _keep(app, "e", status=Status.IN_PROGRESS, label="", worker="w2")

    def keys(*arguments: str) -> str:
        return "".join(sorted(each["key"] for each in _run(app, "list", *arguments)))

    for option, wanted, found in (
        *(("--status", "unknown", "ab"), ("--label", "acme/3", "c"), ("--label", "acme/*", "abc")),
        *(("--task", "shop.mail", "d"), ("--worker", "w2", "be"), ("--older-than", "5m", "a")),
    ):
        assert keys(option, wanted) == found
    assert keys() == "abcde"
    assert len(_run(app, "list", "--limit", "2")) == 2
    assert _run(app, "show", "acme/3")["result"] == "done"
    assert _run(app, "stats")["by_status"] == {"UNKNOWN": 2, "COMPLETED": 1, "RELEASED": 1, "IN_PROGRESS": 1}

    why = ("--yes", "--by", "ann", "--reason", "PAY-1")
    judged = _run(app, "resolve", "--label", "acme/*", "--rerun", *why)
    assert sorted(each["key"] for each in judged["judged"]) == ["a", "b"]
    assert _run(app, "show", "a")["verdict"]["reason"] == "PAY-1"
    assert len(_run(app, "forget", "--label", "acme/*", *why)["judged"]) == 3
    assert keys("--label", "acme/*") == ""
    assert keys("--status", "released") == "d"
