"""Every public exception survives the ways in which Celery carries exceptions."""

import copy
import inspect
import pickle
from typing import Any

import pytest
from celery import Celery

from celery_idempotent import errors
from celery_idempotent.troubleshooting import link, with_link

EXAMPLES = [
    errors.IdempotencyError("base"),
    errors.PolicyError("lease", "-1", "must be positive"),
    errors.KeyMissing("orders.charge", "key='order_id'"),
    errors.KeyReused("orders.charge:1:ab", "task-1"),
    errors.InFlight("orders.charge:1:ab", 1500, "celery@a"),
    errors.LeaseLost("orders.charge:1:ab", 1_800_000_000_000),
    errors.DeadlineExceeded("orders.charge:1:ab", 1_800_000_000_000),
    errors.OutcomeUnknown("orders.charge:1:ab", "attempt 1 ended"),
    errors.ResultLost("orders.charge:1:ab", "too large"),
    errors.ReplayedFailure("orders.charge:1:ab", "bank.Declined", "no money"),
    errors.WriteRefused("orders.charge:1:ab", "writes[1] (Update of stock)", "ConditionalCheckFailed"),
    errors.StoreUnavailable("dynamodb://@x/t", "PutItem", "timed out"),
    errors.StoreMisconfigured("dynamodb://@x/t", "PutItem", "no such table"),
    errors.SafeToRetry("nothing sent"),
]


def _ids(error: object) -> str:
    return type(error).__name__


def test_every_exception_has_an_example() -> None:
    """A new exception cannot be forgotten here."""
    public = {
        each
        for each in vars(errors).values()
        if inspect.isclass(each) and issubclass(each, Exception) and not issubclass(each, Warning)
    }

    assert {type(each) for each in EXAMPLES} == public
    assert {each.__name__ for each in public} | {"IdempotencyWarning"} == set(errors.__all__)


@pytest.mark.parametrize("error", [*EXAMPLES, errors.IdempotencyWarning("text", "retain")], ids=_ids)
def test_survives_pickle_and_copy(error: Exception) -> None:
    """Billiard pickles exceptions between processes; type, fields and text come through."""
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(twin) is type(error)
        assert twin.args == error.args
        assert vars(twin) == vars(error)
        assert str(twin) == str(error)


@pytest.mark.parametrize("error", EXAMPLES, ids=_ids)
def test_survives_celerys_json_backend(error: Exception) -> None:
    """The result backend stores exceptions as JSON; the caller gets the same type with the same text."""
    backend = Celery(set_as_current=False, backend="cache+memory://").backend

    stored = backend.decode(backend.encode(backend.prepare_exception(error, "json")))
    twin = backend.exception_to_python(stored)

    assert type(twin) is type(error)
    assert str(twin) == str(error)
    assert vars(twin) == vars(error)


@pytest.mark.parametrize("error", EXAMPLES[1:-1], ids=_ids)
def test_text_names_every_field(error: Exception) -> None:
    """What a person reads in the log contains all that the exception knows."""
    for value in error.args:
        assert str(value) in str(error)


@pytest.mark.parametrize("error", EXAMPLES[1:-1], ids=_ids)
def test_text_is_one_line_whatever_its_fields_hold(error: Exception) -> None:
    """A task id or a reason that somebody chose forges no line of a log; the fields themselves stay as they are."""
    forged = type(error)(*(f"{each}\nERROR \x1b[2J\u202e" if isinstance(each, str) else each for each in error.args))

    assert str(forged).isprintable()
    assert "\\nERROR \\x1b[2J\\u202e" in str(forged)
    assert any("\n" in str(value) for value in vars(forged).values()) or isinstance(error, errors.LeaseLost)


