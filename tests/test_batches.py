"""A batch's length, its pieces, its move and its call."""

from __future__ import annotations

import enum
import types
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from adaptive_trainer.batches import (
    Uncuttable,
    cut,
    length,
    num_elements,
    shapes,
    sizes,
    tensors_of,
    to_device,
)
from adaptive_trainer.errors import DataError
from adaptive_trainer.forward import call, loss_of

Pair = namedtuple("Pair", ["inputs", "targets"])  # noqa: PYI024  what users write


class Typed(NamedTuple):
    x: Tensor
    name: str


@dataclass
class Plain:
    x: Tensor
    scale: float
    rows: list[str]


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Tensor
    y: Tensor


@dataclass
class Derived:
    x: Tensor
    doubled: Tensor = field(init=False)
    table: Tensor = field(default_factory=lambda: torch.arange(3))

    def __post_init__(self):
        self.doubled = self.x * 2

    @cached_property
    def mask(self):
        return self.x > 0


class Colour(enum.Enum):
    RED = 1


class Graph:
    """Of another library."""


class AttributeDict(dict):
    def __init__(self, *args, **keywords):
        super().__init__(*args, **keywords)
        self.__dict__ = self


class Stored(MutableMapping):
    """Its shallow copy shares the store."""

    def __init__(self, store):
        self.store = store

    def __getitem__(self, key):
        return self.store[key]

    def __setitem__(self, key, value):
        self.store[key] = value

    def __delitem__(self, key):
        del self.store[key]

    def __iter__(self):
        return iter(self.store)

    def __len__(self):
        return len(self.store)


def rows(num, *rest, dtype=torch.float32):
    count = num * int(np.prod(rest))
    return torch.arange(count).reshape(num, *rest).to(dtype)


# Sizes of pieces.


@pytest.mark.parametrize(
    ("num_samples", "micro_batch", "smallest", "pieces"),
    [
        (10, 4, 1, (4, 3, 3)),
        (5, 3, 1, (3, 2)),
        (5, None, 1, (5,)),
        (5, 9, 1, (5,)),
        (0, 4, 1, (0,)),
        (5, 2, 1, (2, 2, 1)),
        (5, 2, 2, (3, 2)),
        (3, 1, 2, (3,)),
        (1, 1, 2, (1,)),
        (4, 1, 2, (2, 2)),
    ],
)
def test_sizes_are_as_equal_as_possible_and_never_below_the_smallest(num_samples, micro_batch, smallest, pieces):
    assert sizes(num_samples, micro_batch, smallest) == pieces


def test_sizes_agree_with_tensor_split():
    for num_samples in range(1, 30):
        for micro_batch in range(1, num_samples + 1):
            found = sizes(num_samples, micro_batch)
            assert max(found) <= micro_batch
            assert found == tuple(map(len, torch.arange(num_samples).tensor_split(len(found))))


# Length.

