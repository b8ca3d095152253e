"""Checkpoints: whatever happens while one is written or afterwards, the newest whole one is what is opened."""

import errno
import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from adaptive_trainer import manifest, saving, tensor_files
from adaptive_trainer.errors import CheckpointError
from adaptive_trainer.packing import Unpackable

WEIGHTS = {"weight": torch.arange(12.0).reshape(3, 4), "numbers": torch.tensor([1, 2, 3])}
FILES = ["model.safetensors", "state.json", "state.safetensors", "manifest.json"]


def no_warning(line):
    pytest.fail(line)


def write(root, step, keep=10, **rest):
    return saving.write(root, step, WEIGHTS, {"step": step, "moments": torch.full((5,), float(step))} | rest, keep=keep)


def steps_in(root):
    return [int(path.name.removeprefix("step-")) for path in saving.checkpoints(root)]


def hidden_in(root):
    return sorted(path.name for path in root.iterdir() if path.name.startswith("."))


def contents_of(root):
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def assert_holds(opened, step):
    assert (opened.step, opened.rest["step"]) == (step, step)
    assert torch.equal(opened.rest["moments"], torch.full((5,), float(step)))
    assert set(opened.weights()) == set(WEIGHTS)
    assert all(torch.equal(opened.weights()[name], tensor) for name, tensor in WEIGHTS.items())


@pytest.fixture
def two(tmp_path):
    """A folder with the checkpoints of steps 1 and 2."""
    write(tmp_path / "checkpoints", 1)
    write(tmp_path / "checkpoints", 2)
    return tmp_path / "checkpoints"


# What is written.


def test_what_is_written_is_opened(tmp_path):
    root = tmp_path / "run" / "checkpoints"
    saved = write(root, 42)
    assert (saved.path, saved.step) == (root / "step-00000042", 42)
    assert sorted(path.name for path in saved.path.iterdir()) == sorted(FILES)
    assert saved.num_bytes == sum(path.stat().st_size for path in saved.path.iterdir())
    assert_holds(saving.open_newest(root, no_warning), 42)
    told = json.loads((saved.path / "manifest.json").read_text())
    assert (told["version"], told["step"]) == (1, 42)
    assert {name: (file["size"], file["sha256"]) for name, file in told["files"].items()} == {
        name: (len(data), hashlib.sha256(data).hexdigest())
        for name, data in contents_of(saved.path).items() if name != "manifest.json"
    }  # fmt: skip


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.turned = nn.Parameter(torch.randn(4, 3).t())


def test_weights_load_strictly_into_the_plain_model_under_all_its_names(tmp_path):
    model, other = Tied(), Tied()
    saved = saving.write(tmp_path, 1, model.state_dict(), None, keep=1)
    other.load_state_dict(load_file(saved.path / "model.safetensors"), strict=True)
    assert other.head.weight is other.embed.weight
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))


dtypes = st.sampled_from(sorted(tensor_files._CODES, key=str))
shapes = st.lists(st.integers(0, 4), max_size=3)


@st.composite
def tensors(draw):
    dtype, shape = draw(dtypes | st.sampled_from([torch.complex128, torch.complex32, torch.uint4])), draw(shapes)
    size = torch.Size(shape).numel() * dtype.itemsize
    data = bytes(draw(st.binary(min_size=size, max_size=size)))
    if dtype is torch.bool:
        data = bytes(byte % 2 for byte in data)
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    tensor = flat.view(dtype).reshape(shape)
    return tensor.movedim(0, -1) if len(shape) > 1 and draw(st.booleans()) else tensor


names = st.text(st.characters(exclude_categories=["Cs"])).filter(lambda name: name != "__metadata__")


