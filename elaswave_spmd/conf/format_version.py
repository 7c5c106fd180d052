"""The format version: one number for everything that one version of this package writes and another one may read.

It stands in a run's config.yaml, in the manifest of every checkpoint, and, for a run with agents, in what both sides
say first at the rendezvous and in an agent's first message. A reader refuses any other number and names both, before it
looks at anything else: bits that are misread are worse than a run that does not start. Raise it with every change of
one of these formats that an older reader would misunderstand.
"""

from __future__ import annotations

FORMAT_VERSION = 2
FORMAT_FIELD = "format"
"""The name under which the number is written, in config.yaml and in manifests."""


def version_mismatch(found: object) -> str:
    """The clause that says which version was found and which one this package has; empty if they are the same.

    Args:
        found: the value of `FORMAT_FIELD`; None if there is none.
    """
    if type(found) is int and found == FORMAT_VERSION:
        return ""
    named = "no format version" if found is None else f"format version {found}"
    return f"has {named}, and this version of elaswave_spmd has format version {FORMAT_VERSION}"
