"""The tutorial, as a reader does it: its files, its commands, in its order, in two terminals.

``python -m tests.support.tutorial some.whl`` does it with that package, in an empty environment. It needs Python only.
"""

import os
import pty
import re
import select
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

T = TypeVar("T")

PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"
PUBLISHED = "celery-idempotent[sql] @ git+https://github.com/celery-idempotent/celery-idempotent"
"""What a reader installs."""
PATIENCE_S = 300
WORKER, READY = "celery -A shop worker", re.compile(r" ready\.$", re.MULTILINE)
SHELL = ("bash", "--norc", "--noprofile", "--noediting", "-i")
PROMPT = re.compile(r"<<(\d+)>>")
"""What the shell says when a command is over: its status."""
CTRL_C = b"\x03"
SEEN_BY_NOBODY = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")
DIFFERS = (
    (r"\d{4}-\d\d-\d\d [\d:]+,\d+", "TIME"),
    (r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "ID"),
    (r"pid:\d+", "PID"),
    (r"ForkPoolWorker-\d+", "PROCESS"),
    (r"\b\d+ s\b", "AGE"),
    (r"(?<=\S) {2,}", "  "),  # as wide as an age makes its column
    (r" +$", ""),
    (r"^\n", ""),
)
"""What each run has of its own, and what stands for it in a comparison."""


@dataclass(frozen=True, slots=True)
class File:
    """What a reader saves."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Commands:
    """What a reader types, line by line."""

    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Printed:
    """What the last commands have printed. A line of dots stands for any lines."""

    text: str


@dataclass(frozen=True, slots=True)
class Logged:
    """What a reader sees in the worker's terminal, among other lines and in whatever order."""

    lines: tuple[str, ...]


Step = File | Commands | Printed | Logged


