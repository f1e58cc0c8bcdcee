"""The pages: each reads what it shows, in a thread, as a store may take its time."""

from collections.abc import Mapping, Sequence
from functools import cache, partial
from http import HTTPStatus
from typing import Any
from urllib.parse import quote, unquote, urlencode

from celery import Celery
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from celery_idempotent.contrib.web.guard import Denied, PageAccess, Sessions, set_cookie, with_headers
from celery_idempotent.contrib.web.overview import OPEN, Overview, prometheus_text
from celery_idempotent.contrib.web.records import PAGE, STATUSES, Form, ago, answer, search_of, timeline
from celery_idempotent.engine.claim import effect_key
from celery_idempotent.engine.verdicts import fitting
from celery_idempotent.errors import IdempotencyError, StoreUnavailable
from celery_idempotent.integration import binding
from celery_idempotent.integration.operating import display
from celery_idempotent.integration.operating.verdicts import CHOICES, Judged, judge_each
from celery_idempotent.integration.settings import runtime_of
from celery_idempotent.printable import one_line
from celery_idempotent.protocol.contents import reveal
from celery_idempotent.protocol.record import Record

_PATIENCE = 1.0
"""Seconds that a view waits for a count that is under way."""

_PATIENCE_OF_A_SCRAPE = 8.0
"""The same; Prometheus gives up after ten."""

_MINUTE = 60.0
"""Seconds for which a count is scraped again; each costs a store without an index a look at all that it has."""

_WHO = "idempotency_who"
"""The cookie that remembers who gives the verdicts, so that the next form need not ask."""


def page_of(app: Celery, token: str, *, write: bool) -> ASGIApp:
    """The ASGI app: files that everybody may have, and pages behind a guard."""
    pages = _Pages(app, write)
    views = [
        Route("/", pages.overview),
        Route("/records", pages.records),
        Route("/record", pages.record),
        Route("/judge", pages.judge, methods=["POST"]),
        Route("/metrics", pages.metrics),
    ]
    static = Mount("/static", StaticFiles(packages=[(str(__package__), "static")]))
    guarded = Mount("", routes=views, middleware=[Middleware(PageAccess, sessions=Sessions(token))])
    handlers: Any = dict.fromkeys((HTTPException, IdempotencyError), pages.explain)
    return with_headers(Starlette(routes=[static, guarded], exception_handlers=handlers))


def _printable(value: Any) -> Any:
    """Whatever a template prints, in which somebody else may have put what a browser or a person would obey."""
    return value if isinstance(value, Markup) else one_line(value)


def _lines(text: str) -> Markup:
    """Several lines, each printed as such."""
    return Markup("\n").join(escape(one_line(line)) for line in text.split("\n"))