LENGTHS = {
    "tensor": (rows(7, 2), None, 7),
    "pair": ((rows(7, 2), rows(7)), None, 7),
    "two fields and two samples": ([rows(2, 5), rows(2)], None, 2),
    "the most common": ({"table": rows(3), "x": rows(7, 2), "y": rows(7)}, None, 7),
    "the first in a tie": ({"x": rows(7, 2), "table": rows(3)}, None, 7),
    "labels break the tie": ({"table": rows(3, 2), "labels": rows(7)}, None, 7),
    "targets break the tie": ((rows(3, 2), rows(7, dtype=torch.int64)), None, 7),
    "expected wins over common": ({"a": rows(3), "b": rows(3), "x": rows(7)}, 7, 7),
    "last batch beside a table as long as a full one": ({"x": rows(5, 2), "table": rows(8), "labels": rows(5)}, 8, 5),
    "flattened labels are longer than the batch": ({"x": rows(4, 5), "labels": rows(20)}, 4, 4),
    "last pair of one, full batches of two": ((rows(1, 5), rows(1, 5)), 2, 1),
    "expected that nothing has": ({"x": rows(7)}, 4, 7),
    "numpy": ({"x": np.zeros((7, 2))}, None, 7),
    "nested": ({"inputs": {"ids": rows(7, 3), "mask": (rows(7, 3), None)}, "scale": 0.5}, None, 7),
    "state of two tensors": ((rows(7, 2), (rows(7, 3), rows(7, 3))), None, 7),
    "strings": (["a", "b", "c"], None, 3),
    "numbers": ([1, 2, 3], None, 3),
    "list of dicts": ([{"x": rows(3, 4), "y": 1}] * 5, None, 5),
    "fields of strings": ([("a", "b", "c"), ("d", "e", "f")], None, 3),
    "dict of lists": ({"text": ["a", "b", "c"], "label": [1, 0, 1]}, None, 3),
    "ragged rows": ([rows(5), rows(3), rows(7)], None, 3),
    "ragged rows, expected is also a row's length": ([rows(5), rows(3), rows(7)], 3, 3),
    "identity collate of images": ([rows(3, 8, 8)] * 5, 5, 5),
    "detection": (
        (tuple(rows(3, 4, 4) for _ in range(4)), tuple({"boxes": rows(k, 4)} for k in (1, 3, 2, 5))),
        None,
        4,
    ),
    "scalars only": ({"scale": 0.5, "name": "a", "none": None}, None, None),
    "0-d": (torch.tensor(1.0), None, None),
    "nothing": ({}, None, None),
    "empty": (rows(0, 3), None, 0),
    "sparse": (rows(7, 2).to_sparse_csr(), None, 7),
}


@pytest.mark.parametrize("case", LENGTHS)
def test_length_is_the_number_of_samples(case):
    batch, expected, found = LENGTHS[case]
    assert length(batch, expected) == found


# Cutting: every structure of the field.


def test_case_060_pair_and_list_pair_are_fields_also_with_two_samples():
    x, y = rows(2, 5), rows(2)
    for make in (tuple, list):
        pieces = cut(make([x, y]), 2, (1, 1))
        assert [type(piece) for piece in pieces] == [make, make]
        assert all(torch.equal(piece[0], x[i : i + 1]) for i, piece in enumerate(pieces))
        assert all(torch.equal(piece[1], y[i : i + 1]) for i, piece in enumerate(pieces))


def test_case_060_two_fields_of_one_kind_and_two_samples():
    pieces = cut([rows(2, 5), rows(2, 5) + 100], 2, (1, 1))
    assert torch.equal(pieces[1][0], rows(2, 5)[1:])
    assert torch.equal(pieces[1][1], rows(2, 5)[1:] + 100)


def test_case_060_scalars_strings_and_other_lengths_are_shared():
    table = rows(7)
    shared = {
        "temperature": 0.5, "flag": True, "name": "abcd", "raw": b"abcd", "none": None, "zero": torch.tensor(3.0),
        "colour": Colour.RED, "dtype": torch.float32, "device": torch.device("cpu"), "number": np.float64(2),
        "table": table, "np_table": np.arange(7), "class": Graph, "function": rows, "size": torch.Size([4, 4]),
    }  # fmt: skip
    pieces = cut({"x": rows(4, 2), **shared}, 4, (2, 2))
    for piece in pieces:
        assert piece["x"].shape == (2, 2)
        assert all(piece[key] is value for key, value in shared.items())


@pytest.mark.parametrize(
    ("batch", "second"),
    [
        (["a", "b", "c"], ["c"]),
        (("a", "b", "c"), ("c",)),
        ([1, 2, 3], [3]),
        ([{"text": "a"}, {"text": "b"}, {"text": "c"}], [{"text": "c"}]),
        ([None, "b", None], [None]),
        ([[1, 2], [3], [4, 5, 6]], [[4, 5, 6]]),
        ([("a", "b", "c"), ("d", "e", "f")], [("c",), ("f",)]),
    ],
)
def test_case_060_lists_of_rows_are_sliced(batch, second):
    assert cut(batch, 3, (2, 1))[1] == second
    assert cut({"rows": batch, "x": rows(3)}, 3, (2, 1))[1]["rows"] == second


