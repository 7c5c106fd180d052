"""Keywords of `train` become settings: by name what can be imported, by value everything else."""

from __future__ import annotations

import ast
import functools
import importlib
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import elaswave_spmd as ew
from elaswave_spmd.api.keywords import Given, name_data, name_model, put
from elaswave_spmd.by_value import MODULE, ByValue, Held, as_given, check_given, importable_name, plain_name
from elaswave_spmd.conf.compose import settings_from, words_of
from elaswave_spmd.data import DataSpec, prepare_data
from elaswave_spmd.errors import ConfigError, DataError, ModelError, RunError, UserError
from elaswave_spmd.models import GPT
from elaswave_spmd.worker.plan_run import plan_run


class Net(ew.LayeredModel):
    def __init__(self, vocab_size: int = 4) -> None:
        super().__init__({"embed": nn.Embedding(vocab_size, vocab_size)})


def make_net(vocab_size: int) -> Net:
    return Net(vocab_size)


class Rows:
    vocab_size = 4

    def __init__(self, lock: object = None) -> None:
        self.inner = {"lock": lock}

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> list[int]:
        return [0] * 9


def named(name: Callable[[object, dict[str, Any], Given], None], value: object, **settings: Any) -> tuple[Any, ...]:
    """The settings that a keyword gives, and the names of what goes by value."""
    found, given = dict(settings), Given()
    name(value, found, given)
    return found, list(given.objects)


def test_what_can_be_imported_goes_by_its_name() -> None:
    here = __name__
    assert named(name_model, None) == ({}, [])
    assert named(name_model, "llama_tiny") == ({"model": "llama_tiny"}, [])
    assert named(name_model, "my_file.Net") == ({"model.target": "my_file.Net"}, [])
    assert named(name_model, GPT) == ({"model.target": "elaswave_spmd.models.gpt.GPT"}, [])
    assert named(name_model, Net) == ({"model.target": f"{here}.Net"}, [])
    assert named(name_model, make_net) == ({"model.target": f"{here}.make_net"}, [])
    assert named(name_data, "text") == ({"data": "text"}, [])
    assert named(name_data, Rows) == ({"data.target": f"{here}.Rows"}, [])


def test_everything_else_goes_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    assert named(name_model, lambda: Net(3)) == ({"model.target": "by_value.lambda"}, ["lambda"])
    assert named(name_model, functools.partial(make_net, 3)) == ({"model.target": "by_value.make_net"}, ["make_net"])
    assert named(name_data, Rows()) == ({"data.target": "by_value.Rows"}, ["Rows"])
    monkeypatch.setattr(Net, "__module__", "__main__")
    assert named(name_model, Net) == ({"model.target": "by_value.Net"}, ["Net"])
    given = Given()
    both: dict[str, Any] = {}
    name_model(functools.partial(Rows), both, given)
    name_data(Rows(), both, given)
    assert both == {"model.target": "by_value.Rows", "data.target": "by_value.Rows_data"}
    assert given.names == {"model": "...", "data": "..."}


def test_what_goes_by_value_is_given_again_by_its_name_where_it_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("elaswave_spmd.api.keywords"), "importable_name", lambda value: None)

    class Here(Rows):
        pass

    for value, name in ((Rows, "Rows"), (Here, "..."), (lambda: Rows(), "..."), (functools.partial(Rows), "...")):
        given = Given()
        name_data(value, {}, given)
        assert given.names == {"data": name}
    for value in (Rows(), [1, 2]):
        given = Given()
        name_data(value, {}, given)
        assert given.names == {"data": "..."}


def test_a_model_that_is_constructed_and_things_that_are_none_are_refused() -> None:
    with pytest.raises(ModelError, match="is constructed already"):
        named(name_model, Net())
    with pytest.raises(ModelError, match="model is 3"):
        named(name_model, 3)
    with pytest.raises(DataError, match="no dataset"):
        named(name_data, 3)


