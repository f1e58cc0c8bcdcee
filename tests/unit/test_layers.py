"""Imports point downwards only; read from the source, so that no import can hide: lazy, relative, or of a name."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import celery_idempotent

ROOT = Path(celery_idempotent.__file__).parent
GROUND = {"clock", "errors", "printable", "troubleshooting", "_version"}
"""Beside the package's face at the root, what every room may use."""

MAY_USE: dict[str, set[str]] = {
    "protocol": set(),
    "engine": {"protocol"},
    "stores": {"protocol"},
    "integration": {"protocol", "engine", "stores"},
    "contrib": {"protocol", "engine", "stores", "integration"},
    "testing": {"protocol", "engine", "stores", "integration"},
}
"""The rooms from the ground up, and the rooms below each that it may import from."""

FLOORS = ("broker", "operating", "messages", "task", "cli")
"""Within ``integration``, from the ground up: each room may import from those before it and from the modules beside
them, which import from no room."""

FACES = {
    "__init__": {"protocol", "engine", "stores", "integration"},
    "signals": {"integration"},
    "outbox": {"integration"},
    "beat": {"integration"},
}
"""Modules at the root that hand on what is public and define nothing."""

PLUGGED_IN = {"stores.__init__": {"contrib.django.store"}, "integration.cli.base": {"contrib.web"}}
"""By module, what it opens by name though it stands above: a store that a URL's scheme names, as a third party's is; a
command beside the others."""

PACKAGES: dict[str, set[str]] = {
    "clock": set(),
    "errors": set(),
    "printable": set(),
    "troubleshooting": set(),
    "_version": set(),
    "__init__": set(),
    "signals": set(),
    "outbox": set(),
    "beat": set(),
    "protocol": set(),
    "protocol.canonical": {"pydantic_core"},
    "protocol.codec": {"kombu"},
    "engine": {"kombu"},
    "stores": set(),
    "stores.dynamodb": {"boto3", "botocore", "mypy_boto3_dynamodb", "urllib3"},
    "stores.objects.s3": {"boto3", "botocore"},
    "stores.redis": {"redis"},
    "stores.sql": {"psycopg", "sqlalchemy"},
    "integration": {"billiard", "celery", "click", "kombu"},
    "integration.cli": {"celery", "click", "kombu", "rich"},
    "stores.keyring": {"cryptography"},
    "contrib": set(),
    "contrib.aws_lambda": {"celery"},
    "contrib.django": {"celery", "django", "sqlalchemy"},
    "contrib.http": {"celery"},
    "contrib.http.django": {"asgiref", "celery", "django"},
    "contrib.http.flask": {"celery", "flask", "werkzeug"},
    "contrib.otel": {"opentelemetry"},
    "contrib.sns": {"boto3", "celery", "click", "mypy_boto3_sqs"},
    "contrib.web": {"celery", "click", "jinja2", "markupsafe", "starlette", "uvicorn"},
    "testing": {"celery", "kombu", "pytest", "sqlalchemy"},
}
"""By the longest prefix: the packages beyond the standard library that may be imported. A driver is known to its store
alone, Celery to the rooms above the engine."""

IMPURE = {"time", "random", "secrets", "os", "socket", "threading", "logging"}
"""What reads a clock, draws a number, keeps a thread or does I/O: not in the protocol, nor on the ground."""


def _modules() -> dict[str, Path]:
    return {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in ROOT.rglob("*.py")}


MODULES = _modules()


def _imports(name: str, source: str) -> Iterator[str]:
    """The absolute name of everything that a module imports, wherever in it: of ``from a import b`` it is ``a.b``."""
    package = ["celery_idempotent", *name.split(".")][:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{origin}.{each.name}" for each in node.names)


def _imports_of(name: str) -> set[str]:
    return set(_imports(name, MODULES[name].read_text()))


def _named(source: str) -> set[str]:
    """The modules that are named in a text, as for ``import_module``; a log's or a task's name is none."""
    texts = {node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)}
    dotted = {each.partition(":")[0] for each in texts if isinstance(each, str)}
    return {each for each in dotted if each.startswith("celery_idempotent.") and _module_of(each.split(".", 1)[1])}


def _room(name: str) -> str:
    """The folder that a module or an import is in; at the root, its own name."""
    return name.split(".")[0]


def _floor(name: str) -> str:
    """The folder or module within its room."""
    return name.split(".")[1]


def _own(imports: set[str]) -> set[str]:
    return {
        each.removeprefix("celery_idempotent").lstrip(".")
        for each in imports
        if each.split(".")[0] == "celery_idempotent"
    }


def _refused(name: str, imports: set[str]) -> set[str]:
    """The imports that point upwards, sideways or to the package's face."""
    room = _room(name)
    allowed = MAY_USE[room] | {room} if room in MAY_USE else FACES.get(name, set())
    return {each for each in _own(imports) if _room(each) not in allowed | GROUND}


