"""Finds the settings that the package reads outside conf/, by following the sections through its source text.

An expression denotes a section if it is a name, parameter or attribute that is annotated with the section's class, one
that such an expression was assigned to, or a section's attribute of an expression that denotes `Settings`. An attribute
called `settings` or `_settings` denotes `Settings` where nothing else is known about it. A property or method of a
section that is read outside stands for the settings that its body reads.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from elaswave_spmd.conf import schema
from elaswave_spmd.conf.section import Section, declarations

CLASSES: dict[str, type[Section]] = {
    value.__name__: value for value in vars(schema).values() if isinstance(value, type) and Section in value.__bases__
}
GROUPS = dict(schema.GROUPS)
ITEMS = {"events": "ChaosEvent", "slow": "SlowDevice"}
"""Settings that are lists of sections."""
PACKAGE = Path(schema.__file__).parents[1]


def settings_read_outside() -> set[str]:
    """Whole names of the settings that some file outside conf/ reads."""
    files = [path for path in PACKAGE.rglob("*.py") if path.parent.name != "conf"]
    read: set[tuple[str, str]] = set()  # (name of a section's class, attribute)
    for path in files:
        read |= read_in(ast.parse(path.read_text(encoding="utf-8")))
    inside = _read_by_members()
    todo = list(read)
    while todo:  # members of sections lead on to what their bodies read
        for found in inside.get(todo.pop(), ()):
            if found not in read:
                read.add(found)
                todo.append(found)
    names = {(cls, d.field): d.name for cls, section in CLASSES.items() for d in declarations(section)}
    return {names[found] for found in read if found in names}


def _read_by_members() -> dict[tuple[str, str], set[tuple[str, str]]]:
    """(class, property or method) -> the (class, attribute) pairs that its body reads."""
    tree = ast.parse(Path(schema.__file__).read_text(encoding="utf-8"))
    found: dict[tuple[str, str], set[tuple[str, str]]] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name in CLASSES:
            for member in node.body:
                if isinstance(member, ast.FunctionDef) and member.name != "check_rules":
                    found[node.name, member.name] = read_in(member, {"self": node.name})
    return found


def read_in(tree: ast.AST, known: dict[str, str] | None = None) -> set[tuple[str, str]]:
    """The (class, attribute) pairs that a piece of source text reads."""
    types = {expression: {cls} for expression, cls in (known or {}).items()}
    before = -1
    while before != (before := sum(map(len, types.values()))):
        for node in ast.walk(tree):
            _bind(node, types)
    loads = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load))
    return {(cls, node.attr) for node in loads for cls in _classes(node.value, types)}


Types = dict[str, set[str]]
"""Source text of an expression -> names of the sections' classes that it denotes somewhere in the file."""


def _bind(node: ast.AST, types: Types) -> None:
    """Note what a statement shows about the types of names and attributes."""
    if isinstance(node, ast.arg) and node.annotation is not None:
        _note(types, node.arg, _annotated(node.annotation))
    elif isinstance(node, ast.AnnAssign):
        _note(types, ast.unparse(node.target), _annotated(node.annotation))
        if isinstance(node.target, ast.Name):  # a field of a dataclass
            _note(types, f"self.{node.target.id}", _annotated(node.annotation))
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            _bind_target(target, node.value, types)
    elif isinstance(node, ast.NamedExpr):
        _bind_target(node.target, node.value, types)
    elif isinstance(node, (ast.For, ast.comprehension)) and isinstance(node.iter, ast.Attribute):
        if node.iter.attr in ITEMS and _classes(node.iter.value, types):
            _note(types, ast.unparse(node.target), {ITEMS[node.iter.attr]})
    elif isinstance(node, ast.FunctionDef) and node.returns is not None:  # a property
        _note(types, f"self.{node.name}", _annotated(node.returns))


def _bind_target(target: ast.expr, value: ast.expr, types: Types) -> None:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        for left, right in zip(target.elts, value.elts, strict=True):
            _bind_target(left, right, types)
    elif isinstance(target, (ast.Name, ast.Attribute)):
        _note(types, ast.unparse(target), _classes(value, types))


def _note(types: Types, expression: str, classes: set[str]) -> None:
    if classes:
        types.setdefault(expression, set()).update(classes)


def _annotated(annotation: ast.expr) -> set[str]:
    return CLASSES.keys() & set(re.findall(r"\w+", ast.unparse(annotation)))


def _classes(node: ast.expr, types: Types) -> set[str]:
    """Names of the sections' classes that an expression may denote."""
    if found := types.get(ast.unparse(node)):
        return found
    if not isinstance(node, ast.Attribute):
        return set()
    if node.attr in GROUPS and "Settings" in _classes(node.value, types):
        return {GROUPS[node.attr].__name__}
    return {"Settings"} if node.attr in ("settings", "_settings") else set()
