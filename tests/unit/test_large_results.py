"""Results that are objects: written before the record, read by replays and steps, lost only with a reason."""

import json
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from typing import Any

import pytest

from celery_idempotent.engine.attempt import ProtectedAttempt
from celery_idempotent.engine.claim import Claim
from celery_idempotent.engine.delivery import Conflict, Outcome, load
from celery_idempotent.engine.events import EventName
from celery_idempotent.errors import LeaseLost, ResultLost, StoreMisconfigured, StoreUnavailable
from celery_idempotent.protocol.codec import Codec, Encoded
from celery_idempotent.protocol.contents import OBJECT, ContentLost, Pointer, Slot, pointer_in, unpack
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.store import RecordTooLarge
from celery_idempotent.protocol.verdicts import Action
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.stores.objects import LargeResults
from celery_idempotent.stores.wrappers import Offloading, folder_of, pointers_of
from celery_idempotent.testing.contract import a_record
from tests.support.judging import judge
from tests.support.objects import NO_ANSWER, REFUSED, MemoryObjects, large_results, pointed
from tests.support.scene import Again, Scene

LARGE = "x" * 200
SLOT = Slot("k", "result")
SMALL = "x" * 50


class _LargeScene(Scene):
    """Deliveries with a place for results of more than 100 bytes."""

    def __init__(self, *errors: Exception | None, over: int = 100) -> None:
        super().__init__()
        self.objects = MemoryObjects(*errors)
        self.large = LargeResults(self.objects, over, "shop/")

    def finish(self, value: Any = LARGE, **policy: Any) -> Any:
        """What a delivery is told whose body returns ``value``."""
        outcome = self.run(lambda claim: value, **policy)
        assert isinstance(outcome, Outcome)
        return outcome.value

    @property
    def pointer(self) -> Pointer:
        assert isinstance(self.record.result, str)
        pointer = pointer_in(Encoded(self.record.result, self.record.content_type or ""))
        assert pointer is not None
        return pointer

    def room_for(self, size: int) -> None:
        """From now on the store refuses records whose result, or step, is longer."""

        def refuse(record: Record) -> None:
            if len(str(record.result or "")) > size or len(str(record.steps)) > size:
                raise RecordTooLarge("400 KB")

        self.store.before_swap = refuse

    @property
    def reasons(self) -> dict[str, str]:
        return {str(event.name): event.reason for event in self.events}


@pytest.fixture
def scene() -> _LargeScene:
    return _LargeScene()