def raw(tensor):
    return tensor_files._as_integers(tensor).contiguous().tolist()


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(names, tensors(), max_size=5), st.integers(1, 20))
def test_weights_come_back_bit_for_bit_whatever_the_pieces(tmp_path, weights, chunk_bytes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_files, "CHUNK_BYTES", max(chunk_bytes, 16))
        saved = saving.write(tmp_path, 1, weights, {"again": list(weights.values())}, keep=1)
    opened = saving.open_newest(tmp_path, no_warning)
    loaded, again = load_file(saved.path / "model.safetensors"), opened.rest["again"]
    assert set(loaded) == set(opened.weights()) == set(weights)
    assert len(opened.weights()) == len(weights)
    for (name, tensor), other in zip(weights.items(), again, strict=True):
        for found in (opened.weights()[name], other):
            assert (found.dtype, found.shape, raw(found)) == (tensor.dtype, tensor.shape, raw(tensor))
        if tensor.dtype in tensor_files._CODES:
            assert (loaded[name].dtype, raw(loaded[name])) == (tensor.dtype, raw(tensor))


class Largest(TorchDispatchMode):
    """The largest memory that any operation makes."""

    num_bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        known = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
        made = [t for t in result if isinstance(t, torch.Tensor)] if isinstance(result, list | tuple) else [result]
        for t in made:
            if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in known:
                self.num_bytes = max(self.num_bytes, t.untyped_storage().nbytes())
        return result


def test_a_single_element_with_a_stride_of_its_own_is_written():
    header, data = tensor_files.chunks({"a": torch.ones(3, 5).t()[2:3, 1:2]})
    assert (bytes(data), b'"shape":[1,1]' in header) == (b"\x00\x00\x80\x3f", True)


@pytest.mark.parametrize(
    ("tensor", "allowed"),
    [
        (torch.ones(3 * 2**20, 8), 0),
        (torch.ones(8, 3 * 2**20).t(), 16 * 2**20),
        (torch.ones(2, 3, 2**22).transpose(1, 2), 16 * 2**20),
    ],
)
def test_saving_holds_no_second_copy(tensor, allowed):
    assert tensor.nbytes > 6 * 16e6 - 1e6
    with Largest() as largest:
        sizes = [len(piece) for piece in tensor_files.chunks({"a": tensor})][1:]
    assert sum(sizes) == tensor.nbytes
    assert max(sizes) <= 16 * 2**20
    assert largest.num_bytes <= allowed


def test_the_weights_are_read_one_by_one_into_memory_of_their_own(two):
    weights = saving.open_newest(two, no_warning).weights()
    weights["weight"].fill_(7)
    shutil.rmtree(two)
    assert torch.equal(weights["weight"], WEIGHTS["weight"])
    with pytest.raises(KeyError):
        weights["other"]


def test_what_cannot_be_kept_is_said_before_anything_is_written(tmp_path):
    with pytest.raises(Unpackable, match=re.escape("state['a b']: a function cannot be kept")):
        saving.write(tmp_path / "new", 1, WEIGHTS, {"state": {"a b": lambda: 1}}, keep=1)
    with pytest.raises(Unpackable, match=re.escape("weight: a tensor of layout torch.sparse_coo cannot be kept")):
        saving.write(tmp_path / "new", 1, {"weight": torch.eye(2).to_sparse()}, None, keep=1)
    assert not (tmp_path / "new").exists()
    with pytest.raises(ValueError, match="'__metadata__' cannot name a tensor"):
        saving.write(tmp_path / "new", 1, {"__metadata__": torch.ones(1)}, None, keep=1)
    assert list((tmp_path / "new").iterdir()) == []