def steps(page: str) -> Iterator[Step]:
    """What a reader of the page does and sees, in order. A file has the name that the page said last before it."""
    for block in re.finditer(r"^```(\w+)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        match block[1], block[2]:
            case "py", text:
                yield File(re.findall(r"`(\w+\.py)`", page[: block.start()])[-1], text)
            case "sh", text:
                yield Commands(tuple(text.splitlines()))
            case "text", text if text.startswith("["):
                yield Logged(tuple(text.splitlines()))
            case "text", text:
                yield Printed(text)
            case language, _:
                raise ValueError(f"nobody knows what to do with a block of {language}")


def is_shown(expected: str, printed: str) -> bool:
    """Whether a page shows what was printed, but for what each run has of its own."""
    return bool(_pattern(expected).fullmatch(_without_differences(printed)))


def _pattern(expected: str) -> re.Pattern[str]:
    shown = re.escape(_without_differences(expected)).replace("\\\n", "\n")
    return re.compile(re.sub(r"^(\\\.){3}\n", r"(?:.*\\n)*?", shown, flags=re.MULTILINE).replace(r"\.\.\.", ".*"))


def _without_differences(text: str) -> str:
    for pattern, instead in DIFFERS:
        text = re.sub(pattern, instead, text, flags=re.MULTILINE)
    return text


class Terminal:
    """A shell that believes a person sits before it: 80 columns, and no colours."""

    def __init__(self, folder: Path) -> None:
        self._pid, self._screen = pty.fork()
        if self._pid == 0:
            os.chdir(folder)
            os.execvpe(SHELL[0], SHELL, _environment())
        self._seen = ""
        self._wait_for_prompt()
        self.run("stty -echo")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End the shell and what it has left running."""
        os.killpg(os.tcgetpgrp(self._screen), signal.SIGKILL)
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._screen)

    def run(self, line: str) -> str:
        """Type a command, wait for its end and give what it printed."""
        self._type(line)
        end = self._wait_for_prompt()
        printed = self._seen[: end.start()]
        assert end[1] == "0", f"{line}\n{printed}"
        return printed

    def start(self, line: str, sign: re.Pattern[str]) -> None:
        """Type a command that goes on, and wait until it says that it does."""
        self._type(line)
        self._wait(lambda: sign.search(self._seen))

    def stop(self) -> None:
        """Press Ctrl-C, and wait until what was running has ended."""
        os.write(self._screen, CTRL_C)
        self._wait_for_prompt()

    def see(self, lines: Sequence[str]) -> None:
        """Wait until what is running has printed all of the lines, those that are equal as often as they come."""
        shown = Counter(map(_pattern, lines))

        def found() -> bool:
            seen = _without_differences(self._seen)
            return all(len(pattern.findall(seen)) >= times for pattern, times in shown.items())

        self._wait(found)

    def _type(self, line: str) -> None:
        self._seen = ""
        os.write(self._screen, line.encode() + b"\n")

    def _wait_for_prompt(self) -> re.Match[str]:
        prompt = self._wait(lambda: PROMPT.search(self._seen))
        assert prompt
        return prompt

    def _wait(self, found: Callable[[], T]) -> T:
        until = time.monotonic() + PATIENCE_S
        while not (match := found()):
            readable, _, _ = select.select([self._screen], [], [], max(0, until - time.monotonic()))
            assert readable, f"not seen within {PATIENCE_S} s:\n{self._seen}"
            read = os.read(self._screen, 65_536).decode(errors="replace")
            self._seen += SEEN_BY_NOBODY.sub("", read)
        return match


class Reader:
    """Somebody with a worker in one terminal, and everything else in another.

    Args:
        folder: Where both terminals are opened.
        worker: Where the reader begins, and runs workers.
        other: Where the reader types while a worker runs.
        package: What is installed instead of the published package.
    """

    def __init__(self, folder: Path, worker: Terminal, other: Terminal, package: Path) -> None:
        self._folder, self._worker, self._other, self._package = folder, worker, other, package
        self._working = False
        self._printed = ""

    def follow(self, page: str) -> None:
        """Do what the page says, and see what it shows."""
        for step in steps(page):
            match step:
                case File(name, text):
                    (self._folder / "shop" / name).write_text(text)
                case Commands(lines) if lines[-1].startswith(WORKER):
                    self._start(*lines)
                case Commands(lines):
                    self._printed = "".join(map(self._type, lines))
                case Logged(lines):
                    self._worker.see(lines)
                case Printed(text):
                    assert is_shown(text, self._printed), f"shown:\n{text}\nprinted:\n{self._printed}"

    def _start(self, *lines: str) -> None:
        if self._working:
            self._worker.stop()
            self._working = False
        for line in lines[:-1]:
            self._type(line)
        self._worker.start(lines[-1], READY)
        self._working = True

    def _type(self, line: str) -> str:
        terminal = self._other if self._working else self._worker
        return terminal.run(line.replace(PUBLISHED, f"{self._package}[sql]"))


def follow(page: str, package: Path, folder: Path) -> None:
    """Do in an empty folder what the page says, with a package that was built here."""
    assert PUBLISHED in page
    with ExitStack() as stack:
        worker, other = (stack.enter_context(Terminal(folder)) for _ in range(2))
        Reader(folder, worker, other, package).follow(page)


def _environment() -> dict[str, str]:
    """Of somebody who has not activated anything, and whose python3 is the one that this runs on."""
    inherited = {name: value for name, value in os.environ.items() if not re.match("PYTHON|VIRTUAL_ENV|COV", name)}
    path = os.pathsep.join([f"{sys.base_prefix}/bin", os.defpath])
    return {**inherited, "PATH": path, "TERM": "dumb", "PS1": "<<$?>>", "VIRTUAL_ENV_DISABLE_PROMPT": "1"}


if __name__ == "__main__":
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as empty:
        follow(PAGE.read_text(), Path(sys.argv[1]).resolve(), Path(empty))
    sys.stdout.write(f"the tutorial does what it says, in {time.monotonic() - begun:.0f} s\n")
