"""Results that are objects: written before the record, read by replays and steps, and lost only with a reason."""

import json
import os
from collections.abc import Callable
from hashlib import sha256
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
from celery.app import utils

from celery_idempotent import Policy, PolicyError, StoreMisconfigured, StoreUnavailable
from celery_idempotent.engine.attempt import ProtectedAttempt
from celery_idempotent.engine.claim import Claim
from celery_idempotent.engine.delivery import Conflict, Outcome, load
from celery_idempotent.errors import ResultLost
from celery_idempotent.integration.operating.worker import check
from celery_idempotent.protocol.codec import Encoded
from celery_idempotent.protocol.contents import OBJECT, ContentLost, Pointer, Slot, pointer_in, unpack
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.store import RecordTooLarge
from celery_idempotent.protocol.verdicts import Action
from celery_idempotent.stores import objects as objects_module
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.stores.objects import LargeResults, ObjectMissing, address_of, open_large_results
from celery_idempotent.stores.objects.folder import FolderObjects
from celery_idempotent.stores.objects.s3 import S3Objects
from celery_idempotent.stores.wrappers import Offloading, folder_of, pointers_of
from celery_idempotent.testing.contract import a_record
from tests.support.deliveries import Shop
from tests.support.judging import judge
from tests.support.objects import NO_ANSWER, REFUSED, MemoryObjects, large_results
from tests.support.scene import Again, Scene, raising

LARGE, OTHER, SMALL = "x" * 200, "y" * 200, "x" * 50
SLOT = Slot("k", "result")


class LargeScene(Scene):
    """Deliveries with a place for results of more than ``over`` bytes."""

    def __init__(self, *errors: Exception | None, over: int = 100) -> None:
        super().__init__()
        self.objects = MemoryObjects(*errors)
        self.large = LargeResults(self.objects, over, "shop/")
        self.around: Any = Offloading(self.store, self.large)

    def finish(self, value: Any = LARGE, **policy: Any) -> Any:
        """What a delivery is told whose body returns ``value``."""
        outcome = self.run(lambda claim: value, **policy)
        assert isinstance(outcome, Outcome)
        return outcome.value

    def commit(self) -> Any:
        return self.perform(lambda handle: handle.commit(LARGE, writes=[{"Put": {}}])).value

    def step(self, value: str = LARGE) -> Any:
        """What a body returns that has one step and raises after it the first time; the step is counted."""

        def call(step: Any) -> str:
            self.steps += 1
            return value

        def body(handle: ProtectedAttempt) -> Any:
            result = handle.step("fetch", call)
            if handle.number == 1:
                raise Again
            return result[:10]

        return self.perform(body).value

    steps = 0

    def change(self, **changes: Any) -> None:
        """Change the record, as whoever can write the store can."""
        self.store.swap(self.record.but(revision="r", **changes), self.record.revision)


@pytest.fixture
def scene() -> LargeScene:
    return LargeScene()


@pytest.fixture
def done(scene: LargeScene) -> LargeScene:
    """One operation, whose result is an object."""
    scene.finish()
    scene.events.clear()
    return scene


def test_large_result_is_an_object_and_every_delivery_gets_it(scene: LargeScene) -> None:
    """It is there before the record points to it: a death between the two leaves an object that nobody knows."""
    at_put: list[Status] = []
    scene.objects.before_put = lambda: at_put.append(scene.record.status)

    assert [scene.finish() for _ in range(3)] == [LARGE] * 3

    assert (scene.runs, at_put) == (1, [Status.IN_PROGRESS])
    ((name, data),) = scene.objects.objects.items()
    assert data == json.dumps(LARGE).encode()
    pointer = Pointer(name, 202, sha256(data).hexdigest(), "application/json", is_text=True)
    assert pointer_in(Encoded(scene.record.result or "", scene.record.content_type or "")) == pointer
    assert name.startswith(f"shop/{folder_of('k')}/")