def _circles(rooms: dict[str, set[str]]) -> set[str]:
    """The modules that import themselves by way of others."""
    reached = {name: set(used) for name, used in rooms.items()}
    for middle in rooms:
        for name in rooms:
            if middle in reached[name]:
                reached[name] |= reached[middle]
    return {name for name in rooms if name in reached[name]}


def _module_of(imported: str) -> str | None:
    """The module that ``a.b.c`` is in or is."""
    parts = imported.split(".")
    for length in range(len(parts), 0, -1):
        name = ".".join(parts[:length])
        if name in MODULES:
            return name
        if f"{name}.__init__" in MODULES:
            return f"{name}.__init__"
    return None


def modules_used(name: str) -> set[str]:
    """The other modules of the package that a module imports."""
    found = (_module_of(each) for each in _own(_imports_of(name)))
    return {module for module in found if module is not None and module != name}


def test_every_module_has_a_room() -> None:
    """What stands at the root is a face or the ground; everything else is in a room."""
    rooms = {_room(name) for name in MODULES}
    assert rooms == {*MAY_USE, *FACES, *GROUND}


@pytest.mark.parametrize("name", sorted(MODULES))
def test_imports_point_downwards(name: str) -> None:
    """A module imports from its own room and from those below, and never from the package's face."""
    assert not _refused(name, _imports_of(name))


@pytest.mark.parametrize("name", sorted(name for name in MODULES if _room(name) == "integration"))
def test_rooms_of_the_integration_have_floors(name: str) -> None:
    """What a broker does is known to tasks, and never the other way round."""
    above = FLOORS[FLOORS.index(_floor(name)) + 1 :] if _floor(name) in FLOORS else FLOORS
    assert not {each for each in modules_used(name) if _room(each) == "integration" and _floor(each) in above}


@pytest.mark.parametrize("name", sorted(MODULES))
def test_module_that_is_named_in_a_text_is_below(name: str) -> None:
    """What is imported by its name is an import, too."""
    assert _refused(name, _named(MODULES[name].read_text())) <= PLUGGED_IN.get(name, set())


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Within a room, too, there is an order."""
    assert not _circles({name: modules_used(name) for name in MODULES if not name.endswith("__init__")})


@pytest.mark.parametrize("name", sorted(MODULES))
def test_only_declared_packages_are_imported(name: str) -> None:
    """A driver is imported by its own store alone, Celery above the engine, and nothing else at all."""
    prefixes = [prefix for prefix in PACKAGES if name == prefix or name.startswith(f"{prefix}.")]
    allowed = PACKAGES[max(prefixes, key=len)]
    roots = {each.split(".")[0] for each in _imports_of(name)}
    assert roots - set(sys.stdlib_module_names) - {"celery_idempotent"} <= allowed


@pytest.mark.parametrize("name", sorted(name for name in MODULES if _room(name) in {"protocol", *GROUND} - {"clock"}))
def test_the_pure_part_has_no_clock_randomness_or_io(name: str) -> None:
    """What decides takes the time and every nonce as an argument."""
    assert not {each.split(".")[0] for each in _imports_of(name)} & IMPURE
    assert "clock" not in modules_used(name)


@pytest.mark.parametrize("name", sorted(FACES))
def test_a_face_defines_nothing(name: str) -> None:
    """It only hands on names, so that whoever looks for a thing finds it in its room."""
    body = ast.parse(MODULES[name].read_text()).body
    assert all(isinstance(node, ast.Import | ast.ImportFrom | ast.Expr | ast.Assign) for node in body)


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("protocol.keys", "def f():\n    import celery_idempotent"),
        ("protocol.keys", "from celery_idempotent import Policy"),
        ("protocol.keys", "from .. import engine"),
        ("protocol.keys", "from ..engine import attempt"),
        ("protocol.keys", "def f():\n    from celery_idempotent.stores import open_store"),
        ("engine.claim", "from celery_idempotent import stores"),
        ("engine.claim", "import celery_idempotent.stores.memory"),
        ("stores.memory", "from celery_idempotent.engine.claim import Claim"),
        ("stores.sql.store", "from ...integration import task"),
        ("integration.task", "from celery_idempotent.testing import FakeClock"),
        ("integration.task", "from celery_idempotent import signals"),
        ("contrib.django.store", "from celery_idempotent.testing import FakeClock"),
        ("signals", "from celery_idempotent.testing import FakeClock"),
        ("errors", "from celery_idempotent.protocol.record import Record"),
    ],
)
def test_an_import_cannot_hide(name: str, source: str) -> None:
    """Lazy and relative ones count, and so does the package's face."""
    assert _refused(name, set(_imports(name, source)))


def test_a_name_cannot_hide() -> None:
    """Neither a module's name for ``import_module``, nor one with an attribute behind it."""
    names = ("celery_idempotent.engine.claim", "celery_idempotent.integration.task.task:IdempotentTask")
    source = f"import_module('{names[0]}')\nby_name('{names[1]}')"
    assert len(_refused("stores.memory", _named(source))) == 2


def test_a_circle_is_found() -> None:
    """Of three modules, and not of those that only lead to it."""
    assert _circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == {"a", "b", "c"}
