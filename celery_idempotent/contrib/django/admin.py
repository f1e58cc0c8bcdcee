"""The admin page: look at records, release claims, and resolve outcomes that are UNKNOWN.

Nothing is edited here. A verdict is given on the record that the person saw, so a record that changed meanwhile keeps
its change.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from django.contrib import admin, messages
from django.contrib.admin.utils import quote, unquote
from django.contrib.admin.views.main import ChangeList
from django.core.exceptions import PermissionDenied
from django.core.paginator import Paginator
from django.db import connections, transaction
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.html import format_html, format_html_join

from celery_idempotent.contrib.django import display, project
from celery_idempotent.contrib.django.forms import ReleaseForm, ResolveForm
from celery_idempotent.contrib.django.models import IdempotencyRecord
from celery_idempotent.engine import operator
from celery_idempotent.errors import PolicyError, StoreMisconfigured, StoreUnavailable
from celery_idempotent.printable import one_line
from celery_idempotent.protocol.publishing import shown_status
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.store import RecordTooLarge

_MOST_LISTED = 1_000
"""Records behind one list. Counting further would read the whole table for a number that nobody needs."""

_MOST_RELEASED = 100
"""Claims released at once; a person has checked each of them."""

_MEANINGS = {
    Status.IN_PROGRESS: "An attempt owns the key until its lease is over.",
    Status.COMPLETED: "The effect happened; later deliveries get the result.",
    Status.FAILED: "The failure is the outcome; later deliveries get it.",
    Status.RELEASED: "Given back without an outcome, or recorded by a publisher; the next delivery runs the task.",
    Status.UNKNOWN: "Nobody can tell whether the effect happened. Check the receiver, then resolve it.",
}

_UNREADABLE = "A newer version wrote this, or it is damaged; deliveries are postponed until somebody repairs it."

if TYPE_CHECKING:
    _Admin = admin.ModelAdmin[IdempotencyRecord]
    _Paginator = Paginator[IdempotencyRecord]
else:
    _Admin = admin.ModelAdmin
    _Paginator = Paginator


class _BoundedPaginator(_Paginator):
    @cached_property
    def count(self) -> int:
        listed = self.object_list
        assert isinstance(listed, QuerySet)
        return listed.order_by()[:_MOST_LISTED].count()


class _RecordList(ChangeList):
    def get_queryset(self, request: HttpRequest, exclude_parameters: Any = None) -> Any:
        """Without what can be large and is not listed."""
        return super().get_queryset(request, exclude_parameters).defer("result_text", "result_bytes", "steps", "error")


class _StatusFilter(admin.SimpleListFilter):
    title = "status"
    parameter_name = "status"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(str(each), str(each)) for each in Status]

    def queryset(self, request: HttpRequest, queryset: QuerySet[IdempotencyRecord]) -> QuerySet[IdempotencyRecord]:
        return queryset.filter(status=self.value()) if self.value() else queryset


class _TaskFilter(admin.SimpleListFilter):
    """Offers the tasks that the app knows: asking the table for its own would read all of it."""

    title = "task"
    parameter_name = "task"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        chosen = request.GET.get(self.parameter_name)
        return [(name, name) for name in sorted({*project.idempotent_tasks(), *([chosen] if chosen else [])})]

    def queryset(self, request: HttpRequest, queryset: QuerySet[IdempotencyRecord]) -> QuerySet[IdempotencyRecord]:
        return queryset.filter(task=self.value()) if self.value() else queryset


def _on_one_line(field: str) -> Callable[..., str | None]:
    """The value of ``field``, which somebody else has chosen."""

    @admin.display(description=field.replace("_", " "), ordering=field, empty_value="-")
    def shown(self: Any, row: IdempotencyRecord) -> str | None:
        value = getattr(row, field)
        return value and one_line(value)

    return shown


def _in_utc(field: str, description: str) -> Callable[..., str]:
    @admin.display(description=description)
    def shown(self: Any, row: IdempotencyRecord) -> str:
        return display.utc(getattr(row, field))

    return shown


@admin.register(IdempotencyRecord)
class IdempotencyRecordAdmin(_Admin):
    """Records for people: those who may view look, those who may change give verdicts, nobody edits."""

    list_display = ("state", "shown_task", "short_key", "attempts", "updated_utc", "shown_worker", "forgotten_utc")
    list_display_links = ("short_key",)
    list_filter = (_StatusFilter, _TaskFilter)
    search_fields = ("key", "task_id")
    search_help_text = "A whole idempotency key, or a whole task id (which reads the whole table)."
    # UNKNOWN first, COMPLETED last and the latest of them first: as the table's index has it, but PostgreSQL's.
    ordering = ("-status", "-expires_at")
    paginator = _BoundedPaginator
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    list_max_show_all = 0
    actions = ("release_selected", "resolve_selected")
    change_list_template = "celery_idempotent/admin/record_list.html"
    change_form_template = "celery_idempotent/admin/record.html"
    fieldsets = (
        (
            None,
            {
                "fields": (
                    *("state", "meaning", "shown_key", "shown_task", "shown_task_id", "shown_worker"),
                    *("shown_app", "attempts", "shown_error"),
                )
            },
        ),
        ("Outcome", {"fields": ("shown_result", "result_size", "content_type", "forgotten")}),
        ("Steps", {"fields": ("shown_steps",)}),
        (
            "Claim",
            {
                "fields": (
                    *("leased", "updated", "created", "takeovers", "fencing_token"),
                    *("owner", "revision", "fingerprint", "schema_version"),
                )
            },
        ),
    )

    # -- what is shown

    shown_key = _on_one_line("key")
    shown_task = _on_one_line("task")
    shown_task_id = _on_one_line("task_id")
    shown_worker = _on_one_line("worker")
    shown_app = _on_one_line("app")
    shown_error = _on_one_line("error")
    updated = _in_utc("updated_at", "updated")
    created = _in_utc("created_at", "created")
    leased = _in_utc("lease_until", "lease until")

    @admin.display(description="status", ordering="status")
    def state(self, row: IdempotencyRecord) -> str:
        """The status, and whether a lease is over or a message queued; or that the record cannot be read, and why."""
        if row.unreadable:
            return f"unreadable: {row.unreadable}"
        if _lease_is_over(row):
            return f"{row.status}, lease over"
        return shown_status(row.status, row.owner, row.lease_until, project.store_of_admin().now())

    @admin.display(description="key", ordering="key")
    def short_key(self, row: IdempotencyRecord) -> str:
        """The key as far as a list has room, all of it on hover."""
        return format_html('<span title="{}">{}</span>', one_line(row.key), one_line(display.short_key(row.key)))

    @admin.display(description="meaning")
    def meaning(self, row: IdempotencyRecord) -> str:
        """What the status means for the next delivery."""
        return _UNREADABLE if row.unreadable else _MEANINGS[Status(row.status)]

    @admin.display(description="updated (UTC)", ordering="updated_at")
    def updated_utc(self, row: IdempotencyRecord) -> str:
        """When the record was written last, for the list."""
        return _moment(row.updated_at)

    @admin.display(description="forgotten (UTC)", ordering="expires_at")
    def forgotten_utc(self, row: IdempotencyRecord) -> str:
        """Until when the outcome counts, for the list."""
        return "never" if row.expires_at is None else _moment(row.expires_at * 1000)

    @admin.display(description="forgotten after")
    def forgotten(self, row: IdempotencyRecord) -> str:
        """Until when the outcome counts; a record without an outcome is not forgotten."""
        return "never" if row.expires_at is None else display.utc(row.expires_at * 1000)

    @admin.display(description="result")
    def shown_result(self, row: IdempotencyRecord) -> str:
        """The outcome, if it is JSON."""
        if row.unreadable:
            return "not shown"
        result = row.record.result
        return "none" if result is None else _preformatted(display.outcome(result, row.content_type))

    @admin.display(description="result size")
    def result_size(self, row: IdempotencyRecord) -> str:
        """How much of an outcome is kept."""
        return "unknown" if row.unreadable else f"{display.size(row.record.result)} bytes"

    @admin.display(description="steps")
    def shown_steps(self, row: IdempotencyRecord) -> str:
        """Finished and started steps."""
        return "not shown" if row.unreadable else _preformatted(display.json_text(row.steps))

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """The list, with a warning where workers write elsewhere."""
        context = {"elsewhere": project.why_records_are_elsewhere(), "most_listed": _MOST_LISTED}
        return super().changelist_view(request, {**context, **(extra_context or {})})

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """All of one record, and the verdicts that it can take."""
        row = self.get_object(request, unquote(object_id))
        context: dict[str, Any] = {}
        if row is not None and self.has_verdict_permission(request):
            context = {
                "resolve_url": self._url("resolve", row.key) if _is_unknown(row) else None,
                "release_url": self._url("release", row.key) if _lease_is_over(row) else None,
            }
        return super().change_view(request, object_id, form_url, {**context, **(extra_context or {})})

    def get_queryset(self, request: HttpRequest) -> QuerySet[IdempotencyRecord]:
        """The records of the database that workers write to."""
        return super().get_queryset(request).using(project.store_of_admin().alias)

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        """A list that leaves out what is large."""
        return _RecordList

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[IdempotencyRecord], search_term: str
    ) -> tuple[QuerySet[IdempotencyRecord], bool]:
        """By key, which is found at once, or else by task id."""
        term = search_term.strip()
        if not term:
            return queryset, False
        by_key = queryset.filter(key=term)
        return (by_key if by_key.exists() else queryset.filter(task_id=term)), False

    # -- who may do what

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Nobody: records are made by claims."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: IdempotencyRecord | None = None) -> bool:
        """Nobody edits; who has the permission gives verdicts."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: IdempotencyRecord | None = None) -> bool:
        """Nobody: what is forgotten can happen again."""
        return False

    def has_verdict_permission(self, request: HttpRequest) -> bool:
        """Whether the person may release and resolve: by the model's permission to change."""
        return super().has_change_permission(request)

    # -- verdicts

    def get_urls(self) -> list[URLPattern]:
        """The pages of verdicts, before the admin's own, which take any path for a key."""
        pages: list[tuple[str, str, Callable[..., HttpResponse]]] = [
            ("<path:object_id>/resolve/", "resolve", self.resolve_view),
            ("<path:object_id>/release/", "release", self.release_view),
            ("release/", "release_many", self.release_many_view),
        ]
        prefix = "celery_idempotent_idempotencyrecord"
        own = [path(route, self._verdict_view(view), name=f"{prefix}_{name}") for route, name, view in pages]
        return [*own, *super().get_urls()]

    @admin.action(description="Release selected claims whose lease is over", permissions=["verdict"])
    def release_selected(self, request: HttpRequest, queryset: QuerySet[IdempotencyRecord]) -> HttpResponse | None:
        """Ask for a confirmation to release several claims."""
        rows = list(queryset[: _MOST_RELEASED + 1])
        if len(rows) > _MOST_RELEASED:
            self.message_user(request, f"Release at most {_MOST_RELEASED} at a time.", messages.ERROR)
            return None
        return self._release_page(request, rows)

    @admin.action(description="Resolve the selected UNKNOWN outcome", permissions=["verdict"])
    def resolve_selected(self, request: HttpRequest, queryset: QuerySet[IdempotencyRecord]) -> HttpResponse | None:
        """Go to the page that resolves one outcome."""
        rows = list(queryset[:2])
        if len(rows) > 1:
            self.message_user(request, "Resolve one at a time: check the receiver for each.", messages.ERROR)
            return None
        return HttpResponseRedirect(self._url("resolve", rows[0].key))

    def resolve_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """The verdict on one UNKNOWN outcome."""
        row = self.get_object(request, unquote(object_id))
        if row is None:
            return self._nothing_recorded(request, object_id)
        if not _is_unknown(row):
            self.message_user(
                request, f"Only an UNKNOWN outcome can be resolved; this is {self.state(row)}.", messages.ERROR
            )
            return HttpResponseRedirect(self._url("change", row.key))
        form = ResolveForm(request.POST or None, initial={"revision": row.revision})
        if form.is_valid():
            self._resolve(request, row, form.cleaned_data)
            return HttpResponseRedirect(self._url("change", row.key))
        return self._page(
            request,
            "resolve.html",
            "Resolve an unknown outcome",
            record=row,
            times={"created": self.created(row), "updated": self.updated(row)},
            steps=display.step_states(row.record.steps),
            retained=display.duration(project.policy_of(row.record).retain_ms),
            form=form,
            back=self._url("change", row.key),
        )

    def release_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Ask for a confirmation to release one claim."""
        row = self.get_object(request, unquote(object_id))
        if row is None:
            return self._nothing_recorded(request, object_id)
        return self._release_page(request, [row])

    def release_many_view(self, request: HttpRequest) -> HttpResponse:
        """Release the claims that the confirmation showed, each only if it is still what was shown."""
        seen = dict(each.split(" ", 1)[::-1] for each in request.POST.getlist("seen")[:_MOST_RELEASED])
        rows = list(self.get_queryset(request).filter(key__in=seen))
        if not rows:
            self.message_user(request, "There is nothing to release.", messages.WARNING)
            return HttpResponseRedirect(self._url("changelist"))
        form = ReleaseForm(request.POST)
        if not form.is_valid():
            return self._release_page(request, rows, form)
        for row in rows:
            self._release(request, row, seen[row.key])
        return HttpResponseRedirect(self._url("changelist"))

    def _nothing_recorded(self, request: HttpRequest, object_id: str) -> HttpResponse:
        self.message_user(request, f"Nothing is recorded under {unquote(object_id)}.", messages.WARNING)
        return HttpResponseRedirect(self._url("changelist"))

    def _resolve(self, request: HttpRequest, row: IdempotencyRecord, given: Mapping[str, Any]) -> None:
        store, key, revision = project.store_of_admin(), row.record.key, given["revision"]
        if given["verdict"] == "rerun":
            done = "Resolved: it did not happen. The next delivery runs the task; if there is none, publish it again."
            self._give(request, row, done, lambda: operator.rerun(store, key, seen_revision=revision))
            return
        codec, retain = project.runtime().codec, project.policy_of(row.record).retain_ms
        self._give(
            request,
            row,
            "Resolved: it happened. Later deliveries get the result.",
            lambda: operator.completed(store, codec, key, given["value"], retain=retain, seen_revision=revision),
        )

    def _release(self, request: HttpRequest, row: IdempotencyRecord, revision: str) -> None:
        store = project.store_of_admin()

        def release() -> Record:
            grace = project.policy_of(row.record).grace_ms
            return operator.release(store, row.record.key, grace=grace, seen_revision=revision)

        self._give(
            request, row, "Released. The next delivery runs the task; if there is none, publish it again.", release
        )

    def _give(self, request: HttpRequest, row: IdempotencyRecord, done: str, verdict: Callable[[], Record]) -> None:
        """Give a verdict; tell the person, and the admin's log, what became of it."""
        # The key comes last: Django begins a message with a capital letter, and a key must be shown as it is.
        try:
            verdict()
        except PolicyError as error:
            told, level = f"Nothing was changed: {error.remedy}.", messages.ERROR
        except RecordTooLarge as error:
            told, level = f"Nothing was changed: the result is too large ({error}).", messages.ERROR
        except StoreMisconfigured as error:
            told, level = f"Nothing was changed: {error.reason}.", messages.ERROR
        except StoreUnavailable as error:
            told, level = f"It is not certain what was written; look again ({error}).", messages.ERROR
        else:
            told, level = done, messages.SUCCESS
            self.log_change(request, row, done)
        self.message_user(request, f"{told} Key: {row}", level)

    def _release_page(
        self, request: HttpRequest, rows: Sequence[IdempotencyRecord], form: ReleaseForm | None = None
    ) -> HttpResponse:
        releasable = [each for each in rows if _lease_is_over(each)]
        return self._page(
            request,
            "release.html",
            "Release claims",
            releasable=[
                {"record": each, "policy": project.policy_of(each.record), "updated": self.updated(each)}
                for each in releasable
            ],
            others=[{"key": each.key, "state": self.state(each)} for each in rows if each not in releasable],
            now=display.utc(project.store_of_admin().now()),
            form=form or ReleaseForm(),
            back=self._url("changelist"),
        )

    def _page(self, request: HttpRequest, template: str, title: str, **context: Any) -> HttpResponse:
        return TemplateResponse(
            request,
            f"celery_idempotent/admin/{template}",
            {**self.admin_site.each_context(request), "opts": self.opts, "title": title, **context},
        )

    def _url(self, page: str, *key: str) -> str:
        name = f"admin:celery_idempotent_idempotencyrecord_{page}"
        return reverse(name, args=[quote(each) for each in key], current_app=self.admin_site.name)

    def _verdict_view(self, view: Callable[..., HttpResponse]) -> Callable[..., HttpResponse]:
        """``view`` for those who may give verdicts, and outside of the transactions of ATOMIC_REQUESTS."""

        def guarded(request: HttpRequest, **arguments: str) -> HttpResponse:
            if not self.has_verdict_permission(request):
                raise PermissionDenied
            return view(request, **arguments)

        served = self.admin_site.admin_view(guarded)
        for alias in connections:
            served = transaction.non_atomic_requests(using=alias)(served)
        return served


def _is_unknown(row: IdempotencyRecord) -> bool:
    return not row.unreadable and row.status == Status.UNKNOWN


def _lease_is_over(row: IdempotencyRecord) -> bool:
    return not row.unreadable and row.status == Status.IN_PROGRESS and row.lease_until <= project.store_of_admin().now()


def _moment(milliseconds: int) -> str:
    """A time that may be broken between its day and its hour only."""
    pieces = [(each,) for each in display.utc_short(milliseconds).split()]
    return format_html_join(" ", '<span class="nowrap">{}</span>', pieces)


def _preformatted(text: str) -> str:
    return format_html("<pre>{}</pre>", text)