@pytest.mark.parametrize(("value", "puts"), [("x" * 98, 0), ("x" * 99, 1), ("é" * 16, 0), ("é" * 17, 1)])
def test_size_is_counted_in_bytes_of_what_is_encoded(scene: LargeScene, value: str, puts: int) -> None:
    """Quotes and escapes included; what is small asks for no object, neither when it is recorded nor in a replay."""
    assert [scene.finish(value) for _ in range(2)] == [value] * 2
    assert (len(scene.objects.puts), len(scene.objects.gets)) == (puts, puts)


def test_lease_is_renewed_while_the_object_is_on_its_way(scene: LargeScene) -> None:
    """A large one takes long, and the heartbeat must not wait for it."""
    renewed: list[int] = []

    def body(claim: Any) -> str:
        scene.objects.before_put = lambda: (claim.renew(), renewed.append(scene.record.lease_until))[0]  # type: ignore[func-returns-value]
        scene.clock.advance(30_000)
        return LARGE

    scene.run(body)
    assert renewed == [scene.clock.now() + 60_000]


def test_what_is_no_result_is_no_object(scene: LargeScene) -> None:
    """A failure, which is bounded and which people look for in the record; what is not kept; a conflict."""
    for _ in range(2):
        with pytest.raises(LookupError):
            scene.run(raising(LookupError(LARGE)), remember=(LookupError,))
    private, meeting = LargeScene(), LargeScene()
    private.codec = scene.codec._replace(private=True)
    assert [private.finish() for _ in range(2)] == [LARGE, None]
    meeting.run(lambda claim: isinstance(meeting.run(lambda claim: "never"), Conflict) and SMALL)

    assert [each.objects.puts + each.objects.gets for each in (scene, private, meeting)] == [[]] * 3


