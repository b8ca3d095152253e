"""A value that is packed, written as JSON and unpacked is the same value; what cannot be the same is refused by its place."""

import enum
import json
import math
import random
import struct
import subprocess
import sys
import warnings
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import nn

from adaptive_trainer.packing import Unpackable, pack, unpack


def returned(value):
    """What comes back when structure and tensors went through files."""
    structure, tensors = pack(value)
    return unpack(json.loads(json.dumps(structure, allow_nan=False)), {name: copied(t) for name, t in tensors.items()})


def copied(tensor):
    # Not every dtype can be copied as what it is.
    as_bytes = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
    return as_bytes.clone(memory_format=torch.contiguous_format).view(tensor.dtype)


def bits(value):
    return struct.pack(">d", value)


def same(a, b):  # noqa: PLR0911  one case after the other
    """Equal with types, order and bits, which ``==`` does not look at."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float) and not isinstance(a, np.generic):
        return bits(a) == bits(b)
    if isinstance(a, complex) and not isinstance(a, np.generic):
        return bits(a.real) == bits(b.real) and bits(a.imag) == bits(b.imag)
    if isinstance(a, torch.Tensor):
        same_kind = (a.dtype, a.shape, a.requires_grad) == (b.dtype, b.shape, b.requires_grad)
        return same_kind and raw(a) == raw(b)
    if isinstance(a, np.ndarray | np.generic):
        return (a.dtype.str, a.shape, a.tobytes()) == (b.dtype.str, b.shape, b.tobytes())
    if isinstance(a, dict):
        factories = getattr(a, "default_factory", None) is getattr(b, "default_factory", None)
        return factories and same([list(entry) for entry in a.items()], [list(entry) for entry in b.items()])
    if isinstance(a, set | frozenset):
        return len(a) == len(b) and all(any(same(x, y) for y in b) for x in a)
    if isinstance(a, list | tuple | deque) and not isinstance(a, torch.Size):
        lengths = (len(a), getattr(a, "maxlen", None)) == (len(b), getattr(b, "maxlen", None))
        return lengths and all(map(same, a, b))
    return a == b


def raw(tensor):
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


text = st.text(st.characters(exclude_categories=()))  # lone surrogates too
keys = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | text | st.binary() | st.complex_numbers(),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
plain_dtypes = st.one_of(
    arrays.scalar_dtypes(), arrays.byte_string_dtypes(), arrays.unicode_string_dtypes(), arrays.complex_number_dtypes()
)
ndarrays = arrays.arrays(plain_dtypes, arrays.array_shapes(min_dims=0, min_side=0, max_side=3))
values = st.recursive(
    keys | st.sampled_from([torch.float8_e4m3fn, torch.device("cuda:3"), torch.Size([2, 0])]) | ndarrays,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.sets(keys, max_size=4),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4).map(OrderedDict),
        st.dictionaries(keys, inner, max_size=4).map(lambda entries: defaultdict(list, entries)),
        st.lists(keys, max_size=4).map(Counter),
        st.lists(inner, max_size=4).map(lambda entries: deque(entries, 5)),
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(values)
def test_what_is_packed_comes_back(value):
    assert same(returned(value), value)


@pytest.mark.parametrize(
    "value",
    [
        10**5000, -(10**400), 2**53, -(2**53), 2**53 - 1, True, 1, 1.0, -0.0, 5e-324, math.inf, -math.inf, math.nan, -math.nan,
        struct.unpack(">d", bytes.fromhex("7ff8000000000123"))[0], complex(-0.0, math.nan), "", "\ud800", "\ud83d\ude00",
        "😀", b"\x00\xff", {1: "a", "1": "b", 1.5: "c", None: "d", (1, ("x",)): "e", frozenset({1}): "f", b"1": "g"},
        defaultdict(None, {1: 2}), defaultdict(int), defaultdict(set, {"a": {1}}), defaultdict(dict), defaultdict(float),
        deque([1, 2], None), deque(maxlen=0), deque([1, 2], 2), Counter("abca"), OrderedDict([("b", 1), ("a", 2)]),
        torch.Size([]), torch.device("cpu"), torch.complex32, np.float32(0.1), np.float64("nan"), np.bool_(True), np.int64(-1),
        np.str_("a\0"), np.str_(""), np.bytes_(b"\0"), np.longdouble("0.1"), np.datetime64("2020-01-01", "D"), np.timedelta64("NaT"),
        np.arange(6, dtype=">i4").reshape(2, 3).T[::-1], np.float64(-0.0), {"tensor": 0}, [{"dict": []}],
    ],
    ids=lambda value: type(value).__name__,  # some can neither be written nor printed
)  # fmt: skip
def test_values_at_the_edges_come_back(value):
    assert same(returned(value), value)


def test_arrays_that_come_back_can_be_written_to():
    array = np.frombuffer(b"abcdefgh", dtype=np.int32)
    back = returned(array)
    back += 1
    assert back.tolist() == (array + 1).tolist()


def test_random_states_come_back_and_go_on():
    stream = np.random.RandomState(3)
    stream.normal()
    state = {"python": random.getstate(), "legacy": stream.get_state(), "numpy": stream.get_state(legacy=False)}
    back = returned(state | {"torch": torch.get_rng_state()})
    expected = [random.random(), stream.normal(), torch.rand(3).tolist()]
    random.setstate(back["python"])
    torch.set_rng_state(back["torch"])
    assert [random.random(), None, torch.rand(3).tolist()] == [expected[0], None, expected[2]]
    for kind in ("legacy", "numpy"):
        stream.set_state(back[kind])
        assert stream.normal() == expected[1]


# Tensors.

DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)} - {
    torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4,
}, key=str)  # fmt: skip


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (2, 3)], ids=str)
def test_tensors_of_every_dtype_and_shape_come_back(dtype, shape):
    numbers = torch.arange(math.prod(shape) * dtype.itemsize, dtype=torch.uint8) % (2 if dtype is torch.bool else 64)
    tensor = numbers.view(dtype).reshape(shape)
    (back,) = returned([tensor])
    assert (back.dtype, back.shape, type(back)) == (dtype, tensor.shape, torch.Tensor)
    assert back.reshape(-1).view(torch.uint8).tolist() == numbers.tolist()


def test_tensors_that_do_not_lie_in_order_come_back():
    base = torch.arange(24.0).reshape(2, 3, 4)
    value = [base[:, 1], torch.ones(1).expand(3, 4), torch.arange(4)[::2]]
    value += [torch.arange(6.0).reshape(2, 3).t(), torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)]
    value += [torch.randn(3, dtype=torch.complex64).conj(), torch.randn(3, dtype=torch.complex64).conj().imag]
    back = returned(value)
    assert all(torch.equal(a, b) for a, b in zip(value, back, strict=True))
    assert [back[3].stride(), back[4].stride()] == [value[3].stride(), value[4].stride()]


def test_a_small_view_does_not_take_its_whole_storage_along():
    _, tensors = pack([torch.zeros(1000, 1000)[3]])
    assert [tensor.nbytes for tensor in tensors.values()] == [4000]


def test_packing_copies_nothing():
    tensor = torch.randn(3, 4)
    _, tensors = pack({"alone": tensor, "buffer": (buffer := torch.zeros(8)), "part": buffer[2:]})
    assert {t.untyped_storage().data_ptr() for t in tensors.values()} == {
        tensor.untyped_storage().data_ptr(), buffer.untyped_storage().data_ptr(),
    }  # fmt: skip


def test_a_tensor_that_is_there_twice_comes_back_as_one():
    tensor = torch.randn(3)
    back = returned({"a": tensor, "b": [tensor]})
    assert back["a"] is back["b"][0]
    assert len(pack([tensor, tensor])[1]) == 1


def test_tensors_that_look_at_one_memory_do_so_again():
    flat = torch.arange(20, dtype=torch.float64)
    value = {"a": flat[3:9].view(2, 3), "b": flat[6:12], "numbers": flat.view(torch.int16)[13:47:2], "c": flat[3:9].t()}
    copy = {name: tensor.clone() for name, tensor in value.items()}
    back = returned(value)
    assert all(torch.equal(back[name], copy[name]) for name in value)
    back["b"].fill_(-1)
    value["b"].fill_(-1)
    assert all(torch.equal(back[name], value[name]) for name in value)
    assert not torch.equal(back["a"], copy["a"])


def test_views_of_unlike_sizes_come_back_wherever_they_begin():
    memory = torch.arange(256, dtype=torch.uint8)
    value = [
        memory[33:38],
        memory.view(torch.int16)[25:30],
        memory.view(torch.complex128)[3],
        memory[200:].view(torch.float64),
    ]
    back = returned(value)
    assert all(raw(a) == raw(b) for a, b in zip(value, back, strict=True))
    back[2].zero_()
    assert back[1].tolist() == [0] * 5  # bytes 50 to 60, of which the complex number has 48 to 64


def test_parameters_come_back_as_parameters():
    weight = nn.Parameter(torch.randn(2, 3))
    value = [weight, nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False), (weight * 2)]
    back = returned(value)
    assert [type(entry) for entry in back] == [nn.Parameter, nn.Parameter, torch.Tensor]
    assert [entry.requires_grad for entry in back] == [True, False, True]
    assert torch.equal(back[0], weight)
    assert back[2].is_leaf


# What is refused.


class Foo:
    pass


class Number(enum.IntEnum):
    ONE = 1


Point = namedtuple("Point", "x y")  # noqa: PYI024  as users write them
ITSELF = []
ITSELF.append(ITSELF)


def quantized():
    with warnings.catch_warnings(action="ignore"):  # torch is about to drop them
        return torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8)


def deep(levels):
    value = 1
    for _ in range(levels):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"optimizer": {"state": {0: {"x": Foo()}}}}, "optimizer.state[0]['x']: a Foo cannot be kept in a checkpoint"),
        (Foo(), "the value: a Foo cannot be kept"),
        ({"a": [1, {"b c": Foo}]}, "a[1]['b c']: a type cannot be kept"),
        ({"a": {Number.ONE: 2}}, "a (a key): a Number cannot be kept"),
        ({"a": {Number.ONE}}, "a{a member}: a Number cannot be kept"),
        ([Point(1, 2)], "[0]: a Point cannot be kept"),
        ([lambda: 1], "[0]: a function cannot be kept"),
        ([defaultdict(lambda: 1)], "[0]: a defaultdict of <function"),
        ([np.array([object()])], "[0]: a NumPy value of dtype object cannot be kept"),
        ([np.zeros(2, dtype=[("a", "i4")])], "[0]: a NumPy value of dtype [('a', '<i4')] cannot"),
        ([np.ma.masked_array([1])], "[0]: a MaskedArray cannot be kept"),
        ([torch.eye(2).to_sparse()], "[0]: a tensor of layout torch.sparse_coo cannot be kept"),
        ([torch.empty(2, device="meta")], "[0]: a tensor without data (it is on the meta device) cannot be kept"),
        (
            [quantized()],
            "[0]: a quantized tensor (torch.qint8) cannot",
        ),
        ([nn.UninitializedParameter()], "[0]: an UninitializedParameter cannot be kept"),
        ({"a": ITSELF}, "a[0]: a list that holds itself cannot be kept"),
        (deep(65), "a dict inside 64 others cannot be kept"),
    ],
)
def test_what_cannot_come_back_is_refused_by_its_place(value, message):
    with pytest.raises(Unpackable) as caught:
        pack(value)
    assert message in str(caught.value)


def test_what_is_nested_as_deeply_as_allowed_comes_back():
    assert same(returned(deep(64)), deep(64))


def test_a_value_that_is_there_twice_does_not_hold_itself():
    twice = [1]
    assert returned([twice, twice, (twice,)]) == [[1], [1], ([1],)]


# What was not packed here.

ROW = {"name": "0", "requires_grad": False, "parameter": False}
VIEW = ROW | {"dtype": "torch.float32", "size": [1], "stride": [1], "offset": 0}


@pytest.mark.parametrize(
    ("value", "rows"),
    [
        ({"os.system": "true"}, []), ({"builtins.eval": "1"}, []), ({}, []), ({"int": "1", "str": "00"}, []),
        ({"int": "zz"}, []), ({"float": "00"}, []), ({"str": "ff"}, []), ({"bytes": 3}, []), ({"torch.dtype": "torch.nn"}, []),
        ({"torch.device": "nowhere"}, []), ({"tensor": 0}, []), ({"tensor": "0"}, []), ({"set": [[1]]}, []),
        ({"dict": [[[1], 2]]}, []), ({"dict": [1]}, []), ({"defaultdict": ["eval"]}, []), ({"deque": []}, []),
        ({"numpy.ndarray": ["|O", [1], {"bytes": "AAAAAAAAAAA="}]}, []), ({"numpy.generic": ["|O", {"bytes": "AAAAAAAAAAA="}]}, []),
        ({"numpy.generic": ["<f8", {"bytes": ""}]}, []), ({"numpy.ndarray": ["<f8", [10**12], {"tensor": 0}]}, [ROW]),
        ({"tensor": 0}, [{}]), ({"tensor": 0}, [ROW | {"name": "1"}]), ({"tensor": 0}, [ROW | {"requires_grad": True}]),
        ({"tensor": 0}, [VIEW | {"size": [2]}]), ({"tensor": 0}, [VIEW | {"offset": 1}]), ({"tensor": 0}, [VIEW | {"offset": -1}]),
        ({"tensor": 0}, [VIEW | {"stride": [-1]}]), ({"tensor": 0}, [VIEW | {"dtype": "torch.load"}]), ({"tensor": 0}, 7),
    ],
    ids=str,
)  # fmt: skip
def test_what_pack_did_not_make_is_refused(value, rows):
    with pytest.raises(ValueError, match="not a packed structure"):
        unpack({"value": value, "tensors": rows}, {"0": torch.zeros(4, dtype=torch.uint8)})


@pytest.mark.parametrize("structure", [None, [], {}, {"value": 1}, "x", 3])
def test_what_has_another_form_is_refused(structure):
    with pytest.raises(ValueError, match="not a packed structure"):
        unpack(structure, {})


def test_what_is_nested_without_end_is_refused():
    node = 1
    for _ in range(100_000):
        node = [node]
    with pytest.raises(ValueError, match="RecursionError"):
        unpack({"value": node, "tensors": []}, {})


def test_neither_way_knows_pickle():
    code = (
        "import sys, torch; from adaptive_trainer.packing import pack, unpack; import pickle\n"
        "def no(*_, **__): raise SystemExit('pickled')\n"
        "pickle.dumps = pickle.loads = pickle.Pickler = pickle.Unpickler = torch.save = torch.load = no\n"
        "print(unpack(*pack({'a': [torch.ones(2), (1, 2)]}))['a'][1])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert ran.stdout == "(1, 2)\n"


class Full(dict):
    def __getitem__(self, name):
        raise torch.OutOfMemoryError(name)


def test_memory_that_runs_out_is_not_taken_for_a_damaged_file():
    structure, tensors = pack([torch.ones(2)])
    with pytest.raises(torch.OutOfMemoryError):
        unpack(structure, Full(tensors))
