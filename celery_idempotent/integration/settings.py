"""What an app's settings mean: its store, its codec, its broker. One instance per app and process tree."""

import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, cast
from weakref import proxy

from celery import Celery
from celery.app import utils
from celery.exceptions import Ignore, Reject, Retry
from celery.utils.collections import ConfigurationView
from kombu.serialization import prepare_accept_content, registry

from celery_idempotent.engine.breaker import Breaker
from celery_idempotent.engine.delivery import ControlFlow
from celery_idempotent.errors import IdempotencyError, PolicyError, SafeToRetry
from celery_idempotent.printable import not_installed, scheme_of
from celery_idempotent.protocol.codec import Codec
from celery_idempotent.protocol.effects import is_duration, milliseconds
from celery_idempotent.protocol.policy import Policy
from celery_idempotent.protocol.record import Record
from celery_idempotent.protocol.store import Store
from celery_idempotent.stores import open_store

if TYPE_CHECKING:
    from celery_idempotent.stores.wrappers import Cipher

T = TypeVar("T")

CONTROL_FLOW = ControlFlow(nothing_begun=(Retry,), no_outcome=(Ignore, Reject))
"""Celery's own exceptions: ``Retry`` is the author's word that running again is right; ``Ignore``, also
raised by ``self.replace()``, and ``Reject`` end a delivery without an outcome."""

NOTHING_BEGUN: tuple[type[BaseException], ...] = (SafeToRetry, *CONTROL_FLOW.nothing_begun)
"""What the call of a step raises to state that it had no effect."""

SETTINGS: Mapping[str, Any] = {
    "idempotency_store": None,
    "idempotency_policy": None,
    "idempotency_namespace": None,
    "idempotency_large_results": None,
    "idempotency_grace": 1,
    "idempotency_queued_for": 86_400,  # a message that nobody has executed for a day may be gone
    "idempotency_relay": 1.0,
    "idempotency_purge": 0,
    "idempotency_purge_released": 0,
    "idempotency_purge_abandoned": 0,
    "idempotency_keep_verdicts": 365 * 86_400,  # who pays for a doubtful effect may ask until the books are closed
    "idempotency_hold_messages": True,
    "idempotency_cipher": None,
    "idempotency_cipher_required": False,
    "idempotency_watch_effects": False,
}
"""Every setting of this library, with its default; times are in seconds."""

_VISIBILITY_TIMEOUT = {"sqs": 1800, "redis": 3600}
"""Seconds; kombu's defaults (kombu 5.3 to 5.7, transport/SQS and transport/redis)."""


def refuse_control_flow(policy: Policy) -> None:
    """Refuse a policy that takes Celery's control flow for an outcome."""
    for each in policy.remember:
        if issubclass(each, CONTROL_FLOW.steering):
            meaning = "ends a delivery without an outcome"
            if issubclass(each, Retry):
                meaning = "says that running again is right, so it always gives the claim back"
            raise PolicyError("remember", repr(policy.remember), f"{each.__name__} {meaning}; leave it out")


class OptionUnknown(PolicyError):
    """Nothing reads this option or setting: it is misspelt, or stands in the wrong place."""

    see = IdempotencyError.see  # by the class: no entry is about a name that nobody knows


class Broker(NamedTuple):
    """What matters of the broker here."""

    driver: str  # kombu's name of the transport's, such as "sqs"
    visibility_timeout: float | None  # seconds; None where the broker has none

    @property
    def is_sqs(self) -> bool:
        return self.driver == "sqs"

    @property
    def is_rabbitmq(self) -> bool:
        return self.driver == "amqp"


@dataclass(frozen=True, slots=True, repr=False)
class StoreHandle:
    """A store, its circuit breaker, and the ``idempotency_store`` that it was opened by, which can hold a password."""

    setting: Any
    store: Store
    breaker: Breaker

    def close(self) -> None:
        """Close the store, unless it was given as the setting."""
        from celery_idempotent.stores.wrappers import innermost  # most processes never change their store

        if innermost(self.store) is not self.setting:
            self.store.close()


def _given(app: Celery, setting: str) -> Any:
    return app.conf.get(setting, SETTINGS[setting])


def _row(setting: str, remedy: str, use: Callable[[Any], T], fits: Callable[[Any], bool]) -> "cached_property[T]":
    """What a setting of this library means; it is refused where it does not fit."""

    def look(runtime: "Runtime") -> T:
        value = _given(runtime._app, setting)
        if not fits(value):
            raise PolicyError(setting, repr(value), f"must be {remedy}")
        return use(value)

    return cached_property(look)


