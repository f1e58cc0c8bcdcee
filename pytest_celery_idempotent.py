"""The pytest plugin of celery-idempotent: fixtures, and options for effect coverage. A suite that uses none of
them does not notice it.

pytest loads a plugin in every run of every suite of its environment. So this one stands outside of the package,
whose import brings Celery, and imports nothing before a test asks for it.
"""

import json
from argparse import ArgumentTypeError
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from celery_idempotent.testing import EffectCoverage, FakeStore

__all__ = ["effect_coverage", "idempotency_store"]

_REPORTS = pytest.StashKey["list[EffectCoverage]"]()


@pytest.fixture
def idempotency_store() -> "Iterator[FakeStore]":
    """A new, empty :class:`~celery_idempotent.testing.FakeStore` behind every app, for the length of the test."""
    from celery._state import _get_active_apps

    from celery_idempotent.testing import FakeStore
    from celery_idempotent.testing.stores import installed

    store = FakeStore()
    with installed(store, *_get_active_apps()):
        yield store


@pytest.fixture
def effect_coverage(request: pytest.FixtureRequest) -> "Callable[..., EffectCoverage]":
    """:func:`celery_idempotent.testing.effect_coverage`, whose reports the options of pytest are about."""
    from celery_idempotent.testing import effect_coverage as cover

    def cover_and_keep(task: Any, *args: Any, **options: Any) -> "EffectCoverage":
        report = cover(task, *args, **{"on_progress": _Progress(request.config, task), **options})
        request.node.stash.setdefault(_REPORTS, []).append(report)
        return report

    return cover_and_keep


class _Progress:
    """Shows on a terminal how many of the deaths were tried."""

    def __init__(self, config: pytest.Config, task: Any) -> None:
        self._terminal = config.pluginmanager.get_plugin("terminalreporter")
        self._capture = config.pluginmanager.get_plugin("capturemanager")
        self._task = task

    def __call__(self, done: int, of: int) -> None:
        if self._terminal is None or self._capture is None or not self._terminal.isatty:
            return
        with self._capture.global_and_fixture_disabled():
            self._terminal.rewrite(f"{self._task.name}: {done} of {of} deaths", erase=True)
            if done == of:
                self._terminal.rewrite("", erase=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    """See the page on effect coverage."""
    group = parser.getgroup("effect coverage", "effect coverage (celery-idempotent)")
    group.addoption("--effect-coverage", action="store_true", help="Print the reports of the fixture effect_coverage.")
    group.addoption(
        "--effect-coverage-fail-under",
        type=_percent,
        metavar="N",
        help="Fail where fewer than N percent of all deaths are safe, or none was tried.",
    )
    group.addoption("--effect-coverage-html", type=Path, metavar="DIR", help="Write the reports as pages.")


def _percent(text: str) -> float:
    with suppress(ValueError):
        if 0 <= float(text) <= 100:
            return float(text)
    raise ArgumentTypeError(f"must be a number from 0 to 100, and is {text!r}")


def pytest_configure(config: pytest.Config) -> None:
    """Reports are collected where they are told."""
    if not hasattr(config, "workerinput"):  # a process of pytest-xdist sends them to the one that started it
        config.pluginmanager.register(_Summary(config), "celery_idempotent_summary")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Generator[None, Any, Any]:
    """Attach a test's reports to its result, in a form that travels between processes."""
    result: Any = yield
    if call.when == "call" and (reports := item.stash.get(_REPORTS, [])):
        from dataclasses import asdict

        rows = [(each.task, [asdict(death) for death in each.deaths], each.notes) for each in reports]
        result.effect_coverage = json.dumps(rows)
    return result


class _Summary:
    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._reports: list[EffectCoverage] = []
        self._lines: list[str] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        if found := getattr(report, "effect_coverage", None):
            from celery_idempotent.testing.coverage import Death, EffectCoverage

            for task, deaths, notes in json.loads(found):
                self._reports.append(EffectCoverage(task, [Death(**each) for each in deaths], notes))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        wanted, folder = (self._config.getoption(f"effect_coverage_{each}") for each in ("fail_under", "html"))
        if folder is not None and self._reports:
            self._lines.append(f"pages: {_write_pages(folder, self._reports)}")
        if wanted is not None and (shortfall := self._shortfall(wanted)):
            self._lines.append(f"FAILED: {shortfall}; --effect-coverage-fail-under={wanted:g}")
            session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED

    def _shortfall(self, wanted: float) -> str:
        deaths = [death for each in self._reports for death in each.deaths]
        if not deaths:
            return "no task was tried"
        from celery_idempotent.testing import EffectCoverage

        percent = EffectCoverage("", deaths).percent
        return f"{int(percent)} % of {len(deaths)} deaths are safe" if percent < wanted else ""

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self._config.getoption("effect_coverage"):
            self._lines[:0] = map(str, self._reports)
        if self._lines:
            terminalreporter.section("effect coverage")
            terminalreporter.write_line("\n\n".join(self._lines))


_STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem }
h2 { font-size: 1.1rem }
td { padding: 0 .8rem 0 0; vertical-align: top }
.line { opacity: .6; text-align: right }
.source { font: 13px/1.7 ui-monospace, monospace; overflow-wrap: anywhere; white-space: pre-wrap }
.unsafe { background: #f003 }
"""


def _write_pages(folder: Path, reports: "list[EffectCoverage]") -> Path:
    """An index, and a page for each report with its source."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for number, report in enumerate(reports, 1):
        page = f"{number}.html"
        (folder / page).write_text(_page(report.task, "".join(_body(report))), encoding="utf-8")
        told = escape(report.partition("\n")[0].removeprefix(f"{report.task}: "))
        rows.append(f'<tr><td><a href="{page}">{escape(report.task)}</a><td>{told}')
    index = folder / "index.html"
    index.write_text(_page("Effect coverage", f"<table>{''.join(rows)}</table>"), encoding="utf-8")
    return index


def _page(title: str, body: str) -> str:
    head = f"<meta charset=utf-8><meta name=viewport content='width=device-width'><title>{escape(title)}</title>"
    return f"<!doctype html><html lang=en>{head}<style>{_STYLE}</style><h1>{escape(title)}</h1>{body}"


def _body(report: "EffectCoverage") -> Iterator[str]:
    from celery_idempotent.integration.operating.watching import shown
    from celery_idempotent.testing.coverage import margins

    yield f"<p>{escape(report.partition(chr(10))[0])}</p>"
    for path, rows in margins(report.deaths).items():
        yield f"<h2>{escape(shown(path))}</h2><table>"
        for line, source, said in rows:
            cells = f"<td class=line>{line}<td class=source>{escape(source)}<td>{escape(said)}"
            yield f"<tr class={'safe' if said.startswith('ok') else 'unsafe'}>{cells}"
        yield "</table>"
    yield from ("<ul>", *(f"<li>{escape(each)}" for each in report.notes), "</ul>")