class TestCompletion:
    """What is recorded, and in which order."""

    def test_a_large_result_is_an_object_and_every_delivery_gets_it(self, scene: _LargeScene) -> None:
        """The record points to it."""
        assert [scene.finish() for _ in range(3)] == [LARGE] * 3
        assert scene.runs == 1
        assert scene.record.content_type == OBJECT
        assert list(scene.objects.objects) == [scene.pointer.name] == scene.objects.puts
        assert json.loads(scene.objects.objects[scene.pointer.name]) == LARGE
        assert (scene.pointer.size, scene.pointer.content_type) == (202, "application/json")

    def test_a_small_result_asks_for_no_object(self, scene: _LargeScene) -> None:
        """Neither when it is recorded nor when it is replayed."""
        assert [scene.finish(SMALL) for _ in range(2)] == [SMALL] * 2
        assert scene.objects.puts == scene.objects.gets == []
        assert scene.record.content_type == "application/json"

    @pytest.mark.parametrize(("letter", "count", "is_large"), [("x", 98, False), ("x", 99, True)])
    def test_what_is_over_is_counted_in_bytes_of_what_is_encoded(
        self, scene: _LargeScene, letter: str, count: int, is_large: bool
    ) -> None:
        """Two more than letters, for the quotes."""
        scene.finish(letter * count)
        assert bool(scene.objects.puts) is is_large

    def test_the_object_is_there_before_the_record_points_to_it(self, scene: _LargeScene) -> None:
        """A process that dies between the two leaves an object that nobody knows, and no pointer to nothing."""
        at_put: list[Status] = []
        at_swap: list[bool] = []
        scene.objects.before_put = lambda: at_put.append(scene.record.status)
        scene.store.before_swap = lambda record: at_swap.append(record.result is None or bool(scene.objects.objects))
        scene.finish()
        assert at_put == [Status.IN_PROGRESS]
        assert at_swap == [True, True]

    def test_the_lease_is_renewed_while_the_object_is_on_its_way(self, scene: _LargeScene) -> None:
        """A large one takes long, and the heartbeat must not wait for it."""
        renewed: list[int] = []
        claims: list[Claim] = []

        def renew() -> None:
            claims[0].renew()
            renewed.append(scene.record.lease_until)

        def body(claim: Claim | None) -> str:
            assert claim is not None
            claims.append(claim)
            scene.clock.advance(30_000)
            return LARGE

        scene.objects.before_put = renew
        scene.run(body)
        assert renewed == [scene.clock.now() + 60_000]

    def test_a_failure_stays_in_the_record(self, scene: _LargeScene) -> None:
        """It is bounded, and people look for it there."""

        def fail(claim: Claim | None) -> None:
            raise LookupError(LARGE)

        for _ in range(2):
            with pytest.raises(LookupError):
                scene.run(fail, remember=(LookupError,))
        assert scene.objects.puts == []

    def test_bytes_come_back_as_bytes(self, scene: _LargeScene) -> None:
        """Of a serialiser that makes them."""
        scene.codec = Codec("pickle", frozenset({"application/json", "application/x-python-serialize"}))
        value = {"blob": b"\xff" * 200}
        assert [scene.finish(value) for _ in range(2)] == [value] * 2
        assert scene.pointer.is_text is False

    def test_observing_keeps_it_as_well(self, scene: _LargeScene) -> None:
        """So that what it would have done can be seen; it waits for nothing."""
        scene.objects.always = NO_ANSWER
        assert scene.observe(lambda claim: LARGE) == LARGE
        assert (scene.record.status, scene.record.result) == (Status.COMPLETED, None)
        assert len(scene.objects.puts) == 1


class TestFailingPut:
    """The effect has happened: it is recorded in any case."""

    def test_no_answer_is_waited_for(self) -> None:
        """With the patience of the completion itself, and told once."""
        scene = _LargeScene(*[NO_ANSWER] * 5)
        assert [scene.finish() for _ in range(2)] == [LARGE] * 2
        assert scene.runs == 1
        assert len(set(scene.objects.puts)) == 1
        assert len(scene.objects.puts) == 6

    def test_waiting_is_told(self, caplog: pytest.LogCaptureFixture) -> None:
        """Somebody may look into the log because a task does not end."""
        _LargeScene(*[NO_ANSWER] * 5).finish()
        assert caplog.text.count("result_waits") == 1

    def test_what_will_never_be_written_is_lost_at_once(self, scene: _LargeScene) -> None:
        """The operation is completed, says why, and never runs again."""
        scene.objects.always = REFUSED
        assert scene.finish() == LARGE
        assert len(scene.objects.puts) == 1
        assert (scene.record.status, scene.record.result) == (Status.COMPLETED, None)
        assert "AccessDenied" in scene.reasons["result_dropped"]
        with pytest.raises(ResultLost, match="AccessDenied"):
            scene.finish()
        assert scene.runs == 1

    def test_patience_has_an_end(self, scene: _LargeScene) -> None:
        """Then the result is lost and not the record of the effect, which would happen again."""
        scene.objects.always = NO_ANSWER
        assert scene.finish() == LARGE
        assert scene.clock.monotonic() >= 600
        assert (scene.record.status, scene.record.result) == (Status.COMPLETED, None)
        assert "no answer" in scene.reasons["result_dropped"]

    def test_a_time_limit_that_strikes_in_the_put_is_raised_after_the_record(self, scene: _LargeScene) -> None:
        """The write is made again, to the same name."""

        class Limit(Exception):
            pass

        struck = iter([Limit()])

        def strike() -> None:
            for error in struck:
                raise error

        scene.objects.before_put = strike
        with pytest.raises(Limit):
            scene.finish()
        assert scene.finish() == LARGE
        assert (scene.runs, len(set(scene.objects.puts))) == (1, 1)


