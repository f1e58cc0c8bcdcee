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


@pytest.fixture
def register(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package ``theirs`` that registers a right scheme and several wrong ones."""
    (tmp_path / "theirs_module.py").write_text(THEIRS)
    (tmp_path / "theirs_broken.py").write_text("import a_driver_that_is_not_there")
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[celery_idempotent.stores]\n"
        "theirs = theirs_module:TheirStore.from_url\n"
        "absent = theirs_absent:Store\n"
        "broken = theirs_broken:Store\n"
        "misspelt = theirs_module:ThierStore\n"
        "setting = theirs_module:SETTING\n"
        "nothing = theirs_module:forgets_to_return\n"
        "something = theirs_module:gives_something_else\n"
        "unread = theirs_module:cannot_read\n"
        "refusing = theirs_module:refuses\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("register")
def test_registered_scheme_opens_with_the_whole_url() -> None:
    """The callable gets the URL as it was written, and what it returns is the store."""
    store = open_store("theirs://user:secret@host/x?y=1")

    assert isinstance(store, MemoryStore)
    assert vars(store)["url"] == "theirs://user:secret@host/x?y=1"


@pytest.mark.usefixtures("register")
@pytest.mark.parametrize(
    ("scheme", "told"),
    [
        ("absent", "absent = theirs_absent:Store of theirs: it cannot be loaded: .*No module named 'theirs_absent'"),
        ("broken", "broken = theirs_broken:Store of theirs: it cannot be loaded: .*a_driver_that_is_not_there"),
        ("misspelt", "misspelt = theirs_module:ThierStore of theirs: it cannot be loaded: .*ThierStore"),
        ("setting", "it is 'no callable'; it must be a callable that takes the URL"),
        (
            "nothing",
            "it returned a NoneType, which is not a store; it lacks swap, get, scan, delete, now, provision, close",
        ),
        ("unread", r"of theirs: it raised ValueError at .*theirs_module\.py, line \d+"),
        ("refusing", "write a host"),
        ("something", "it returned a dict, which is not a store; it lacks swap, scan, delete, now, provision, close"),
    ],
)
def test_unusable_entry_point_is_named(scheme: str, told: str) -> None:
    """Whose it is, what is wrong, and never the URL, which can hold a password."""
    url = f"{scheme}://user:{'secret'}@host"

    with pytest.raises(PolicyError, match=told) as raised:
        open_store(url)

    assert f"'{scheme}://...'" in str(raised.value)
    assert "secret" not in "".join(traceback.format_exception(raised.value))


@pytest.mark.usefixtures("register")
def test_unknown_scheme_lists_registered_ones() -> None:
    """Who misspells a scheme sees those of third parties, too."""
    with pytest.raises(PolicyError, match=r"known schemes: .*memory.*theirs"):
        open_store("thiers://host")
