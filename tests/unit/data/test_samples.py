"""Datasets whose samples are no tokens: what is collated, by which keys, and what the model is given of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from elaswave_spmd.data import DataSpec, PreparedData, open_split, prepare_data
from elaswave_spmd.data.samples import GenericDataset, SampleKeys, collated, plain_attributes, takes_keys
from elaswave_spmd.data.tree import map_tree, named_leaves
from elaswave_spmd.errors import DataError
from tests.sample_models import Sentences, Sharded


class Pair(NamedTuple):
    x: Any
    y: Any


class Samples:
    """Whatever it was given."""

    def __init__(self, *samples: Any) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        return self._samples[index]


def batch_of(*samples: Any) -> Any:
    dataset = Samples(*samples)
    return GenericDataset(dataset, 0, len(dataset), "mine").batch(np.arange(len(dataset)))


def test_leaves_are_stacked_in_their_own_dtypes() -> None:
    sample = {"image": np.ones((2, 3), np.float16), "label": 3, "more": Pair(torch.tensor([1], dtype=torch.int8), 0.5)}
    batch = batch_of(sample, sample)
    assert type(batch["more"]) is Pair
    shapes = {name: (leaf.dtype, tuple(leaf.shape)) for name, leaf in named_leaves(batch)}
    assert shapes == {
        'batch["image"]': (torch.float16, (2, 2, 3)),
        'batch["label"]': (torch.int64, (2,)),
        'batch["more"].x': (torch.int8, (2, 1)),
        'batch["more"].y': (torch.float64, (2,)),
    }
    assert torch.equal(batch_of(torch.ones(2), torch.zeros(2)), torch.tensor([[1.0, 1.0], [0.0, 0.0]]))


def test_trees_keep_their_form() -> None:
    tree = {"a": [1, (2, 3)], "b": Pair(4, {"c": 5})}
    assert map_tree(lambda n: n + 1, tree) == {"a": [2, (3, 4)], "b": Pair(5, {"c": 6})}
    assert dict(named_leaves(tree, "b")) == {
        'b["a"][0]': 1,
        'b["a"][1][0]': 2,
        'b["a"][1][1]': 3,
        'b["b"].x': 4,
        'b["b"].y["c"]': 5,
    }


@pytest.mark.parametrize(
    ("samples", "told"),
    [
        (([1.0], [1.0, 2.0]), "cannot be stacked"),
        ((np.ones(2), np.ones(2), np.ones(3)), r"cannot be stacked: one is sample 2 float64\[3\]"),
        ((1.0, None), "cannot be stacked: one is sample 1 NoneType"),
        (({"x": 1.0}, {"x": 1.0, "y": 2.0}), r'cannot be stacked: one is sample 1\["x"\] float, sample 1\["y"\] float'),
        (({"x": {"a": 1}}, {"x": {"a": 1, "b": 2}}), r'one is sample 1\["x"\]\["a"\] int, sample 1\["x"\]\["b"\] int'),
        (([({"a": 1}, 2)], [({"a": 1, "b": 2}, 2)]), r"cannot be stacked: one is sample 1"),
        (({"x": 1, "name": "one"},), r'batch\["name"\]\[0\] of mine is of type str'),
        (({},), "has no tensors"),
    ],
)
def test_what_cannot_be_a_batch(samples: tuple[Any, ...], told: str) -> None:
    with pytest.raises(DataError, match=told):
        batch_of(*samples)


def test_an_error_of_collate_is_told_with_the_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "user_rows.py").write_text(
        """
class Rows:
    def __len__(self): return 10
    def __getitem__(self, i): return [1.0] * (1 + i)
    def collate(self, samples): return samples[0] + samples["all"]