class TestRoom:
    """A store with less room than ``over``."""

    def test_what_a_record_has_no_room_for_is_an_object_all_the_same(self) -> None:
        """Whatever ``over`` says: it would be lost otherwise."""
        scene = _LargeScene(over=1_000)
        scene.room_for(300)
        value = "x" * 400
        assert [scene.finish(value) for _ in range(2)] == [value] * 2
        assert scene.record.content_type == OBJECT

    def test_without_a_place_for_it_it_is_lost_as_ever(self) -> None:
        """The setting is what makes the difference."""
        scene = _LargeScene()
        scene.large = None
        scene.room_for(100)
        assert scene.finish() == LARGE
        with pytest.raises(ResultLost, match="400 KB"):
            scene.finish()

    def test_a_record_without_room_for_the_pointer_loses_it(self, scene: _LargeScene) -> None:
        """As one without room for the result; it is completed."""
        scene.room_for(10)
        assert scene.finish() == LARGE
        assert (scene.record.status, scene.record.error) == (Status.COMPLETED, "400 KB")

    def test_nor_is_there_room_for_the_pointer_of_a_small_one(self) -> None:
        """It is tried as an object before it is given up."""
        scene = _LargeScene(over=1_000)
        scene.room_for(10)
        assert scene.finish() == LARGE
        assert (scene.record.status, scene.record.error, len(scene.objects.puts)) == (Status.COMPLETED, "400 KB", 1)

    def test_a_record_without_room_for_anything_says_so(self, scene: _LargeScene) -> None:
        """What is left is not the result's size."""

        def refuse(record: Record) -> None:
            if record.status is Status.COMPLETED:
                raise RecordTooLarge("400 KB")

        scene.store.before_swap = refuse
        with pytest.raises(RecordTooLarge):
            scene.finish()

    def test_a_result_that_is_not_kept_is_no_object(self) -> None:
        """``private=True``: every replay returns None."""
        scene = _LargeScene()
        scene.codec = replace(scene.codec, private=True)
        assert [scene.finish() for _ in range(2)] == [LARGE, None]
        assert scene.objects.puts == []


class TestReplay:
    """A duplicate of an operation whose result is an object."""

    @pytest.fixture(autouse=True)
    def _done(self, scene: _LargeScene) -> None:
        scene.finish()
        scene.events.clear()

    def _lost(self, scene: _LargeScene, reason: str) -> None:
        with pytest.raises(ResultLost, match=reason):
            scene.finish()
        assert scene.runs == 1
        assert scene.names == ["replayed", "result_lost"]

    def test_an_object_that_is_gone_is_a_lost_result(self, scene: _LargeScene) -> None:
        """And the body never runs again."""
        scene.objects.objects.clear()
        self._lost(scene, "its object is gone")

    def test_an_object_with_other_bytes_is_a_lost_result(self, scene: _LargeScene) -> None:
        """Of the same length, so that only the checksum tells."""
        (name,) = scene.objects.objects
        scene.objects.objects[name] = scene.objects.objects[name].replace(b"x", b"y")
        self._lost(scene, "SHA-256")

    def test_an_object_that_was_cut_is_a_lost_result(self, scene: _LargeScene) -> None:
        """It says by how much."""
        (name,) = scene.objects.objects
        scene.objects.objects[name] = b"x"
        self._lost(scene, "it has 1 bytes, and was written with 202")

    def test_an_object_of_another_operation_is_never_read_or_deleted(self, scene: _LargeScene) -> None:
        """Whoever can write the store chooses what a pointer says, and must not choose among all of the bucket."""
        seen = scene.record
        name = f"shop/{folder_of('another')}/nonce"
        scene.objects.objects = {name: b'"theirs"'}
        pointer = Pointer(name, 8, sha256(b'"theirs"').hexdigest(), "application/json", is_text=True).to_encoded()
        step = {"text": pointer.data, "content_type": OBJECT}
        scene.store.swap(seen.but(result=pointer.data, steps={"a": step}, revision="r"), seen.revision)
        self._lost(scene, "not one of this operation's")
        judge(scene.around, "k", Action.FORGET)
        assert list(scene.objects.objects) == [name]

    def test_a_damaged_pointer_is_a_lost_result(self, scene: _LargeScene) -> None:
        """Nothing is read for it."""
        seen = scene.record
        scene.store.swap(seen.but(result="[1", revision="r"), seen.revision)
        self._lost(scene, "pointer is damaged")

    @pytest.mark.parametrize("error", [NO_ANSWER, REFUSED])
    def test_no_answer_is_no_loss(self, scene: _LargeScene, error: StoreUnavailable) -> None:
        """Nothing is replayed, and the delivery comes again."""
        scene.objects.errors.append(error)
        with pytest.raises(StoreUnavailable):
            scene.finish()
        assert scene.names == ["store_unavailable"]
        assert scene.finish() == LARGE
        assert scene.runs == 1

    def test_no_answer_never_runs_a_body_unprotected(self, scene: _LargeScene) -> None:
        """Whatever ``on_outage`` says: that the operation is done is known."""
        scene.objects.errors.append(NO_ANSWER)
        with pytest.raises(StoreUnavailable):
            scene.finish(on_outage="run")
        assert scene.runs == 1

    def test_a_worker_without_the_setting_takes_nothing_for_lost(self, scene: _LargeScene) -> None:
        """It says what is missing."""
        scene.large = None
        with pytest.raises(StoreMisconfigured, match="the setting is not there"):
            scene.finish()
        assert scene.runs == 1