def _time(setting: str, meaning: str) -> "cached_property[int]":
    return _row(setting, f"seconds {meaning}", milliseconds, is_duration)


class Runtime:
    """Everything that one app's settings decide."""

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._opening = threading.Lock()
        self._last_opened: StoreHandle | None = None
        self._codecs: dict[bool, Codec] = {}

    def check(self) -> None:
        """Read every setting but that of the store: what cannot be used is refused before any work."""
        for name, each in vars(Runtime).items():
            if isinstance(each, cached_property):
                getattr(self, name)

    @property
    def store(self) -> Store:
        """The store of ``idempotency_store``, opened at the first use."""
        return self.opened.store

    @property
    def opened(self) -> StoreHandle:
        """The store and its breaker, by one look at the settings."""
        setting, opened = self._app.conf.get("idempotency_store"), self._last_opened
        if opened is None or opened.setting is not setting:
            with self._opening:
                # Another thread may have opened it meanwhile; a computed setting is an equal value at each access.
                before = opened = self._last_opened
                if opened is None or opened.setting != setting:
                    setting = _steady(partial(self._app.conf.get, "idempotency_store"))
                    store = self.around(open_store(setting))
                    opened = self._last_opened = StoreHandle(setting, store, Breaker(repr(store)))
                    if before is not None:
                        before.close()  # attempts that began in it connect again
        return opened

    def around(self, store: Store) -> Store:
        """``store`` with what two settings put around it; ``PolicyError`` where one of them cannot be used."""
        large, cipher = self._app.conf.get("idempotency_large_results"), cipher_of(self._app)
        if large is None and cipher is None:
            return store
        from celery_idempotent.stores.objects import open_large_results  # most apps have neither
        from celery_idempotent.stores.wrappers import Offloading, Sealed

        if large is not None:
            store = cast(Store, Offloading(store, open_large_results(large)))  # encrypted is what is kept there, too
        if cipher is not None:
            required = _given(self._app, "idempotency_cipher_required")
            store = cast(Store, Sealed(store, cipher, is_required=required))
        return store

    @cached_property
    def default_policy(self) -> Policy:
        policy = self._app.conf.get("idempotency_policy") or Policy()
        if not isinstance(policy, Policy):
            raise PolicyError("idempotency_policy", repr(policy), "must be a Policy")
        refuse_control_flow(policy)
        return policy

    def policy_of(self, record: Record | None) -> Policy:
        task = self._app.tasks.get(record.task) if record else None
        return cast(Policy, getattr(task, "idempotency_policy", self.default_policy))

    def scope_of(self, policy: Policy, task: str) -> str:
        return f"{self.namespace}{policy.scope_of(task)}"

    @cached_property
    def codec(self) -> Codec:
        """Encodes all that a store keeps by ``result_serializer``, and decodes that and JSON alone."""
        # What messages may be, such as pickle, is not asked: a record is data of whoever can write the store.
        conf = self._app.conf
        setting = "accept_content" if conf.result_accept_content is None else "result_accept_content"
        own = registry.name_to_type.get(conf.result_serializer, "")
        if own not in prepare_accept_content(conf[setting]) | {"application/json"}:
            raise PolicyError(
                "result_serializer",
                repr(conf.result_serializer),
                f"outcomes in it could never be replayed, as {setting} does not list it; add it there",
            )
        return Codec(conf.result_serializer, frozenset({own, "application/json"}))

    def codec_of(self, policy: Policy) -> Codec:
        """How the outcomes of a task with ``policy`` are kept; raises as :attr:`codec` does."""
        codec = self._codecs.get(policy.private)
        if codec is None:
            codec = self._codecs[policy.private] = self.codec.under(policy)
        return codec

    # What stands before every key of the app.
    namespace = _row(
        "idempotency_namespace",
        "1 to 64 letters, digits, dots, dashes or underscores",
        lambda value: f"{value}:" if value else "",
        # There must be room for a scope, a generation and 64 digits in a key of 2048 bytes.
        lambda value: value is None or (isinstance(value, str) and bool(re.fullmatch("[A-Za-z0-9._-]{1,64}", value))),
    )
    # Whose messages a worker holds: of idempotent tasks, of all, or none.
    hold_messages = _row(
        "idempotency_hold_messages",
        'True, False or "all"',
        lambda held: cast(bool | Literal["all"], held),
        lambda held: isinstance(held, bool) or held == "all",
    )
    # Whether effects of observed tasks are noted.
    watch = _row("idempotency_watch_effects", "True or False", bool, lambda value: isinstance(value, bool))
    # Milliseconds.
    grace = _time("idempotency_grace", "that a takeover waits after a lease")
    relay_every = _time("idempotency_relay", "between two looks, or 0 for none")
    queued_for = _time("idempotency_queued_for", "for which a message that was sent counts as queued")
    purge_every = _time("idempotency_purge", "between two purges, or 0 for no purge")
    purge_released = _time("idempotency_purge_released", "for which they stay, or 0 for no purge")
    purge_abandoned = _time("idempotency_purge_abandoned", "for which they stay, or 0 for no purge")
    keep_verdicts = _time("idempotency_keep_verdicts", "for which a verdict stays, or 0 for no longer than retain")

    @cached_property
    def broker(self) -> Broker:
        """What matters of the broker that the app publishes to; connects to nothing."""
        driver = self._app.connection_for_write().get_transport_cls().driver_type
        options = self._app.conf.broker_transport_options or {}
        return Broker(driver, options.get("visibility_timeout", _VISIBILITY_TIMEOUT.get(driver)))


