"""Trees of values: dicts, lists, tuples and named tuples, nested in any way, as samples and batches are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any


def map_tree(function: Callable[[Any], Any], tree: Any) -> Any:
    """A tree of the same structure, with `function` applied to each leaf. Mappings become dicts."""
    if isinstance(tree, Mapping):
        return {key: map_tree(function, value) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tree(function, value) for value in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(map_tree(function, value) for value in tree)
    return function(tree)


def named_leaves(tree: Any, name: str = "batch") -> Iterator[tuple[str, Any]]:
    """The leaves of a tree, each with the expression by which a user reaches it: `batch["image"]`, `batch[0]`.

    Args:
        name: the name of the tree itself.
    """
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from named_leaves(value, f"{name}[{key!r}]".replace("'", '"'))
    elif isinstance(tree, tuple) and hasattr(tree, "_fields"):
        for field, value in zip(tree._fields, tree, strict=True):  # pyright: ignore[reportAttributeAccessIssue]
            yield from named_leaves(value, f"{name}.{field}")
    elif isinstance(tree, (list, tuple)):
        for number, value in enumerate(tree):
            yield from named_leaves(value, f"{name}[{number}]")
    else:
        yield name, tree