class TestTakeover:
    """Two attempts of one operation."""

    def test_each_attempt_writes_an_object_of_its_own(self, scene: _LargeScene) -> None:
        """The late one gets the result that counts, and what that is has not changed."""

        def late(claim: Claim | None) -> str:
            if scene.runs == 1:
                scene.clock.advance(61_000)
                assert scene.finish("y" * 200) == "y" * 200
            return LARGE

        assert scene.run(late).value == "y" * 200
        assert len(set(scene.objects.puts)) == 2
        assert scene.finish() == "y" * 200
        assert {name.rpartition("/")[0] for name in scene.objects.puts} == {f"shop/{folder_of('k')}"}

    def test_an_object_that_arrives_late_changes_nothing(self, scene: _LargeScene) -> None:
        """It was on its way when its attempt was taken over, and comes when the operation is done."""
        late: list[tuple[str, bytes]] = []
        put = scene.objects.put

        def hang(name: str, data: bytes) -> None:
            late.append((name, data))
            scene.objects.put = put  # type: ignore[method-assign]
            scene.clock.advance(61_000)
            assert scene.finish("y" * 200) == "y" * 200
            raise NO_ANSWER

        scene.objects.put = hang  # type: ignore[method-assign]
        assert scene.finish() == "y" * 200
        put(*late[0])
        assert scene.finish() == "y" * 200

    @pytest.mark.parametrize("error", [None, NO_ANSWER])
    def test_a_body_that_raised_gets_the_result_of_its_successor(
        self, scene: _LargeScene, error: StoreUnavailable | None
    ) -> None:
        """Or, where that cannot be read now, comes again for it."""

        def late(claim: Claim | None) -> str:
            scene.clock.advance(61_000)
            other = _LargeScene()
            other.store, other.clock, other.large = scene.store, scene.clock, scene.large
            other.finish()
            scene.objects.errors.append(error)
            raise LookupError

        if error:
            with pytest.raises(StoreUnavailable):
                scene.run(late)
        else:
            assert scene.run(late).value == LARGE


