"""Every public exception survives the ways in which Celery carries exceptions, and a body's traceback stays short."""
# mypy: allow-untyped-decorators

import copy
import inspect
import pickle
import traceback
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from hypothesis import given
from hypothesis import strategies as st

import celery_idempotent
from celery_idempotent import Policy, errors, idempotent
from celery_idempotent.printable import one_line
from celery_idempotent.troubleshooting import link
from tests.support.deliveries import Shop
from tests.support.scene import raising

BACKEND = Celery(set_as_current=False, backend="cache+memory://").backend
TOKEN = st.integers(0, 2**63)
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
OPTION = st.sampled_from(["lease", "effects['a b']", "idempotency_store", "timeout, pool_size"])

FIELDS: dict[type[Exception], list[st.SearchStrategy[Any]]] = {
    errors.IdempotencyError: [TEXT],
    errors.PolicyError: [OPTION, TEXT, TEXT],
    errors.KeyMissing: [TEXT] * 2,
    errors.KeyReused: [TEXT] * 2,
    errors.InFlight: [TEXT, TOKEN, TEXT],
    errors.LeaseLost: [TEXT, TOKEN],
    errors.DeadlineExceeded: [TEXT, TOKEN],
    errors.OutcomeUnknown: [TEXT] * 2,
    errors.ResultLost: [TEXT] * 2,
    errors.ReplayedFailure: [TEXT] * 3,
    errors.WriteRefused: [TEXT] * 3,
    errors.StoreUnavailable: [TEXT] * 3,
    errors.StoreMisconfigured: [TEXT] * 3,
    errors.SafeToRetry: [TEXT],
}
"""By type, what its constructor takes."""


class _NoTable(errors.StoreUnavailable):
    """Of somebody's own store."""

    def __init__(self, store: str, operation: str, reason: str) -> None:
        super().__init__(store, operation, reason)


class _Weak(errors.IdempotencyWarning):
    def __init__(self, text: str) -> None:
        super().__init__(text)


MADE = {**FIELDS, _NoTable: [TEXT] * 3, _Weak: [TEXT], errors.IdempotencyWarning: [TEXT] * 2}


def test_every_exception_is_here_and_in_the_tree() -> None:
    """A new one cannot be forgotten; the tree in the module's docstring is the real one."""
    found = [each for each in vars(errors).values() if inspect.isclass(each) and issubclass(each, Exception)]
    public = {each for each in found if not issubclass(each, Warning)}
    assert FIELDS.keys() == public
    assert {each.__name__ for each in public} | {"IdempotencyWarning"} == set(errors.__all__)
    assert {each for each in public if not issubclass(each, errors.IdempotencyError)} == {errors.SafeToRetry}
    assert issubclass(errors.StoreMisconfigured, errors.StoreUnavailable)


@given(st.sampled_from(list(MADE)).flatmap(lambda kind: st.builds(kind, *MADE[kind])))
def test_survives_pickle_copy_and_celerys_json(error: Exception) -> None:
    """Billiard pickles exceptions, and result backends store them as JSON; type, fields and text come through."""
    stored = BACKEND.decode(BACKEND.encode(BACKEND.prepare_exception(error, "json")))
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error), BACKEND.exception_to_python(stored)):
        assert (type(twin), vars(twin), str(twin)) == (type(error), vars(error), str(error))


@given(st.sampled_from(list(FIELDS)[1:-1]).flatmap(lambda kind: st.builds(kind, *FIELDS[kind])))
def test_text_is_one_line_that_names_every_field_and_its_entry(error: errors.IdempotencyError) -> None:
    """A task id or a reason that somebody chose forges no line of a log; the address follows from class or option."""
    text = str(error)
    assert text == one_line(text)
    assert text.endswith(f"; see {link(error.see)}")
    for value in error.args:
        assert one_line(value).removesuffix(".") in text
    assert type("Mine", (type(error),), {})(*error.args).see == error.see


@pytest.mark.parametrize(
    ("error", "see"),
    [
        (errors.PolicyError("effects['a b']", "", ""), "options#effects"),
        (errors.PolicyError("timeout, pool_size", "", ""), "options#timeout"),
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


OURS = str(Path(celery_idempotent.__file__).parent)


@pytest.mark.parametrize("is_task", [True, False])
def test_a_traceback_of_a_body_shows_at_most_six_frames_of_ours(is_task: bool) -> None:
    """From the call to the author's first line."""
    shop = Shop()
    shop.does = raising(ValueError("declined"))
    function = idempotent(Policy(), app=shop.app, name="decline")(shop.does)
    with pytest.raises(ValueError, match="declined") as raised:
        shop.charge.apply(("o",), throw=True) if is_task else function()
    frames = [each.name for each in traceback.extract_tb(raised.tb) if each.filename.startswith(OURS)]
    frames = [each for each in frames if each != "apply"]  # of this test: a worker calls the task itself
    assert 0 < len(frames) <= 6, frames
