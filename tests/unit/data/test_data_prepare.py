"""From a DataSpec to samples: splits, bad input, users' own datasets."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaswave_spmd.data import DataSpec, PreparedData, TokenDataset, open_split, prepare_data
from elaswave_spmd.data.prepare import split_samples
from elaswave_spmd.errors import ConfigError, DataError


def _text(tmp_path: Path, num_bytes: int) -> DataSpec:
    (tmp_path / "a.txt").write_bytes(bytes(i % 251 for i in range(num_bytes)))
    return DataSpec(name="text", path=str(tmp_path / "a.txt"), cache=str(tmp_path / "cache"), validation_fraction=0.25)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory whose modules are importable, and forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def _module(folder: Path, name: str, body: str) -> None:
    (folder / f"{name}.py").write_text(body, encoding="utf-8")


_PLAIN = """
class Plain:
    vocab_size = 50
    def __init__(self, seq_len, size=10):
        self.seq_len, self.size = seq_len, size
    def __len__(self):
        return self.size
    def __getitem__(self, i):
        return [(i + k) % 50 for k in range(self.seq_len + 1)]

class Split(Plain):
    def __init__(self, path, seq_len, split):
        super().__init__(seq_len, {"train": 7, "validation": 3}[split])
        self.split, self.path = split, path
