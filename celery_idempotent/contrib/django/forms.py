"""The forms in which a person gives a verdict."""

from typing import Any

from django import forms

from celery_idempotent.integration.operating.verdicts import json_of


class VerdictForm(forms.Form):
    """What every verdict says."""

    reason = forms.CharField(
        label="Why",
        max_length=2000,
        widget=forms.TextInput(attrs={"size": 60}),
        help_text="What the receiver told you, or the number of a ticket. It is kept with your name.",
    )


class ResolveForm(VerdictForm):
    """The verdict on UNKNOWN outcomes."""

    verdict = forms.ChoiceField(
        label="What the receiver says",
        widget=forms.RadioSelect,
        choices=[
            ("completed", "It happened. Answer every later delivery with the result below."),
            ("rerun", "It did not happen. The next delivery runs the task."),
        ],
    )
    result = forms.CharField(
        label="Result to replay, as JSON",
        required=False,
        widget=forms.Textarea(attrs={"rows": 4, "cols": 60, "spellcheck": "false"}),
        help_text='What the task would have returned, such as "ch_1" with its quotes; null if nobody uses it. '
        "Only where it happened.",
    )
    checked = forms.BooleanField(label="I checked the receiver, and this is what happened.")

    def clean(self) -> dict[str, Any]:
        """Decode the result where there must be one."""
        cleaned = super().clean() or self.cleaned_data
        if cleaned.get("verdict") == "completed":
            try:
                cleaned["value"] = json_of(cleaned.get("result", ""))
            except ValueError:
                self.add_error("result", 'Write JSON: "ch_1" with its quotes, 7, {"id": 7} or null.')
        return cleaned


class ReleaseForm(VerdictForm):
    """The confirmation before claims are given back."""

    checked = forms.BooleanField(
        label="I have checked the receiver: the effects of these attempts did not happen, or may happen again."
    )


class ForgetForm(VerdictForm):
    """The confirmation before outcomes are forgotten."""

    checked = forms.BooleanField(label="I want the next delivery of each of these to run as if it were the first.")
