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
from collections.abc import Callable, Sequence
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
        os.write(self._screen, b"\x03")
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


def follow(page: str, package: Path, folder: Path) -> None:
    """Do in an empty folder what the page says, with a package that was built here, and see what it shows.

    A worker is in one terminal, where the reader begins, and everything else that is typed while it runs in another.
    """
    assert PUBLISHED in page
    page = page.replace(PUBLISHED, f"{package}[sql]")
    with Terminal(folder) as worker, Terminal(folder) as other:
        current, printed = worker, ""
        for block in re.finditer(r"^```(\w+)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
            language, text = block[1], block[2]
            *lines, last = text.splitlines()
            if language == "py":  # a file has the name that the page said last before it
                (folder / "shop" / re.findall(r"`(\w+\.py)`", page[: block.start()])[-1]).write_text(text)
            elif language == "sh" and last.startswith(WORKER):
                if current is other:
                    worker.stop()
                for line in lines:
                    worker.run(line)
                worker.start(last, READY)
                current = other
            elif language == "sh":
                printed = "".join(map(current.run, [*lines, last]))
            elif language == "text" and text.startswith("["):
                worker.see([*lines, last])
            else:
                assert language == "text", f"nobody knows what to do with a block of {language}"
                assert is_shown(text, printed), f"shown:\n{text}\nprinted:\n{printed}"


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
