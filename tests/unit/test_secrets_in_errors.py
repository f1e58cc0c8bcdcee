"""A wrong URL is refused without quoting it: a password can be anywhere."""

import traceback
from typing import Any

import pytest

from celery_idempotent import PolicyError, open_store
from celery_idempotent.contrib.http.guard import HttpGuard
from celery_idempotent.contrib.web.guard import Sessions
from celery_idempotent.integration.settings import runtime_of
from celery_idempotent.integration.task.guard import place_of
from celery_idempotent.printable import scheme_of
from celery_idempotent.stores.dynamodb import DynamoDBStore
from celery_idempotent.stores.objects import address_of
from tests.support.deliveries import an_app

SECRET = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"  # as AWS makes them

PLACES = """
{secret}  ://{secret}  db+{secret}  nosuch:{secret}@host  nosuch://user:{secret}@host
dynamodb://key:{secret}  dynamodb://key:{secret}/table  dynamodb://key:{secret}@  dynamodb://key:{secret}@eu-west-1
dynamodb://key:{secret}@/table  dynamodb://key:{secret}@host:port/table  dynamodb://key:{secret}@[host/table
dynamodb://key:{secret}@eu-west-1/table?reigon=x
redis://:{secret}@host:port  redis://user:{secret}@host/0  redis://user:{secret}@host/0?db=x  redis://:{secret}
redis://[{secret}@host  redis://ho\u2100st:{secret}@host  sentinel://:{secret}@host:26379
redis+cluster://user:{secret}@host;redis://other
postgresql://user:{secret}  postgresql://user:{secret}:host/db  postgresql://user@host:{secret}/db
postgresql+nosuch://user:{secret}@host/db  oracle://user:{secret}@host/db  sqlite://user:{secret}@host
mysql+pymysql://user:{secret}@host/db?timeout=x
"""


@pytest.mark.parametrize("secret", [SECRET, "pa#ss@w?rd:1"])
@pytest.mark.parametrize("url", [*PLACES.split(), "no {secret}://host"])
def test_error_quotes_nothing_of_a_url(url: str, secret: str) -> None:
    """Neither the error, nor what it came from, which a traceback would show."""
    try:
        store = open_store(url.format(secret=secret))
    except PolicyError as error:
        shown = "".join(traceback.format_exception(error))
    else:
        shown = repr(store)

    assert not [part for part in (secret, *secret.split("/"), *secret.split("@")) if part in shown]


@pytest.mark.parametrize(
    "url", ["redis://u:{secret}@h", "dynamodb://k:{secret}@eu-west-1/t", "s3://k:{secret}@bucket/x"]
)
def test_nothing_that_holds_a_url_shows_its_password(url: str) -> None:
    """In a traceback with the values of variables, as Sentry sends one."""
    url = url.format(secret="s3cr3t")
    holders: list[Any] = [Sessions("s3cr3t"), address_of(f"{url}?secret=s3cr3t" if "s3:" not in url else url)]
    if "s3:" not in url:
        app = an_app(idempotency_store=url)
        for each in (place_of(url, None)(), runtime_of(app)):
            holders += [each, each.opened]
        holders += [HttpGuard("anybody", url, None, {}), open_store(url), *vars(open_store(url)).values()]

    assert "s3cr3t" not in repr(holders)


@pytest.mark.parametrize("url", ["redis:/user:pw@host", "user:pw@host://x", "pw", "redis://user:pw@host"])
def test_scheme_is_all_that_is_shown(url: str) -> None:
    """And only what can be one."""
    assert scheme_of(f"db+{url}") == ("'db+redis://...'" if "://user" in url else "'...'")


@pytest.mark.parametrize("secret", [SECRET, SECRET.replace("/", "%2F").replace("+", "%2B")])
def test_secret_of_aws_stands_in_a_url_as_it_is(secret: str) -> None:
    """With its slashes; escaped they are understood, too."""
    store = open_store(f"dynamodb://AKIAIOSFODNN7EXAMPLE:{secret}@eu-west-1/table?sort_key_attr=a@b")
    assert isinstance(store, DynamoDBStore)
    assert repr(store) == "dynamodb://@eu-west-1/table"
    credentials = store._connected()._request_signer._credentials  # type: ignore[attr-defined]
    assert (credentials.access_key, credentials.secret_key) == ("AKIAIOSFODNN7EXAMPLE", SECRET)
    store.close()
