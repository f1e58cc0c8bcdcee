"""The demo's story: what the rows of a ledger say, in sentences."""

import io
import itertools
import json
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from lab.demo import column, screen
from lab.demo.ledger import Ledger, Row
from lab.demo.story import Story

CHARGE, STOCK = "charge_card", "reserve_stock"


def tell(*rows: Row) -> list[str]:
    """What the story says of rows that come a second apart."""
    story = Story(column.VOICE)
    timed = (replace(row, time=float(second)) for second, row in enumerate(rows, 100))
    return [str(line).lstrip() for row in timed if (line := story.hear(row))]


def delivery(pid: int, task: str = CHARGE, order: str = "order-0007", task_id: str = "m") -> Row:
    return Row(what="delivery", task=task, order=order, task_id=task_id, pid=pid)


def row(what: str, pid: int, task: str = CHARGE, order: str = "order-0007", point: str = "") -> Row:
    return Row(what=what, task=task, order=order, point=point, pid=pid)


def killed(pid: int, point: str, task: str = CHARGE, order: str = "order-0007") -> list[Row]:
    effect = [row("effect", pid, task, order)] if point == "after" else []
    return [delivery(pid, task, order), row("run", pid, task, order), *effect, row("kill", pid, task, order, point)]


def test_a_kill_after_the_charge_is_told_to_its_end() -> None:
    """Who was killed, who took over, and that the bank knew the key."""
    end = [delivery(2), row("taken_over", 2), row("run", 2), row("recognised", 2), row("ended", 2)]
    assert tell(*killed(1, "after"), *end) == [
        "3.0  charge 0007   1 killed right after its effect",
        "8.0  charge 0007   2 took over; the bank knew its key: charged once",
    ]


def test_a_kill_before_the_charge_ends_with_the_only_one() -> None:
    """The successor's charge is the first."""
    end = [delivery(2), row("taken_over", 2), row("run", 2), row("effect", 2), row("ended", 2)]
    assert tell(*killed(1, "before"), *end)[1] == "7.0  charge 0007   2 took over: charged once"


def test_plain_celery_charges_again() -> None:
    """Without a sign of a takeover it is a second run."""
    end = [delivery(2), row("run", 2), row("effect", 2), row("ended", 2)]
    assert tell(*killed(1, "after"), *end)[1].endswith("2 ran it again: charged 2 times")


def test_a_copy_that_is_replayed_meanwhile_does_not_end_the_tale() -> None:
    """It can come between the successor's completion and its end."""
    end = [delivery(2), row("taken_over", 2), row("effect", 2)]
    copy = [delivery(3, task_id="other"), row("replayed", 3), row("ended", 3)]
    assert tell(*killed(1, "before"), *end, *copy, row("ended", 2))[1].endswith("2 took over: charged once")


def test_stock_that_is_reserved_twice_is_told_with_its_excuse() -> None:
    """Exactly once is not promised for it; the reader is told why."""
    end = [row("taken_over", 2), row("effect", 2, STOCK), row("ended", 2)]
    assert tell(*killed(1, "after", STOCK), delivery(2, STOCK), *end)[1].endswith(
        "2 took over: reserved 2 times (it knows no key)"
    )


def test_a_postponed_delivery_ends_nothing() -> None:
    """A message that comes back too early and finds the dead claim is not the end of the tale."""
    early = [delivery(2), row("conflicted", 2), row("ended", 2)]
    assert len(tell(*killed(1, "before"), *early)) == 1


def test_a_copy_that_meets_a_running_body_is_told_in_both_columns() -> None:
    """Plain Celery runs both at once; the library postpones the copy."""
    running = [delivery(1), row("run", 1), delivery(2)]
    assert tell(*running, row("run", 2)) == ["3.0  charge 0007   came again: 2 runs it while 1 does"]
    assert tell(*running, row("conflicted", 2)) == ["3.0  charge 0007   came again while 1 works on it: postponed"]


def test_a_copy_that_meets_nobody_does_not_overlap() -> None:
    """The first has ended, or its process is dead."""
    assert tell(delivery(1), row("run", 1), row("ended", 1), delivery(2), row("run", 2)) == []
    assert tell(*killed(1, "before"), delivery(2), row("conflicted", 2))[1:] == []


def test_an_order_that_is_published_twice_is_told_in_both_columns() -> None:
    """A second charge, or the first one's result."""
    first = [delivery(1), row("run", 1), row("effect", 1), row("ended", 1)]
    copy = delivery(2, task_id="other")
    assert tell(*first, copy, row("run", 2), row("effect", 2))[0].endswith("came again: charged 2 times")
    assert tell(*first, copy, row("replayed", 2), row("ended", 2))[0].endswith("got the recorded result, nothing ran")


def test_an_outage_of_the_store_is_told() -> None:
    """Who found it away, and that it came back."""
    told = tell(delivery(1), row("store_unavailable", 1), row("ended", 1), row("store_killed", 0))
    assert [line.split("  ")[-1].strip() for line in told] == [
        "found the store away: nothing ran, postponed",
        "killed; it is back with all that it had acknowledged",
    ]


def test_few_accidents_of_a_kind_are_told_and_all_are_counted() -> None:
    """An ending is told for whose kill was."""
    story = Story(column.VOICE)
    orders = [f"order-{number:04}" for number in range(5)]
    rows = [
        *itertools.chain(*(killed(pid, "before", order=order) for pid, order in enumerate(orders))),
        *itertools.chain(
            *(
                (delivery(9, order=order), row("taken_over", 9), row("effect", 9, order=order), row("ended", 9))
                for order in orders
            )
        ),
    ]
    lines = [line for each in rows if (line := story.hear(each))]
    assert (len(lines), story.kills, story.takeovers, len(story.ended)) == (2 * column.VOICE.told, 5, 5, 5)


def test_lines_reach_a_screen_that_is_no_terminal() -> None:
    """As they come, without a bar or an escape sequence."""
    console = Console(file=io.StringIO(), width=80)
    with screen.telling(console, "plain Celery", Story(column.VOICE), 3) as hear:
        hear(killed(1, "before"))
        assert isinstance(console.file, io.StringIO)
        shown = console.file.getvalue()
    assert shown.endswith("charge 0007   1 killed right before its effect\n")
    assert console.file.getvalue() == shown
    assert "\x1b" not in shown


def test_the_ledger_is_read_on_from_where_one_was(tmp_path: Path) -> None:
    """What is half written is read when it is whole."""
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.append(Row(what="run"))
    first, position = ledger.since(0)
    half, rest = json.dumps({"what": "kill"})[:6], json.dumps({"what": "kill"})[6:]
    with (tmp_path / "ledger.jsonl").open("a") as file:
        file.write("\n" + half)
    assert ([each.what for each in first], ledger.since(position)[0]) == (["run"], [])
    with (tmp_path / "ledger.jsonl").open("a") as file:
        file.write(rest + "\n")
    assert [each.what for each in ledger.since(position)[0]] == ["kill"]