"""
    )
    with pytest.raises(DataError, match="TypeError: list indices must be integers") as raised:
        prepare_data(DataSpec(target="user_rows.Rows"), 12)
    assert "user_rows.py:5, in collate" in str(raised.value)


def test_a_dataset_may_collate() -> None:
    class Joined(Samples):
        def collate(self, samples: list[np.ndarray]) -> dict[str, Any]:
            sizes = [len(sample) for sample in samples]
            return {"x": np.concatenate(samples), "lengths": sizes, "number": 2, "all": np.array(sum(sizes))}

    batch = collated([np.ones(2), np.ones(3)], Joined(), "joined", [0, 1])
    assert batch["x"].shape == (5,) and [int(n) for n in batch["lengths"]] == [2, 3] and int(batch["number"]) == 2
    assert batch["all"].shape == () and int(batch["all"]) == 5


def test_a_collate_that_fills_the_same_memory_again_changes_no_batch() -> None:
    """The next batch is read while this one is in use."""

    class Reusing(Samples):
        tensor, array = torch.zeros(2), np.zeros(2)

        def collate(self, samples: list[float]) -> tuple[torch.Tensor, np.ndarray]:
            self.tensor[:], self.array[:] = torch.tensor(samples), samples
            return self.tensor, self.array

    dataset = Reusing()
    first, _ = (collated(some, dataset, "reusing", [0, 1]) for some in ([1.0, 2.0], [3.0, 4.0]))
    assert [leaf.tolist() for leaf in first] == [[1.0, 2.0], [1.0, 2.0]]


def test_samples_by_keys() -> None:
    class Keyed(Samples):
        def __getitem__(self, index: int, keys: SampleKeys) -> np.ndarray:  # pyright: ignore[reportIncompatibleMethodOverride]
            return np.array(
                [index, keys.sample_id, keys.numpy().random(), float(torch.rand((), generator=keys.generator()))]
            )

    class ByName(Keyed):
        def __getitem__(self, index: int, flag: bool = False, *, keys: SampleKeys) -> np.ndarray:  # pyright: ignore[reportIncompatibleMethodOverride]
            assert not flag
            return super().__getitem__(index, keys)

    assert takes_keys(Keyed()) and takes_keys(ByName()) and not takes_keys(Samples())
    by_name = GenericDataset(ByName(), 10, 5, "by name").batch(np.array([0, 3]), 7, 1)
    assert torch.equal(by_name, GenericDataset(Keyed(), 10, 5, "keyed").batch(np.array([0, 3]), 7, 1))
    split = GenericDataset(Keyed(), 10, 5, "keyed")
    first, again, other = (split.batch(np.array([0, 3]), 7, step) for step in (1, 1, 2))
    assert torch.equal(first, again) and first[:, :2].tolist() == [[10, 0], [13, 3]]
    assert not torch.equal(first[:, 2], other[:, 2]) and not torch.equal(first[:, 3], other[:, 3])
    assert torch.equal(split.batch(np.array([3]), 7, 1)[0], first[1]), "whichever micro-batch it is in"
    assert not torch.equal(split.batch(np.array([0, 3]), 8, 1)[:, 2], first[:, 2])


def test_ids_and_errors_name_the_sample() -> None:
    split = GenericDataset(Samples(1, 2, 3), 1, 2, "mine")
    assert split.batch(np.array([1, 0])).tolist() == [3, 2]
    with pytest.raises(IndexError, match=r"\[0, 2\)"):
        split.batch(np.array([2]))
    with pytest.raises(IndexError) as raised:
        GenericDataset(Samples(1), 1, 2, "mine").batch(np.array([1]))
    assert "in sample 2 of mine" in vars(raised.value)["__notes__"]


def test_attributes_are_integers_and_shapes() -> None:
    class Sized(Samples):
        num_classes = 3
        names = ("a", "b")
        rate = 0.5

        def __init__(self) -> None:
            super().__init__(1)
            self.image_shape, self.big, self.is_on = (1, 8, 8), np.int64(4), True
            self.strides = [2, 2]

        @property
        def num_rows(self) -> int:
            raise AssertionError("a property is code of the user's, and is not called")

    assert plain_attributes(Sized()) == {"num_classes": 3, "image_shape": [1, 8, 8], "big": 4, "strides": [2, 2]}


def test_what_a_base_class_of_ours_reads_by_is_no_attribute() -> None:
    assert plain_attributes(Sharded()) == {"shards": [0, 10, 20, 30]}
    sharded, plain = (GenericDataset(one, 0, 40, "mine").batch(np.arange(7, 23)) for one in (Sharded(), Sentences()))
    leaves = zip(named_leaves(sharded), named_leaves(plain), strict=True)
    assert all(name == other and torch.equal(one, two) for (name, one), (other, two) in leaves)


def test_a_dataset_without_vocabulary_is_prepared_and_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "user_images.py").write_text(
        """
class Images:
    num_classes = 4
    def __init__(self, seq_len=0): self.length = seq_len
    def __len__(self): return 10
    def __getitem__(self, i): return float(i), i % 4
"""
    )
    prepared = prepare_data(DataSpec(target="user_images.Images", validation_fraction=0.2), 12)
    assert not prepared.is_tokens and (prepared.num_train_samples, prepared.num_validation_samples) == (8, 2)
    assert prepared.attributes == {"num_classes": 4, "length": 12}
    assert PreparedData.from_dict(prepared.to_dict()) == prepared
    x, y = open_split(prepared, "validation").batch(np.array([0, 1]))
    assert x.tolist() == [8.0, 9.0] and y.tolist() == [0, 1]


def test_token_data_has_no_attributes_to_send() -> None:
    prepared = PreparedData("text", "", 0, "bytes", 256, 4, 1, 0, token_file="/tokens")
    assert prepared.is_tokens and "attributes" not in prepared.to_dict()