class TestSteps:
    """Results of steps."""

    @pytest.fixture
    def calls(self) -> list[str]:
        return []

    def _twice(self, scene: _LargeScene, calls: list[str], value: str = LARGE) -> Any:
        """Deliver a body with one step, which raises after it the first time."""

        def body(handle: ProtectedAttempt) -> str:
            result = handle.step("fetch", lambda step: calls.append("fetch") or value)  # type: ignore[func-returns-value]
            if handle.number == 1:
                raise Again
            return str(result)[:10]

        with pytest.raises(Again):
            scene.perform(body)
        return lambda: scene.perform(body).value

    def test_a_large_one_is_an_object_that_the_next_attempt_reads(self, scene: _LargeScene, calls: list[str]) -> None:
        """The call is not made again."""
        again = self._twice(scene, calls)
        assert scene.record.steps["fetch"]["content_type"] == OBJECT
        assert again() == "x" * 10
        assert (calls, len(scene.objects.puts)) == (["fetch"], 1)

    def test_the_first_attempt_reads_nothing(self, scene: _LargeScene, calls: list[str]) -> None:
        """It has the value."""
        self._twice(scene, calls)
        assert scene.objects.gets == []

    def test_one_that_the_record_has_no_room_for_is_an_object(self, calls: list[str]) -> None:
        """Steps share one record, so this comes sooner than with results."""
        scene = _LargeScene(over=1_000)
        scene.room_for(400)
        again = self._twice(scene, calls, "x" * 500)
        assert again() == "x" * 10
        assert calls == ["fetch"]

    def test_one_that_is_lost_is_not_called_again(self, scene: _LargeScene, calls: list[str]) -> None:
        """As one that was never kept."""
        again = self._twice(scene, calls)
        scene.objects.objects.clear()
        with pytest.raises(ResultLost, match="step 'fetch': its object is gone"):
            again()
        assert calls == ["fetch"]

    def test_one_that_cannot_be_read_now_is_read_later(self, scene: _LargeScene, calls: list[str]) -> None:
        """The delivery comes again, and the step has been made."""
        again = self._twice(scene, calls)
        scene.objects.errors.append(NO_ANSWER)
        with pytest.raises(StoreUnavailable):
            again()
        assert again() == "x" * 10
        assert calls == ["fetch"]

    def test_one_that_can_never_be_written_is_finished_all_the_same(self, scene: _LargeScene, calls: list[str]) -> None:
        """Its effect has happened."""
        scene.objects.errors.append(REFUSED)
        again = self._twice(scene, calls)
        with pytest.raises(ResultLost, match="AccessDenied"):
            again()
        assert calls == ["fetch"]


class TestCommit:
    """``attempt.commit()``."""

    def _commit(self, scene: _LargeScene, value: str = LARGE) -> Any:
        return scene.perform(lambda handle: handle.commit(value, writes=[{"Put": {}}])).value

    def test_the_object_is_there_before_the_commit(self, scene: _LargeScene) -> None:
        """And is read by replays."""
        at_swap: list[int] = []
        scene.store.before_swap = lambda record: at_swap.append(len(scene.objects.objects))
        assert [self._commit(scene) for _ in range(2)] == [LARGE] * 2
        assert at_swap[:2] == [0, 1]
        assert scene.record.content_type == OBJECT

    def test_what_can_never_be_written_is_committed_without(self, scene: _LargeScene) -> None:
        """And told."""
        scene.objects.always = REFUSED
        assert self._commit(scene) == LARGE
        assert "AccessDenied" in scene.reasons["result_dropped"]
        assert scene.record.status is Status.COMPLETED

    def test_no_answer_is_waited_for(self) -> None:
        """Nothing is locked meanwhile."""
        scene = _LargeScene(*[NO_ANSWER] * 3)
        assert [self._commit(scene) for _ in range(2)] == [LARGE] * 2


def _complete(scene: _LargeScene) -> Claim:
    claims: list[Claim] = []
    scene.run(lambda claim: claims.append(claim) if claim else None)
    return claims[0]


class TestTransactions:
    """What ``tx.done()`` asks of a claim; a transaction holds locks."""

    @pytest.fixture
    def claim(self, scene: _LargeScene) -> Claim:
        return _complete(scene)

    def test_an_object_is_written_at_once(self, scene: _LargeScene, claim: Claim) -> None:
        """Before the record in the transaction."""
        kept = claim.packed(scene.codec.keep(LARGE), SLOT, is_final=False)
        assert kept.encoded is not None
        assert kept.encoded.content_type == OBJECT
        assert len(scene.objects.objects) == 1

    def test_each_result_is_an_object_of_its_own(self, scene: _LargeScene, claim: Claim) -> None:
        """Also one that the same attempt names again: what a record points to is never written over."""
        for value in (LARGE, LARGE, f"{LARGE}!"):
            claim.packed(scene.codec.keep(value), SLOT, is_final=False)
        assert len(scene.objects.objects) == 3

    def test_no_answer_is_not_waited_for(self, scene: _LargeScene, claim: Claim) -> None:
        """Nothing has happened yet, and it is undone."""
        scene.objects.always = NO_ANSWER
        with pytest.raises(StoreUnavailable):
            claim.packed(scene.codec.keep(LARGE), SLOT, is_final=False)
        assert len(scene.objects.puts) == 1

    def test_what_can_never_be_written_is_lost(self, scene: _LargeScene, claim: Claim) -> None:
        """It would be refused again and again."""
        scene.objects.always = REFUSED
        kept = claim.packed(scene.codec.keep(LARGE), SLOT, is_final=False)
        assert (kept.encoded, kept.value) == (None, LARGE)
        assert "AccessDenied" in str(kept.lost)

    @pytest.mark.parametrize("value", [SMALL, object()])
    def test_all_else_is_left_as_it_is(self, scene: _LargeScene, claim: Claim, value: Any) -> None:
        """What is small, and what could not be encoded."""
        kept = scene.codec.keep(value)
        assert claim.packed(kept, SLOT, is_final=False) is kept
        assert scene.objects.puts == []