def test_nothing_half_written_stays_when_somebody_interrupts(two, monkeypatch):
    before = contents_of(two)

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(saving, "_put_in_place", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(two, 3)
    assert contents_of(two) == before
    assert hidden_in(two) == []


# How many stay.


def test_older_ones_are_removed_and_the_newest_are_kept(tmp_path):
    for step in (1, 2, 3, 10, 200_000_000):
        write(tmp_path, step, keep=2)
    assert steps_in(tmp_path) == [200_000_000, 10]
    write(tmp_path, 200_000_001, keep=0)
    assert steps_in(tmp_path) == [200_000_001]
    assert hidden_in(tmp_path) == []


def test_damaged_ones_neither_count_nor_are_removed(tmp_path):
    for step in (1, 2, 3):
        write(tmp_path, step)
    os.truncate(tmp_path / "step-00000002" / "state.json", 3)
    write(tmp_path, 4, keep=2)
    assert steps_in(tmp_path) == [4, 3, 2]
    os.truncate(tmp_path / "step-00000004" / "manifest.json", 3)
    write(tmp_path, 5, keep=2)
    assert steps_in(tmp_path) == [5, 4, 3, 2]
    write(tmp_path, 6, keep=1)
    assert steps_in(tmp_path) == [6, 4, 2]


def test_later_ones_stay_when_a_run_goes_on_from_further_back(tmp_path):
    for step in (1, 2, 30):
        write(tmp_path, step)
    write(tmp_path, 3, keep=1)
    assert steps_in(tmp_path) == [30, 3]


def test_a_checkpoint_of_the_same_step_is_replaced(two):
    saving.write(two, 2, {"other": torch.ones(1)}, "new", keep=2)
    opened = saving.open_newest(two, no_warning)
    assert (opened.step, opened.rest, list(opened.weights())) == (2, "new", ["other"])
    assert hidden_in(two) == []


@pytest.mark.parametrize("kind", ["file", "link", "folder"])
def test_what_stands_in_the_place_of_a_checkpoint_is_replaced(tmp_path, kind):
    place, elsewhere = tmp_path / "root" / "step-00000001", tmp_path / "elsewhere"
    place.parent.mkdir()
    elsewhere.mkdir()
    (elsewhere / "mine").write_text("mine")
    {"file": place.touch, "link": lambda: place.symlink_to(elsewhere), "folder": place.mkdir}[kind]()
    write(place.parent, 1)
    assert_holds(saving.open_newest(place.parent, no_warning), 1)
    assert (elsewhere / "mine").read_text() == "mine"
    assert hidden_in(place.parent) == []


# What is opened.


def test_without_any_checkpoint_there_is_nothing(tmp_path):
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-0000000x").mkdir()
    (tmp_path / "step-000000001").mkdir()
    (tmp_path / ".step-00000001.1.part").mkdir()
    (tmp_path / "notes.txt").touch()
    assert saving.open_newest(tmp_path, no_warning) is None
    assert saving.open_newest(tmp_path / "nowhere", no_warning) is None
    assert saving.checkpoints(tmp_path / "nowhere") == []


def assert_passed_over(root, what, step=1):
    """The second is passed over with one line that says what, and the first is opened."""
    lines = []
    assert_holds(saving.open_newest(root, lines.append), step)
    (line,) = lines
    assert str(root / "step-00000002") in line
    assert "\n" not in line
    assert re.search(what, line), line


def places(size, count):
    return sorted({0, 1, 7, 8, 9, size - 1, *random.Random(size).sample(range(size), min(size, count))})


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_anywhere_is_seen(two, name):
    path = two / "step-00000002" / name
    whole = path.read_bytes()
    for place in places(len(whole), 40):
        for flip in (1, 32, 255):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ flip]) + whole[place + 1 :])
            assert_passed_over(
                two, f"{name}|newer version|bytes instead of|its checksum" if name == FILES[-1] else name
            )


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_cut_short_or_too_long_is_seen(two, name):
    path = two / "step-00000002" / name
    whole = path.read_bytes()
    for size in places(len(whole), 20):
        path.write_bytes(whole[:size])
        assert_passed_over(two, name)
    path.write_bytes(whole + b"\0")
    assert_passed_over(two, name)
    path.write_bytes(whole)
    assert_holds(saving.open_newest(two, no_warning), 2)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_and_what_is_no_file_is_seen(two, name, tmp_path):
    path = two / "step-00000002" / name
    whole = path.read_bytes()
    path.unlink()
    assert_passed_over(two, f"{name} cannot be read \\(No such file")
    path.mkdir()
    assert_passed_over(two, name)
    path.rmdir()
    os.mkfifo(path)
    assert_passed_over(two, name)
    path.unlink()
    (tmp_path / "elsewhere").write_bytes(whole)
    path.symlink_to(tmp_path / "elsewhere")
    assert_passed_over(two, name)


