"""The admin page: look at records, resolve outcomes that are UNKNOWN, release claims, and forget outcomes.

Nothing is edited here. A verdict is given on the record that the person saw, so a record that changed meanwhile keeps
its change.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.utils import quote, unquote
from django.contrib.admin.views.main import ChangeList
from django.core.paginator import Paginator
from django.db import connections, transaction
from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, reverse
from django.utils.html import format_html, format_html_join

from celery_idempotent.contrib.django import project
from celery_idempotent.contrib.django.models import IdempotencyRecord
from celery_idempotent.engine.verdicts import fitting
from celery_idempotent.errors import StoreUnavailable
from celery_idempotent.integration.operating import display, verdicts
from celery_idempotent.printable import one_line
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.verdicts import Action, counts_until
from celery_idempotent.stores.wrappers import Sealed

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


class _ColumnFilter(admin.SimpleListFilter):
    def queryset(self, request: HttpRequest, queryset: QuerySet[IdempotencyRecord]) -> QuerySet[IdempotencyRecord]:
        return queryset.filter(**{str(self.parameter_name): self.value()}) if self.value() else queryset


class _StatusFilter(_ColumnFilter):
    title = parameter_name = "status"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(str(each), str(each)) for each in Status]


class _TaskFilter(_ColumnFilter):
    """Offers the tasks that the app knows: asking the table for its own would read all of it."""

    title = parameter_name = "task"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        chosen = request.GET.get(self.parameter_name)
        return [(name, name) for name in sorted({*project.idempotent_tasks(), *([chosen] if chosen else [])})]


def _column(
    description: str, value: Callable[[IdempotencyRecord], Any], ordering: str | None = None
) -> Callable[..., Any]:
    """A column of the list, or a field of the page."""

    @admin.display(description=description, ordering=ordering, empty_value="-")
    def show(self: Any, row: IdempotencyRecord) -> Any:
        return value(row)

    return show


def _text(field: str) -> Callable[..., Any]:
    """The text in ``field``, decrypted, on one line: somebody else has chosen it."""

    def value(row: IdempotencyRecord) -> str | None:
        return one_line(getattr(row if row.unreadable else project.reveal(row.fetched), field) or "") or None

    return _column(field.replace("_", " "), value, field)


def _of_whole(description: str, value: Callable[[Record], str | None]) -> Callable[..., Any]:
    """What is made of all of a record, decrypted."""
    return _column(description, lambda row: "not shown" if row.unreadable else value(project.reveal(row.record)))


def _verbatim(text: str) -> str:
    return format_html("<pre>{}</pre>", text)


def _state(row: IdempotencyRecord) -> str:
    """The status as people read it; or that the record cannot be read, and why."""
    if row.unreadable:
        return f"unreadable: {row.unreadable}"
    return display.state(row.fetched, grace=project.runtime().grace, now=project.store_of_admin().now())


def _short_key(row: IdempotencyRecord) -> str:
    """The key as far as a list has room, all of it on hover."""
    return format_html('<span title="{}">{}</span>', one_line(row.key), one_line(display.beginning(row.key)))


def _forgotten(row: IdempotencyRecord, show: Callable[[int], str]) -> str:
    """Until when the outcome counts; a record without an outcome is not forgotten."""
    until = row.expires_at and row.expires_at * 1000 if row.unreadable else counts_until(row.fetched)
    return "never" if until is None else show(until)


def _moment(milliseconds: int) -> str:
    """A time that may be broken between its day and its hour only."""
    pieces = [(each,) for each in display.utc_short(milliseconds).split()]
    return format_html_join(" ", '<span class="nowrap">{}</span>', pieces)


def _about(row: IdempotencyRecord) -> dict[str, Any]:
    """What a person is told of a record that waits for a verdict."""
    record = project.reveal(row.fetched)
    policy = project.policy_of(record)
    texts = ("key", "label", "task", "task_id", "worker", "error")
    return {
        **{name: one_line(getattr(record, name) or "") for name in texts},
        "record": row,
        "policy": policy,
        "created": display.utc(row.created_at),
        "updated": display.utc(row.updated_at),
        "updated_short": _moment(row.updated_at),
        "short_key": _short_key(row),
        "steps": [(one_line(name), display.step_state(plain)) for name, plain in record.steps.items()],
        "retained": display.duration(policy.retain_ms),
    }


class VerdictForm(forms.Form):
    """What every verdict says."""

    reason = forms.CharField(
        label="Why",
        max_length=2000,
        widget=forms.TextInput(attrs={"size": 60}),
        help_text="What the receiver told you, or the number of a ticket. It is kept with your name.",
    )
    checked = forms.BooleanField()


class ResolveForm(VerdictForm):
    """The verdict on UNKNOWN outcomes."""

    verdict = forms.ChoiceField(
        label="What the receiver says",
        widget=forms.RadioSelect,
        choices=[(str(each), ". ".join(verdicts.CHOICES[each])) for each in (Action.COMPLETED, Action.RERUN)],
    )
    result = forms.CharField(
        label="Result to replay, as JSON",
        required=False,
        widget=forms.Textarea(attrs={"rows": 4, "cols": 60, "spellcheck": "false"}),
        help_text='What the task would have returned, such as "ch_1" with its quotes; null if nobody uses it. '
        "Only where it happened.",
    )

    def clean(self) -> dict[str, Any]:
        """Decode the result where there must be one."""
        cleaned = super().clean() or self.cleaned_data
        if cleaned.get("verdict") == "completed":
            try:
                cleaned["value"] = verdicts.json_of(cleaned.get("result", ""))
            except ValueError:
                self.add_error("result", 'Write JSON: "ch_1" with its quotes, 7, {"id": 7} or null.')
        return cleaned


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of verdict: what it is called, and how it is given. What takes ``action`` takes it."""

    name: str
    heading: str
    selection: str
    action: Action
    confirmation: str
    form: type[VerdictForm] = VerdictForm

    def fits(self, row: IdempotencyRecord) -> bool:
        """Whether the record can take it now."""
        if row.unreadable:
            return False
        now = project.store_of_admin().now()
        return self.action in fitting(row.fetched, grace=project.runtime().grace, now=now)


