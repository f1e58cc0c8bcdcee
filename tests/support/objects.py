"""Objects in a dict, which fail as planned."""

from collections import deque
from collections.abc import Callable

from cryptography.fernet import Fernet

from celery_idempotent.errors import StoreMisconfigured, StoreUnavailable
from celery_idempotent.protocol.codec import Encoded
from celery_idempotent.protocol.contents import Pointer, Slot, pointer_in
from celery_idempotent.protocol.store import Store
from celery_idempotent.stores.keyring import KeyRing
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.stores.objects import LargeResults, ObjectMissing
from celery_idempotent.stores.wrappers import Offloading, Sealed

NO_ANSWER = StoreUnavailable("memory", "put", "no answer")
REFUSED = StoreMisconfigured("memory", "put", "AccessDenied")


class MemoryObjects:
    """Keeps objects in a dict. Each put and get meets the next planned error, if there is one."""

    def __init__(self, *errors: Exception | None) -> None:
        self.errors = deque(errors)
        #: What every request meets once the planned errors are used up.
        self.always: Exception | None = None
        self.objects: dict[str, bytes] = {}
        #: By name, in order.
        self.puts: list[str] = []
        self.gets: list[str] = []
        #: Called before each put; a test can interfere here.
        self.before_put: Callable[[], None] = lambda: None

    def put(self, name: str, data: bytes) -> None:
        self.puts.append(name)
        self.before_put()
        self._fail()
        assert self.objects.get(name, data) == data, "one object is never written with two contents"
        self.objects[name] = data

    def get(self, name: str) -> bytes:
        self.gets.append(name)
        self._fail()
        try:
            return self.objects[name]
        except KeyError as error:
            raise ObjectMissing(name) from error

    def delete(self, name: str) -> None:
        self._fail()
        self.objects.pop(name, None)

    def _fail(self) -> None:
        error = self.errors.popleft() if self.errors else self.always
        if error:
            raise error


def large_results(*errors: Exception | None, over: int = 100, prefix: str = "") -> LargeResults:
    """Objects in memory for what has more than ``over`` bytes."""
    return LargeResults(MemoryObjects(*errors), over, prefix)


def pointed(encoded: Encoded, key: str = "k", prefix: str = "p/") -> Pointer:
    """A pointer to ``encoded`` as the result of the operation with that key."""
    packed = Offloading(MemoryStore(), large_results(over=0, prefix=prefix)).pack(encoded, Slot(key, "result"))
    assert packed is not None
    pointer = pointer_in(packed.encoded)
    assert pointer is not None
    return pointer


def sealed(store: Store) -> Sealed:
    """``store`` as the settings open it where results are encrypted, and large ones are objects."""
    return Sealed(Offloading(store, LargeResults(MemoryObjects(), 1_000)), KeyRing(Fernet.generate_key()))
