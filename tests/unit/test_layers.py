"""What ``.importlinter`` cannot say of imports; ``make lint`` checks what it says."""

import ast
import sys

import pytest

from tests.support.layers import CONTRACTS, MAY_USE, MODULES, PACKAGE, imports

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
