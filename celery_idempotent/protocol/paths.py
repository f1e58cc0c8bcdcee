"""What a JMESPath builds from the arguments of a call, and what it only finds there.

A path that is to identify something is *strict*: whatever it builds (a multiselect, a projection, ``map``) has no
null in it. JMESPath keeps the nulls of a multiselect and drops those of a projection; either way, calls that differ
would become one. What a path only finds is data, and may hold nulls.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from jmespath.visitor import TreeInterpreter

Node = Any
"""A node of a parsed path, as jmespath makes them: a dict with ``type``, ``children`` and maybe ``value``."""


class Absent(Exception):
    """A part, such as ``[1]`` or ``.tenant``, of what a strict path builds is missing or null."""

    def __init__(self, part: str) -> None:
        super().__init__(part)
        self.part = part


LENIENT = TreeInterpreter()
"""JMESPath as its specification has it."""


class _Strict(TreeInterpreter):
    def visit_multi_select_list(self, node: Node, value: Any) -> Any:
        return None if value is None else self._each((child, value) for child in node["children"])

    def visit_multi_select_dict(self, node: Node, value: Any) -> Any:
        if value is None:
            return None
        return {child["value"]: self._part(f".{child['value']}", child, value) for child in node["children"]}

    def visit_projection(self, node: Node, value: Any) -> Any:
        source, wanted = node["children"]
        base = self.visit(source, value)
        return self._each((wanted, element) for element in base) if isinstance(base, list) else None

    def visit_value_projection(self, node: Node, value: Any) -> Any:
        source, wanted = node["children"]
        base = self.visit(source, value)
        if not isinstance(base, Mapping):
            return None
        return [self._part(f".{name}", wanted, element) for name, element in base.items()]

    def visit_filter_projection(self, node: Node, value: Any) -> Any:
        source, wanted, condition = node["children"]
        base = self.visit(source, value)
        if not isinstance(base, list):
            return None
        # The condition chooses elements; it is not part of what is built.
        return self._each((wanted, each) for each in base if _is_true(LENIENT.visit(condition, each)))

    def visit_function_expression(self, node: Node, value: Any) -> Any:
        found = super().visit_function_expression(node, value)
        if node["value"] == "map" and None in found:
            raise Absent(f"[{found.index(None)}]")
        return found

    def _each(self, parts: Iterable[tuple[Node, Any]]) -> list[Any]:
        return [self._part(f"[{index}]", node, value) for index, (node, value) in enumerate(parts)]

    def _part(self, name: str, node: Node, value: Any) -> Any:
        try:
            found = self.visit(node, value)
        except Absent as absent:
            raise Absent(name + absent.part) from None
        if found is None:
            raise Absent(name)
        return found


def _is_true(value: Any) -> bool:
    # JMESPath's own rule: 0 is true.
    return value is not None and value is not False and value not in ("", [], {})


STRICT = _Strict()
"""JMESPath that raises :exc:`Absent` where it would build something with a null in it, or leave a null out."""


def root_names(node: Node) -> set[str]:
    """The arguments that an expression starts from; none where it starts from all of them or from a literal."""
    match node["type"]:
        case "field":
            return {node["value"]}
        case kind if kind in _CHAINS:
            return root_names(node["children"][0])
        case kind if kind in _BRANCHES:
            return set().union(*map(root_names, node["children"]))
        case _:
            return set()


_CHAINS = frozenset(
    {"subexpression", "index_expression", "projection", "value_projection", "filter_projection", "flatten", "pipe"}
)
"""Kinds of nodes whose first child alone looks at the arguments; the others look at what that one gives."""

_BRANCHES = frozenset(
    {"multi_select_list", "multi_select_dict", "key_val_pair", "or_expression", "function_expression"}
)
"""Kinds of nodes whose children all look at the arguments."""
