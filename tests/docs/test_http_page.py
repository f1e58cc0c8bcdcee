"""The pages on HTTP: each row of its table is acted out, and each of its programs is run as it stands there."""

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import httpx2
import pytest

from celery_idempotent import Policy
from celery_idempotent.contrib.http.semantics import Problem
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import FakeClock, FaultyStore
from lab.embedded.server import free_port
from tests.support.asgi import AsgiShop, Client
from tests.support.documents import DOCS, anchors, code, execute_block, table
from tests.support.http_behaviour import Got, Reply
from tests.support.waiting import wait_until

PAGES = [DOCS / f"how-to/{name}.md" for name in ("fastapi", "flask", "django-requests")]
PROBLEMS = DOCS / "troubleshooting/http.md"
ROWS = table(DOCS / "how-to/http.md", "When")
BIN = Path(sys.executable).parent
KEY = ("idempotency-key", "k-1")
DAY = 86_400_000

Scene = Callable[["Acted"], Got]
SCENES: dict[str, Scene] = {}


class Acted:
    """A shop whose store can fail, and whose clock can be set."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.store = FaultyStore(MemoryStore(self.clock.now))
        self.shop = AsgiShop()
        self.runs = 0

    def serve(self, *statuses: int, body: bytes = b"ok", **options: Any) -> None:
        """An application that answers with these, and then with 201."""
        answers = iter(statuses)

        def respond() -> Reply:
            self.runs += 1
            return Reply(next(answers, 201), body)

        self.shop.serve(respond, store=self.store, **options)

    def again(self, *statuses: int, **options: Any) -> Got:
        """The second answer."""
        self.serve(*statuses, **options)
        self.shop.request()
        return self.shop.request()


def scene(when: str) -> Callable[[Scene], Scene]:
    """What the row says that happens."""

    def kept(act: Scene) -> Scene:
        SCENES[when] = act
        return act

    return kept


@scene("a key comes for the first time")
def _first(acted: Acted) -> Got:
    acted.serve()
    return acted.shop.request()


@scene("it comes again, completed")
def _again(acted: Acted) -> Got:
    return acted.again()


@scene("it comes again, in flight")
def _in_flight(acted: Acted) -> Got:
    met: list[Got] = []

    def respond() -> Reply:
        beside = Thread(target=lambda: met.append(acted.shop.request()))
        beside.start()
        beside.join()
        return Reply()

    acted.shop.serve(respond, store=acted.store)
    acted.shop.request()
    return met[0]


@scene("it comes with another payload")
def _reused(acted: Acted) -> Got:
    acted.again()
    return acted.shop.request(body=b"[]")


@scene("the key is missing, and is not required")
def _missing(acted: Acted) -> Got:
    acted.serve()
    acted.shop.request(None)
    assert acted.runs == 1
    return acted.shop.request(None)


@scene("the key is missing, and is required")
def _required(acted: Acted) -> Got:
    acted.serve(required=True)
    return acted.shop.request(None)


@scene("the key is a string")
def _string(acted: Acted) -> Got:
    acted.serve()
    return acted.shop.request('"a \\"key\\""')


@scene("the key stands without quotes")
def _bare(acted: Acted) -> Got:
    acted.serve()
    first = acted.shop.request("k-1")
    assert "idempotent-replayed" in acted.shop.request('"k-1"').headers
    return first


@scene("the key is longer than 255 characters")
def _long(acted: Acted) -> Got:
    acted.serve()
    assert acted.shop.request("x" * 255).status == 201
    return acted.shop.request("x" * 256)


@scene("there are two header lines")
def _two(acted: Acted) -> Got:
    acted.serve()
    return acted.shop.send("POST", "/orders", [KEY, KEY], b"")


@scene("another caller has the same key")
def _another(acted: Acted) -> Got:
    acted.serve(caller="authorization")
    acted.shop.request(authorization="Bearer ann")
    got = acted.shop.request(authorization="Bearer bob")
    assert acted.runs == 2
    return got


@scene("the caller cannot be told")
def _nobody(acted: Acted) -> Got:
    acted.serve(caller=lambda scope: None)
    return acted.shop.request()


@scene("the method is GET")
def _get(acted: Acted) -> Got:
    acted.serve(200, 200)
    acted.shop.request(method="GET")
    got = acted.shop.request(method="GET")
    assert acted.runs == 2
    return got


@scene("the application answered 404")
def _not_found(acted: Acted) -> Got:
    return acted.again(404)


@scene("the application answered 429")
def _too_many(acted: Acted) -> Got:
    return acted.again(429)


@scene("the application answered 500")
def _failed(acted: Acted) -> Got:
    return acted.again(500)


@scene('the application answered 500, under `on_takeover="refuse"`')
def _refused(acted: Acted) -> Got:
    return acted.again(500, policy=Policy(on_takeover="refuse"))


@scene("the request is too large")
def _too_large(acted: Acted) -> Got:
    acted.serve(max_request=1)
    return acted.shop.request()


@scene("the response was too large to keep")
def _lost(acted: Acted) -> Got:
    return acted.again(max_response=1)


@scene("nobody knows what the first request did")
def _unknown(acted: Acted) -> Got:
    def respond() -> Reply:
        raise SystemExit

    acted.shop.serve(respond, store=acted.store, policy=Policy(on_takeover="refuse"))
    with pytest.raises(SystemExit):
        acted.shop.request()
    return acted.shop.request()


@scene("the store does not answer")
def _outage(acted: Acted) -> Got:
    acted.serve()
    acted.store.faults.extend(["request lost"] * 9)
    got = acted.shop.request()
    assert acted.runs == 0
    return got


@scene("the outcome is older than `retain`")
def _old(acted: Acted) -> Got:
    acted.again()
    acted.clock.advance(7 * DAY)
    got = acted.shop.request()
    assert acted.runs == 2
    return got


def test_every_row_is_acted_out() -> None:
    """No row is there that nobody runs."""
    assert [row["When"] for row in ROWS] == list(SCENES)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["When"])
def test_row_is_what_happens(row: dict[str, str]) -> None:
    """Status, problem, whether it is replayed, and ``Retry-After``."""
    got = SCENES[row["When"]](Acted())
    status, *more = re.findall(r"`([\w-]+)`", row["Here"].replace("`Retry-After`", "`retry-after`"))
    expected = [each for each in more if each not in ("replayed", "retry-after")]
    assert got.status == int(status)
    assert ([got.problem] if "problem+json" in got.headers.get("content-type", "") else []) == expected
    assert ("idempotent-replayed" in got.headers) == ("replayed" in more)
    assert ("retry-after" in got.headers) == ("retry-after" in more)


def test_every_problem_has_its_anchor() -> None:
    """Where its type leads."""
    assert {problem.value[0] for problem in Problem} <= anchors(PROBLEMS)
    text = PROBLEMS.read_text()
    for problem in Problem:
        slug, status, *_ = problem.value
        assert f"## {slug}\n\n```text\n{status}" in text


def test_message_that_is_published_twice_has_one_key(monkeypatch: pytest.MonkeyPatch, unchanged_celery: None) -> None:
    """As the page's own view publishes it, whose first request fails after that."""
    store = MemoryStore()
    monkeypatch.setattr("celery_idempotent.integration.settings.open_store", lambda url: store)
    monkeypatch.setattr("celery_idempotent.integration.task.guard._by_url", {})
    published: list[str] = []

    class Ship:
        def apply_async(self, args: tuple[str], idempotency_key: str) -> None:
            published.append(idempotency_key)
            if len(published) == 1:
                raise ConnectionError

    names: dict[str, Any] = {"ship": Ship(), "__name__": "page"}
    for line, text in code(PAGES[0], "python"):
        execute_block(PAGES[0], line, text, names)
    client = Client(names["api"])
    with pytest.raises(ConnectionError):
        client.request(path="/parcels/o-1", authorization="Bearer ann")
    for _ in range(2):
        assert client.request(path="/parcels/o-1", authorization="Bearer ann").status == 200
    assert published == [published[0]] * 2