def test_case_060_nested_mapping_of_rows_and_tensors():
    batch = {"inputs": {"ids": rows(4, 3), "text": ["a", "b", "c", "d"]}, "labels": rows(4)}
    second = cut(batch, 4, (3, 1))[1]
    assert torch.equal(second["inputs"]["ids"], rows(4, 3)[3:])
    assert second["inputs"]["text"] == ["d"]
    assert torch.equal(second["labels"], rows(4)[3:])


def test_ragged_tensors_are_rows_at_the_top_and_inside_even_if_one_is_as_long_as_the_batch():
    ragged = [rows(5), rows(3), rows(7)]
    assert cut(ragged, 3, (2, 1))[1][0] is ragged[2]
    assert [row is whole for row, whole in zip(cut((ragged, rows(3)), 3, (2, 1))[0][0], ragged, strict=False)] == [
        True
    ] * 2


def test_a_nested_list_of_tensors_as_long_as_the_batch_is_fields():
    hidden, cell = rows(2, 3), rows(2, 3) + 10
    pieces = cut((rows(2, 5), [hidden, cell]), 2, (1, 1))
    assert torch.equal(pieces[1][1][0], hidden[1:])
    assert torch.equal(pieces[1][1][1], cell[1:])


def test_a_nested_list_of_structures_as_long_as_the_batch_is_fields():
    views = [{"ids": rows(2, 3), "note": "a"}, {"ids": rows(2, 3) + 9, "note": "b"}]
    pieces = cut({"views": views, "y": rows(2)}, 2, (1, 1))
    assert torch.equal(pieces[1]["views"][1]["ids"], rows(2, 3)[1:] + 9)
    assert pieces[1]["views"][1]["note"] == "b"


def test_two_fields_that_are_lists_of_two_rows_each():
    images, targets = (rows(3, 4, 4), rows(3, 5, 5)), ({"boxes": rows(1, 4)}, {"boxes": rows(2, 4)})
    pieces = cut((images, targets), 2, (1, 1))
    assert pieces[1][0][0] is images[1]
    assert pieces[1][1][0]["boxes"] is targets[1]["boxes"]


def test_two_samples_of_two_parts_each_are_rows():
    samples = [(rows(3, 4), 0), (rows(5, 4), 1)]
    assert length(samples) == 2
    assert cut(samples, 2, (1, 1))[1] == [samples[1]]


def test_detection_with_as_many_images_as_channels_is_rows():
    images = [rows(3, 4, 4 + i) for i in range(3)]
    targets = [{"boxes": rows(k, 4), "labels": rows(k)} for k in (1, 3, 2)]
    pieces = cut((images, targets), 3, (2, 1))
    assert pieces[1][0][0] is images[2]
    assert len(pieces[0][0]) == len(pieces[0][1]) == 2
    assert pieces[1][1][0]["boxes"] is targets[2]["boxes"]


def test_named_tuples_keep_their_class():
    pair, typed = cut((Pair(rows(4, 2), rows(4)), Typed(rows(4), "four")), 4, (2, 2))[1]
    assert type(pair) is Pair
    assert torch.equal(pair.inputs, rows(4, 2)[2:])
    assert type(typed) is Typed
    assert typed.name == "four"


def test_results_of_torch_keep_their_class():
    found = rows(4, 2).max(dim=1)
    piece = cut(found, 4, (3, 1))[1]
    assert type(piece) is type(found)
    assert torch.equal(piece.indices, found.indices[3:])


def test_dataclasses_are_cut_without_running_their_constructor():
    plain = cut(Plain(rows(3, 2), 0.5, ["a", "b", "c"]), 3, (2, 1))[1]
    assert type(plain) is Plain
    assert (plain.scale, plain.rows) == (0.5, ["c"])
    frozen = cut(Frozen(rows(3, 2), rows(3)), 3, (2, 1))[1]
    assert type(frozen) is Frozen
    assert torch.equal(frozen.y, rows(3)[2:])


def test_dataclass_fields_outside_init_are_cut_and_cached_properties_computed_anew():
    batch = Derived(rows(4))
    assert batch.mask.shape == (4,)
    batch.doubled = batch.doubled + 1
    piece = cut(batch, 4, (3, 1))[1]
    assert torch.equal(piece.doubled, rows(4)[3:] * 2 + 1)
    assert torch.equal(piece.mask, torch.tensor([True]))
    assert piece.table is batch.table