@pytest.mark.parametrize("error", EXAMPLES[1:-1], ids=_ids)
def test_text_ends_with_the_address_of_its_entry(error: errors.IdempotencyError) -> None:
    """It follows from the class, or from the option; that of a subclass of somebody else is its base's."""
    assert str(error).endswith(f"; see {link(error.see)}")
    assert type("Mine", (type(error),), {})(*error.args).see == error.see


@pytest.mark.parametrize(
    ("error", "see"),
    [
        (errors.PolicyError("max_takeovers", "", ""), "options#max-takeovers"),
        (errors.PolicyError("effects['a b']", "", ""), "options#effects"),
        (errors.PolicyError("timeout, pool_size", "", ""), "options#timeout"),
        (errors.PolicyError("ATOMIC_REQUESTS", "", ""), "options#atomic-requests"),
        (errors.PolicyError("idempotency_store", "", ""), "settings#idempotency-store"),
        (errors.KeyMissing("", ""), "errors#key-missing"),
        (errors.StoreMisconfigured("", "", ""), "stores#store-misconfigured"),
        (errors.IdempotencyWarning("", "x-consumer-timeout of the queue q"), "warnings#x-consumer-timeout"),
        (errors.IdempotencyWarning(""), ""),
    ],
    ids=str,
)
def test_the_entry_follows_from_class_and_option(error: Any, see: str) -> None:
    """So no message can name a wrong one."""
    assert error.see == see


def test_tree_is_as_documented() -> None:
    """The tree in the module's docstring is the real one."""
    for each in EXAMPLES:
        name = type(each).__name__
        assert name in str(errors.__doc__)
        assert isinstance(each, errors.IdempotencyError) or name == "SafeToRetry"
    assert issubclass(errors.StoreMisconfigured, errors.StoreUnavailable)


class _NoTable(errors.StoreUnavailable):
    def __init__(self, store: str, operation: str, reason: str) -> None:
        super().__init__(store, operation, reason)


class _BadOption(errors.PolicyError):
    def __init__(self, option: str, value: str, remedy: str) -> None:
        super().__init__(option, value, remedy)


class _Weak(errors.IdempotencyWarning):
    def __init__(self, text: str) -> None:
        super().__init__(text)


@pytest.mark.parametrize("error", [_NoTable("a", "b", "c"), _BadOption("a", "b", "c"), _Weak("a")], ids=_ids)
def test_a_subclass_that_takes_what_its_base_takes_is_built_again(error: Exception) -> None:
    """Such as an error of somebody's own store, or a warning about no option."""
    backend = Celery(set_as_current=False, backend="cache+memory://").backend
    stored = backend.decode(backend.encode(backend.prepare_exception(error, "json")))

    for twin in (pickle.loads(pickle.dumps(error)), backend.exception_to_python(stored)):
        assert type(twin) is type(error)
        assert str(twin) == str(error)


def test_a_warning_of_ones_own_is_told_whatever_its_constructor_does() -> None:
    """An error in the text of a warning would end the worker that is only warned."""

    class Weak(errors.IdempotencyWarning):
        def __init__(self, loss: int) -> None:
            self.text = loss  # type: ignore[assignment]

    assert str(Weak(3)) == "3"


def test_a_warning_is_one_line_whatever_it_tells() -> None:
    """A task's name forges no line of a log either."""
    assert str(errors.IdempotencyWarning("a\nERROR \x1b[2J\u202e")) == r"a\nERROR \x1b[2J\u202e"


@pytest.mark.parametrize("own", [None, 3, ["keys#a"], "https://shop.example/help#x", "../../../evil#x", "keys", print])
def test_what_is_no_entry_leads_nowhere(own: Any) -> None:
    """A subclass may call something of its own ``see``."""

    class OutOfStock(errors.IdempotencyError):
        see = own

    assert str(OutOfStock("none left")) == "none left"


def test_a_sentence_ends_before_the_address_without_its_full_stop() -> None:
    """Drivers and lists of settings end theirs with one."""
    assert with_link("Connection refused.", "keys#a").startswith("Connection refused; see https://")
