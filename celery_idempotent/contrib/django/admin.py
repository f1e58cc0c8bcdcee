"""The admin page: look at records, resolve outcomes that are UNKNOWN, release claims, and forget outcomes.

Nothing is edited here. A verdict is given on the record that the person saw, so a record that changed meanwhile keeps
its change.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from django.contrib import admin, messages
from django.contrib.admin.utils import quote, unquote
from django.contrib.admin.views.main import ChangeList
from django.core.exceptions import PermissionDenied
from django.core.paginator import Paginator
from django.db import connections, transaction
from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.html import format_html, format_html_join

from celery_idempotent.contrib.django import project
from celery_idempotent.contrib.django.forms import ForgetForm, ReleaseForm, ResolveForm, VerdictForm
from celery_idempotent.contrib.django.models import IdempotencyRecord
from celery_idempotent.engine.verdicts import fitting
from celery_idempotent.errors import StoreUnavailable
from celery_idempotent.integration import display, verdicts
from celery_idempotent.printable import one_line
from celery_idempotent.protocol.record import Status
from celery_idempotent.protocol.verdicts import Action, counts_until
from celery_idempotent.stores.sealed import Sealed

_MOST_LISTED = 1_000
"""Records behind one list. Counting further would read the whole table for a number that nobody needs."""

_MOST_JUDGED = 100
"""Records that get one verdict at once; a person has checked each of them."""

_MEANINGS = {
    Status.IN_PROGRESS: "An attempt owns the key until its lease is over.",
    Status.COMPLETED: "The effect happened; later deliveries get the result.",
    Status.FAILED: "The failure is the outcome; later deliveries get it.",
    Status.RELEASED: "Given back without an outcome, or recorded by a publisher; the next delivery runs the task.",
    Status.UNKNOWN: "Nobody can tell whether the effect happened. Check the receiver, then resolve it.",
}

_UNREADABLE = "A newer version wrote this, or it is damaged; deliveries are postponed until somebody repairs it."

_LABELS_ARE_ENCRYPTED = (
    "No key was found. Labels are encrypted, and a database cannot look for one: use celery idempotency list --label."
)

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


def _in_clear(field: str) -> Callable[..., str | None]:
    """The same of a field that may be encrypted."""

    @admin.display(description=field, ordering=field, empty_value="-")
    def shown(self: Any, row: IdempotencyRecord) -> str | None:
        value = getattr(row if row.unreadable else project.revealed(row.fetched), field)
        return one_line(value) if value else None

    return shown


def _in_utc(field: str, description: str) -> Callable[..., str]:
    @admin.display(description=description)
    def shown(self: Any, row: IdempotencyRecord) -> str:
        return display.utc(getattr(row, field))

    return shown


@admin.register(IdempotencyRecord)
class IdempotencyRecordAdmin(_Admin):
    """Records for people: those who may view look, those who may change give verdicts, nobody edits."""

    list_display = (
        *("state", "shown_task", "shown_label", "short_key", "attempts"),
        *("updated_utc", "forgotten_utc"),
    )
    list_display_links = ("short_key",)
    list_filter = (_StatusFilter, _TaskFilter)
    search_fields = ("key", "label", "task_id")
    search_help_text = (
        "An idempotency key or a label; a star at the end stands for any rest. Or a whole task id, or the beginning of "
        "a key (which read the whole table)."
    )
    # UNKNOWN first, COMPLETED last and the latest of them first: as the table's index has it, but PostgreSQL's.
    ordering = ("-status", "-expires_at")
    paginator = _BoundedPaginator
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    list_max_show_all = 0
    actions = ("resolve_selected", "release_selected", "forget_selected")
    change_list_template = "celery_idempotent/admin/record_list.html"
    change_form_template = "celery_idempotent/admin/record.html"
    fieldsets = (
        (
            None,
            {
                "fields": (
                    *("state", "meaning", "shown_label", "shown_key", "shown_task", "shown_task_id"),
                    *("shown_worker", "shown_app", "attempts", "shown_error"),
                )
            },
        ),
        ("Outcome", {"fields": ("shown_result", "result_size", "content_type", "forgotten")}),
        ("Steps", {"fields": ("shown_steps",)}),
        ("Verdict", {"fields": ("shown_verdict",)}),
        (
            "Claim",
            {
                "fields": (
                    *("leased", "updated", "created", "takeovers", "fencing_token"),
                    *("owner", "revision", "fingerprint", "trace", "schema_version"),
                )
            },
        ),
    )

    # -- what is shown

    shown_key = _on_one_line("key")
    shown_task = _on_one_line("task")
    shown_label = _in_clear("label")
    shown_task_id = _on_one_line("task_id")
    shown_worker = _on_one_line("worker")
    shown_app = _on_one_line("app")
    shown_error = _in_clear("error")
    updated = _in_utc("updated_at", "updated")
    created = _in_utc("created_at", "created")
    leased = _in_utc("lease_until", "lease until")

    @admin.display(description="status", ordering="status")
    def state(self, row: IdempotencyRecord) -> str:
        """The status as people read it; or that the record cannot be read, and why."""
        if row.unreadable:
            return f"unreadable: {row.unreadable}"
        grace = project.policy_of(row.fetched).grace_ms
        return display.state(row.fetched, grace=grace, now=project.store_of_admin().now())

    @admin.display(description="key", ordering="key")
    def short_key(self, row: IdempotencyRecord) -> str:
        """The key as far as a list has room, all of it on hover."""
        return format_html('<span title="{}">{}</span>', one_line(row.key), one_line(display.beginning(row.key)))

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
        until = _counts_until(row)
        return "never" if until is None else _moment(until)

    @admin.display(description="forgotten after")
    def forgotten(self, row: IdempotencyRecord) -> str:
        """Until when the outcome counts; a record without an outcome is not forgotten."""
        until = _counts_until(row)
        return "never" if until is None else display.utc(until)

    @admin.display(description="result")
    def shown_result(self, row: IdempotencyRecord) -> str:
        """The outcome, if it is JSON."""
        if row.unreadable:
            return "not shown"
        record = project.revealed(row.record)
        if record.result is None:
            return "none"
        return _preformatted(display.outcome(record.result, record.content_type))

    @admin.display(description="result size")
    def result_size(self, row: IdempotencyRecord) -> str:
        """How much of an outcome is kept."""
        return "unknown" if row.unreadable else f"{display.size(row.record.result)} bytes"

    @admin.display(description="steps")
    def shown_steps(self, row: IdempotencyRecord) -> str:
        """Finished and started steps."""
        if row.unreadable:
            return "not shown"
        return _preformatted(display.json_text(json.dumps(dict(project.revealed(row.record).steps))))

    @admin.display(description="verdict", empty_value="-")
    def shown_verdict(self, row: IdempotencyRecord) -> str | None:
        """Who has judged what last, when and why."""
        if row.unreadable:
            return "not shown"
        told = project.revealed(row.record).verdict
        return display.verdict(told) if told else None

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """The list, with a warning where workers write elsewhere."""
        context = {"elsewhere": project.why_records_are_elsewhere(), "most_listed": _MOST_LISTED}
        return super().changelist_view(request, {**context, **(extra_context or {})})

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """All of one record, and the verdicts that it can take."""
        row = self.get_object(request, unquote(object_id))
        offered = []
        if row is not None and self.has_verdict_permission(request):
            offered = [(self._url(kind.name, row.key), kind) for kind in _KINDS.values() if kind.fits(row)]
        context: dict[str, Any] = {"verdicts": offered}
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
        """By key or label, which are found at once, or else by task id or what a list shows of a key."""
        term = search_term.strip()
        if not term:
            return queryset, False
        how = "__startswith" if term.endswith("*") else ""
        for field in ("key", "label"):
            found = queryset.filter(**{f"{field}{how}": term.removesuffix("*") if how else term})
            if found.exists():
                return found, False
        if isinstance(project.store_of_admin(), Sealed):
            self.message_user(request, _LABELS_ARE_ENCRYPTED, messages.INFO)
        return queryset.filter(Q(task_id=term) | Q(key__startswith=term)), False

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
        prefix = "celery_idempotent_idempotencyrecord"
        own = []
        for name, kind in _KINDS.items():
            one, several = partial(self.one_view, kind=kind), partial(self.several_view, kind=kind)
            own += [
                path(f"<path:object_id>/{name}/", self._verdict_view(one), name=f"{prefix}_{name}"),
                path(f"{name}/", self._verdict_view(several), name=f"{prefix}_{name}_many"),
            ]
        return [*own, *super().get_urls()]

    @admin.action(description="Resolve selected UNKNOWN outcomes", permissions=["verdict"])
    def resolve_selected(self, request: HttpRequest, queryset: QuerySet[IdempotencyRecord]) -> HttpResponse | None:
        """Ask for one verdict on several outcomes."""
        return self._selected(request, queryset, _RESOLVE)

    @admin.action(description="Release selected claims whose lease is over", permissions=["verdict"])
    def release_selected(self, request: HttpRequest, queryset: QuerySet[IdempotencyRecord]) -> HttpResponse | None:
        """Ask for a confirmation to release several claims."""
        return self._selected(request, queryset, _RELEASE)

    @admin.action(description="Forget selected outcomes and released records", permissions=["verdict"])
    def forget_selected(self, request: HttpRequest, queryset: QuerySet[IdempotencyRecord]) -> HttpResponse | None:
        """Ask for a confirmation to forget several records."""
        return self._selected(request, queryset, _FORGET)

    def _selected(
        self, request: HttpRequest, queryset: QuerySet[IdempotencyRecord], kind: "_Kind"
    ) -> HttpResponse | None:
        rows = list(queryset[: _MOST_JUDGED + 1])
        if len(rows) > _MOST_JUDGED:
            self.message_user(request, f"{kind.title} at most {_MOST_JUDGED} at a time.", messages.ERROR)
            return None
        return self._judge_page(request, kind, rows)

    def one_view(self, request: HttpRequest, object_id: str, kind: "_Kind") -> HttpResponse:
        """Ask for a verdict on one record."""
        row = self.get_object(request, unquote(object_id))
        if row is None:
            self.message_user(request, f"Nothing is recorded under {unquote(object_id)}.", messages.WARNING)
            return HttpResponseRedirect(self._url("changelist"))
        return self._judge_page(request, kind, [row])

    def several_view(self, request: HttpRequest, kind: "_Kind") -> HttpResponse:
        """Give the verdict on the records that the form showed, on each only if it is still what was shown."""
        seen = dict(each.split(" ", 1)[::-1] for each in request.POST.getlist("seen")[:_MOST_JUDGED])
        rows = list(self.get_queryset(request).filter(key__in=seen))
        if not rows:
            self.message_user(request, f"There is nothing to {kind.name}.", messages.WARNING)
            return HttpResponseRedirect(self._url("changelist"))
        form = kind.form(request.POST)
        if not form.is_valid():
            return self._judge_page(request, kind, rows, form)
        for row in rows:
            self._give(request, row, kind, seen[row.key], form.cleaned_data)
        return HttpResponseRedirect(self._url("change", rows[0].key) if len(rows) == 1 else self._url("changelist"))

    def _give(
        self, request: HttpRequest, row: IdempotencyRecord, kind: "_Kind", revision: str, given: Mapping[str, Any]
    ) -> None:
        """Give a verdict; tell the person, the log, and whoever listens, what became of it."""
        # The key comes last: Django begins a message with a capital letter, and a key must be shown as it is.
        action = kind.chosen(given)
        proof = {"result": given.get("value"), "by": request.user.get_username(), "reason": given["reason"]}
        try:
            project.judge(action, row.key, seen_revision=revision, **proof)
        except verdicts.REFUSED as error:
            answer, level = f"Nothing was changed: {verdicts.refusal(error)}.", messages.ERROR
        except StoreUnavailable as error:
            answer, level = f"It is not certain what was written; look again ({error}).", messages.ERROR
        else:
            answer, level = _DONE[action], messages.SUCCESS
            self.log_change(request, row, f"{answer} Reason: {given['reason']}")
        self.message_user(request, f"{answer} Key: {row}", level)

    def _judge_page(
        self, request: HttpRequest, kind: "_Kind", rows: Sequence[IdempotencyRecord], form: VerdictForm | None = None
    ) -> HttpResponse:
        fitting = [each for each in rows if kind.fits(each)]
        return self._page(
            request,
            f"{kind.name}.html",
            kind.heading,
            kind=kind,
            fitting=[self._about(each) for each in fitting],
            others=[{"key": each.key, "state": self.state(each)} for each in rows if each not in fitting],
            now=display.utc(project.store_of_admin().now()),
            form=form or kind.form(),
            action=self._url(f"{kind.name}_many"),
            back=self._url("changelist"),
        )

    def _about(self, row: IdempotencyRecord) -> dict[str, Any]:
        """What a person is told of a record that waits for the verdict."""
        record = project.revealed(row.record)
        policy = project.policy_of(record)
        return {
            "record": row,
            "label": one_line(record.label),
            "error": one_line(record.error or ""),
            "policy": policy,
            "created": self.created(row),
            "updated": self.updated(row),
            "updated_short": self.updated_utc(row),
            "short_key": self.short_key(row),
            "steps": [(name, display.step_state(plain)) for name, plain in record.steps.items()],
            "retained": display.duration(policy.retain_ms),
        }

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


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of verdict: what it is called, and how it is given. What takes ``action`` takes it."""

    name: str
    title: str
    heading: str
    form: type[VerdictForm]
    action: Action

    def chosen(self, given: Mapping[str, Any]) -> Action:
        """The verdict that a filled-in form states."""
        return Action(given.get("verdict", self.action))

    def fits(self, row: IdempotencyRecord) -> bool:
        """Whether the record can take it now."""
        if row.unreadable:
            return False
        grace = project.policy_of(row.fetched).grace_ms
        return self.action in fitting(row.fetched, grace=grace, now=project.store_of_admin().now())