def test_mappings_keep_their_class():
    default = defaultdict(list, x=rows(4))
    user = UserDict(x=rows(4))
    user.note = "kept"
    for batch in ({"x": rows(4)}, OrderedDict(x=rows(4)), default, user):
        piece = cut(batch, 4, (3, 1))[1]
        assert type(piece) is type(batch)
        assert torch.equal(piece["x"], rows(4)[3:])
        assert len(batch["x"]) == 4
    assert cut(default, 4, (3, 1))[0].default_factory is list
    assert cut(user, 4, (3, 1))[0].note == "kept"


def test_a_dict_with_its_keys_as_attributes_has_the_piece_under_both():
    piece = cut(AttributeDict(x=rows(4)), 4, (3, 1))[1]
    assert piece.x is piece["x"]
    assert len(piece.x) == 1


def test_mappings_that_cannot_be_copied_safely_become_dicts():
    for batch in (types.MappingProxyType({"x": rows(4)}), Stored({"x": rows(4)})):
        piece = cut(batch, 4, (3, 1))[1]
        assert type(piece) is dict
        assert len(piece["x"]) == 1
        assert len(batch["x"]) == 4


def test_batch_encoding_keeps_its_class():
    transformers = pytest.importorskip("transformers")
    batch = transformers.BatchEncoding({"input_ids": rows(4, 3), "labels": rows(4)})
    piece = cut(batch, 4, (3, 1))[1]
    assert type(piece) is transformers.BatchEncoding
    assert torch.equal(piece.input_ids, rows(4, 3)[3:])
    assert batch["input_ids"].shape == (4, 3)


def test_numpy_arrays_are_cut_as_views():
    array = np.arange(8).reshape(4, 2)
    piece = cut({"x": array}, 4, (3, 1))[1]["x"]
    assert np.array_equal(piece, array[3:])
    assert np.shares_memory(piece, array)


def test_tensors_are_views():
    x = rows(4, 2)
    for piece, start in zip(cut((x, rows(4)), 4, (3, 1)), (0, 3), strict=True):
        assert piece[0].data_ptr() == x[start].data_ptr()


@pytest.mark.parametrize("pieces", [(3, 1), (2, 2), (1, 1, 1, 1)])
def test_case_060_sparse_tensors_are_cut_by_rows(pieces):
    dense = torch.tensor([[0.0, 1, 0], [0, 0, 0], [2, 0, 3], [0, 0, 4]])
    for sparse in (dense.to_sparse_csr(), dense.to_sparse_coo()):
        found = [piece["x"] for piece in cut({"x": sparse, "y": rows(4)}, 4, pieces)]
        assert {piece.layout for piece in found} == {sparse.layout}
        assert torch.equal(torch.cat([piece.to_dense() for piece in found]), dense)


def test_batched_csr_is_cut_by_matrices():
    dense = torch.stack([torch.eye(3) * (i + 1) for i in range(4)])
    found = cut({"x": dense.to_sparse_csr()}, 4, (3, 1))
    assert torch.equal(torch.cat([piece["x"].to_dense() for piece in found]), dense)


# What cannot be cut.

PACKED = pack_padded_sequence(rows(4, 3, 1), torch.tensor([3, 2, 2, 1]), batch_first=True)
NESTED = torch.nested.nested_tensor([rows(2), rows(3), rows(1), rows(2)])
JAGGED = torch.nested.nested_tensor([rows(2), rows(3), rows(1), rows(2)], layout=torch.jagged)


