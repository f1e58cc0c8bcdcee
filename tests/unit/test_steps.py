"""What a record keeps of a step, and what an attempt does about it: the whole table."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_idempotent.protocol.codec import Encoded
from celery_idempotent.protocol.effects import OnTakeover
from celery_idempotent.protocol.steps import (
    Begin,
    Begun,
    Call,
    Doubt,
    Finished,
    Recall,
    Terms,
    decide_step,
    from_plain,
    only_finished,
    to_plain,
)

BEGUN = Begun(at=1_000, attempt=2)
FINISHED = Finished(Encoded('"ch_1"', "application/json"))


@pytest.mark.parametrize(
    ("seen", "on_takeover", "window", "decision"),
    [
        (None, "rerun", None, Call()),
        (None, "rerun", 500, Call()),
        (None, "refuse", None, Begin()),
        (None, "refuse", 500, Begin()),
        (BEGUN, "rerun", None, Call()),
        (BEGUN, "refuse", None, Doubt("step 'mail' began in attempt 2 and did not end")),
        (BEGUN, "refuse", 1_001, Call()),
        (
            BEGUN,
            "refuse",
            1_000,
            Doubt("step 'mail' began in attempt 2 and did not end, and its window of 1 s is over"),
        ),
        (FINISHED, "rerun", None, Recall(FINISHED)),
        (FINISHED, "refuse", None, Recall(FINISHED)),
        (FINISHED, "refuse", 1, Recall(FINISHED)),
    ],
)
def test_table(seen: Begun | Finished | None, on_takeover: OnTakeover, window: int | None, decision: object) -> None:
    """A finished step is never called again; one that began is called again only where that is safe or chosen."""
    assert decide_step("mail", seen, terms=Terms(on_takeover, window), now=2_000) == decision


@given(
    st.one_of(
        st.builds(Begun, st.integers(0), st.integers(1)),
        st.builds(Finished, st.builds(Encoded, st.text() | st.binary(), st.just("application/x"))),
        st.builds(Finished, st.none(), st.text()),
    )
)
def test_states_round_trip_through_a_record(state: Begun | Finished) -> None:
    """What is read from a record is what was written, text and bytes alike."""
    assert from_plain(to_plain(state)) == state


def test_nothing_recorded_is_no_state() -> None:
    """A step that no attempt has reached has no state."""
    assert from_plain(None) is None


@pytest.mark.parametrize("plain", [{}, {"begun_at": "soon", "attempt": 1}, {"text": "1"}, {"state": "new"}])
def test_foreign_state_is_refused(plain: dict[str, Any]) -> None:
    """A state of another shape is an error, not a step that may be called."""
    with pytest.raises(ValueError, match="not a state of a step"):
        from_plain(plain)


def test_verdict_of_no_effect_keeps_finished_steps() -> None:
    """Who says that nothing happened lets begun steps run again, and no finished one."""
    steps = {"a": to_plain(BEGUN), "b": to_plain(FINISHED), "c": to_plain(Finished(None, "too large"))}

    assert only_finished(steps) == {"b": steps["b"], "c": steps["c"]}
