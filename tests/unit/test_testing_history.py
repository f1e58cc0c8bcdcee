"""The check of concurrent histories accepts what a register can have replied, and nothing else."""

import itertools

import pytest

from celery_idempotent.testing.contract.parallel import Exchange, is_linearizable, shown


def swap(new: str, expected: str | None, reply: str | None, during: tuple[int, int]) -> Exchange:
    return Exchange("swap", new, expected, reply, *during)


def get(reply: str | None, during: tuple[int, int]) -> Exchange:
    return Exchange("get", None, None, reply, *during)


def delete(expected: str, reply: bool, during: tuple[int, int]) -> Exchange:
    return Exchange("delete", None, expected, reply, *during)


POSSIBLE = {
    "nothing happened": [],
    "one after the other": [swap("a", None, "a", (0, 1)), swap("b", "a", "b", (2, 3)), get("b", (4, 5))],
    "a loser is told who won": [swap("a", None, "a", (0, 5)), swap("b", None, "a", (0, 5))],
    "a resend finds its own write": [swap("a", None, "a", (0, 1)), swap("a", None, "a", (2, 3))],
    "a read beside a write sees the old or the new": [
        swap("a", None, "a", (0, 1)),
        swap("b", "a", "b", (2, 9)),
        get("a", (3, 4)),
        get("b", (5, 6)),
        get("b", (7, 8)),
    ],
    "a key can be claimed again once deleted": [
        swap("a", None, "a", (0, 1)),
        delete("a", True, (2, 9)),
        swap("b", None, "b", (2, 9)),
        swap("c", None, "b", (2, 9)),
    ],
    "a replacement finds nothing beside a deletion": [
        swap("a", None, "a", (0, 1)),
        swap("b", "a", None, (2, 9)),
        delete("a", True, (2, 9)),
    ],
}

IMPOSSIBLE = {
    "two winners of an empty key": [swap("a", None, "a", (0, 5)), swap("b", None, "b", (0, 5))],
    "two winners of one revision": [
        swap("a", None, "a", (0, 1)),
        swap("b", "a", "b", (2, 9)),
        swap("c", "a", "c", (2, 9)),
    ],
    "a read that goes back": [
        swap("a", None, "a", (0, 1)),
        swap("b", "a", "b", (2, 9)),
        get("b", (3, 4)),
        get("a", (5, 6)),
    ],
    "an acknowledged write that is not seen": [swap("a", None, "a", (0, 1)), get(None, (2, 3))],
    "a write seen before it was asked for": [get("a", (0, 1)), swap("a", None, "a", (2, 3))],
    "a loser that had won": [swap("a", None, None, (0, 1)), get("a", (2, 3))],
    "a deletion of another revision": [swap("a", None, "a", (0, 1)), delete("b", True, (2, 3))],
    "two deletions of one revision": [
        swap("a", None, "a", (0, 1)),
        delete("a", True, (2, 9)),
        delete("a", True, (2, 9)),
    ],
    "a record that comes back": [
        swap("a", None, "a", (0, 1)),
        delete("a", True, (2, 3)),
        get("a", (4, 5)),
    ],
    "a resend that overwrites a successor": [
        swap("a", None, "a", (0, 1)),
        swap("b", "a", "b", (2, 3)),
        swap("a", None, "a", (4, 5)),
    ],
}


@pytest.mark.parametrize("name", POSSIBLE)
def test_possible_history_is_accepted(name: str) -> None:
    """In whatever order its calls are listed."""
    assert all(is_linearizable(calls) for calls in itertools.permutations(POSSIBLE[name]))


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_impossible_history_is_refused(name: str) -> None:
    """In whatever order its calls are listed."""
    assert not any(is_linearizable(calls) for calls in itertools.permutations(IMPOSSIBLE[name]))


def test_history_is_shown_in_order_of_time() -> None:
    """What a failed test prints can be read from top to bottom."""
    calls = [get("b", (4_000_000, 5_000_000)), delete("b", True, (6_000_000, 7_000_000)), swap("b", "a", "b", (0, 1))]

    assert [line.split("  ")[-1] for line in shown(calls).splitlines()] == [
        "swap a by b -> b",
        "get -> b",
        "delete b -> True",
    ]