_KINDS = (
    _Kind(
        "resolve",
        "Resolve unknown outcomes",
        "Resolve selected UNKNOWN outcomes",
        Action.COMPLETED,
        "I checked the receiver, and this is what happened.",
        ResolveForm,
    ),
    _Kind(
        "release",
        "Release claims",
        "Release selected claims whose lease is over",
        Action.RELEASE,
        "I have checked the receiver: the effects of these attempts did not happen, or may happen again.",
    ),
    _Kind(
        "forget",
        "Forget outcomes",
        "Forget selected outcomes and released records",
        Action.FORGET,
        "I want the next delivery of each of these to run as if it were the first.",
    ),
)


def _action(kind: _Kind) -> Callable[..., HttpResponse | None]:
    """What asks for one verdict on all selected records, and gives it when the form comes back."""

    @admin.action(description=kind.selection, permissions=["verdict"])
    def select(self: Any, request: HttpRequest, queryset: QuerySet[IdempotencyRecord]) -> HttpResponse | None:
        rows = list(queryset.defer(None).defer("result_text", "result_bytes")[: _MOST_JUDGED + 1])
        if not 0 < len(rows) <= _MOST_JUDGED:
            most = f"{kind.name.capitalize()} at most {_MOST_JUDGED} at a time."
            self.message_user(request, most if rows else f"There is nothing to {kind.name}.", messages.ERROR)
            return None
        form = kind.form(request.POST if "seen" in request.POST else None)
        answer = self.judge if form.is_valid() else self.ask
        page: HttpResponse = answer(request, kind, rows, form)
        return page

    select.__name__ = f"{kind.name}_selected"
    return select