# Celery hides settings from `celery report` and `inspect conf` by their names, as of Django's, and asks nobody; this is
# the list that it keeps. A URL can hold a password.
utils.HIDDEN_SETTINGS = re.compile(
    f"{utils.HIDDEN_SETTINGS.pattern}|IDEMPOTENCY_STORE|IDEMPOTENCY_LARGE_RESULTS|IDEMPOTENCY_CIPHER",
    utils.HIDDEN_SETTINGS.flags,
)


def cipher_of(app: Celery) -> "Cipher | None":
    """What encrypts at rest, by ``idempotency_cipher``; None where nothing does. Raises as :meth:`Runtime.around`."""
    setting, required = app.conf.get("idempotency_cipher"), _given(app, "idempotency_cipher_required")
    if not isinstance(required, bool) or (required and setting is None):
        raise PolicyError(
            "idempotency_cipher_required", repr(required), "must be True or False, and True needs idempotency_cipher"
        )
    if setting is None:
        return None
    try:
        from celery_idempotent.stores.keyring import KeyRing
    except ModuleNotFoundError as error:
        raise PolicyError("idempotency_cipher", "...", not_installed(error, "cipher")) from error
    return KeyRing(setting)


def _steady(look: Callable[[], Any]) -> Any:
    """The store's setting, as soon as two looks see the same: it may just have changed."""
    seen = look()
    for _ in range(3):
        before, seen = seen, look()
        if before is seen or before == seen:
            break
    else:
        raise PolicyError(
            "idempotency_store",
            scheme_of(seen) if isinstance(seen, str) else type(seen).__name__,
            "it is another at each access of the settings, so every delivery would open one of its own; make the value "
            "once, as with functools.cached_property, or write a URL",
        )
    if seen is None:
        raise PolicyError(
            "idempotency_store",
            "None",
            "set it to a store or its URL, such as dynamodb://@eu-west-1/idempotency (under a settings namespace "
            "CELERY it is called CELERY_IDEMPOTENCY_STORE); functions and requests may be given store=... instead",
        )
    return seen


_RUNTIME = "_celery_idempotent_runtime"
"""Attribute of an app. Its runtime goes with it; a copy of the app, as pickle makes it, gets one of its own."""


def runtime_of(app: Celery) -> Runtime:
    found: Runtime | None = getattr(app, _RUNTIME, None)  # of a proxy, that of its app
    if found is not None:
        return found
    app = app._get_current_object() if hasattr(app, "_get_current_object") else app
    made: Runtime = vars(app).setdefault(_RUNTIME, Runtime(proxy(app)))  # the app outlives its runtime
    return made


def runtime_alone(store: str | Store) -> Runtime:
    """That of a store without an app: results are JSON, and no other setting is read."""
    json = {"result_serializer": "json", "result_accept_content": None, "accept_content": ["json"]}
    return Runtime(
        cast(Celery, SimpleNamespace(tasks={}, conf=ConfigurationView({"idempotency_store": store, **json})))
    )