class TestForgetting:
    """``forget``: nothing of the call stays."""

    def test_objects_are_deleted_with_the_record(self, scene: _LargeScene) -> None:
        """Of this operation, and of no other."""
        scene.finish()
        scene.objects.objects["shop/another"] = b""
        judge(scene.around, "k", Action.FORGET)
        assert list(scene.objects.objects) == ["shop/another"]

    def test_objects_of_steps_are_deleted(self, scene: _LargeScene) -> None:
        """Of an operation that was released."""

        def body(handle: ProtectedAttempt) -> None:
            handle.step("a", lambda step: LARGE)
            handle.step("b", lambda step: SMALL)
            raise Again

        with pytest.raises(Again):
            scene.perform(body)
        judge(scene.around, "k", Action.FORGET)
        assert scene.objects.objects == {}

    def test_what_cannot_be_deleted_is_told(self, scene: _LargeScene, caplog: pytest.LogCaptureFixture) -> None:
        """The operation is forgotten; the object goes by the bucket's own rule."""
        scene.finish()
        name = scene.pointer.name
        scene.objects.always = REFUSED
        judge(scene.around, "k", Action.FORGET)
        assert scene.record.result is None
        assert f"event=idempotency.object_left key=k object={name}" in caplog.text

    def test_without_the_setting_nothing_is_deleted(self, scene: _LargeScene) -> None:
        """There is nobody to ask."""
        scene.finish()
        judge(scene.store, "k", Action.FORGET)
        assert len(scene.objects.objects) == 1

    def test_what_cannot_be_read_points_to_nothing(self) -> None:
        """A damaged pointer, or a step that nobody can read, stops nobody who forgets the rest."""
        steps = {
            "damaged": {"text": "x", "content_type": OBJECT},
            "unreadable": {},
            "lost": {"lost": "too large"},
            "begun": {"begun_at": 1, "attempt": 1},
        }
        record = a_record().but(status=Status.RELEASED, steps=steps, result="x", content_type=OBJECT)
        assert list(pointers_of(record)) == []


class TestCheck:
    """What a worker asks before its first task."""

    def test_it_writes_one_object_reads_it_and_finds_that_another_is_missing(self) -> None:
        """Always the same one."""
        large = large_results(prefix="shop/")
        for _ in range(2):
            Offloading(MemoryStore(), large).verify()
        assert isinstance(large.objects, MemoryObjects)
        assert list(large.objects.objects) == ["shop/celery-idempotent-check"]

    @pytest.mark.parametrize(
        ("break_it", "told"),
        [
            (lambda objects: setattr(objects, "put", lambda name, data: None), "not there after it was written"),
            (lambda objects: setattr(objects, "get", lambda name: b"?"), "not what was written"),
            (lambda objects: setattr(objects, "always", REFUSED), "AccessDenied"),
            (lambda objects: objects.errors.extend([None, None, REFUSED]), "AccessDenied"),
            (lambda objects: objects.objects.update({"celery-idempotent-missing": b""}), "nobody has written"),
        ],
    )
    def test_what_cannot_work_is_told(self, break_it: Callable[[MemoryObjects], None], told: str) -> None:
        """Also that a lost object could not be told from a forbidden one."""
        large = large_results()
        assert isinstance(large.objects, MemoryObjects)
        break_it(large.objects)
        with pytest.raises(StoreMisconfigured, match=told):
            Offloading(MemoryStore(), large).verify()