@pytest.mark.parametrize(
    ("batch", "place", "kind"),
    [
        ({"graph": Graph(), "y": rows(4)}, 'batch["graph"]', "Graph"),
        ((rows(4), {"meta": Graph()}), 'batch[1]["meta"]', "Graph"),
        (Frozen(Graph(), rows(4)), "batch.x", "Graph"),
        ((PACKED, rows(4)), "batch[0]", "PackedSequence"),
        ((NESTED, rows(4)), "batch[0]", "nested tensor"),
        ((JAGGED, rows(4)), "batch[0]", "nested tensor"),
        ((rows(4, 4).to_sparse_csc(), rows(4)), "batch[0]", "sparse_csc"),
        ((rows(4), {"a", "b"}), "batch[1]", "set"),
        (Graph(), "batch", "Graph"),
    ],
)
def test_case_060_what_cannot_be_cut_is_named_with_its_place_and_passed_whole(batch, place, kind):
    with pytest.raises(Uncuttable) as caught:
        cut(batch, 4, (2, 2))
    assert str(caught.value).startswith(f"{place} is a")
    assert kind in str(caught.value)
    assert "step=" in str(caught.value)
    assert "halve_batch" in str(caught.value)
    assert len(cut(batch, 4, (4,))) == 1


def test_a_batch_in_which_nothing_has_its_length_is_not_repeated():
    with pytest.raises(Uncuttable, match="length of its 4 samples"):
        cut({"x": rows(5), "scale": 2.0}, 4, (2, 2))


def test_rows_may_be_objects_of_any_kind():
    graphs = [Graph(), Graph(), Graph()]
    assert cut((graphs, rows(3)), 3, (2, 1))[1][0] == [graphs[2]]


# Containers are new, leaves are the same.


def test_containers_are_new_for_every_call_and_tensors_are_not():
    inner = [rows(4), "a"]
    batch = {"x": rows(4, 2), "inner": inner, "rows": [{"id": i} for i in range(4)], "graph": Graph()}
    (first,), (second,) = cut(batch, 4, (4,)), cut(batch, 4, (4,))
    first.clear()
    second["inner"].append("b")
    second["rows"][0]["id"] = 99
    assert second["x"] is batch["x"]
    assert second["graph"] is batch["graph"]
    assert len(inner) == 2
    assert batch["rows"][0] == {"id": 0}


def test_rows_in_pieces_are_new_containers():
    batch = {"x": rows(4), "rows": [{"id": i} for i in range(4)]}
    cut(batch, 4, (2, 2))[1]["rows"][0]["id"] = 99
    assert batch["rows"][2] == {"id": 2}


def test_pieces_of_a_single_sample_batch_and_of_none():
    assert torch.equal(cut([rows(1, 2)], 1, (1,))[0][0], rows(1, 2))
    assert cut((rows(0, 2), []), 0, (0,))[0][0].shape == (0, 2)


@st.composite
def structures(draw, num_samples):
    """Nested batches in which no list happens to be as long as the batch, unless it holds rows."""
    other = st.integers(0, 9).filter(lambda size: size != num_samples)
    leaf = st.one_of(
        st.sampled_from([(), (3,), (num_samples,)]).map(lambda rest: torch.rand(num_samples, *rest)),
        other.map(torch.rand),
        st.just(num_samples).map(lambda size: [f"row {i}" for i in range(size)]),
        st.just(num_samples).map(lambda size: np.random.default_rng(0).random((size, 2))),
        st.sampled_from([0.5, 3, True, None, "text", b"raw", Colour.RED]),
        st.just(0).map(lambda _: torch.tensor(1.5)),
    )

    def containers(inner):
        lists = st.lists(inner, max_size=5).filter(lambda entries: len(entries) != num_samples)
        return st.one_of(
            lists,
            lists.map(tuple),
            st.dictionaries(st.text(max_size=3), inner, max_size=4),
            st.tuples(inner, inner).map(Pair._make),
            st.tuples(inner, inner).map(lambda pair: Frozen(*pair)),
            st.dictionaries(st.sampled_from("abc"), inner).map(OrderedDict),
        )

    return {"x": torch.rand(num_samples, 2), "rest": draw(st.recursive(leaf, containers, max_leaves=12))}


