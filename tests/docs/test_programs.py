"""The programs of the pages and the example do what is said of them, run as a reader runs them."""
# mypy: allow-untyped-decorators

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from celery import Celery
from cryptography.fernet import Fernet

from celery_idempotent.beat import SchedulerMixin
from celery_idempotent.testing import OutageContract, StoreContract
from lab.embedded.server import free_port
from tests.support.documents import DOCS, ROOT, code, execute_block
from tests.support.packages import needs
from tests.support.waiting import wait_until

pytest_plugins = ["pytester"]

BIN = Path(sys.executable).parent
BARE = ("-p", "no:cacheprovider", "-p", "no:celery", "-p", "no:ddtrace", "-p", "no:docker_tools")
"""Without what else is installed here."""


def page(name: str) -> Path:
    return DOCS / f"how-to/{name}.md"


def run(folder: Path, line: str, **environment: str) -> str:
    """What a command prints that ends well."""
    program, *arguments = shlex.split(line)
    ended = subprocess.run(
        [str(BIN / program), *arguments], cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@contextmanager
def running(folder: Path, lines: list[str]) -> Iterator[None]:
    """Commands that go on, each in a session of its own, for as long as the block lasts."""
    with (folder / "log").open("w") as log, ExitStack() as started:
        for program, *arguments in map(shlex.split, lines):
            options: Any = {"cwd": folder, "stdout": log, "stderr": log, "start_new_session": True}
            process = subprocess.Popen([str(BIN / program), *arguments], **options)
            started.callback(process.wait)
            started.callback(os.killpg, process.pid, signal.SIGKILL)
        yield


def curl(line: str) -> httpx2.Response | None:
    """What the page's line asks; None where nobody answers."""
    _, _, address, *options = shlex.split(line)
    pairs = list(zip(options[::2], options[1::2], strict=True))
    headers = dict(value.split(": ", 1) for name, value in pairs if name == "-H")
    (body,) = (value for name, value in pairs if name == "--json")
    headers["Content-Type"] = "application/json"
    try:
        return httpx2.post(f"http://{address}", content=body, headers=headers, timeout=30)
    except httpx2.TransportError:
        return None


@pytest.mark.parametrize(
    ("name", "file", "status"),
    [("fastapi", "api.py", 202), ("flask", "charges.py", 201), ("django-requests", "shop_site.py", 201)],
)
def test_request_has_its_effect_once(name: str, file: str, status: int, tmp_path: Path) -> None:
    """On the page's servers: two requests with one key, one effect, and the answers that the page shows."""
    (tmp_path / file).write_text(code(page(name), "py")[0][1])
    port = str(free_port())
    lines = [line.replace("8000", port) for _, text in code(page(name), "sh") for line in text.splitlines()]
    prepares = [line for line in lines if line.startswith("python ") and " -c " not in line]
    goes_on = [line for line in lines if line.startswith(("celery", "uvicorn", "gunicorn"))]
    (asks,), counts = ([line for line in lines if line.startswith(start)] for start in ("curl", "python -c"))
    for line in prepares:
        run(tmp_path, line)

    with running(tmp_path, goes_on):
        first, again = (wait_until(lambda: curl(asks), "the server answers") for _ in range(2))
        assert first is not None
        assert again is not None
        assert (first.status_code, again.status_code) == (status, status), (tmp_path / "log").read_text()
        assert first.content == again.content
        assert again.headers["idempotent-replayed"] == "true"
        shown = [text.strip() for _, text in code(page(name), "text")]
        if counts:
            wait_until(lambda: run(tmp_path, counts[0]).strip() == shown[-1], "the parcel is sent")
    for text in shown[:1]:
        head, body = text.split("\n\n")
        assert (int(head.split()[1]), body) == (again.status_code, again.text)
    assert (tmp_path / "log").read_text().count("charging 500") == (name == "flask")


def test_function_charges_once_however_often_its_script_is_run(tmp_path: Path) -> None:
    """The first run tells the charge and its receipt, the second its receipt."""
    (tmp_path / "charges.py").write_text(code(page("functions"), "py")[0][1])
    assert [run(tmp_path, "python charges.py o-1") for _ in range(2)] == ["charging 500 for o-1\nch_o-1\n", "ch_o-1\n"]


def test_secret_is_not_in_the_store(tmp_path: Path) -> None:
    """After a rotation it is still read, without its key nothing runs, and the command has the keys."""
    (tmp_path / "orders.py").write_text(code(page("secret-results"), "py")[0][1])
    (old, new), paths = (Fernet.generate_key().decode() for _ in range(2)), {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    secret = "DE02120300000000202051"

    for keys, charges in ((old, 1), (f"{new} {old}", 0)):
        printed = run(tmp_path, "python orders.py o-1", ORDER_KEYS=keys, **paths)
        assert (printed.count("charging"), printed.count(secret)) == (charges, 1)
    assert secret.encode() not in (tmp_path / "orders.sqlite").read_bytes()
    with pytest.raises(AssertionError, match="idempotency_cipher"):
        run(tmp_path, "python orders.py o-1", ORDER_KEYS=new, **paths)
    assert secret in run(tmp_path, "celery -A orders idempotency show o-1 --json", ORDER_KEYS=old, **paths)


@needs("redbeat")
def test_redbeats_scheduler_takes_the_mixin() -> None:
    """And its lock is off."""
    names: dict[str, Any] = {"app": Celery("shop", set_as_current=False), "__name__": "shop.beats"}
    execute_block(page("beat"), *code(page("beat"), "py")[1], names)
    assert issubclass(names["Scheduler"], SchedulerMixin)
    assert names["app"].conf.redbeat_lock_key is None


@needs("django_celery_beat")
def test_djangos_scheduler_takes_the_mixin(tmp_path: Path) -> None:
    """In a process of its own, whose Django is that of django-celery-beat."""
    (tmp_path / "beats.py").write_text(f"""
import django
from django.conf import settings
settings.configure(INSTALLED_APPS=["django.contrib.contenttypes", "django_celery_beat"])
django.setup()
{code(page("beat"), "py")[0][1]}
assert Scheduler.__mro__[1] is SchedulerMixin
""")
    run(tmp_path, "python beats.py", PYTHONPATH=str(ROOT))


def test_tests_of_the_page_pass_and_fail_as_it_says(pytester: pytest.Pytester) -> None:
    """In the files that it says, with every warning an error; the report of the failing one is shown line by line."""
    *shop, ledger = (text for _, text in code(page("testing"), "python"))
    ((_, shown),), ((_, failing),) = code(page("testing"), "text"), code(page("testing"), "py")
    written = "\n".join([*shop, failing])
    pytester.makepyfile(test_shop=written, test_ledger=ledger)
    result = pytester.runpytest_subprocess("-W", "error", *BARE)
    tests = re.findall(r"^def test_", written + ledger, re.MULTILINE)
    result.assert_outcomes(passed=len(tests) - 1, failed=1)
    result.stdout.fnmatch_lines([f"E *{line}" for line in shown.splitlines() if line], consecutive=False)


def test_store_of_the_page_passes_the_contract(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an installed package, opened by its URL, with every warning an error; no test of the contract is left out."""
    ((_, toml),) = code(page("write-a-store"), "toml")
    group = re.findall(r'^\[project\.entry-points\."(.+)"\]$', toml, re.MULTILINE)
    entries = [f"{name} = {value}" for name, value in re.findall(r'^(\w+) = "(.+)"$', toml, re.MULTILINE)]
    info = pytester.mkdir("filestore-1.0.dist-info")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: filestore\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("\n".join([f"[{group[0]}]", *entries]))
    for _, text in code(page("write-a-store"), "python"):
        if named := re.match(r"# (\w+\.py)\n", text):
            (pytester.path / named[1]).write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(pytester.path), prepend=":")

    result = pytester.runpytest_subprocess("-W", "error", *BARE)

    names = {name for each in (StoreContract, OutageContract) for name in dir(each) if name.startswith("test_")}
    result.assert_outcomes(passed=len(names))


@pytest.mark.parametrize(("url", "secure"), [("sqs://key:secret@", True), ("sqs://test:test@127.0.0.1:4577//", False)])
def test_example_never_speaks_to_aws_in_the_clear(
    unchanged_celery: None, monkeypatch: pytest.MonkeyPatch, url: str, secure: bool
) -> None:
    """An emulator at an address is."""
    monkeypatch.setenv("EXAMPLE_BROKER_URL", url)
    names: dict[str, Any] = {}
    exec(compile((ROOT / "example_project" / "app.py").read_text(), "app.py", "exec"), names)
    assert names["app"].conf.broker_transport_options["is_secure"] is secure
