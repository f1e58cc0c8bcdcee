"""Every store beside the oracle, and who notices a store that is broken on purpose."""

import inspect
from collections.abc import Iterator
from contextlib import closing

from hypothesis import Phase

from celery_idempotent.errors import StoreMisconfigured
from celery_idempotent.protocol.store import Store
from celery_idempotent.stores import open_store
from celery_idempotent.testing import StoreContract
from lab.proof.flaws import FLAWS
from lab.proof.machine import run_machine
from lab.proof.sweep import sweep

STEPS = 30  # of each run of the state machine over a real server
_NOTICED = (AssertionError, StoreMisconfigured)
"""A record in which fields of two writes are mixed is refused when it is read, before anybody compares it."""


def follow(url: str, *, examples: int, flaw: str = "none", phases: tuple[Phase, ...] = tuple(Phase)) -> None:
    """Drive the store at ``url`` beside the oracle, in so many runs of :data:`STEPS` steps."""
    with closing(_opened(url, flaw)) as store:
        run_machine(lambda: store, examples=examples, steps=STEPS, phases=phases)


def judge(target: str, url: str, flaw: str) -> Iterator[tuple[str, str]]:
    """Who notices a store of that kind which is broken so, and by what; the quickest first."""
    for by, look in (("races", _races), ("oracle", _oracle), ("crash sweep", _sweep)):
        if evidence := look(target, url, flaw):
            yield by, evidence


def _races(target: str, url: str, flaw: str) -> str:
    race = StoreContract().test_calls_at_once_have_one_history
    with closing(_opened(url, flaw)) as store:
        try:
            race(store)
        except _NOTICED:
            return (inspect.getdoc(race) or "a race").splitlines()[0]
    return ""


def _oracle(target: str, url: str, flaw: str) -> str:
    try:
        follow(url, examples=60, flaw=flaw, phases=(Phase.generate,))
    except _NOTICED:
        return "a reply or a stored record differs"
    return ""


def _sweep(target: str, url: str, flaw: str) -> str:
    found = sweep("brief", target=target, url=url, flaw=flaw).problems
    return f"{found[0].problems[0]} ({found[0].task})" if found else ""


def _opened(url: str, flaw: str) -> Store:
    store = open_store(url)
    store.provision()  # before it is broken: it tries the store out, and would refuse some mistakes
    return FLAWS[flaw](store)
