"""Pages of effect coverage: an index, and a page for each task with its source in the margins' colours."""

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from celery_idempotent.testing.coverage import EffectCoverage, margins

_STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem }
td { padding: 0 .8rem 0 0; vertical-align: top }
.line { opacity: .6; text-align: right }
.source { font: 13px/1.7 ui-monospace, monospace; overflow-wrap: anywhere; white-space: pre-wrap }
.unsafe { background: #f003 }
"""


def write_pages(folder: Path, reports: Sequence[EffectCoverage]) -> Path:
    """Write them, and return the index."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for number, report in enumerate(reports, 1):
        page = f"{number}.html"
        (folder / page).write_text(_page(report.task, "".join(_body(report))), encoding="utf-8")
        rows.append(f'<tr><td><a href="{page}">{escape(report.task)}</a><td class=line>{report.percent:.0f} %')
    index = folder / "index.html"
    index.write_text(_page("Effect coverage", f"<table>{''.join(rows)}</table>"), encoding="utf-8")
    return index


def _page(title: str, body: str) -> str:
    head = f"<meta charset=utf-8><meta name=viewport content='width=device-width'><title>{escape(title)}</title>"
    return f"<!doctype html><html lang=en>{head}<style>{_STYLE}</style><h1>{escape(title)}</h1>{body}"


def _body(report: EffectCoverage) -> Iterator[str]:
    yield f"<p>{report.percent:.0f} % of {len(report.deaths)} deaths are safe.</p>"
    for path, rows in margins(report.deaths).items():
        yield f"<h2>{escape(path)}</h2><table>"
        for line, source, said in rows:
            cells = f"<td class=line>{line}<td class=source>{escape(source)}<td>{escape(said)}"
            yield f"<tr class={'unsafe' if 'died' in said else 'safe'}>{cells}"
        yield "</table>"
    yield from ("<ul>", *(f"<li>{escape(each)}" for each in report.notes), "</ul>")
