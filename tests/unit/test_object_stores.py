"""Where large results are kept: the URL, the folder, entry points, and the setting."""

import os
import stat
from importlib.metadata import EntryPoint
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from celery.app.utils import HIDDEN_SETTINGS

from celery_idempotent import IdempotentTask, Policy, PolicyError, StoreMisconfigured, StoreUnavailable, idempotent
from celery_idempotent.integration.operating.worker import check
from celery_idempotent.stores import objects as objects_module
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.stores.objects import LargeResults, ObjectMissing, ObjectStore, address_of, open_large_results
from celery_idempotent.stores.objects.folder import FolderObjects
from celery_idempotent.stores.objects.s3 import S3Objects
from tests.support.deliveries import an_app, deliver, published
from tests.support.objects import NO_ANSWER, REFUSED, MemoryObjects, large_results

LARGE = "x" * 200


class TestUrls:
    """``idempotency_large_results``."""

    @pytest.mark.parametrize(
        ("over", "size"),
        [
            ("", 102_400),
            ("?over=0", 0),
            ("?over=1000", 1000),
            ("?over=10B", 10),
            ("?over=100KB", 102_400),
            ("?over=1mb", 1_048_576),
            ("?over=1%20MB", 1_048_576),
        ],
    )
    def test_over_is_a_size(self, over: str, size: int) -> None:
        """In bytes, or units of 1024."""
        assert open_large_results(f"s3://bucket/prefix{over}").over == size

    @pytest.mark.parametrize(
        ("url", "prefix"),
        [
            ("s3://bucket", ""),
            ("s3://bucket/", ""),
            ("s3://bucket/a/b", "a/b/"),
            ("S3://bucket/a/", "a/"),
            ("s3://key:se/cret@bucket/a%20b?region=eu-west-1&endpoint=http://localhost:9000", "a b/"),
        ],
    )
    def test_a_path_is_how_names_begin(self, url: str, prefix: str) -> None:
        """Whether it ends with a slash or not."""
        opened = open_large_results(url)
        assert (repr(opened.objects), opened.prefix) == ("s3://bucket", prefix)

    def test_a_folder_is_no_part_of_names(self) -> None:
        """Where it is mounted elsewhere, all that is recorded is found again."""
        opened = open_large_results("file:///mnt/results")
        assert (repr(opened.objects), opened.prefix) == ("file:///mnt/results", "")

    @pytest.mark.parametrize(
        ("url", "remedy"),
        [
            ("results", "write s3://bucket/prefix"),
            ("s3:bucket", "write s3://bucket/prefix"),
            ("s3://", "the bucket's name cannot be read"),
            ("s3:///prefix", "the bucket's name cannot be read"),
            ("s3://user:pass@host:9000/bucket", "the bucket's name cannot be read"),
            ("s3://pass@bucket", "a key and its secret"),
            ("s3://:pass@bucket", "a key and its secret"),
            ("s3://bucket?over=lots", "over='lots' is not a size"),
            ("s3://bucket?over=", "over='' is not a size"),
            ("s3://bucket?over=-1", "over='-1' is not a size"),
            ("s3://bucket?over=1GB", "over='1GB' is not a size"),
            ("s3://bucket?ovr=1", "unknown option ovr; there are endpoint, over, region"),
            ("s3://bucket?endpoint=localhost:9000", "endpoint is a URL"),
            ("file://results", "write file:///absolute/folder"),
            ("file:///", "write file:///absolute/folder"),
            ("file:///a?region=b", "unknown option region; there are over"),
            ("ftp://host/folder", "nothing has this scheme; known schemes: file, s3"),
        ],
    )
    def test_one_that_cannot_be_used_says_what_to_write(self, url: str, remedy: str) -> None:
        """With the setting, and of the URL no more than its scheme: what is wrong may be a password."""
        with pytest.raises(PolicyError, match=remedy) as refused:
            open_large_results(url)
        assert refused.value.option == "idempotency_large_results"
        assert "pass" not in str(refused.value)

    def test_what_is_neither_is_refused(self) -> None:
        """As a number that was meant as ``over``."""
        with pytest.raises(PolicyError, match="must be a URL"):
            open_large_results(100_000)  # type: ignore[arg-type]

    def test_one_that_is_opened_is_taken(self) -> None:
        """For a session of one's own, or a store of one's own."""
        large = large_results()
        assert open_large_results(large) is large

    def test_a_missing_driver_names_the_extra(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As a store's does."""

        def missing(module: str) -> None:
            raise ModuleNotFoundError("No module named 'boto3'", name="boto3")

        monkeypatch.setattr(objects_module, "import_module", missing)
        with pytest.raises(PolicyError, match=r'boto3 is not installed; run: pip install "celery-idempotent\[s3\]"'):
            open_large_results("s3://bucket")


def _registered(monkeypatch: pytest.MonkeyPatch, opener: Any) -> None:
    entry_point = SimpleNamespace(name="blob", value="package:opener", load=lambda: opener)
    found: Any = lambda group: [entry_point] if group == "celery_idempotent.objects" else []  # noqa: E731
    monkeypatch.setattr(objects_module, "entry_points", found)


class TestEntryPoints:
    """A scheme of somebody else's."""

    def test_it_gets_the_url_without_what_is_ours(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """And names that begin with the path."""
        urls: list[str] = []
        objects = MemoryObjects()

        def opener(url: str) -> MemoryObjects:
            urls.append(url)
            return objects

        _registered(monkeypatch, opener)
        opened = open_large_results("blob://user:pw@account/folder?over=1KB&tier=hot")
        assert urls == ["blob://user:pw@account/folder?tier=hot"]
        assert (opened.objects, opened.over, opened.prefix) == (objects, 1024, "folder/")
        open_large_results("blob://account")
        assert urls[1] == "blob://account/"

    def test_what_is_no_object_store_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It says what is missing."""
        _registered(monkeypatch, lambda url: SimpleNamespace(put=print))
        with pytest.raises(PolicyError, match="package:opener returned what lacks get, delete"):
            open_large_results("blob://account")

    def test_the_group_is_read_from_what_is_installed(self) -> None:
        """The name that a package declares is the one that is looked for."""
        assert EntryPoint("blob", "package:opener", objects_module._GROUP).group == "celery_idempotent.objects"


class TestFolder:
    """``file:///folder``."""

    @pytest.fixture
    def objects(self, tmp_path: Path) -> ObjectStore:
        return open_large_results(f"file://{tmp_path}?over=1").objects

    def test_it_keeps_what_it_is_given(self, objects: ObjectStore) -> None:
        """Whole, as often as it is written, until it is deleted."""
        for _ in range(2):
            objects.put("shop/a/b", b"data")
        assert objects.get("shop/a/b") == b"data"
        objects.delete("shop/a/b")
        objects.delete("shop/a/b")
        with pytest.raises(ObjectMissing, match="shop/a/b"):
            objects.get("shop/a/b")

    def test_nothing_unfinished_stays(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A write that fails half-way leaves no file under the name, nor beside it."""

        def full(descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(StoreUnavailable, match="No space left") as told:
            FolderObjects(tmp_path).put("a/b", b"data")
        assert not isinstance(told.value, StoreMisconfigured)
        assert [each for each in tmp_path.rglob("*") if each.is_file()] == []

    def test_what_a_put_has_written_outlives_a_loss_of_power(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The file, its name in its folder, and the folder's own name."""
        synced = []
        monkeypatch.setattr(
            os, "fsync", lambda descriptor: synced.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        )
        FolderObjects(tmp_path).put("a/b", b"data")
        assert synced[0].name.startswith(".")
        assert synced[1:] == [tmp_path / "a", tmp_path]

    @pytest.mark.parametrize("name", ["../outside", "a/../../outside", "", ".", "/etc/hostname", "a\0b"])
    def test_no_name_leads_out_of_it(self, tmp_path: Path, name: str) -> None:
        """Whoever can write the store chooses what a pointer says."""
        folder = tmp_path / "results"
        folder.mkdir()
        (tmp_path / "outside").write_text("secret")
        with pytest.raises(ObjectMissing):
            FolderObjects(folder).get(name)

    def test_a_disk_that_is_not_mounted_is_no_lost_result(self, tmp_path: Path) -> None:
        """Nor is anything written to what is under it."""
        objects = FolderObjects(tmp_path / "mnt")
        for ask in (lambda: objects.get("a"), lambda: objects.put("a", b""), lambda: objects.delete("a")):
            with pytest.raises(StoreMisconfigured, match="the folder is not there"):
                ask()

    def test_a_file_in_the_way_is_told(self, tmp_path: Path) -> None:
        """It stays so until somebody changes something."""
        (tmp_path / "a").mkdir()
        with pytest.raises(StoreMisconfigured, match="directory"):
            FolderObjects(tmp_path).get("a")

    def test_a_forbidden_folder_is_told(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The superuser may do anything, so the error is made here."""

        def forbidden(*arguments: Any, **options: Any) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "mkdir", forbidden)
        with pytest.raises(StoreMisconfigured, match="Permission denied"):
            FolderObjects(tmp_path).put("a/b", b"")

    def test_files_are_files(self, objects: ObjectStore, tmp_path: Path) -> None:
        """A person can look at them."""
        objects.put("a", b"data")
        assert stat.S_ISREG((tmp_path / "a").stat().st_mode)


def _app(setting: Any, **settings: Any) -> Any:
    return an_app(idempotency_large_results=setting, **settings)


def _charge(app: Any, **policy: Any) -> Any:
    calls: list[str] = []

    def charge(order_id: str) -> str:
        """Return something large."""
        calls.append(order_id)
        return LARGE

    task = app._task_from_fun(
        charge, name="charge", base=IdempotentTask, idempotent=Policy("order_id", **policy), shared=False
    )
    task.calls = calls
    return task


class TestSetting:
    """As an app has it."""

    def test_duplicates_get_what_is_in_the_folder(self, tmp_path: Path) -> None:
        """Through Celery, end to end."""
        task = _charge(_app(f"file://{tmp_path}?over=100"))
        assert [deliver(task, "o").value for _ in range(2)] == [LARGE] * 2
        assert task.calls == ["o"]
        assert len([each for each in tmp_path.rglob("*") if each.is_file()]) == 1

    @pytest.mark.parametrize("setting", ["s3://bucket?over=lots", 5])
    def test_what_cannot_be_used_is_refused_when_a_task_is_bound(self, setting: Any) -> None:
        """The earliest moment there is."""
        with pytest.raises(PolicyError, match="idempotency_large_results="):
            _charge(_app(setting)).run  # noqa: B018 - reading it binds the task

    def test_binding_needs_no_driver(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Publishers bind tasks, too."""
        monkeypatch.setattr(objects_module, "import_module", lambda module: pytest.fail("imported"))
        assert _charge(_app("s3://bucket/prefix")).idempotency_key_for("o")

    def test_an_unknown_scheme_stops_a_worker(self) -> None:
        """Whether a package registers it is looked for when it is opened."""
        app = _app("ftp://host/folder")
        _charge(app)
        with pytest.raises(PolicyError, match="nothing has this scheme"):
            check(app, "celery.concurrency.solo")

    def test_what_cannot_be_written_stops_a_worker(self) -> None:
        """And ``check``, which asks the same."""
        app = _app(large_results(REFUSED))
        _charge(app)
        with pytest.raises(StoreMisconfigured, match="AccessDenied"):
            check(app, "celery.concurrency.solo")

    def test_what_can_be_written_does_not(self) -> None:
        """One object says so."""
        large = large_results()
        app = _app(large)
        _charge(app)
        check(app, "celery.concurrency.solo")
        assert isinstance(large.objects, MemoryObjects)
        assert list(large.objects.objects) == ["celery-idempotent-check"]

    def test_it_is_hidden_in_reports(self) -> None:
        """A URL can hold a secret key."""
        assert HIDDEN_SETTINGS is not None
        from celery.app import utils

        assert utils.HIDDEN_SETTINGS.search("IDEMPOTENCY_LARGE_RESULTS")

    def test_a_replay_without_an_answer_is_postponed(self) -> None:
        """As in an outage of the store; the task does not fail."""
        large = large_results()
        assert isinstance(large.objects, MemoryObjects)
        task = _charge(_app(large))
        deliver(task, "o")
        large.objects.always = NO_ANSWER
        assert deliver(task, "o").state == "RETRY"
        assert task.calls == ["o"]


class TestS3:
    """What is asked of boto3; what S3 answers is a contract's."""

    def test_a_reply_is_closed_once_it_is_read(self) -> None:
        """Or its connection would go back to no pool."""
        body = BytesIO(b"data")
        s3 = SimpleNamespace(get_object=lambda **asked: {"Body": body})
        assert S3Objects("bucket", client=lambda: s3).get("a") == b"data"
        assert body.closed

    @pytest.mark.parametrize(("endpoint", "style"), [("http://minio:9000", "path"), (None, None)])
    def test_a_bucket_is_part_of_the_path_where_the_server_is_not_aws(
        self, endpoint: str | None, style: str | None
    ) -> None:
        """Such a server has no host name for each bucket."""
        configs = []

        def client(service: str, *, config: Any, **_: Any) -> Any:
            configs.append(config)
            return SimpleNamespace(delete_object=lambda **asked: None)

        session: Any = SimpleNamespace(client=client)
        S3Objects("bucket", endpoint_url=endpoint, session=session).delete("a")
        assert (configs[0].s3 or {}).get("addressing_style") == style


class TestFunctions:
    """``@idempotent``."""

    def test_a_function_of_an_app_keeps_its_large_results_as_the_apps_tasks_do(self) -> None:
        """A second call reads the object."""
        large = large_results()
        calls: list[str] = []

        @idempotent(Policy("order_id"), app=_app(large))
        def charge(order_id: str) -> str:
            calls.append(order_id)
            return LARGE

        assert [charge("o") for _ in range(2)] == [LARGE] * 2
        assert isinstance(large.objects, MemoryObjects)
        assert (calls, len(large.objects.objects)) == (["o"], 1)

    def test_a_function_with_a_store_alone_has_none(self) -> None:
        """Its results are in the record, whatever their size."""

        @idempotent(Policy("order_id"), store=MemoryStore())
        def charge(order_id: str) -> str:
            return LARGE

        assert [charge("o") for _ in range(2)] == [LARGE] * 2


class TestPublishOnce:
    """A publisher gets the result of what is done."""

    def test_it_reads_the_object(self) -> None:
        """Nothing is sent."""
        task = _charge(_app(large_results()), publish="once")
        deliver(task, "o")
        result = task.delay("o")
        assert list(published(task.app)) == []
        assert result.get() == LARGE

    def test_one_that_cannot_read_it_sends(self) -> None:
        """A delivery can tell."""
        large = large_results()
        task = _charge(_app(large), publish="once")
        deliver(task, "o")
        assert isinstance(large.objects, MemoryObjects)
        large.objects.always = NO_ANSWER
        task.delay("o")
        assert len(list(published(task.app))) == 1


def test_an_address_does_not_show_its_login() -> None:
    """It is printed in a traceback at most."""
    address = address_of("s3://key:secret@bucket/a?over=1")
    assert "secret" not in repr(address)
    assert isinstance(open_large_results("s3://key:secret@bucket"), LargeResults)