_AGAIN = "The next delivery runs the task; if there is none, publish it again."

_DONE = {
    Action.COMPLETED: "Resolved: it happened. Later deliveries get the result.",
    Action.RERUN: f"Resolved: it did not happen. {_AGAIN}",
    Action.RELEASE: f"Released. {_AGAIN}",
    Action.FORGET: "Forgotten. The next delivery is a new operation.",
}

_RESOLVE = _Kind("resolve", "Resolve", "Resolve unknown outcomes", ResolveForm, Action.COMPLETED)
_RELEASE = _Kind("release", "Release", "Release claims", ReleaseForm, Action.RELEASE)
_FORGET = _Kind("forget", "Forget", "Forget outcomes", ForgetForm, Action.FORGET)
_KINDS = {each.name: each for each in (_RESOLVE, _RELEASE, _FORGET)}


def _counts_until(row: IdempotencyRecord) -> int | None:
    return row.expires_at and row.expires_at * 1000 if row.unreadable else counts_until(row.fetched)


def _moment(milliseconds: int) -> str:
    """A time that may be broken between its day and its hour only."""
    pieces = [(each,) for each in display.utc_short(milliseconds).split()]
    return format_html_join(" ", '<span class="nowrap">{}</span>', pieces)


def _preformatted(text: str) -> str:
    return format_html("<pre>{}</pre>", text)
