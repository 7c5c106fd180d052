"""Fixtures of the tests of one worker's parts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Gives a test new programs and settings of torch.compile, which are global to the process."""
    import torch._dynamo
    import torch._inductor.config as inductor

    torch._dynamo.reset()
    limits = {name: getattr(torch._dynamo.config, name) for name in ("recompile_limit", "accumulated_recompile_limit")}
    ours = {"compile_threads": 1, "cpp.threads": 1, "deterministic": False}
    with torch._dynamo.config.patch(limits), inductor.patch(ours):
        yield
    torch._dynamo.callback.callback_handler.clear()
    torch._dynamo.reset()