def test_a_keyword_that_contradicts_a_setting_is_refused() -> None:
    for keyword, value, setting, settings in (
        ("mesh", "dp2", "mesh", {"mesh": "dp3"}),
        ("steps", 3, "train.steps", {"train.steps": 4}),
    ):
        with pytest.raises(ConfigError, match=f"{keyword} is given as"):
            put(dict(settings), keyword, value, setting)
    same = {"train.steps": 3}
    put(same, "steps", 3, "train.steps")
    put(same, "steps", None, "train.steps")
    assert same == {"train.steps": 3}
    with pytest.raises(ConfigError, match="model is given as"):
        named(name_model, "gpt_tiny", **{"model.target": "my_file.Net"})
    with pytest.raises(ConfigError, match="data is given as"):
        named(name_data, Rows, data="text")


def test_names_by_which_others_import() -> None:
    assert importable_name(nn.Linear) == "torch.nn.modules.linear.Linear"
    assert importable_name(ByValue.of) is None  # a method
    assert importable_name(3) is None
    by_hand = ModuleType("made_by_hand")
    assert importable_name(type("T", (), {"__module__": by_hand.__name__})) is None
    assert plain_name(lambda: None, "model") == "lambda" and plain_name(functools.partial(make_net), "x") == "make_net"


@pytest.mark.parametrize(
    ("value", "blamed"),
    [
        (Held(Rows(threading.Lock())), r"data\.value\.inner\['lock'\], a lock, cannot be pickled"),
        (functools.partial(Rows, threading.Lock()), r"data\.args\[0\], a lock, cannot be pickled"),
    ],
)
def test_an_error_names_the_part_that_cannot_be_pickled(value: object, blamed: str) -> None:
    with pytest.raises(ConfigError, match=blamed):
        ByValue.of({"model": Net, "data": value})


def test_a_closure_over_a_lock_is_blamed_for_its_variable() -> None:
    guard = threading.Lock()

    def make(vocab_size: int) -> Net:
        with guard:
            return Net(vocab_size)

    with pytest.raises(ConfigError, match=r"make\.<variable guard>, a lock, cannot be pickled"):
        ByValue.of({"make": make})


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ([1, 2, 3], "data=[1, 2, 3]"),
        (list(range(1000)), "data=[0, 1, 2, 3, 4, 5, ...]"),
        ([[1] * 20, [2]], "data=[[1, 1, 1, 1, 1, 1, ...], [2]]"),
        (Rows(), "data=Rows(...)"),
        (lambda: Rows(), "data=lambda"),
        (functools.partial(Rows, None), "data=Rows"),
    ],
)
def test_an_error_shows_data_as_the_call_gave_it(value: object, shown: str) -> None:
    found, given = {}, Given()
    name_data(value, found, given)
    target = found["data.target"]
    with ByValue.of(given.objects).importable():
        assert as_given(target, "data") == shown
    assert as_given(target, "data") == target and as_given("my_file.Rows", "data") == "my_file.Rows"


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ([], "data=[] has no samples"),
        ({"a": 1}, "data={'a': 1} failed when its first or last sample was read (KeyError: 0)"),
        ([1, [2]], "samples of data=[1, [2]] cannot be stacked"),
    ],
)
def test_what_is_wrong_with_constructed_data_is_told_of_it(value: object, told: str) -> None:
    found, given = {}, Given()
    name_data(value, found, given)
    with ByValue.of(given.objects).importable(), pytest.raises(DataError) as caught:
        prepare_data(DataSpec(target=found["data.target"]), 4)
    assert caught.value.what.startswith(told)


def test_data_that_is_too_little_is_told_as_it_was_given() -> None:
    found, given = {}, Given()
    name_data([1, 2, 3], found, given)
    settings = settings_from(words_of({**found, "model": "mlp_tiny"}))
    with ByValue.of(given.objects).importable(), pytest.raises(DataError, match="fewer than") as caught:
        plan_run(settings, prepare_data(DataSpec(target=found["data.target"]), 4))
    assert caught.value.where == "data=[1, 2, 3]"
    plain = prepare_data(DataSpec(target=f"{__name__}.Rows"), 8)
    with pytest.raises(DataError, match="fewer than") as caught:
        plan_run(settings, plain)
    assert caught.value.where == f"data.target={__name__}.Rows"