def test_a_link_of_the_right_size_is_not_followed(two, tmp_path):
    path = two / "step-00000002" / "state.json"
    target = "x" * path.stat().st_size  # a link's own size is the length of its target's name
    path.unlink()
    path.symlink_to(target)
    assert_passed_over(two, r"state.json is a link, which is not followed")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_what_may_not_be_read_is_passed_over(two):
    (two / "step-00000002" / "state.json").chmod(0)
    assert_passed_over(two, r"state.json cannot be read \(Permission denied\)")


def test_folders_that_are_none_are_passed_over(two, tmp_path):
    place = two / "step-00000002"
    place.rename(tmp_path / "elsewhere")
    place.symlink_to(tmp_path / "elsewhere")
    assert_passed_over(two, "a link or a file")
    place.unlink()
    place.touch()
    assert_passed_over(two, "a link or a file")
    place.unlink()
    place.mkdir()
    assert_passed_over(two, "manifest.json cannot be read")
    place.rmdir()
    shutil.copytree(two / "step-00000001", place)
    assert_passed_over(two, "of another folder")


def test_a_checkpoint_of_a_newer_version_is_passed_over(two, monkeypatch):
    monkeypatch.setattr(manifest, "VERSION", 2)
    write(two, 2)
    monkeypatch.undo()
    assert_passed_over(two, r"written by a newer version \(format 2, this one reads 1\)")


def forge(folder, name, data, **manifest_entries):
    """Another file, with a manifest that says that it is right."""
    (folder / name).write_bytes(data)
    told = json.loads((folder / "manifest.json").read_text()) | manifest_entries
    told["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(told))


BOMB = b"[" * 200_000 + b"]" * 200_000


@pytest.mark.parametrize(
    "data",
    [
        BOMB, b'{"value":' + BOMB + b',"tensors":[]}', b'{"a":' * 100_000 + b"1" + b"}" * 100_000, b"", b"null", b"\xff", b"9" * 5000,
        b'{"value":{"builtins.eval":"1"},"tensors":[]}', b'{"value":{"tensor":0},"tensors":[]}', b'{"value":1}',
        b'{"value":{"tensor":0},"tensors":[{"name":"nowhere","parameter":false,"requires_grad":false}]}',
    ],
    ids=lambda data: data[:30].decode("latin-1"),
)  # fmt: skip
def test_a_foreign_state_is_passed_over(two, data):
    forge(two / "step-00000002", "state.json", data)
    assert_passed_over(two, "not what this version writes")


def file_of(length, header, data=b""):
    return length.to_bytes(8, "little") + header + data


ENTRY = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
UNCODED = b'{"__metadata__":{"dtypes":"%b"},"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}}'


def with_uncoded(text):
    header = UNCODED % text
    return file_of(len(header), header, bytes(8))


@pytest.mark.parametrize("name", ["model.safetensors", "state.safetensors"])
@pytest.mark.parametrize(
    "data",
    [
        b"", b"\0" * 7, file_of(0, b""), file_of(2**63 - 1, ENTRY, bytes(8)), file_of(2**64 - 1, ENTRY), file_of(2**40, ENTRY, bytes(8)),
        file_of(len(ENTRY) + 9, ENTRY, bytes(8)), file_of(len(ENTRY) - 1, ENTRY, bytes(8)), file_of(len(ENTRY), ENTRY, bytes(7)),
        file_of(len(ENTRY), ENTRY.replace(b"[2]", b"[3]"), bytes(8)), file_of(len(ENTRY), ENTRY.replace(b"F32", b"FOO"), bytes(8)),
        file_of(len(BOMB), BOMB), with_uncoded(b"["), with_uncoded(b"[]"), with_uncoded(rb'{\"a\":\"torch.load\"}'),
        with_uncoded(rb'{\"b\":\"torch.complex64\"}'), with_uncoded(rb'{\"a\":\"torch.complex128\"}'), with_uncoded(rb'{\"a\":[]}'),
    ],
    ids=lambda data: str(data[:40]),
)  # fmt: skip
def test_a_header_that_lies_is_passed_over(two, name, data):
    forge(two / "step-00000002", name, data)
    assert_passed_over(two, f"not what this version writes .*{name}|not what this version writes .*tensor")


@pytest.mark.parametrize(
    "data",
    [
        BOMB[:60_000], BOMB, b"", b"null", b"[]", b"1", b'"x"', b"{}", b"\xff", b'{"version":1}', b'{"version":true,"step":2,"files":{}}',
        b'{"version":1.0,"step":2,"files":{}}', b'{"version":"2","step":2,"files":{}}', b'{"version":0,"step":2,"files":{}}',
        b'{"version":1,"step":2,"files":[]}', b'{"version":1,"step":2,"files":{}}', b'{"version":1,"step":3,"files":{}}',
        b'{"version":1,"step":2,"files":{"model.safetensors":7}}', b'{"version":1,"step":2,"files":{"../step-00000001/state.json":{}}}',
        b'{"version":' + b"9" * 5000 + b"}", b'{"version":1,"step":2,"files":{"model.safetensors":{"size":1,"sha256":[]}}}',
    ],
    ids=lambda data: data[:60].decode("latin-1"),
)  # fmt: skip
def test_a_foreign_manifest_is_passed_over(two, data):
    (two / "step-00000002" / "manifest.json").write_bytes(data)
    assert_passed_over(two, "manifest.json|model.safetensors has")


@pytest.mark.parametrize(
    "entries",
    [
        {"version": True},
        {"version": 1.0},
        {"version": None},
        {"version": -1},
        {"step": 3},
        {"step": "2"},
        {"files": None},
    ],
    ids=str,
)
def test_a_manifest_that_is_wrong_in_one_entry_is_passed_over(two, entries):
    path = two / "step-00000002" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))
    assert_passed_over(two, "manifest.json is damaged or of another folder")


