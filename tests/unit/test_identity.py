"""What a run's bits depend on, as checkpoints say it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from elaswave_spmd.identity import identity_of
from elaswave_spmd.settings import Settings


def identity(**runtime: object) -> dict[str, Any]:
    names = ("sha256", "tokenizer", "vocab_size", "num_train_samples", "target")
    data: Any = SimpleNamespace(**dict.fromkeys(names, 1), kwargs={})
    return identity_of(Settings.from_dict({"runtime": runtime}), data)


def test_compiled_programs_are_other_programs_with_the_compiler_that_made_them() -> None:
    plain, compiled = identity(), identity(compile=True)
    assert "compile" not in plain["runtime"] and "cxx" not in plain["versions"]
    assert compiled["runtime"].pop("compile") is True
    assert isinstance(compiled["versions"].pop("cxx"), str)
    assert compiled == plain


def test_checkpointing_is_no_part_of_it_and_threads_are() -> None:
    assert identity(activation_checkpointing=True) == identity()
    assert identity(threads_per_worker=2) != identity()
