"""Where large results are kept: the URL, the folder, entry points, and the setting."""

import os
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
from celery.app import utils

from celery_idempotent import Policy, PolicyError, StoreMisconfigured, StoreUnavailable
from celery_idempotent.integration.operating.worker import check
from celery_idempotent.stores import objects as objects_module
from celery_idempotent.stores.objects import ObjectMissing, address_of, open_large_results
from celery_idempotent.stores.objects.folder import FolderObjects
from celery_idempotent.stores.objects.s3 import S3Objects
from tests.support.deliveries import Shop
from tests.support.objects import NO_ANSWER, REFUSED, MemoryObjects, large_results
from tests.support.scene import raising

LARGE = "x" * 200


@pytest.mark.parametrize(
    ("url", "place", "prefix"),
    [
        ("s3://bucket/", "s3://bucket", ""),
        ("s3://bucket/a/b", "s3://bucket", "a/b/"),
        ("S3://bucket/a/", "s3://bucket", "a/"),
        ("s3://key:se/cret@bucket/a%20b?region=eu-west-1&endpoint=http://localhost:9000", "s3://bucket", "a b/"),
        ("file:///mnt/results", "file:///mnt/results", ""),  # mounted elsewhere, all that is recorded is found again
    ],
)
def test_path_is_how_names_begin(url: str, place: str, prefix: str) -> None:
    """Whether it ends with a slash or not; the login is not shown."""
    opened = open_large_results(url)
    assert (repr(opened.objects), opened.prefix) == (place, prefix)
    assert "cret" not in repr(address_of(url))


@pytest.mark.parametrize(("over", "size"), [("", 102_400), ("?over=0", 0), ("?over=10B", 10), ("?over=1%20mb", 2**20)])
def test_over_is_a_size(over: str, size: int) -> None:
    """In bytes, or units of 1024."""
    assert open_large_results(f"s3://bucket/prefix{over}").over == size


@pytest.mark.parametrize(
    ("url", "remedy"),
    [
        ("results", "write s3://bucket/prefix"),
        ("s3://", "the bucket's name cannot be read"),
        ("s3://pass@bucket", "a key and its secret"),
        ("s3://bucket?over=lots", "over='lots' is not a size"),
        ("s3://bucket?ovr=1", "unknown option ovr; there are endpoint, over, region"),
        ("s3://bucket?endpoint=localhost:9000", "endpoint is a URL"),
        ("file:///", "write file:///absolute/folder"),
        ("file:///a?region=b", "unknown option region; there are over"),
        ("ftp://host/folder", "nothing has this scheme; known schemes: file, s3"),
        (100_000, "must be a URL"),  # a number that was meant as ``over``
    ],
)
def test_url_that_cannot_be_used_says_what_to_write(url: Any, remedy: str) -> None:
    """With the setting, and of the URL no more than its scheme: what is wrong may be a password."""
    with pytest.raises(PolicyError, match=remedy) as refused:
        open_large_results(url)
    assert refused.value.option == "idempotency_large_results"
    assert "pass" not in str(refused.value)


def test_missing_driver_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a store's does; publishers, which only bind tasks, need none."""
    missing = raising(ModuleNotFoundError("No module named 'boto3'", name="boto3"))
    monkeypatch.setattr(objects_module, "import_module", missing)
    assert Shop(idempotency_large_results="s3://bucket/prefix").charge.idempotency_key_for("o")
    with pytest.raises(PolicyError, match=r'boto3 is not installed; run: pip install "celery-idempotent\[s3\]"'):
        open_large_results("s3://bucket")


def test_entry_point_gets_the_url_without_what_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """And names that begin with the path; what it returns must be an object store."""
    objects, wrong = MemoryObjects(), SimpleNamespace(put=print)
    opener = Mock(side_effect=[objects, objects, wrong])
    entry_point = SimpleNamespace(name="blob", value="package:opener", load=lambda: opener)
    declared = EntryPoint("blob", "package:opener", "celery_idempotent.objects").group
    monkeypatch.setattr(objects_module, "entry_points", lambda group: [entry_point] if group == declared else [])

    opened = open_large_results("blob://user:pw@account/folder?over=1KB&tier=hot")
    open_large_results("blob://account")
    assert opener.mock_calls == [call("blob://user:pw@account/folder?tier=hot"), call("blob://account/")]
    assert (opened.objects, opened.over, opened.prefix) == (objects, 1024, "folder/")
    with pytest.raises(PolicyError, match="package:opener returned what lacks get, delete"):
        open_large_results("blob://account")