def joined(pieces):  # noqa: PLR0911  a case for each class of container
    """One batch of pieces: what is the same in all was shared, what is an array or holds rows was cut."""
    first = pieces[0]
    assert {type(piece) for piece in pieces} == {type(first)}
    if isinstance(first, Tensor | np.ndarray):
        if all(piece is first for piece in pieces):
            return first
        return torch.cat(pieces) if isinstance(first, Tensor) else np.concatenate(pieces)
    if isinstance(first, Mapping):
        return type(first)((key, joined([piece[key] for piece in pieces])) for key in first)
    if isinstance(first, Frozen):
        return Frozen(joined([piece.x for piece in pieces]), joined([piece.y for piece in pieces]))
    if isinstance(first, list) and first and isinstance(first[0], str) and first[0].startswith("row"):
        return [row for piece in pieces for row in piece]
    if isinstance(first, list | tuple):
        entries = [joined(list(column)) for column in zip(*pieces, strict=True)]
        return first._make(entries) if isinstance(first, Pair) else type(first)(entries)
    assert all(piece is first for piece in pieces)
    return first


def same(one, other):
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, Frozen):
        return same((one.x, one.y), (other.x, other.y))
    if isinstance(one, Mapping):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one is other or one == other


@settings(max_examples=150, deadline=None)
@given(data=st.data(), num_samples=st.integers(2, 9), micro_batch=st.integers(1, 9))
def test_joining_the_pieces_gives_the_batch_back_and_nothing_is_changed(data, num_samples, micro_batch):
    batch = data.draw(structures(num_samples))
    before = to_device(batch, torch.device("cpu"))
    assert length(batch, num_samples) == num_samples
    pieces = cut(batch, num_samples, sizes(num_samples, min(micro_batch, num_samples)))
    assert [len(piece["x"]) for piece in pieces] == list(sizes(num_samples, min(micro_batch, num_samples)))
    assert same(joined(pieces), batch)
    assert same(before, batch)


# Moving.


def test_to_device_makes_new_containers_and_keeps_tensors_that_are_there():
    batch = {"x": rows(4), "inner": [rows(4), "a"], "pair": Pair(rows(4), 1)}
    moved = to_device(batch, torch.device("cpu"))
    assert moved is not batch
    assert moved["inner"] is not batch["inner"]
    assert moved["x"] is batch["x"]
    assert moved["pair"].inputs is batch["pair"].inputs


def test_to_device_moves_every_tensor_and_what_can_move_itself():
    class Moves:
        place = "here"

        def to(self, device):
            self.place = device
            return self

    own = Moves()
    batch = {
        "x": rows(4),
        "inner": (rows(4), [rows(2)]),
        "own": own,
        "packed": PACKED,
        "text": "a",
        "array": np.ones(2),
    }
    moved = to_device(batch, torch.device("meta"))
    assert {tensor.device.type for tensor in tensors_of(moved)} == {"meta"}
    assert isinstance(moved["packed"], PackedSequence)
    assert moved["own"].place == torch.device("meta")
    assert own.place == "here"
    assert moved["array"] is batch["array"]


def test_tensors_shapes_and_elements():
    batch = ({"input_ids": rows(4, 3), "meta": {"mask": rows(4)}}, rows(4, 2), "text", Frozen(torch.tensor(1.0), 2))
    assert shapes(batch) == {"0.input_ids": (4, 3), "0.meta.mask": (4,), "1": (4, 2), "3.x": ()}
    assert [tensor.numel() for tensor in tensors_of(batch)] == [12, 4, 8, 1]
    assert num_elements(batch) == 25
    assert shapes(rows(4)) == {"batch": (4,)}
    assert num_elements({"packed": PACKED}) == 8
    assert shapes([NESTED, JAGGED]) == {"0": (4,), "1": (4,)}


# Calling the model.


class Echo(nn.Module):
    def forward(self, *args, **keywords):
        return args, keywords


def loss_function(output: Any, targets: Any) -> Tensor:
    raise AssertionError("call does not compute the loss")


@pytest.mark.parametrize("make", [tuple, list, Pair._make])
def test_a_pair_is_inputs_and_targets_of_a_loss_and_two_arguments_without_one(make):
    assert call(Echo(), make(["x", "y"]), loss_function) == ((("x",), {}), "y")
    assert call(Echo(), make(["x", "y"]), None) == ((("x", "y"), {}), None)