def test_a_process_has_what_is_given_while_it_lasts_and_only_then() -> None:
    given = ByValue.of({"Net": Net})
    with given.importable():
        assert named_in(MODULE, "Net") is Net
        check_given("by_value.Net", "model", ModelError)
        with pytest.raises(RunError, match="another run"), given.importable():
            pass
        with pytest.raises(ModelError, match="Other is not here"):
            check_given("by_value.Other", "model", ModelError)
    with pytest.raises(ModelError, match=r"train\(resume=RUN, model=Net\)"):
        check_given("by_value.Net", "model", ModelError)
    check_given("my_file.Net", "model", ModelError)


def test_what_a_run_reads_here_leaves_nothing_in_the_callers_own_dataset() -> None:
    """A second call with the same object pickles it again, and an open file cannot be pickled."""
    calls: list[int] = []

    class Opening(Rows):
        def __init__(self) -> None:
            self.table = np.zeros(3)
            self.tensor = torch.zeros(3)
            self.lock: object = None

        def __getitem__(self, index: int) -> list[int]:
            self.lock = threading.Lock()
            calls.append(index)
            return [0] * 9

    mine, method = Opening(), Opening.__getitem__
    for _ in range(2):
        found, given = {}, Given()
        name_data(mine, found, given)
        with ByValue.of(given.objects).importable():
            prepare_data(DataSpec(target=found["data.target"]), 8)
            held = named_in(MODULE, "Opening")
            assert isinstance(held, Held)
            copy = held.value
            assert type(copy) is Opening and copy is not mine and copy.lock is not None
            assert np.shares_memory(copy.table, mine.table)
            assert copy.tensor.data_ptr() == mine.tensor.data_ptr(), "its memory is not taken twice"
    assert mine.lock is None and calls == [0, 9, 0, 9]
    assert Opening.__getitem__ is method, "the caller's class is as it was"


def test_an_object_that_cannot_be_unpickled_is_refused_before_anything_starts() -> None:
    class Lost(Rows):
        def __setstate__(self, state: object) -> None:
            raise KeyError("state")

    found, given = {}, Given()
    name_data(Lost(), found, given)
    with pytest.raises(ConfigError, match=r"cannot be unpickled .*KeyError: 'state'"):
        ByValue.of(given.objects).importable().__enter__()


def named_in(module: str, name: str) -> object:
    return getattr(importlib.import_module(module), name)


def test_settings_are_those_of_the_command_line() -> None:
    values = {
        "mesh": "dp2_pp2",
        "optim.lr": 1e-3,
        "optim.betas": (0.9, 0.99),
        "model.init_from": None,
        "data": "text",
        "data.path": "a b/'q'=,[x].txt",
        "model.args.name": "true",
        "model.args.sizes": {"wide": [1, 2.5, None, True, "null"]},
        "model.args.text": "1e3",
        "data.args": {"rows": 3, "of": {"a": 1}},
        "chaos.events": [{"step": 5, "kind": "kill", "rank": 1, "point": "backward"}],
        "run.tensorboard": False,
    }
    settings = settings_from(words_of(values))
    assert settings.mesh.shape.num_workers == 4 and settings.optim.lr == 1e-3 and settings.optim.betas == (0.9, 0.99)
    assert settings.data.path == "a b/'q'=,[x].txt"
    assert settings.model.args == {"name": "true", "sizes": {"wide": [1, 2.5, None, True, "null"]}, "text": "1e3"}
    assert settings.data.args == {"rows": 3, "of": {"a": 1}}
    assert settings.chaos.events[0].step == 5 and settings.run.tensorboard is False