def test_nothing_that_a_checkpoint_names_is_executed(two, tmp_path):
    trap = tmp_path / "trap"
    call = f"pathlib.Path({str(trap)!r}).touch()"
    folder = two / "step-00000002"
    for node in (
        {"_target_": "os.system", "command": f"touch {trap}"}, {"py/object/apply": ["os.system", f"touch {trap}"]},
        {"builtins.exec": call}, {"torch.dtype": f"__import__('os').system('touch {trap}')"}, {"defaultdict": ["eval", ["a", call]]},
        {"numpy.ndarray": ["|O", [1], {"bytes": "gASVIQAAAA=="}]}, {"numpy.ndarray": [f"__import__({call!r})", [1], {"bytes": ""}]},
    ):  # fmt: skip
        forge(
            folder, "state.json", json.dumps({"value": node, "tensors": []}).encode(), class_="os.system", reader=call
        )
        assert_passed_over(two, "not what this version writes")
    assert not trap.exists()


def test_entries_that_a_manifest_has_beside_its_own_are_not_looked_at(two):
    path = two / "step-00000002" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"class": "os.system", "_target_": "os.abort"}))
    (path.parent / "foreign.pt").write_bytes(b"\x80\x04cos\nabort\n(tR.")
    assert_holds(saving.open_newest(two, no_warning), 2)


def test_several_damaged_ones_are_passed_over_one_line_each(two):
    write(two, 3)
    write(two, 4)
    os.truncate(two / "step-00000004" / "state.json", 0)
    (two / "step-00000003" / "model.safetensors").unlink()
    lines = []
    assert_holds(saving.open_newest(two, lines.append), 2)
    assert [re.findall(r"step-\d+", line)[0] for line in lines] == ["step-00000004", "step-00000003"]


def test_when_none_is_good_all_are_named_and_what_to_type(two):
    for step in (1, 2):
        os.truncate(two / f"step-0000000{step}" / "state.json", 0)
    before, lines = contents_of(two), []
    with pytest.raises(CheckpointError) as caught:
        saving.open_newest(two, lines.append)
    assert len(lines) == 2
    for word in (str(two), "step-00000001: state.json has 0 bytes", "step-00000002", "resume=never"):
        assert word in str(caught.value)
    assert contents_of(two) == before


# Whatever happens on the way.