def test_a_mapping_is_keyword_arguments_and_its_labels_are_the_targets():
    for batch in ({"ids": 1, "labels": 2}, UserDict(ids=1, labels=2)):
        for loss in (None, loss_function):
            assert call(Echo(), batch, loss) == (((), {"ids": 1, "labels": 2}), 2)
    assert call(Echo(), {"ids": 1}, None) == (((), {"ids": 1}), None)


def test_a_mapping_without_labels_is_refused_before_the_model_runs():
    class Never(nn.Module):
        def forward(self, **_):
            raise AssertionError

    with pytest.raises(DataError, match=r"no 'labels'.*it has 'ids', 'mask'.*step="):
        call(Never(), {"ids": 1, "mask": 2}, loss_function)


def test_anything_else_is_one_argument_and_its_own_target():
    triple, plain = ("a", "b", "c"), Plain(rows(2), 1.0, [])
    assert call(Echo(), triple, loss_function) == (((triple,), {}), triple)
    assert call(Echo(), triple, None) == (((*triple,), {}), None)
    assert call(Echo(), plain, loss_function) == (((plain,), {}), plain)
    assert call(Echo(), plain, None) == (((plain,), {}), None)
    assert call(Echo(), PACKED, None)[0][0][0] is PACKED


def test_the_loss_is_found_in_all_forms_of_output():
    loss = torch.tensor(2.0)
    one = types.SimpleNamespace(loss=loss)
    named = namedtuple("Output", ["logits", "loss"])(rows(4), loss)  # noqa: PYI024  what users write
    for output in (loss, loss.reshape(1), one, {"loss": loss}, UserDict(loss=loss), (loss, rows(4)), named):
        assert loss_of(output).item() == 2.0


@pytest.mark.parametrize("output", [None, (), {}, {"loss": None}, {"logits": rows(4)}, ("a", 1), 2.0, Graph()])
def test_an_output_without_a_loss_is_refused_with_what_to_type(output):
    with pytest.raises(DataError, match=rf"gave a {type(output).__name__} without a loss.*loss=.*step="):
        loss_of(output)


def test_a_loss_of_many_elements_is_refused_with_its_shape():
    for output in (rows(4, 2), {"loss": rows(4, 2)}, (rows(4, 2), 1)):
        with pytest.raises(DataError, match=r"shape \(4, 2\).*reduction='mean'"):
            loss_of(output)


# Tuples are fields.


@pytest.mark.parametrize("batch", [(rows(4), rows(2)), (rows(4, 3), rows(2)), (rows(4), rows(2), rows(7))])
def test_a_tuple_of_arrays_without_a_common_first_dimension_is_never_cut(batch):
    num_samples = length(batch)
    pieces = (1,) * num_samples
    with pytest.raises(Uncuttable, match=r"batch is a tuple of arrays of shapes .* no first dimension in common"):
        cut(batch, num_samples, pieces)
    assert len(cut(batch, num_samples, (num_samples,))) == 1


# What the model cannot take.


class OneInput(nn.Module):
    def forward(self, hidden):
        return hidden


class Failing(nn.Module):
    def forward(self, x, y):
        raise TypeError("mine")


def test_a_pair_without_a_loss_asks_for_one():
    with pytest.raises(DataError) as caught:
        call(OneInput(), (rows(4), rows(4)), None)
    message = str(caught.value)
    assert message.startswith("loss: none is given")
    assert "all 2 entries" in message
    assert "OneInput.forward takes hidden" in message
    assert "loss=torch.nn.MSELoss()" in message


@pytest.mark.parametrize("loss", [None, nn.MSELoss()])
def test_a_mapping_whose_keys_the_model_does_not_take_asks_for_pairs(loss):
    with pytest.raises(DataError) as caught:
        call(OneInput(), {"image": rows(4), "labels": rows(4)}, loss)
    assert "image, labels, and OneInput.forward takes hidden. Let the data give pairs" in str(caught.value)


def test_a_users_own_type_error_passes_through():
    for batch in ((rows(4), rows(4)), {"x": rows(4), "y": rows(4)}):
        with pytest.raises(TypeError, match=r"^mine$"):
            call(Failing(), batch, None)
