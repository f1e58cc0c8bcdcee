"""Stores of third parties, registered as their packages do it: by a dist-info on the path."""

import traceback
from pathlib import Path

import pytest

from celery_idempotent.errors import PolicyError
from celery_idempotent.stores import open_store
from celery_idempotent.stores.memory import MemoryStore

THEIRS = """
from celery_idempotent import PolicyError
from celery_idempotent.stores.memory import MemoryStore

SETTING = "no callable"

class TheirStore(MemoryStore):
    @classmethod
    def from_url(cls, url):
        store = cls()
        store.url = url
        return store

def forgets_to_return(url): ...

def gives_something_else(url):
    return {"url": url}

def cannot_read(url):
    raise ValueError(f"what is {url}?")

def refuses(url):
    raise PolicyError("idempotency_store", "'refusing://...'", "write a host")
"""
# By scheme: the entry point, and what is wrong with it.
SCHEMES = {
    "theirs": ("theirs_module:TheirStore.from_url", ""),
    "absent": ("theirs_absent:Store", "absent = theirs_absent:Store of theirs: .*No module named 'theirs_absent'"),
    "broken": ("theirs_broken:Store", "broken = theirs_broken:Store of theirs: .*a_driver_that_is_not_there"),
    "misspelt": ("theirs_module:ThierStore", "misspelt = theirs_module:ThierStore of theirs: .*ThierStore"),
    "setting": ("theirs_module:SETTING", "it is 'no callable'; it must be a callable"),
    "nothing": (
        "theirs_module:forgets_to_return",
        "it returned a NoneType, which is not a store; it lacks swap, g",
    ),
    "something": (
        "theirs_module:gives_something_else",
        "it returned a dict, which is not a store; it lacks swap, s",
    ),
    "unread": ("theirs_module:cannot_read", r"of theirs: it raised ValueError at .*theirs_module\.py, line \d+"),
    "refusing": ("theirs_module:refuses", "write a host"),
}


@pytest.fixture(autouse=True)
def _register(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package ``theirs`` that registers a right scheme and several wrong ones."""
    (tmp_path / "theirs_module.py").write_text(THEIRS)
    (tmp_path / "theirs_broken.py").write_text("import a_driver_that_is_not_there")
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    lines = [f"{scheme} = {entry_point}" for scheme, (entry_point, _) in SCHEMES.items()]
    (info / "entry_points.txt").write_text("\n".join(["[celery_idempotent.stores]", *lines]))
    monkeypatch.syspath_prepend(tmp_path)


def test_registered_scheme_opens_with_the_whole_url() -> None:
    """The callable gets the URL as it was written, and what it returns is the store; a misspelt one lists it."""
    store = open_store("theirs://user:secret@host/x?y=1")
    assert isinstance(store, MemoryStore)
    assert vars(store)["url"] == "theirs://user:secret@host/x?y=1"
    with pytest.raises(PolicyError, match=r"known schemes: .*memory.*theirs"):
        open_store("thiers://host")


@pytest.mark.parametrize("scheme", [each for each, (_, wrong) in SCHEMES.items() if wrong])
def test_unusable_entry_point_is_named(scheme: str) -> None:
    """Whose it is, what is wrong, and never the URL, which can hold a password."""
    url = f"{scheme}://user:{'secret'}@host"
    with pytest.raises(PolicyError, match=SCHEMES[scheme][1]) as raised:
        open_store(url)
    assert f"'{scheme}://...'" in str(raised.value)
    assert "secret" not in "".join(traceback.format_exception(raised.value))