"""


def test_samples_are_windows_that_share_one_token(tmp_path: Path) -> None:
    prepared = prepare_data(_text(tmp_path, 81), 10)
    assert (prepared.num_train_samples, prepared.num_validation_samples, prepared.num_tokens) == (6, 2, 81)
    train, held_out = open_split(prepared, "train"), open_split(prepared, "validation")
    assert isinstance(train, TokenDataset) and isinstance(held_out, TokenDataset)
    tokens, targets = train.batch(np.array([0, 5]))
    assert tokens.dtype == targets.dtype == np.int64
    assert tokens.tolist() == [list(range(0, 10)), list(range(50, 60))]
    assert targets.tolist() == [list(range(1, 11)), list(range(51, 61))]
    assert held_out[1].tolist() == list(range(70, 81))
    assert (len(train), len(held_out), train.vocab_size) == (6, 2, 256)


def test_prepared_data_travels_as_json(tmp_path: Path) -> None:
    prepared = prepare_data(_text(tmp_path, 81), 10)
    assert PreparedData.from_dict(json.loads(json.dumps(prepared.to_dict()))) == prepared
    assert pickle.loads(pickle.dumps(prepared)) == prepared
    with pytest.raises(DataError, match="unknown fields"):
        PreparedData.from_dict({**prepared.to_dict(), "extra": 1})
    with pytest.raises(DataError, match="incomplete"):
        PreparedData.from_dict({"corpus": "text"})


@pytest.mark.parametrize("ids", [[-1], [6], [0, 99]])
def test_ids_outside_the_split_are_refused(tmp_path: Path, ids: list[int]) -> None:
    train = open_split(prepare_data(_text(tmp_path, 81), 10), "train")
    with pytest.raises(IndexError, match=r"\[0, 6\)"):
        train.batch(np.array(ids))


def test_an_empty_batch_has_shape(tmp_path: Path) -> None:
    tokens, targets = open_split(prepare_data(_text(tmp_path, 81), 10), "train").batch(np.array([], dtype=np.int64))
    assert tokens.shape == targets.shape == (0, 10)


@given(
    tokens=st.integers(2, 400),
    seq_len=st.integers(1, 30),
    fraction=st.floats(0, 0.99),
)
def test_splits_cover_every_sample_once(tokens: int, seq_len: int, fraction: float) -> None:
    array = np.arange(tokens, dtype=np.uint16)
    num_samples = (tokens - 1) // seq_len
    train, held_out = split_samples(num_samples, fraction)
    assert train + held_out == num_samples
    assert (held_out > 0) == (fraction > 0 and num_samples > 0)
    seen = [
        TokenDataset(array, seq_len, 0, max(train, 0), tokens),
        TokenDataset(array, seq_len, train, held_out, tokens),
    ]
    firsts = [int(split[i][0]) for split in seen for i in range(len(split))]
    assert firsts == [i * seq_len for i in range(num_samples)]


def test_shortest_corpus_that_is_accepted(tmp_path: Path) -> None:
    assert prepare_data(_text(tmp_path, 21), 10).num_samples("validation") == 1
    with pytest.raises(DataError, match="leaves no sample to train on") as caught:
        prepare_data(_text(tmp_path, 20), 10)
    assert "data.validation_fraction=0" in caught.value.fix


@pytest.mark.parametrize("num_bytes", [1, 10])
def test_shorter_than_one_sample(tmp_path: Path, num_bytes: int) -> None:
    with pytest.raises(DataError, match="shorter than one sample") as caught:
        prepare_data(_text(tmp_path, num_bytes), 10)
    assert f"{num_bytes} tokens in 1 files, train.seq_len=10" in str(caught.value)
    assert not (tmp_path / "cache").exists()


def test_no_validation_split_on_request(tmp_path: Path) -> None:
    _text(tmp_path, 11)
    spec = DataSpec("text", str(tmp_path / "a.txt"), cache=str(tmp_path / "cache"), validation_fraction=0)
    prepared = prepare_data(spec, 10)
    assert (prepared.num_train_samples, len(open_split(prepared, "validation"))) == (1, 0)


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"name": "wikipedia"}, "data.name"),
        ({"name": "custom"}, "data.target"),
        ({"name": "text"}, "data.path"),
        ({"path": "x.txt"}, "data.path"),
        ({"args": {"a": 1}}, "data.args"),
        ({"validation_fraction": 1.0}, "data.validation_fraction"),
        ({"validation_fraction": float("nan")}, "data.validation_fraction"),
        ({"validation_fraction": "half"}, "data.validation_fraction"),
        ({"seq_len": 0}, "train.seq_len"),
    ],
)
def test_contradictory_specs_are_refused(fields: dict[str, object], where: str) -> None:
    with pytest.raises((ConfigError, DataError)) as caught:
        DataSpec(**fields)  # type: ignore[arg-type]
    assert caught.value.where == where
    assert caught.value.fix


@pytest.mark.parametrize("seq_len", [0, -1, True, 1.5, "8", None])
def test_seq_len_must_be_a_positive_integer(seq_len: object) -> None:
    with pytest.raises(ConfigError, match="positive integer"):
        prepare_data(DataSpec(), seq_len)  # type: ignore[arg-type]


def test_seq_len_in_two_places_must_agree(tmp_path: Path) -> None:
    spec = DataSpec(seq_len=8)
    with pytest.raises(ConfigError, match="given twice"):
        prepare_data(spec, 9)


@pytest.mark.parametrize("damage", ["gone", "short"])
def test_a_token_file_that_went_bad_is_refused(tmp_path: Path, damage: str) -> None:
    prepared = prepare_data(_text(tmp_path, 81), 10)
    path = Path(prepared.token_file)
    path.unlink() if damage == "gone" else path.write_bytes(b"x")
    with pytest.raises(DataError, match="token file"):
        open_split(prepared, "train")


def test_unknown_split(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="two splits"):
        open_split(prepare_data(_text(tmp_path, 81), 10), "test")  # type: ignore[arg-type]


def test_custom_dataset_without_split_gets_its_tail_held_out(here: Path) -> None:
    _module(here, "user_a", _PLAIN)
    prepared = prepare_data(DataSpec(target="user_a.Plain", validation_fraction=0.2), 4)
    assert (prepared.corpus, prepared.num_train_samples, prepared.num_validation_samples) == ("user_a.Plain", 8, 2)
    prepared = PreparedData.from_dict(json.loads(json.dumps(prepared.to_dict())))
    tokens, targets = open_split(prepared, "validation").batch(np.array([1]))
    assert (tokens.tolist(), targets.tolist()) == ([[9, 10, 11, 12]], [[10, 11, 12, 13]])


def test_custom_dataset_with_split_path_and_args(here: Path) -> None:
    _module(here, "user_b", _PLAIN)
    with pytest.raises(
        ConfigError, match=r"data\.validation_fraction=0\.3 is given .* split='validation' of user_b\.Split"
    ):
        prepare_data(DataSpec(target="user_b.Split", path="somewhere", validation_fraction=0.3), 4)
    prepared = prepare_data(DataSpec(target="user_b.Split", path="somewhere"), 4)
    assert (prepared.num_train_samples, prepared.num_validation_samples) == (7, 3)
    assert prepared.kwargs == {"seq_len": 4, "path": "somewhere", "split": "train"}
    assert len(open_split(prepared, "validation")) == 3
    assert prepare_data(DataSpec(target="user_b.Plain", args={"size": 100}), 4).num_train_samples == 98


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("Nothing", "does not name a class"),
        ("user c.X", "does not name a class"),
        ("absent_module.X", "cannot be imported"),
        ("broken.X", "NameError"),
        ("user_c.Absent", "has no class Absent"),
        ("user_c.Raises", "constructor of user_c.Raises failed"),
        ("user_c.NoLength", r"(?s)not a map-style dataset: no __len__.*fix: *def __len__\(self\), which returns"),
        ("user_c.Words", "is of type str"),
        ("user_c.Uneven", "cannot be stacked"),
        ("user_c.BadVocabulary", "positive integer"),
        ("user_c.Empty", "has no samples"),
        ("user_c.Short", "a sample is 5 integers"),
        ("user_c.Floats", "a sample is 5 integers"),
        ("user_c.Outside", r"tokens lie in \[0, vocab_size\)"),
        ("user_c.Failing", "failed when its first or last sample was read"),
        ("builtins.exit", "constructor of builtins.exit failed .SystemExit"),
        ("ends.X", "cannot be imported .SystemExit: 3"),
        ("user_c.Ends", r"failed when its first or last sample was read .RuntimeError: sys.exit\(4\) was called"),
        ("user_c.EndsCollating", r"failed when its first or last sample was read .RuntimeError: sys.exit\(5\)"),
        ("user_c.EndsCounting", r"__len__ of user_c.EndsCounting raised SystemExit: 6"),
        ("user_c.Misspelt", r"vocab_size of user_c.Misspelt raised AttributeError: .*_tokns"),
        ("user_c.NoFile", r"vocab_size of user_c.NoFile raised FileNotFoundError"),
    ],
)
def test_bad_custom_datasets(here: Path, target: str, message: str) -> None:
    _module(here, "broken", "undefined_name")
    _module(here, "ends", "import sys; sys.exit(3)")
    _module(
        here,
        "user_c",
        """