#: What can meet a full disk. Removing is not among it.
CALLS = ["open", "write", "fsync", "mkdir", "rename"]


@contextmanager
def counted(strike):
    """Call ``strike(number, name)`` before each call of the operating system."""
    number = iter(range(10**6))

    def wrapped(name, function):
        def call(*args, **kwargs):
            strike(next(number), name)
            return function(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, wrapped(name, getattr(os, name)))
        yield


def calls_of(action):
    calls = []
    with counted(lambda _, name: calls.append(name)):
        action()
    return calls


@pytest.mark.parametrize("step", [2, 3], ids=["replaced", "new"])
def test_a_disk_that_is_full_at_any_call_leaves_the_earlier_ones(two, step):
    template = two.with_name("template")
    shutil.copytree(two, template)
    num_calls = len(calls_of(lambda: write(two, step, keep=10)))
    assert num_calls > 20
    failed = 0
    for fatal in range(num_calls):
        shutil.rmtree(two)
        shutil.copytree(template, two)
        error = OSError(errno.ENOSPC, "No space left on device")

        def strike(number, _, error=error, fatal=fatal):
            if number == fatal:
                raise error

        with counted(strike):
            try:
                write(two, step, keep=10, new=True)
            except OSError as raised:
                assert raised is error  # noqa: PT017  not at every call is there one
                failed += 1
        assert_holds(saving.open_newest(two, no_warning), max(steps_in(two)))
        assert (
            contents_of(two).items()
            >= {k: v for k, v in contents_of(template).items() if f"{step:08d}" not in k}.items()
        )
        if "new" not in saving.open_newest(two, no_warning).rest:
            assert contents_of(two) == contents_of(template)
        assert not [name for name in hidden_in(two) if name.endswith("part")]
    assert failed >= num_calls - 8


def test_a_disk_that_takes_only_a_little_at_once_gets_it_all(tmp_path, monkeypatch):
    true_write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: true_write(file, data[:7]))
    write(tmp_path, 1)
    monkeypatch.undo()
    assert_holds(saving.open_newest(tmp_path, no_warning), 1)


def test_a_disk_that_keeps_something_else_is_found_out_before_the_checkpoint_counts(two, monkeypatch):
    true_write = os.write
    before = contents_of(two)
    monkeypatch.setattr(os, "write", lambda file, data: true_write(file, bytes(data).replace(b"F32", b"F16")))
    with pytest.raises(OSError, match=r"reads back differently \(model.safetensors is damaged") as caught:
        write(two, 3)
    assert caught.value.errno == errno.EIO
    assert contents_of(two) == before


def test_everything_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    said = []
    true_fsync, true_rename = os.fsync, os.rename

    def fsync(file):
        said.append(Path(f"/proc/self/fd/{file}").readlink().name)
        true_fsync(file)

    def rename(old, new):
        said.append(f"-> {Path(new).name}")
        true_rename(old, new)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    write(tmp_path / "root", 1)
    part = f".step-00000001.{os.getpid()}.part"
    assert said == [tmp_path.name, *FILES, part, "-> step-00000001", "root"]


KILLED = """
import os, random, signal, sys, time
from pathlib import Path
import torch
sys.path.insert(0, "tests/..")
from adaptive_trainer import saving

torch.set_num_threads(1)
top, seed = Path(sys.argv[1]), int(sys.argv[2])
chance = random.Random(seed)
WEIGHTS = {"a": torch.ones(400, 300), "b": torch.ones(300, 20).t()}
NAMES = "open write fsync close mkdir rename lstat unlink rmdir".split()

def save(root, step, keep=2):
    saving.write(root, step, WEIGHTS, {"moments": torch.ones(1000)}, keep=keep)

def child(work):
    pid = os.fork()
    if pid == 0:
        work()
        os._exit(0)
    return pid

def without_end(root):
    for number in range(10**9):
        save(root, number // 2 + 1)  # every step twice, so that every other one is replaced

for trial in range(10):
    root = top / f"random-{trial}"
    save(root, 0)
    pid = child(lambda: without_end(root))
    time.sleep(chance.uniform(0, 0.15))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)

def until(root, step, fatal):
    count = iter(range(10**9))
    def wrapped(function):
        def call(*args, **kwargs):
            if next(count) == fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)
        return call
    for name in NAMES:
        setattr(os, name, wrapped(getattr(os, name)))
    save(root, step)

for step in (2, 3):  # one is replaced; an old one is removed
    fatal, status = 0, 1
    while status:
        root = top / f"step-{step}-{fatal:03}"
        save(root, 1), save(root, 2)
        _, status = os.waitpid(child(lambda: until(root, step, fatal)), 0)
        fatal += 1
"""


