"""Recording doubles: they write down what is called on them, in order, and answer as a test says.

They do nothing that a device or a library does: a test with them shows order and arguments, and no more.
"""

from __future__ import annotations

import inspect
import json
import threading
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed import distributed_c10d

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


class RecordingStore:
    """A recording double of a c10d store that all members share: here the others have been there before.

    Args:
        others: how many have called `add` with each key before.
    """

    prefix = ""

    def __init__(self, others: Mapping[str, int]) -> None:
        self.counts, self.keys = dict(others), set[str]()

    def add(self, key: str, amount: int) -> int:
        self.counts[key] = self.counts.get(key, 0) + amount
        return self.counts[key]

    def set(self, key: str, value: str) -> None:
        self.keys.add(key)

    def check(self, keys: list[str]) -> bool:
        return self.keys >= {*keys}


class RecordingDistributed:
    """A recording double of torch.distributed. `gate`: what init_process_group waits for, as it does for its peers.

    Args:
        others: prefix of a store -> what the other members have added to it; None: they have come, and shrink nothing.
    """

    distributed_c10d = SimpleNamespace(SHRINK_ABORT=distributed_c10d.SHRINK_ABORT)

    def __init__(self, others: Mapping[str, Mapping[str, int]] | None = None) -> None:
        self.others = others
        self.calls: list[Call] = []
        self.threads: set[str] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.fails: BaseException | None = None
        self.refuses_to_shrink: BaseException | None = None
        self.group = SimpleNamespace(WORLD=None)

    def _note(self, name: str, *args: Any, **kwargs: Any) -> None:
        self.calls.append((name, args, kwargs))
        self.threads.add(threading.current_thread().name)

    def PrefixStore(self, prefix: str, store: Any) -> RecordingStore:  # noqa: N802  (torch's name)
        assert store == "the store"
        made = RecordingStore((self.others or {}).get(prefix, {}))
        if self.others is None:
            made.keys.add("all")
        made.prefix = prefix
        return made

    def init_process_group(self, backend: str, **kwargs: Any) -> None:
        self._note("init_process_group", backend, **kwargs)
        assert self.gate.wait(20)
        if self.fails is not None:
            raise self.fails
        assert self.group.WORLD is None, "one default group in a process"
        self.group.WORLD = f"group of {kwargs['store'].prefix}"

    def broadcast(self, values: Any, **kwargs: Any) -> str:
        self._note("broadcast", values, **kwargs)
        inspect.signature(torch.distributed.broadcast).bind(values, **kwargs)
        return "work"

    def shrink_group(self, *args: Any, **kwargs: Any) -> str:
        self._note("shrink_group", *args, **kwargs)
        inspect.signature(torch.distributed.shrink_group).bind(*args, **kwargs)
        if self.refuses_to_shrink is not None:
            raise self.refuses_to_shrink
        self.group.WORLD = f"{self.group.WORLD}, shrunk"
        return self.group.WORLD

    def barrier(self) -> None:
        self._note("barrier")

    def destroy_process_group(self) -> None:
        self._note("destroy_process_group")
        self.group.WORLD = None

    @property
    def names(self) -> list[str]:
        return [name for name, _, _ in self.calls]
