"""What users may import, and what a module may: a change of the names is a change for users."""

import ast
import importlib
import inspect
import pkgutil
import sys
from pathlib import Path

import pytest

import celery_idempotent
from tests.support.layers import CONTRACTS, MAY_USE, MODULES, PACKAGE, imports

NAMES = {
    "celery_idempotent": """
        AtLeastOnce AtMostOnce Attempt Committed DeadlineExceeded Fenced IdempotencyError IdempotencyWarning
        IdempotentMixin IdempotentTask InFlight KeyMissing KeyReused Keyed LeaseLost OutcomeUnknown Policy PolicyError
        Record ReplayedFailure ResultLost SafeToRetry Status Store StoreMisconfigured StoreUnavailable WriteRefused
        __version__ current_attempt forget idempotent open_store release resolve
    """,
    "celery_idempotent.signals": """
        claimed completed conflicted deadline_exceeded failed key_missing key_reused lease_lost outcome_unknown
        publish_skipped record_unreadable released replayed result_dropped result_lost store_unavailable taken_over
        verdict_given
    """,
    "celery_idempotent.contrib.aws_lambda": "sqs_batch",
    "celery_idempotent.contrib.http": "answer",
    "celery_idempotent.contrib.http.asgi": "IdempotencyMiddleware route_of",
    "celery_idempotent.contrib.http.flask": "idempotent_view",
    "celery_idempotent.contrib.otel": "instrument uninstrument",
    "celery_idempotent.contrib.sns": "By Notification Route consume unwrap",
    "celery_idempotent.outbox": "relay send",
    "celery_idempotent.beat": "PersistentScheduler SchedulerMixin",
    "celery_idempotent.stores": """
        CommittingStore IndexedStore Outbox OutboxMessage PurgeableStore RecordTooLarge Store TakenMessage Transaction
        TransactionalStore VerifiableStore WaitingMessage Wanted WriteFailed open_store readable
    """,
    "celery_idempotent.stores.dynamodb": "DynamoDBStore",
    "celery_idempotent.stores.objects": "LargeResults ObjectMissing ObjectStore open_large_results",
    "celery_idempotent.stores.redis": "RedisStore",
    "celery_idempotent.stores.sql": "SQLStore metadata outbox_table records_table",
}
PUBLIC = {module: {*names.split()} for module, names in NAMES.items()}
"""`celery_idempotent.testing` lists its own; the Django app is used by its name, and what is for Django's
views is in tests/django/test_http.py."""

ROOMS = {"contrib", "engine", "integration", "protocol", "stores", "testing"}
BESIDE = {"beat", "errors", "outbox", "signals"}
INTERNAL = {"_version", "clock", "printable", "troubleshooting"}


@pytest.mark.parametrize("module", sorted(PUBLIC))
def test_public_modules_hand_on_these_names_and_no_others_each_with_a_docstring(module: str) -> None:
    """A change is a line in the changelog; methods of a store and of its attempt are described where declared."""
    found = importlib.import_module(module)
    assert set(found.__all__) == PUBLIC[module]
    silent = []
    for name in PUBLIC[module]:
        one = getattr(found, name)
        if not (inspect.isclass(one) or inspect.isfunction(one)):
            continue
        own = vars(one) if inspect.isclass(one) else {}
        methods = {each: own[each] for each in own if inspect.isfunction(own[each]) and not each.startswith("_")}
        silent += [f"{name}.{each}" for each, method in methods.items() if not method.__doc__ and each not in DECLARED]
        silent += [] if one.__doc__ else [name]
    assert silent == []


DECLARED = {
    each
    for name in PUBLIC["celery_idempotent.stores"]
    for each, method in vars(getattr(importlib.import_module("celery_idempotent.stores"), name)).items()
    if inspect.isfunction(method) and method.__doc__
}
"""Methods that a protocol of stores describes."""


def test_the_root_holds_rooms_and_public_modules_only() -> None:
    """What stands beside them can be imported, so it would be."""
    assert {each.name for each in pkgutil.iter_modules(celery_idempotent.__path__)} == ROOMS | BESIDE | INTERNAL


def test_all_words_have_one_meaning() -> None:
    """No two classes of the package share a name, but for Django's ``IdempotentTask``, which adds to the root's."""
    seen: dict[str, str] = {}
    for path in sorted(Path(celery_idempotent.__file__).parent.rglob("*.py")):
        if "migrations" in path.parts or path.parts[-2:] == ("django", "__init__.py"):
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                name = node.name.lstrip("_")
                assert name not in seen, f"{name} is in {seen[name]} and in {path}"
                seen[name] = str(path)


OPENED_BY_NAME = {"contrib.django.store", "contrib.web"}
"""What stands above whoever opens it: a store that a URL's scheme names, and a command beside the others."""


@pytest.mark.parametrize("room", MAY_USE)
def test_module_that_is_named_in_a_text_is_below(room: str) -> None:
    """What is imported by its name is an import, too; a log's or a task's name is none."""
    trees = [ast.parse(path.read_text()) for path in (PACKAGE / room).rglob("*.py")]
    texts = {node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    dotted = {text.partition(":")[0] for text in texts if isinstance(text, str)}
    named = {each.removeprefix("celery_idempotent.") for each in dotted if each.startswith("celery_idempotent.")}
    modules = {each for each in named if each in MODULES or f"{each}.__init__" in MODULES}
    rooms = {each: each.partition(".")[0] for each in modules}
    assert {each for each in modules if rooms[each] not in {room, *MAY_USE[room]}} <= OPENED_BY_NAME


def test_only_packages_that_a_contract_names_are_imported() -> None:
    """Each driver has the folder that may know it; beside them there is what comes with every installation."""
    protected = {name for each in CONTRACTS.values() for name in each.get("protected_modules", "").split()}
    external = {name for name in imports().modules if imports().is_module_squashed(name)}
    assert external - sys.stdlib_module_names - protected == {"pydantic_core", "rich"}
