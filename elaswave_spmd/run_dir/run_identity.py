"""The comparison of a saved run with the run that is to continue it, which must have the same bits."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from elaswave_spmd.errors import ConfigError

_MAX_LISTED = 40  # differences that fit on a screen


def check_identity(
    saved: Mapping[str, Any],
    present: Mapping[str, Any],
    *,
    where: str = "train.resume",
    fix: str = "use the saved values, or start another run",
) -> None:
    """Refuse to resume a run that would not have the same bits.

    Args:
        saved: plain values, nested in any way: a manifest's `identity`, or its `layout`.
        present: the values of the run that is to continue, in the same form.
        where: the setting that asked for it, for the error.
        fix: what the user can do, for the error.

    Raises:
        ConfigError: lists the differences with both values.
    """
    old, new = dict(_leaves(saved)), dict(_leaves(present))
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    if not names:
        return
    lines = [f"{name}: saved {old.get(name, 'nothing')}, now {new.get(name, 'nothing')}" for name in names]
    more = [f"and {len(lines) - _MAX_LISTED} more"] if len(lines) > _MAX_LISTED else []
    raise ConfigError(
        "the run was saved with other values:" + "".join(f"\n  {line}" for line in lines[:_MAX_LISTED] + more),
        rule="the bits of a run depend on these values, so they must not change when it is resumed",
        where=where,
        fix=fix,
    )


def _leaves(value: object, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Pairs of a dotted name and the JSON of its value.

    Values are compared as text, so that 1, 1.0 and true differ and tuples equal lists. An empty mapping counts as a
    missing one.
    """
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _leaves(item, f"{prefix}.{name}" if prefix else str(name))
    elif isinstance(value, (list, tuple)) and any(isinstance(item, Mapping) for item in value):
        for number, item in enumerate(value):
            yield from _leaves(item, f"{prefix}[{number}]")
    else:
        yield prefix, json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