class TestPointers:
    """What a record holds in place of a result."""

    def test_a_pointer_reads_back(self) -> None:
        """As it was written."""
        store, encoded = Offloading(MemoryStore(), large_results(over=0, prefix="p/")), Encoded("é\ud800", "text/x")
        packed = store.pack(encoded, SLOT)
        assert packed is not None
        assert packed.write is not None
        packed.write()
        assert store.unpack(packed.encoded, SLOT) == encoded
        pointer = pointer_in(packed.encoded)
        assert pointer is not None
        assert pointer.name.startswith(f"p/{folder_of('k')}/")

    def test_a_result_is_no_pointer(self) -> None:
        """It is returned as it is, without a place for objects."""
        encoded = Encoded("1", "application/json")
        assert pointer_in(encoded) is None
        assert unpack(MemoryStore(), encoded, SLOT) is encoded

    @pytest.mark.parametrize("data", ["", "[" * 100_000, "{}", '{"name": 1}', b"\xff"])
    def test_a_damaged_one_is_a_loss(self, data: str | bytes) -> None:
        """Whatever stands there."""
        with pytest.raises(ContentLost, match="damaged"):
            Offloading(MemoryStore(), large_results()).unpack(Encoded(data, OBJECT), SLOT)

    def test_a_record_without_a_result_has_nothing_to_fetch(self) -> None:
        """It is lost already."""
        record = a_record().but(status=Status.COMPLETED, result=None)
        assert load(MemoryStore(), record) is record

    def test_a_record_with_its_result_is_left_as_it_is(self) -> None:
        """Every replay comes here, and a copy is most of what one costs."""
        record = a_record().but(status=Status.COMPLETED, result="1", content_type="application/json")
        assert load(MemoryStore(), record) is record

    def test_a_worker_that_knows_no_objects_takes_a_pointer_for_no_result(self) -> None:
        """Its codec accepts no such content."""
        codec = Codec("json", frozenset({"application/json"}))
        pointer = pointed(Encoded("1", "application/json"))
        with pytest.raises(Exception, match="application/vnd.celery-idempotent.object"):
            codec.decode(pointer.to_encoded())


def test_a_result_that_a_verdict_brings_is_an_object_first() -> None:
    """Before the record points to it, as any other; duplicates get it."""
    scene = _LargeScene()
    scene.store.swap(a_record().but(key="k", status=Status.UNKNOWN), None)
    at_swap: list[int] = []
    scene.store.before_swap = lambda record: at_swap.append(len(scene.objects.objects))

    judged = judge(scene.around, "k", Action.COMPLETED, result=Encoded(json.dumps(LARGE), "application/json"), retain=1)

    assert (judged.content_type, at_swap) == (OBJECT, [1])
    assert judged.result is not None
    assert unpack(scene.around, Encoded(judged.result, OBJECT), SLOT).data == json.dumps(LARGE)


def test_the_check_of_a_worker_asks_the_store_and_its_objects() -> None:
    """Either may be misconfigured."""
    asked: list[str] = []

    class Checked(MemoryStore):
        def verify(self) -> None:
            asked.append("store")

    objects = MemoryObjects()
    Offloading(Checked(), LargeResults(objects, 100)).verify()

    assert asked == ["store"]
    assert objects.puts == ["celery-idempotent-check"]


def test_a_conflict_reads_no_object(scene: _LargeScene) -> None:
    """Only an answer that is a result is one."""

    def meet(claim: Claim | None) -> str:
        assert isinstance(scene.run(lambda claim: "never"), Conflict)
        return SMALL

    scene.run(meet)
    assert scene.objects.gets == []


def test_an_attempt_that_lost_its_claim_reports_nothing(scene: _LargeScene) -> None:
    """Its object stays alone."""

    def late(claim: Claim | None) -> str:
        scene.clock.advance(61_000)
        other = Scene()
        other.store, other.clock = scene.store, scene.clock
        other.abandon()
        return LARGE

    with pytest.raises(LeaseLost):
        scene.run(late)
    assert EventName.LEASE_LOST in scene.names