class _Pages:
    def __init__(self, app: Celery, write: bool) -> None:
        self._app = app
        self._write = write
        self._runtime = runtime_of(app)
        self._store = self._runtime.store
        self._overview = Overview(self._runtime)
        self._open = Overview(self._runtime, statuses=OPEN, fresh=_MINUTE)
        self._templates = Environment(
            loader=PackageLoader(__package__), autoescape=True, undefined=StrictUndefined, finalize=_printable,
            trim_blocks=True, lstrip_blocks=True,
        )  # fmt: skip
        self._templates.filters.update(
            utc=display.utc, utc_short=display.utc_short, key=display.beginning, duration=display.duration, lines=_lines
        )
        self._templates.globals.update(seen=_seen, statuses=STATUSES, page_size=PAGE)

    def overview(self, request: Request) -> Response:
        return self._page(request, "overview.html", look=self._overview.look(_PATIENCE))

    def records(self, request: Request) -> Response:
        try:
            search = search_of(request.query_params)
        except ValueError as error:
            return self._message(request, HTTPStatus.BAD_REQUEST, "This search cannot be understood", str(error))
        records, more, is_linear = answer(self._store, search)
        return self._page(
            request,
            "records.html",
            search=search,
            records=records,
            more=more,
            reads_all=is_linear,
            all_chosen="all" in request.query_params,
            tasks=sorted(each.name for each in binding.idempotent_tasks(self._app)),
        )

    def record(self, request: Request) -> Response:
        record = self._store.get(request.query_params.get("key", ""))
        if record is None:
            text = "It may have been forgotten, and deleted."
            return self._message(request, HTTPStatus.NOT_FOUND, "Nothing is recorded here", text)
        record = reveal(self._store, record)
        policy, now = self._runtime.policy_of(record), self._store.now()
        return self._page(
            request,
            "record.html",
            record=record,
            guarantee=policy.guarantee(record.task).split("\n"),
            is_known=record.task in self._app.tasks,
            timeline=timeline(record, now),
            effect_keys={name: effect_key(record.key, name) for name in display.names_of_effects(record, policy)},
            outcome=None if record.result is None else display.outcome(record.result, record.content_type),
            size=display.size(record.result),
            actions=fitting(record, grace=self._runtime.grace, now=now) if self._write else [],
        )

    def metrics(self, request: Request) -> Response:
        """How many wait for a person, and for how long, for Prometheus."""
        found = self._open.look(_PATIENCE_OF_A_SCRAPE).counted
        if found is None:
            return PlainTextResponse("the first count is under way", HTTPStatus.SERVICE_UNAVAILABLE)
        return PlainTextResponse(prometheus_text(found, self._store.now()), media_type="text/plain; version=0.0.4")

    def judge(self, request: Request) -> Response:
        """Ask for a verdict on what was chosen; once it is complete, give it."""
        if not self._write:
            text = "No verdicts can be given here; see --write."
            return self._message(request, HTTPStatus.FORBIDDEN, "This page only shows", text)
        sent: Mapping[str, list[str]] = request.state.form
        seen = _read(sent.get("seen", []))
        if not 0 < len(seen) <= PAGE:
            text = f"Choose at least one record, and at most {PAGE}."
            return self._message(request, HTTPStatus.BAD_REQUEST, "No verdict", text)
        found = [self._store.get(key) for key in seen]
        records = [each for each in found if each and each.revision == seen[each.key]]
        left_out = [key for key in seen if key not in {each.key for each in records}]
        form = Form.of(sent) if "by" in sent else Form(by=unquote(request.cookies.get(_WHO, "")))
        if form.action is None or form.errors:
            now = self._store.now()
            fits = [action for each in records for action in fitting(each, grace=self._runtime.grace, now=now)]
            return self._page(
                request,
                "judge.html",
                HTTPStatus.UNPROCESSABLE_ENTITY if form.errors else HTTPStatus.OK,
                records=records,
                left_out=left_out,
                choices=[(action, *texts, fits.count(action)) for action, texts in CHOICES.items() if action in fits],
                form=form,
            )
        proof = {"result": form.result, "by": form.by, "reason": form.reason, "app": self._app}
        judged: list[Judged] = []
        outage = ""
        try:
            judged.extend(judge_each(form.action, records, **proof))
        except StoreUnavailable as error:
            outage = str(error)
        for count in (self._overview, self._open):
            count.leave_out([each.record.key for each in judged])
        page = self._page(
            request,
            "judged.html",
            total=len(seen),
            judged=judged,
            left_out=left_out,
            outage=outage,
            untried=records[len(judged) :],
            choice=CHOICES[form.action],
        )
        set_cookie(request, page, _WHO, quote(form.by))
        return page

    def explain(self, request: Request, error: Exception) -> Response:
        """The page for whoever may not come in, an address that leads nowhere, and a store that cannot be read."""
        match error:
            case Denied(status_code=HTTPStatus.UNAUTHORIZED):
                is_link = request.method == "GET" and "token" not in request.query_params
                # Browsers bring no cookie where another site's link leads here; on this page's own link they do.
                again = f"?{request.url.query}" if is_link else None
                answer = self._message(
                    request, HTTPStatus.UNAUTHORIZED, "Log in", error.detail, login=True, again=again
                )
                answer.headers["WWW-Authenticate"] = "Bearer"
                return answer
            case Denied():
                return self._message(request, error.status_code, "Refused", error.detail)
            case HTTPException():
                return self._message(request, error.status_code, "There is no such page", "Start at the overview.")
            case _:
                return self._message(request, HTTPStatus.SERVICE_UNAVAILABLE, "This cannot be shown", str(error))

    def _message(
        self, request: Request, status: int, title: str, text: str, *, login: bool = False, again: str | None = None
    ) -> Response:
        return self._page(request, "message.html", status, title=title, text=text, login=login, again=again)

    def _page(self, request: Request, template: str, status: int = HTTPStatus.OK, **context: Any) -> Response:
        now = cache(self._store.now)  # asked where times are shown: not by a page that says that the store is away
        return HTMLResponse(
            self._templates.get_template(template).render(
                link=partial(_link, request.scope["root_path"]),
                path=request.scope["path"].removeprefix(request.scope["root_path"]),
                ago=lambda at: ago(at, now()),
                state=lambda record: display.state(record, grace=self._runtime.grace, now=now()),
                store=repr(self._store),
                app_name=self._app.main or "celery",
                write=self._write,
                form_token=getattr(request.state, "form_token", None),
                **context,
            ),
            status,
        )


def _seen(record: Record) -> str:
    """What a form says of a record that a person looked at: its revision, and its key."""
    return " ".join(quote(each, errors=_ANY) for each in (record.revision, record.key))


def _read(seen: Sequence[str]) -> Mapping[str, str]:
    """By key, the revision of it that a person looked at; empty if that is not what :func:`_seen` has said."""
    try:
        pairs = [[unquote(part, errors=_ANY) for part in each.split(" ", 1)] for each in seen]
    except UnicodeDecodeError:
        return {}
    return {pair[-1]: pair[0] for pair in pairs}


_ANY = "surrogatepass"
"""For the errors of encoding: a store in memory has keys that are no UTF-8."""


def _link(root: str, path: str, query: Mapping[str, object] | None = None) -> str:
    asked = {name: value for name, value in (query or {}).items() if value}
    return f"{root}{path}{f'?{urlencode(asked, errors=_ANY)}' if asked else ''}"