import sys
class Good:
    vocab_size = 9
    def __len__(self): return 5
    def __getitem__(self, i): return [1] * 5
class Raises(Good):
    def __init__(self): raise OSError("no disk")
class NoLength:
    vocab_size = 9
    def __getitem__(self, i): return [1] * 5
class Words:
    def __len__(self): return 5
    def __getitem__(self, i): return {"x": 1.0, "name": "word"}
class Uneven:
    def __len__(self): return 5
    def __getitem__(self, i): return [1] * (i + 1)
class BadVocabulary(Good):
    vocab_size = "many"
class Empty(Good):
    def __len__(self): return 0
class Short(Good):
    def __getitem__(self, i): return [1] * 4
class Floats(Good):
    def __getitem__(self, i): return [1.0] * 5
class Outside(Good):
    def __getitem__(self, i): return [9] * 5
class Failing(Good):
    def __getitem__(self, i): raise KeyError(i)
class Ends(Good):
    def __getitem__(self, i): sys.exit(4)
class EndsCollating:
    def __len__(self): return 5
    def __getitem__(self, i): return [1]
    def collate(self, samples): sys.exit(5)
class EndsCounting(Good):
    def __len__(self): sys.exit(6)
class Misspelt(Good):
    @property
    def vocab_size(self): return max(self._tokns) + 1
class NoFile(Good):
    @property
    def vocab_size(self): return len(open("no-such-file").read())
""",
    )
    with pytest.raises(DataError, match=message):
        prepare_data(DataSpec(target=target), 4)


def test_of_many_classes_those_like_the_one_that_was_named_are_shown(here: Path) -> None:
    _module(here, "user_i", "\n".join(f"class {name}: pass" for name in ("Rows", *(f"Table{i}" for i in range(30)))))
    with pytest.raises(DataError, match="has no class Rowz") as caught:
        prepare_data(DataSpec(target="user_i.Rowz"), 4)
    assert caught.value.exists.startswith("Rows, Table") and caught.value.exists.endswith(", and 26 others")
    assert caught.value.fix == "data.target=user_i.Rows"
    with pytest.raises(DataError, match="has no class XYZ") as caught:
        prepare_data(DataSpec(target="user_i.XYZ"), 4)
    assert caught.value.fix == "name one of its classes"


@pytest.mark.parametrize("fields", [{"path": "x"}, {"args": {"colour": 1}}, {"tokenizer": "tok.json"}])
def test_settings_that_a_custom_dataset_does_not_take(here: Path, fields: dict[str, object]) -> None:
    _module(here, "user_d", _PLAIN)
    with pytest.raises(DataError, match="takes no argument") as caught:
        prepare_data(DataSpec(target="user_d.Plain", **fields), 4)  # type: ignore[arg-type]
    assert "seq_len, size" in caught.value.exists


def test_arguments_that_the_run_would_replace_are_refused(here: Path) -> None:
    """In the workers `split` was train or validation, whatever the controller had made its lengths of."""
    _module(
        here,
        "user_j",
        """
