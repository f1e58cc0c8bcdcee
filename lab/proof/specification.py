"""The protocol as a specification that Spin tries in every order, and the mistakes that it must find.

``lab/specification/idempotency.pml`` says the protocol once more, without a line of the library; here it is only run.
"""

import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from lab import tether
from lab.folders import temporary_folder

_SOURCES = Path(__file__).parent.parent / "specification"
_ANSWERED = ("-f", "!<> answered_last")
"""What must not happen for ever: that the last delivery, which meets no fault, gets no answer."""


def defines(values: Mapping[str, object]) -> list[str]:
    """As options of a preprocessor."""
    return [f"-D{name}={value}" for name, value in values.items()]


@dataclass(frozen=True, slots=True)
class Bounds:
    """Within which every order is tried; deaths and ends of leases are no faults. A mistake is made on purpose."""

    actors: int
    faults: int
    forgetful: bool = False
    liveness: bool = False
    mistake: str = ""

    def __str__(self) -> str:
        parts = [f"{self.actors} actors, {self.faults} faults"]
        parts += ["a store that forgets"] * self.forgetful + ["a message that keeps coming"] * self.liveness
        return ", ".join(parts)

    @property
    def options(self) -> tuple[str, ...]:
        """What Spin is told of them."""
        broken = self.mistake.upper().replace(" ", "_") or "NONE"
        bounds = {"ACTORS": self.actors, "FAULTS": self.faults, "BROKEN": broken}
        kinds = {"FORGETFUL": int(self.forgetful), "LIVENESS": int(self.liveness)}
        return (*defines({**bounds, **kinds}), *_ANSWERED * self.liveness)


QUICK = (Bounds(2, 0), Bounds(2, 0, liveness=True))
LONG = (
    *(Bounds(4, 0), Bounds(3, 0), Bounds(2, 2), Bounds(2, 1, forgetful=True)),
    *(Bounds(3, 0, liveness=True), Bounds(2, 1, liveness=True)),
)

_UNSAFE = ("no revision", "no waiting", "no owner", "no count", "live retention", "no fingerprint", "no doubt")
_OTHERS = (Bounds(4, 0, mistake="hasty verdict"), Bounds(2, 0, liveness=True, mistake="endless lease"))
MISTAKES = (*(Bounds(2, 0, mistake=each) for each in _UNSAFE), *_OTHERS)
"""What the specification does wrong if it is told to; each must break a promise."""


@dataclass(frozen=True, slots=True)
class Check:
    """What Spin tried, and the way to a broken promise, in words; no way if all of them hold."""

    bounds: Bounds
    states: int
    steps: int
    way: tuple[str, ...]

    @property
    def promise(self) -> str:
        """The one that was broken; empty if none was."""
        said = (step.removeprefix("BROKEN: ") for step in self.way if step.startswith("BROKEN: "))
        return next(said, "a message ends with an outcome or UNKNOWN" if self.way else "")

    @property
    def is_right(self) -> bool:
        """Whether a promise was broken if, and only if, it is a mistake that was tried."""
        return bool(self.way) == bool(self.bounds.mistake)

    def as_json(self) -> dict[str, object]:
        tried = {"bounds": str(self.bounds), "mistake": self.bounds.mistake}
        return {**tried, "states": self.states, "steps": self.steps, "broken": self.promise, "way": self.way}


def run(quick: bool) -> Iterator[Check]:
    """Each part of the check as it is done."""
    return map(check, (*(QUICK if quick else LONG), *MISTAKES))


def check(bounds: Bounds) -> Check:
    """Try every order within ``bounds``. The way to what is broken on purpose is the shortest that there is."""
    order = "-DBFS" if bounds.mistake else "-DNOCLAIM"
    size = ["-O2", "-DCOLLAPSE"] if bounds.actors + bounds.faults > 2 else ["-O0"]
    flags = ["-DNFAIR=6"] if bounds.liveness else ["-DSAFETY", order]
    how = ("-a", "-f") if bounds.liveness else ("-n",)
    with checker(bounds.options, [*size, *flags]) as folder:
        told = execute("./pan", "-m100000", *how, folder=folder)
        is_broken = found_in(r"errors: (\d+)", told) != "0"
        if not is_broken and ("Search not completed" in told or "max search depth" in told):
            raise RuntimeError(f"not all was tried: {told}")
        way = _read_way(bounds, folder) if is_broken else ()
        return Check(bounds, _read_count("states, stored", told), _read_count("transitions", told), way)


def _read_count(name: str, told: str) -> int:
    return round(float(found_in(rf"([\d.e+]+) {name}", told)))


@contextmanager
def checker(options: Iterable[str], flags: list[str]) -> Iterator[Path]:
    """A folder with the program that Spin makes of the specification, called ``pan``."""
    if absent := [name for name in ("spin", "gcc") if shutil.which(name) is None]:
        raise RuntimeError(f"not installed: {', '.join(absent)}")
    with temporary_folder() as folder:
        shutil.copytree(_SOURCES, folder, dirs_exist_ok=True)
        execute("spin", *options, "-a", "idempotency.pml", folder=folder)
        execute("gcc", "-w", *flags, "-o", "pan", "pan.c", folder=folder)
        yield folder


def execute(*command: str, folder: Path, given: str = "") -> str:
    """What a command says to what it is ``given``; it must end well, and ends with this process."""
    (folder / "given").write_text(given)
    within = ("sh", "-c", 'cd "$0" && exec "$@" <given', str(folder))
    program = tether.start_program(*within, *command, log=subprocess.PIPE)
    try:
        with cast("IO[bytes]", program.stdout) as output:
            told = output.read().decode()
        if program.wait():
            raise RuntimeError(f"{command}: {told[-4000:]}")
    finally:
        tether.kill(program)
    return told


def _read_way(bounds: Bounds, folder: Path) -> tuple[str, ...]:
    told = execute("spin", "-t", "-T", "-B", *bounds.options, "idempotency.pml", folder=folder)
    steps = (line.partition("spin:")[0].strip() for line in told.splitlines())
    return tuple(step for step in steps if step and not step.startswith("Never claim"))


def found_in(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    if found is None:
        raise RuntimeError(f"the checker said something else than {pattern}: {text}")
    return found[1]