@pytest.mark.parametrize("ask", [LargeScene.finish, LargeScene.commit, LargeScene.step])
@pytest.mark.parametrize(
    ("fault", "puts", "lost"),
    [
        ([NO_ANSWER] * 5, 6, ""),  # waited for, with the patience of the completion itself
        (REFUSED, 1, "AccessDenied"),  # will never be written
        (NO_ANSWER, 7, "no answer"),  # patience has an end, after more puts than these
    ],
)
def test_put_without_success_ends_in_a_result_or_in_a_reason(
    ask: Callable[[LargeScene], Any], fault: Any, puts: int, lost: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The first delivery has the value in any case, and nothing runs again; waiting is told once, a loss says why."""
    scene, is_step = LargeScene(*(fault if isinstance(fault, list) else [])), ask is LargeScene.step
    scene.objects.always = None if isinstance(fault, list) else fault
    begun = scene.clock.monotonic()
    if is_step:
        with pytest.raises(Again):
            ask(scene)
    else:
        assert ask(scene) == LARGE
        assert (scene.record.status, scene.record.result is None) == (Status.COMPLETED, bool(lost))
        reasons = [event.reason for event in scene.events if event.name == "result_dropped"]
        assert [lost in each for each in reasons] == [True] * bool(lost)
    assert (min(len(scene.objects.puts), 7), len(set(scene.objects.puts))) == (puts, 1)
    assert (scene.clock.monotonic() - begun >= 600) is (fault is NO_ANSWER)
    assert caplog.text.count("result_waits") == (fault is not REFUSED)

    scene.objects.always = None
    if lost:
        with pytest.raises(ResultLost, match=lost):
            ask(scene)
    else:
        assert ask(scene) == (LARGE[:10] if is_step else LARGE)
    assert (scene.runs, scene.steps) == ((2, 1) if is_step else (1, 0))


def test_time_limit_that_strikes_in_the_put_is_raised_after_the_record(scene: LargeScene) -> None:
    """The write is made again, to the same name."""
    scene.objects.before_put = Mock(side_effect=[KeyError, None])
    with pytest.raises(KeyError):
        scene.finish()
    assert scene.finish() == LARGE
    assert (scene.runs, len(scene.objects.puts), len(set(scene.objects.puts))) == (1, 2, 1)


@pytest.mark.parametrize(
    ("over", "room", "size", "lost", "puts"),
    [
        (1_000, 300, 400, "", 1),  # whatever ``over`` says: it would be lost otherwise
        (None, 100, 200, "400 KB", 0),  # the setting is what makes the difference
        (1_000, 10, 200, "400 KB", 1),  # nor is there room for the pointer
    ],
)
def test_what_has_no_room_is_an_object_or_lost(over: int | None, room: int, size: int, lost: str, puts: int) -> None:
    """It is completed in any case."""
    scene, value = LargeScene(over=over or 0), "x" * size
    if over is None:
        scene.large = None
    _leave_room(scene, room)

    assert scene.finish(value) == value
    assert (scene.record.status, scene.record.error or "", len(scene.objects.puts)) == (Status.COMPLETED, lost, puts)
    if lost:
        with pytest.raises(ResultLost, match=lost):
            scene.finish()
    else:
        assert scene.finish() == value


def _leave_room(scene: Scene, size: int, *statuses: Status) -> None:
    """From now on the store refuses records whose result, or steps, are longer."""

    def refuse(record: Record) -> None:
        if len(str(record.result or "")) > size or len(str(record.steps)) > size or record.status in statuses:
            raise RecordTooLarge("400 KB")

    scene.store.before_swap = refuse


def test_record_without_room_for_anything_says_so(scene: LargeScene) -> None:
    """What is left is not the result's size."""
    _leave_room(scene, 10, Status.COMPLETED)
    with pytest.raises(RecordTooLarge):
        scene.finish()


def _points_elsewhere(scene: LargeScene) -> None:
    """Whoever can write the store chooses what a pointer says, and must not choose among all of the bucket."""
    name = f"shop/{folder_of('another')}/nonce"
    scene.objects.objects = {name: b'"theirs"'}
    pointer = Pointer(name, 8, sha256(b'"theirs"').hexdigest(), "application/json", is_text=True).to_encoded()
    step = {"text": pointer.data, "content_type": OBJECT}
    scene.change(result=pointer.data, steps={"a": step})


def _changes(change: Callable[[bytes], bytes]) -> Callable[[LargeScene], None]:
    return lambda scene: scene.objects.objects.update(
        {name: change(old) for name, old in scene.objects.objects.items()}
    )


@pytest.mark.parametrize(
    ("break_it", "reason"),
    [
        (lambda scene: scene.objects.objects.clear(), "its object is gone"),
        (_changes(lambda data: data.replace(b"x", b"y")), "SHA-256"),  # of the same length
        (_changes(lambda data: b"x"), "it has 1 bytes, and was written with 202"),
        (_points_elsewhere, "not one of this operation's"),
        (lambda scene: scene.change(result="[1"), "pointer is damaged"),
    ],
)
def test_unusable_object_is_a_lost_result(
    done: LargeScene, break_it: Callable[[LargeScene], object], reason: str
) -> None:
    """It is told so, the body never runs again, and nothing of another operation is read or deleted."""
    break_it(done)
    there = [*done.objects.objects]
    with pytest.raises(ResultLost, match=reason):
        done.finish()

    assert (done.runs, done.names) == (1, ["replayed", "result_lost"])
    judge(done.around, "k", Action.FORGET)
    assert break_it is not _points_elsewhere or [*done.objects.objects] == there


@pytest.mark.parametrize("error", [NO_ANSWER, REFUSED])
@pytest.mark.parametrize("on_outage", ["retry", "run"])
def test_no_answer_is_no_loss(done: LargeScene, error: StoreUnavailable, on_outage: Any) -> None:
    """Nothing is replayed and no body runs: that the operation is done is known. The delivery comes again."""
    done.objects.errors.append(error)
    with pytest.raises(StoreUnavailable):
        done.finish(on_outage=on_outage)
    assert done.names == ["store_unavailable"]
    assert (done.finish(), done.runs) == (LARGE, 1)


def test_worker_without_the_setting_takes_nothing_for_lost(done: LargeScene) -> None:
    """It says what is missing."""
    done.large = None
    with pytest.raises(StoreMisconfigured, match="the setting is not there"):
        done.finish()
    assert done.runs == 1


def _taken_over(scene: LargeScene) -> Any:
    """Another attempt takes over and completes."""
    scene.clock.advance(61_000)
    assert scene.finish(OTHER) == OTHER
    return None


def test_late_attempt_writes_beside_what_counts_and_gets_it(scene: LargeScene) -> None:
    """Each attempt has an object of its own."""
    assert scene.run(lambda claim: _taken_over(scene) or LARGE).value == scene.finish() == OTHER
    assert len(set(scene.objects.puts)) == 2


@pytest.mark.parametrize(("error", "answer"), [(None, OTHER), (NO_ANSWER, StoreUnavailable)])
def test_body_that_raised_gets_the_result_of_its_successor(scene: LargeScene, error: Any, answer: Any) -> None:
    """Or, where that cannot be read now, comes again for it."""

    def late(claim: Claim | None) -> str:
        _taken_over(scene)
        scene.objects.errors.append(error)
        raise LookupError

    assert scene.answer(lambda: scene.run(late)) == answer


@pytest.mark.parametrize(("over", "room"), [(100, 10_000), (1_000, 400)])
def test_large_step_is_an_object_that_the_next_attempt_reads(over: int, room: int) -> None:
    """Also where the record alone has no room for it; the first attempt has the value and reads nothing."""
    scene = LargeScene(over=over)
    _leave_room(scene, room)
    with pytest.raises(Again):
        scene.step("x" * 500)
    assert (scene.record.steps["fetch"]["content_type"], scene.objects.gets) == (OBJECT, [])
    assert scene.step() == "x" * 10
    assert (scene.steps, len(scene.objects.puts)) == (1, 1)


def test_step_whose_object_is_away_or_gone_is_not_called_again(scene: LargeScene) -> None:
    """It has been made: the delivery comes again, or the result is lost."""
    with pytest.raises(Again):
        scene.step()
    scene.objects.errors.append(NO_ANSWER)
    with pytest.raises(StoreUnavailable):
        scene.step()
    scene.objects.objects.clear()
    with pytest.raises(ResultLost, match="step 'fetch': its object is gone"):
        scene.step()
    assert scene.steps == 1


def test_transaction_writes_its_object_before_its_record_and_waits_for_nothing(done: LargeScene) -> None:
    """It holds locks, and nothing has happened that could not be undone. Each result is an object of its own."""
    claims: list[Claim] = []
    other = LargeScene()
    other.run(lambda claim: claims.append(claim) if claim else None)

    def packed(value: Any) -> Any:
        return claims[0].packed(other.codec.keep(value), is_final=False)

    assert [packed(each).encoded.content_type for each in (LARGE, LARGE, OTHER)] == [OBJECT] * 3
    assert len(other.objects.objects) == 3
    for unchanged in (other.codec.keep(SMALL), other.codec.keep(object())):
        assert claims[0].packed(unchanged, is_final=False) is unchanged
    other.objects.always = REFUSED  # again and again
    assert (packed(LARGE).encoded, packed(LARGE).value) == (None, LARGE)
    assert "AccessDenied" in packed(LARGE).lost
    other.objects.always = NO_ANSWER
    with pytest.raises(StoreUnavailable):
        packed(LARGE)
    assert len(other.objects.puts) == 7


def test_forgetting_deletes_the_objects_of_an_operation(done: LargeScene, caplog: pytest.LogCaptureFixture) -> None:
    """Of its result and its steps, and of no other; what cannot be deleted goes by the bucket's own rule."""
    stepped, refused = LargeScene(), LargeScene()
    with pytest.raises(Again):
        stepped.step()
    refused.finish()
    refused.objects.always = REFUSED
    done.objects.objects["shop/another"] = b""

    for each in (done, stepped, refused):
        judge(each.around, "k", Action.FORGET)

    assert ([*done.objects.objects], stepped.objects.objects, refused.record.result) == (["shop/another"], {}, None)
    assert f"event=idempotency.object_left key=k object={refused.objects.puts[0]}" in caplog.text


def test_result_of_a_verdict_is_an_object_first(scene: LargeScene) -> None:
    """Before the record points to it, as any other; duplicates get it."""
    scene.store.swap(a_record().but(key="k", status=Status.UNKNOWN), None)
    at_swap: list[int] = []
    scene.store.before_swap = lambda record: at_swap.append(len(scene.objects.objects))
    encoded = Encoded(json.dumps(LARGE), "application/json")
    judged = judge(scene.around, "k", Action.COMPLETED, result=encoded, retain=1)
    assert (judged.content_type, at_swap) == (OBJECT, [1])
    assert unpack(scene.around, Encoded(judged.result or "", OBJECT), SLOT) == encoded


@pytest.mark.parametrize(
    ("break_it", "told"),
    [
        (lambda objects: None, None),
        (lambda objects: setattr(objects, "put", lambda name, data: None), "not there after it was written"),
        (lambda objects: setattr(objects, "get", lambda name: b"?"), "not what was written"),
        (lambda objects: setattr(objects, "always", REFUSED), "AccessDenied"),
        (lambda objects: objects.errors.extend([None, None, REFUSED]), "AccessDenied"),
        (lambda objects: objects.objects.update({"shop/celery-idempotent-missing": b""}), "nobody has written"),
    ],
)
def test_worker_checks_that_objects_can_be_written_read_and_missed(
    scene: LargeScene, break_it: Callable[[MemoryObjects], None], told: str | None
) -> None:
    """With one small object, always the same; a lost one must be told from a forbidden one."""
    break_it(scene.objects)
    around = Offloading(MemoryStore(), scene.large)  # type: ignore[arg-type]
    if told:
        with pytest.raises(StoreMisconfigured, match=told):
            around.verify()
    else:
        around.verify()
        around.verify()
        assert [*scene.objects.objects] == ["shop/celery-idempotent-check"]


@pytest.mark.parametrize("data", ["é\ud800" * 100, b"\xff" * 200])
def test_text_and_bytes_read_back(scene: LargeScene, data: str | bytes) -> None:
    """Lone surrogates included."""
    encoded = Encoded(data, "x/y")
    packed = scene.around.pack(encoded, SLOT)
    packed.write()
    assert scene.around.unpack(packed.encoded, SLOT) == encoded


@pytest.mark.parametrize("data", ["", "[" * 100_000, "{}", '{"name": 1}', b"\xff"])
def test_damaged_pointer_is_a_loss_and_keeps_nobody_from_forgetting(scene: LargeScene, data: str | bytes) -> None:
    """Whatever stands there, in the result or in a step; a step that nobody can read points to nothing."""
    with pytest.raises(ContentLost, match="damaged"):
        scene.around.unpack(Encoded(data, OBJECT), SLOT)
    unreadable: dict[str, Any] = {"": {}, "lost": {"lost": "too large"}, "begun": {"begun_at": 1, "attempt": 1}}
    steps = {**unreadable, "damaged": {"text": "x", "content_type": OBJECT}}
    assert pointers_of(a_record().but(status=Status.RELEASED, steps=steps, result=data, content_type=OBJECT)) == []


@pytest.mark.parametrize("result", [None, "1"])
def test_record_without_an_object_is_left_as_it_is(result: str | None) -> None:
    """Every replay comes here, and a copy is most of what one costs."""
    record = a_record().but(status=Status.COMPLETED, result=result, content_type="application/json")
    assert load(MemoryStore(), record) is record


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


def test_entry_point_gets_the_url_without_what_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """And names that begin with the path; what it returns must be an object store."""
    objects, wrong = MemoryObjects(), SimpleNamespace(put=print)
    opener = Mock(side_effect=[objects, objects, wrong])
    entry_point = SimpleNamespace(name="blob", value="package:opener", dist=None, load=lambda: opener)
    declared = EntryPoint("blob", "package:opener", "celery_idempotent.objects").group
    monkeypatch.setattr(objects_module, "entry_points", lambda group: [entry_point] if group == declared else [])

    opened = open_large_results("blob://user:pw@account/folder?over=1KB&tier=hot")
    open_large_results("blob://account")
    assert opener.mock_calls == [call("blob://user:pw@account/folder?tier=hot"), call("blob://account/")]
    assert (opened.objects, opened.over, opened.prefix) == (objects, 1024, "folder/")
    with pytest.raises(PolicyError, match="package:opener of its package: it returned a .* lacks get, delete"):
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
