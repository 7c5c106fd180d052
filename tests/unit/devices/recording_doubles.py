"""Recording doubles: they record the calls of them, in order, and answer as a test sets them.

They do nothing that a device or a library does: a test with them shows order and arguments, and no more.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from tests.unit.devices.torch_npu_wheel import RECORD

Call = tuple[str, tuple[Any, ...], dict[str, Any]]


def recorded_signatures() -> dict[str, inspect.Signature]:
    """Dotted name -> signature, as a wheel of torch_npu had them."""
    functions = json.loads(RECORD.read_text(encoding="utf-8"))["functions"]
    return {name: _signature(arguments) for name, arguments in functions.items()}


def _signature(arguments: list[str]) -> inspect.Signature:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    pairs = [argument.partition("=")[::2] for argument in arguments]
    return inspect.Signature(
        [inspect.Parameter(name, kind, default=text or inspect.Parameter.empty) for name, text in pairs]
    )


class RecordingTorchNpu:
    """A recording double of torch_npu; a call that the recorded signatures do not allow is an error.

    Args:
        answers: function name -> what it returns, or an exception that it raises.
    """

    def __init__(self, answers: Mapping[str, Any]) -> None:
        self.calls: list[Call] = []
        self._answers = answers
        for dotted, signature in recorded_signatures().items():
            *path, name = dotted.split(".")[1:]
            owner: Any = self
            for part in path:
                if not hasattr(owner, part):
                    setattr(owner, part, SimpleNamespace())
                owner = getattr(owner, part)
            setattr(owner, name, self._function(name, signature))

    def _function(self, name: str, signature: inspect.Signature) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            signature.bind(*args, **kwargs)
            self.calls.append((name, args, kwargs))
            answer = self._answers.get(name)
            if isinstance(answer, BaseException):
                raise answer
            return answer(*args) if callable(answer) else answer

        return call

    @property
    def names(self) -> list[str]:
        return [name for name, _, _ in self.calls]