@admin.register(IdempotencyRecord)
class IdempotencyRecordAdmin(_Admin):
    """Records for people: those who may view look, those who may change give verdicts, nobody edits."""

    list_display = ("state", "shown_task", "shown_label", "short_key", "attempts", "updated_utc", "forgotten_utc")
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
    actions = tuple(map(_action, _KINDS))
    change_list_template = "celery_idempotent/admin/record_list.html"
    change_form_template = "celery_idempotent/admin/record.html"
    fieldsets = tuple(
        (heading, {"fields": tuple(fields.split())})
        for heading, fields in (
            (
                None,
                "state meaning shown_label shown_key shown_task shown_task_id shown_worker shown_app attempts "
                "shown_error",
            ),
            ("Outcome", "shown_result result_size content_type forgotten"),
            ("Steps", "shown_steps"),
            ("Verdict", "shown_verdict"),
            ("Claim", "leased updated created takeovers fencing_token owner revision fingerprint trace schema_version"),
        )
    )

    # -- what is shown

    shown_key = _text("key")
    shown_task = _text("task")
    shown_label = _text("label")
    shown_task_id = _text("task_id")
    shown_worker = _text("worker")
    shown_app = _text("app")
    shown_error = _text("error")
    updated = _column("updated", lambda row: display.utc(row.updated_at))
    created = _column("created", lambda row: display.utc(row.created_at))
    leased = _column("lease until", lambda row: display.utc(row.lease_until))
    updated_utc = _column("updated (UTC)", lambda row: _moment(row.updated_at), "updated_at")
    forgotten_utc = _column("forgotten (UTC)", lambda row: _forgotten(row, _moment), "expires_at")
    forgotten = _column("forgotten after", lambda row: _forgotten(row, display.utc))
    state = _column("status", _state, "status")
    short_key = _column("key", _short_key, "key")
    meaning = _column("meaning", lambda row: _UNREADABLE if row.unreadable else _MEANINGS[Status(row.status)])
    result_size = _column(
        "result size", lambda row: "unknown" if row.unreadable else f"{display.size(row.record.result)} bytes"
    )
    shown_result = _of_whole(
        "result",
        lambda record: (
            "none" if record.result is None else _verbatim(display.outcome(record.result, record.content_type))
        ),
    )
    shown_steps = _of_whole("steps", lambda record: _verbatim(display.json_text(json.dumps(dict(record.steps)))))
    shown_verdict = _of_whole("verdict", lambda record: display.verdict(record.verdict) if record.verdict else None)

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """The list, with a warning where workers write elsewhere."""
        context = {"elsewhere": project.why_records_are_elsewhere(), "most_listed": _MOST_LISTED}
        return super().changelist_view(request, {**context, **(extra_context or {})})

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """All of one record, and the verdicts that it can take."""
        row = self.get_object(request, unquote(object_id))
        is_judge = self.has_verdict_permission(request)
        offered = [kind for kind in _KINDS if is_judge and row and kind.fits(row)]
        context = {"verdicts": offered, "list": self._url("changelist")}
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

    def has_add_permission(self, request: HttpRequest, obj: IdempotencyRecord | None = None) -> bool:
        """Nobody: records are made by claims, nobody edits, and what is forgotten can happen again."""
        return False

    has_change_permission = has_delete_permission = has_add_permission

    def has_verdict_permission(self, request: HttpRequest) -> bool:
        """Whether the person may release and resolve: by the model's permission to change."""
        return super().has_change_permission(request)

    # -- verdicts

    def get_urls(self) -> list[URLPattern]:
        """Verdicts, which are actions of the list, stay outside of the transactions of ATOMIC_REQUESTS."""
        for alias in connections:
            transaction.non_atomic_requests(using=alias)(type(self).changelist_view)  # perhaps overridden
        return super().get_urls()

    def judge(
        self, request: HttpRequest, kind: _Kind, rows: Sequence[IdempotencyRecord], form: forms.Form
    ) -> HttpResponse:
        """Give the verdict on each record only if it is still what the form showed."""
        shown = (each.partition(" ") for each in request.POST.getlist("seen"))
        seen = {key: revision for revision, _, key in shown}
        for row in rows:
            action = Action(form.cleaned_data.get("verdict", kind.action))
            reason = form.cleaned_data["reason"]
            proof = {"result": form.cleaned_data.get("value"), "by": request.user.get_username(), "reason": reason}
            try:
                project.judge(action, row.key, seen_revision=seen.get(row.key, ""), **proof)
            except verdicts.REFUSED as error:
                answer, level = f"Nothing was changed: {verdicts.refusal(error)}.", messages.ERROR
            except StoreUnavailable as error:
                answer, level = f"It is not certain what was written; look again ({error}).", messages.ERROR
            else:
                answer, level = f"Given: {'. '.join(verdicts.CHOICES[action])}", messages.SUCCESS
                self.log_change(request, row, f"{answer} Reason: {reason}")
            # The key comes last: Django begins a message with a capital letter, and a key must be shown as it is.
            self.message_user(request, f"{answer} Key: {row}", level)
        return HttpResponseRedirect(self._url("change", rows[0].key) if len(rows) == 1 else self._url("changelist"))

    def ask(
        self, request: HttpRequest, kind: _Kind, rows: Sequence[IdempotencyRecord], form: forms.Form
    ) -> HttpResponse:
        """Show the records that can take the verdict, and the form."""
        fitting = [each for each in rows if kind.fits(each)]
        context = {
            **self.admin_site.each_context(request),
            "opts": self.opts,
            "title": kind.heading,
            "kind": kind,
            "fitting": [_about(each) for each in fitting],
            "others": [f"{each}: {_state(each)}" for each in rows if each not in fitting],
            "now": display.utc(project.store_of_admin().now()),
            "form": form,
            "back": self._url("changelist"),
        }
        return TemplateResponse(request, f"celery_idempotent/admin/{kind.name}.html", context)

    def _url(self, page: str, *key: str) -> str:
        name = f"admin:celery_idempotent_idempotencyrecord_{page}"
        return reverse(name, args=[quote(each) for each in key], current_app=self.admin_site.name)