def test_only_good_ones_are_left_when_a_writer_is_killed_at_any_moment(tmp_path):
    seed = time.time_ns() % 10**6
    subprocess.run([sys.executable, "-c", KILLED, tmp_path, str(seed)], check=True, timeout=110)
    roots = sorted(tmp_path.iterdir())
    assert len(roots) > 10 + 2 * 30
    unfinished = 0
    for root in roots:
        unfinished += bool(hidden_in(root))
        saving.clear_unfinished(root)
        assert hidden_in(root) == [], seed
        assert saving.checkpoints(root), seed
        for path in saving.checkpoints(root):
            assert saving._opened(path).rest["moments"].sum() == 1000, seed
        if root.name.startswith("step-"):
            assert {2} <= set(steps_in(root)) <= {1, 2, 3}
    assert unfinished > 30


# What is left.


def a_dead_pid():
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_what_dead_writers_have_left_is_removed_and_what_living_ones_write_stays(two):
    dead, alive = a_dead_pid(), os.getppid()
    for pid in (dead, alive, os.getpid(), 10**30):
        (two / f".step-00000007.{pid}.part").mkdir()
        (two / f".step-00000007.{pid}.part" / "model.safetensors").touch()
    (two / f".step-00000008.{dead}.part").touch()
    (two / ".hidden").touch()
    (two / f".step-8.{dead}.part").mkdir()
    before = {path: data for path, data in contents_of(two).items() if path.startswith("step-")}
    saving.clear_unfinished(two)
    assert hidden_in(two) == sorted([".hidden", f".step-8.{dead}.part", f".step-00000007.{alive}.part"])
    assert {path: data for path, data in contents_of(two).items() if path.startswith("step-")} == before
    saving.clear_unfinished(two / "nowhere")


def test_what_was_moved_aside_comes_back_if_its_successor_never_came(two):
    dead = a_dead_pid()
    (two / "step-00000002").rename(two / f".step-00000002.{dead}.old")
    shutil.copytree(two / "step-00000001", two / f".step-00000001.{dead}.old")
    saving.clear_unfinished(two)
    assert_holds(saving.open_newest(two, no_warning), 2)
    assert (steps_in(two), hidden_in(two)) == ([2, 1], [])


def test_links_are_removed_and_not_what_they_show_at(two, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "mine").touch()
    (two / f".step-00000007.{a_dead_pid()}.part").symlink_to(tmp_path / "elsewhere")
    saving.clear_unfinished(two)
    assert hidden_in(two) == []
    assert (tmp_path / "elsewhere" / "mine").exists()


NOW = datetime(2026, 3, 4, 5, 6, 7)  # noqa: DTZ001  the time on the wall is what the name tells


def test_a_folder_of_checkpoints_is_set_aside_whole(two):
    before = contents_of(two)
    names = []
    for _ in range(3):
        names.append(saving.set_aside(two, NOW))
        assert contents_of(names[-1]) == before
        shutil.copytree(names[-1], two)
    assert [path.name for path in names] == [f"checkpoints.old-20260304-050607{end}" for end in ("", "-2", "-3")]
    assert {path.parent for path in names} == {two.parent}


def test_where_there_is_nothing_nothing_is_set_aside(tmp_path):
    assert saving.set_aside(tmp_path / "nowhere", NOW) is None
    (tmp_path / "checkpoints").mkdir()
    assert saving.set_aside(tmp_path / "checkpoints", NOW) is None
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]