def _program(words: str) -> str:
    (found,) = (text for page in PAGES for _, text in code(page, "py") if words in text)
    assert len(found.splitlines()) < 60
    return found


def _command(line: str, port: int) -> list[str]:
    program, *arguments = shlex.split(line.replace("8000", str(port)))
    return [str(BIN / program), *arguments]


def _page(words: str) -> Path:
    (found,) = (page for page in PAGES if any(words in text for _, text in code(page, "sh")))
    return found


def _lines(words: str) -> list[str]:
    lines = (line for _, text in code(_page(words), "sh") for line in text.splitlines())
    return [line for line in lines if not line.startswith("pip ")]


def _shown(words: str) -> list[str]:
    return [text for _, text in code(_page(words), "text")]


def _is_shown(got: httpx2.Response, shown: str) -> None:
    """Status, headers and body are what the page shows of them."""
    (status, *headers), body = (part.splitlines() for part in shown.split("\n\n", 1))
    assert int(status.split()[1]) == got.status_code
    for name, value in (header.split(": ", 1) for header in headers):
        assert got.headers[name] == value
    assert body == got.text.splitlines()


@contextmanager
def _running(commands: list[list[str]], folder: Path, log: Path) -> Iterator[None]:
    """The commands, each for as long as the block lasts."""
    with log.open("w") as output:
        started = [
            subprocess.Popen(
                command,
                cwd=folder,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            for command in commands
        ]
        try:
            yield
        finally:
            for each in started:
                os.killpg(each.pid, signal.SIGKILL)
                each.wait()


def _curl(line: str, port: int) -> httpx2.Response | None:
    """What the page's line of curl asks."""
    _, _, address, *options = shlex.split(line.replace("8000", str(port)))
    pairs = list(zip(options[::2], options[1::2], strict=True))
    headers = dict(value.split(": ", 1) for name, value in pairs if name == "-H")
    (body,) = (value for name, value in pairs if name == "--json")
    try:
        return httpx2.post(
            f"http://{address}", content=body, headers={**headers, "Content-Type": "application/json"}, timeout=30
        )
    except httpx2.TransportError:
        return None


def _answered(line: str, port: int) -> httpx2.Response:
    got = wait_until(lambda: _curl(line, port), line)
    assert got is not None
    return got


def test_order_and_parcel_are_one_operation(tmp_path: Path) -> None:
    """On uvicorn, with a worker: one order, one parcel, and the answers that the page shows."""
    (tmp_path / "api.py").write_text(_program("FastAPI()\n"))
    prepare, worker, server, curl, count = _lines("uvicorn api:app")
    answered, counted = _shown("uvicorn api:app")
    port, log = free_port(), tmp_path / "log"
    made = subprocess.run(_command(prepare, port), cwd=tmp_path, check=False, capture_output=True)
    assert made.returncode == 0, made.stderr

    def rows() -> str:
        return subprocess.run(_command(count, port), cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    with _running([_command(worker, port), _command(server, port)], tmp_path, log):
        first, again = _answered(curl, port), _answered(curl, port)
        assert (first.status_code, again.status_code) == (202, 202), log.read_text()
        assert first.content == again.content
        _is_shown(again, answered)
        assert wait_until(lambda: rows().strip(), "the parcel is sent") == counted.strip()


def test_charge_is_made_once(tmp_path: Path) -> None:
    """Flask on gunicorn."""
    (tmp_path / "charges.py").write_text(_program("Flask(__name__)"))
    server, curl = _lines("gunicorn charges:app")
    port, log = free_port(), tmp_path / "log"
    with _running([_command(server, port)], tmp_path, log):
        first, again = _answered(curl, port), _answered(curl, port)
    assert (first.status_code, again.status_code) == (201, 201), log.read_text()
    assert first.content == again.content
    _is_shown(again, *_shown("gunicorn charges:app"))
    assert log.read_text().count("charging 500") == 1


def test_django_books_once(tmp_path: Path) -> None:
    """On gunicorn, after its migration."""
    (tmp_path / "shop_site.py").write_text(_program("settings.configure("))
    migrate, server, curl = _lines("gunicorn shop_site:application")
    port, log = free_port(), tmp_path / "log"
    subprocess.run(_command(migrate, port), cwd=tmp_path, check=True, capture_output=True)
    with _running([_command(server, port)], tmp_path, log):
        first, again = _answered(curl, port), _answered(curl, port)
    assert (first.status_code, first.json()) == (201, {"booked": 500}), log.read_text()
    assert (again.status_code, again.content) == (201, first.content)
    _is_shown(again, *_shown("gunicorn shop_site:application"))