class Any:
    def __init__(self, **options): pass
    def __len__(self): return 5
    def __getitem__(self, i): return [1.0]
""",
    )
    with pytest.raises(ConfigError, match=r"data\.args\.split=all is given"):
        prepare_data(DataSpec(target="user_j.Any", args={"split": "all"}), 4)
    with pytest.raises(ConfigError, match=r"data\.args\.path=a contradicts data\.path=b"):
        prepare_data(DataSpec(target="user_j.Any", args={"path": "a"}, path="b"), 4)
    assert prepare_data(DataSpec(target="user_j.Any", args={"path": "a"}, path="a"), 4).kwargs == {"path": "a"}


def test_arguments_that_a_constructor_lacks_are_told_with_the_settings_that_give_them(here: Path) -> None:
    _module(
        here,
        "user_f",
        """
import functools
class Rows:
    def __init__(self, seq_len, path, *, table, limit=3):
        self.rows = open(path)
    def __len__(self): return 4
    def __getitem__(self, i): return [1.0]
class Inner(Rows):
    def __init__(self): super().__init__(3)
@functools.wraps(Rows)
def wrapped(seq_len): return Whole()
class Whole(Rows):
    def __init__(self): pass
""",
    )
    with pytest.raises(DataError, match=r"user_f\.Rows needs path, table, which the settings do not give") as caught:
        prepare_data(DataSpec(target="user_f.Rows"), 4)
    assert caught.value.fix == "data.path=VALUE +data.args.table=VALUE"
    assert caught.value.exists == "it was given seq_len"
    with pytest.raises(DataError, match="needs table,") as caught:
        prepare_data(DataSpec(target="user_f.Rows", path="x"), 4)
    assert caught.value.fix == "+data.args.table=VALUE"
    with pytest.raises(DataError, match=r"the constructor of user_f\.Inner failed"):
        prepare_data(DataSpec(target="user_f.Inner"), 4)
    assert prepare_data(DataSpec(target="user_f.wrapped", validation_fraction=0), 4).num_train_samples == 4


@pytest.mark.parametrize(
    ("returns", "told", "fix"),
    [
        ("return 10 / 2", "__len__ of user_g.Rows returned 5.0", "divide with //"),
        ("return -3", "__len__ of user_g.Rows returned -3", "return the number"),
        ("return None", "__len__ of user_g.Rows returned None", "return the number"),
        ("return 2**70", "__len__ of user_g.Rows returned 1180591620717411303424", "return the number"),
        ("raise KeyError('no table')", "__len__ of user_g.Rows raised KeyError: 'no table'", "correct it"),
    ],
)
def test_a_length_that_is_none_is_told_with_what_was_returned(here: Path, returns: str, told: str, fix: str) -> None:
    _module(
        here, "user_g", f"class Rows:\n    def __len__(self): {returns}\n    def __getitem__(self, i): return [1.0]"
    )
    with pytest.raises(DataError) as caught:
        prepare_data(DataSpec(target="user_g.Rows"), 4)
    assert caught.value.what == told and caught.value.fix.startswith(fix) and "whole number" in caught.value.rule
    assert caught.value.where.endswith(returns) == returns.startswith("raise")


def test_a_length_may_be_any_whole_number(here: Path) -> None:
    body = "import numpy\nclass Rows:\n    def __len__(self): return numpy.int64(4)\n"
    _module(here, "user_h", f"{body}    def __getitem__(self, i): return [1.0]")
    assert prepare_data(DataSpec(target="user_h.Rows", validation_fraction=0), 4).num_train_samples == 4


def test_a_custom_dataset_that_changes_between_processes_is_refused(here: Path) -> None:
    _module(here, "user_e", _PLAIN)
    prepared = prepare_data(DataSpec(target="user_e.Plain", args={"size": 20}), 4)
    shrunk = PreparedData.from_dict({**prepared.to_dict(), "kwargs": {"seq_len": 4, "size": 5}})
    with pytest.raises(DataError, match="differs"):
        open_split(shrunk, "train")


def test_the_room_imports_no_torch_and_no_tokenizers() -> None:
    code = "import sys, elaswave_spmd.data; print([m for m in ('torch', 'tokenizers', 'rich') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