def test_folder_keeps_what_it_is_given(tmp_path: Path) -> None:
    """Whole, as often as it is written, until it is deleted, in a file for people to look at."""
    objects = open_large_results(f"file://{tmp_path}?over=1").objects
    for _ in range(2):
        objects.put("shop/a/b", b"data")
    assert objects.get("shop/a/b") == (tmp_path / "shop/a/b").read_bytes() == b"data"
    for _ in range(2):
        objects.delete("shop/a/b")
    with pytest.raises(ObjectMissing, match="shop/a/b"):
        objects.get("shop/a/b")
    shop = _shop(f"file://{tmp_path}?over=100")
    assert [shop.deliver("o").value for _ in range(2)] == [LARGE] * 2
    assert len([each for each in tmp_path.rglob("*") if each.is_file()]) == len(shop.runs) == 1


def test_put_is_whole_and_outlives_a_loss_of_power(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file, its name in its folder, and the folder's own name; one that fails half-way leaves no file."""
    synced: list[Path] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(Path(f"/proc/self/fd/{descriptor}").readlink()))
    FolderObjects(tmp_path).put("a/b", b"data")
    assert synced[0].name.startswith(".")
    assert synced[1:] == [tmp_path / "a", tmp_path]
    monkeypatch.setattr(os, "fsync", raising(OSError(28, "No space left on device")))
    with pytest.raises(StoreUnavailable, match="No space left") as told:
        FolderObjects(tmp_path).put("c/d", b"data")
    assert type(told.value) is StoreUnavailable
    assert [each for each in tmp_path.rglob("*") if each.is_file()] == [tmp_path / "a/b"]


@pytest.mark.parametrize("name", ["../outside", "a/../../outside", "", "/etc/hostname", "a\0b"])
def test_no_name_leads_out_of_a_folder(tmp_path: Path, name: str) -> None:
    """Whoever can write the store chooses what a pointer says."""
    (tmp_path / "results").mkdir()
    (tmp_path / "outside").write_text("secret")
    with pytest.raises(ObjectMissing):
        FolderObjects(tmp_path / "results").get(name)


def test_folder_that_stays_unusable_is_no_lost_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is not mounted, to which nothing is written either; a file in the way; a missing permission."""
    away, here = FolderObjects(tmp_path / "mnt"), FolderObjects(tmp_path)
    (tmp_path / "a").mkdir()
    for ask in (lambda: away.get("a"), lambda: away.put("a", b""), lambda: away.delete("a"), lambda: here.get("a")):
        with pytest.raises(StoreMisconfigured):
            ask()
    monkeypatch.setattr(Path, "mkdir", raising(PermissionError(13, "Permission denied")))  # the superuser may do all
    with pytest.raises(StoreMisconfigured, match="Permission denied"):
        here.put("a/b", b"")


@pytest.mark.parametrize(("endpoint", "style"), [("http://minio:9000", "path"), (None, None)])
def test_bucket_is_part_of_the_path_where_the_server_is_not_aws(endpoint: str | None, style: str | None) -> None:
    """Such a server has no host name for each bucket."""
    session = Mock()
    S3Objects("bucket", endpoint_url=endpoint, session=session).delete("a")
    assert (session.client.call_args.kwargs["config"].s3 or {}).get("addressing_style") == style


def _shop(setting: Any, **policy: Any) -> Shop:
    shop = Shop(Policy("order_id", **policy), idempotency_large_results=setting)
    shop.does = lambda order_id, cents: LARGE
    return shop


def test_what_cannot_be_opened_or_written_stops_a_worker() -> None:
    """Whether a package registers a scheme is looked for when it is opened; a wrong URL fails where a task is bound."""
    for setting, told in (("ftp://host/folder", "nothing has this scheme"), (large_results(REFUSED), "AccessDenied")):
        with pytest.raises((PolicyError, StoreMisconfigured), match=told):
            check(_shop(setting).app, "celery.concurrency.solo")
    with pytest.raises(PolicyError, match="idempotency_large_results="):
        _shop("s3://bucket?over=lots")
    assert utils.HIDDEN_SETTINGS.search("IDEMPOTENCY_LARGE_RESULTS")


def test_replay_without_an_answer_is_postponed_and_a_publisher_without_one_sends() -> None:
    """As in an outage of the store; one with an answer publishes nothing, and has the result."""
    large: Any = large_results()
    shop = _shop(large, publish="once")
    shop.deliver("o")
    assert (shop.charge.delay("o").get(), shop.published()) == (LARGE, [])

    large.objects.always = NO_ANSWER
    assert (shop.deliver("o").state, shop.runs, len(shop.published())) == ("RETRY", ["o"], 1)
    shop.charge.delay("o")
    assert len(shop.published()) == 1