@pytest.mark.parametrize("text", ["cost ${x}", "${seed}", "a\\${seed}", "\\\\${seed}", "}${", "$", "\\"])
def test_a_text_that_looks_like_a_reference_to_a_setting_stays_a_text(text: str) -> None:
    settings = settings_from(words_of({"generate.prompt": text, "model.args.texts": [text, {"of": text}]}))
    assert settings.generate.prompt == text and settings.model.args == {"texts": [text, {"of": text}]}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"optim.lrr": 1}, "there is no setting optim.lrr"),
        ({"optim.lr": "1e-3"}, "optim.lr='1e-3' is not a number"),
        ({"train.steps": 1.5}, "train.steps=1.5 is not a whole number"),
        ({"optim.lr": object()}, "optim.lr is given as <object"),
        ({"a=b": 1}, "settings has the name 'a=b'"),
        ({"model.args.sizes": {"a b": 1}}, "has the key 'a b'"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        settings_from(words_of(values))
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("values", "shown", "fix"),
    [
        ({"optim": {"lr": 0.1}}, 'a dict for optim: {"optim": {"lr": 0.1}}', 'settings={"optim.lr": 0.1}'),
        (
            {"seed": 3, "train": {"steps": 3}, "model": {"name": "x", "args": {"window": 4}}},
            'a dict for train and model: {"train": {"steps": 3}, "model": {"name": "x", "args": {"window": 4}}}',
            'settings={"train.steps": 3, "model.name": "x", "model.args": {"window": 4}}',
        ),
        ({"optim": {}}, 'a dict for optim: {"optim": {}}', "leave optim out"),
    ],
)
def test_groups_of_settings_in_dicts_are_refused_with_their_whole_names(
    values: dict[str, Any], shown: str, fix: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        words_of(values)
    assert refused.value.what == f"settings has {shown}" and refused.value.fix == fix


def test_the_fix_for_groups_in_dicts_is_good() -> None:
    with pytest.raises(ConfigError) as refused:
        words_of({"optim": {"lr": 0.1, "betas": (0.9, 0.99)}, "mesh": {"dp": 2}, "data": {"args": {"rows": 3}}})
    settings = settings_from(words_of(ast.literal_eval(refused.value.fix.removeprefix("settings="))))
    assert settings.optim.lr == 0.1 and settings.mesh.dp == 2 and settings.data.args == {"rows": 3}


def endless() -> dict[str, Any]:
    found: dict[str, Any] = {}
    found["deeper"] = [found]
    return found


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: ew.train(settings=["train.steps=1"]), "settings is ['train.steps=1'], which is no dict"),  # pyright: ignore[reportArgumentType]
        (lambda: ew.plan(settings="mesh=dp2"), "settings is 'mesh=dp2', which is no dict"),  # pyright: ignore[reportArgumentType]
        (lambda: ew.simulate("small_events", settings=[1]), "settings is [1], which is no dict"),  # pyright: ignore[reportArgumentType]
        (lambda: ew.train(run_dir=5), "run_dir is 5, which is no path"),  # pyright: ignore[reportArgumentType]
        (lambda: ew.train(run_dir=b"runs/a"), "run_dir is b'runs/a', which is no path"),  # pyright: ignore[reportArgumentType]
        (lambda: ew.train(run_dir="a\0b"), "run_dir is 'a\\x00b', which is no path"),
        (lambda: ew.train(resume=5), "resume is 5, which is no path"),  # pyright: ignore[reportArgumentType]
        (lambda: ew.train(settings={"run.dir": "a\0b"}), "run.dir=a\0b has a NUL character"),
        (lambda: ew.train(settings={"train.resume": "a\0b"}), "train.resume=a\0b has a NUL character"),
        (lambda: ew.train(settings={"model.args": endless()}), "is given as a value that is nested without an end"),
        (lambda: ew.load_run(None), "run_dir is None, which is no path"),  # pyright: ignore[reportArgumentType]
        (lambda: ew.load_model(5), "run is 5, which is no path"),  # pyright: ignore[reportArgumentType]
        (lambda: ew.simulate(5), "scenario is 5, which is no path"),  # pyright: ignore[reportArgumentType]
        (lambda: ew.plan("dp2", 6), "event is 6, which is no text"),  # pyright: ignore[reportArgumentType]
        (lambda: ew.plan("dp2", "join 99999999999"), "join 99999999999 is out of range"),
    ],
)
def test_arguments_of_the_wrong_kind_are_refused_in_words(call: Callable[[], object], said: str) -> None:
    with pytest.raises(UserError) as caught:
        call()
    assert said in caught.value.what
