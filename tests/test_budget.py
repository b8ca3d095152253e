"""The memory limit of machines without an accelerator: counted to the byte, raised as torch's own error."""

from __future__ import annotations

import gc
import re
import sys
import threading

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

from adaptive_trainer.allocations import Allocations, Storages, dense_parts
from adaptive_trainer.budget import Budget
from adaptive_trainer.oom import recognise
from adaptive_trainer.phases import Phase, Track

ROOMY_BYTES = 1 << 40


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tracked(limit_bytes=ROOMY_BYTES):
    budget = Budget(limit_bytes)
    return budget, Track(guards=(budget,))


def count_allocations(function):
    """The sizes in bytes of what ``function`` allocates, in order."""
    sizes = []
    with Allocations(lambda storage: sizes.append(storage.nbytes())):
        kept = function()
    return sizes, kept


class Run:
    """A model with Adam under a budget, a phase at a time; ``peaks`` has each phase's own peak."""

    def __init__(self, limit_bytes=ROOMY_BYTES, num_rows=64, width=32):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01, foreach=False)
        self.x = torch.randn(num_rows, width)
        self.budget, self.track = tracked(limit_bytes)
        self.budget.adopt(self.model.parameters())
        self.peaks = {}

    def step(self):
        with self.budget.hold([self.x]):
            with self._phase(Phase.FORWARD):
                loss = self.model(self.x).square().mean()
            with self._phase(Phase.BACKWARD):
                loss.backward()
            del loss
        with self._phase(Phase.OPTIMIZER):
            self.optimizer.step()

    def _phase(self, phase):
        self.peaks[self.track.phase] = self.budget.peak_bytes
        self.budget.reset_peak()
        return self.track.enter(phase)

    def phase_peaks(self):
        self.step()
        self.peaks[self.track.phase] = self.budget.peak_bytes
        return self.peaks


def test_peak_of_forward_and_backward_is_the_hand_count_to_the_byte():
    num_rows, num_in, num_out = 500, 64, 32
    layer = nn.Linear(num_in, num_out)
    x = torch.randn(num_rows, num_in)
    budget, track = tracked()
    budget.adopt(layer.parameters())
    parameters_bytes, output_bytes, scalar_bytes = 4 * (num_in * num_out + num_out), 4 * num_rows * num_out, 4
    with budget.hold([x]):
        with track.enter(Phase.FORWARD):
            loss = layer(x).sum()
        assert budget.peak_bytes == parameters_bytes + x.nbytes + output_bytes + scalar_bytes
        budget.reset_peak()
        with track.enter(Phase.BACKWARD):
            loss.backward()
        # the loss, its gradient of one, and a gradient for each parameter
        assert budget.peak_bytes == parameters_bytes + x.nbytes + 2 * scalar_bytes + parameters_bytes
    assert budget.live_bytes == 2 * parameters_bytes + scalar_bytes


def test_adam_state_is_charged_by_the_step_that_makes_it():
    run = Run()
    parameters_bytes = sum(parameter.nbytes for parameter in run.model.parameters())
    run.step()
    counters_bytes = 4 * len(list(run.model.parameters()))
    assert run.budget.live_bytes == 4 * parameters_bytes + counters_bytes  # parameters, gradients, two moments
    run.optimizer.zero_grad()
    assert run.budget.live_bytes == 3 * parameters_bytes + counters_bytes
    before = run.budget.live_bytes
    run.step()
    run.optimizer.zero_grad()
    assert run.budget.live_bytes == before


def test_the_measured_peak_passes_and_one_byte_less_raises():
    peak_bytes = max(Run().phase_peaks().values())
    Run(peak_bytes).step()
    run = Run(peak_bytes - 1)
    with pytest.raises(torch.OutOfMemoryError):
        run.step()


@pytest.mark.parametrize(
    ("phase", "num_rows", "width"),
    [(Phase.FORWARD, 4096, 8), (Phase.BACKWARD, 1, 128), (Phase.OPTIMIZER, 1, 128)],
)
def test_limit_strikes_in_the_phase_that_passes_it_as_torchs_own_error(phase, num_rows, width):
    peaks = Run(num_rows=num_rows, width=width).phase_peaks()
    earlier = max(peak for name, peak in peaks.items() if list(Phase).index(name) < list(Phase).index(phase))
    assert earlier < peaks[phase], "the case is not built as it should be"
    run = Run(peaks[phase] - 1, num_rows=num_rows, width=width)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        run.step()
    assert type(raised.value) is torch.OutOfMemoryError
    assert run.track.phase is phase


def test_what_did_not_fit_is_not_counted_once_it_died():
    budget, track = tracked(1000)
    with track.enter(Phase.FORWARD):
        kept = torch.zeros(100)
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(200)
        assert budget.live_bytes == kept.nbytes
        assert torch.zeros(150).nbytes == 600  # exactly what is free
    assert budget.peak_bytes == 1000


def test_live_bytes_are_back_at_their_mark_after_a_failed_step():
    run = Run(num_rows=4096, width=8)
    mark_bytes = run.budget.live_bytes
    run.budget.limit_bytes = run.phase_peaks()[Phase.FORWARD] - 1
    run.optimizer.zero_grad()
    run.optimizer.state.clear()
    gc.collect()
    assert run.budget.live_bytes == mark_bytes
    failed = False
    try:
        run.step()
    except torch.OutOfMemoryError:
        failed = True
    assert failed
    assert run.budget.live_bytes == mark_bytes


def test_frees_are_noticed_outside_phases_and_from_other_threads():
    budget, track = tracked()
    with track.enter(Phase.FORWARD):
        tensors = [torch.zeros(10) for _ in range(100)]
    assert budget.live_bytes == 4000
    tensors.pop()
    assert budget.live_bytes == 3960
    thread = threading.Thread(target=tensors.clear)
    thread.start()
    thread.join()
    assert budget.live_bytes == 0
    assert budget.peak_bytes == 4000
    with track.enter(Phase.FORWARD):
        kept = torch.zeros(10)
    budget.reset_peak()
    assert budget.peak_bytes == kept.nbytes


def test_storages_keep_their_sum_while_threads_make_and_free():
    storages = Storages()

    def make_and_free():
        for _ in range(2000):
            storages.put(torch.empty(10).untyped_storage(), 40)

    threads = [threading.Thread(target=make_and_free) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert storages.total_bytes == 0


def test_a_new_storage_is_not_taken_for_a_dead_one_of_the_same_id():
    storages = Storages()
    storage = torch.empty(10).untyped_storage()
    storages.put(storage, 40)
    dead = id(storage)
    del storage
    others = []
    while not others or (id(others[-1]) != dead and len(others) < 1000):
        others.append(torch.empty(10).untyped_storage())
    assert id(others[-1]) == dead, "the case did not come about"
    assert storages.get(others[-1]) is None


def test_only_what_is_made_inside_a_phase_is_counted():
    budget, track = tracked(100)
    host = torch.zeros(1000)
    with track.enter(Phase.FORWARD):
        host.add_(1)
        assert host.view(10, 100)[2:, ::2].transpose(0, 1).detach().is_contiguous() is False
    assert budget.peak_bytes == 0


@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_views_inplace_operations_and_aliases_are_no_allocations(context):
    host = torch.zeros(4, 4)

    def alias_in_many_ways():
        with context():
            host.mul_(2)
            torch.add(host, 1, out=host)
            parts = [
                host.view(16),
                host.reshape(2, 8),
                host.t(),
                host.contiguous(),
                host.to(torch.float32),
                host.detach(),
            ]
            parts += [*host.split(2), *host.unbind(), torch.dropout(host, 0.5, False), host.expand(3, 4, 4)]
            return parts

    assert count_allocations(alias_in_many_ways)[0] == []


def test_an_allocation_is_reported_once_whatever_is_done_with_it_later():
    def compute():
        made = torch.ones(8)
        return made.view(2, 4).add_(1), made.relu_(), made[:3]

    assert count_allocations(compute)[0] == [32]


def test_outputs_in_lists_are_reported_each():
    def compute():
        values = torch._foreach_mul([torch.ones(2), torch.ones(3)], 2.0)
        return values, torch.zeros(4, 4).max(dim=0)

    assert count_allocations(compute)[0] == [8, 12, 8, 12, 64, 16, 32]


def test_tensors_made_from_numbers_are_reported():
    assert count_allocations(lambda: torch.tensor([1.0, 2.0]))[0] == [8]


def test_growth_by_resizing_is_charged_and_refused_growth_is_not():
    budget, track = tracked(2000)
    with track.enter(Phase.FORWARD):
        tensor = torch.empty(0)
        assert budget.live_bytes == 0
        tensor.resize_(100)
        assert budget.live_bytes == 400
        torch.add(torch.ones(1), torch.ones(150), out=tensor.resize_(0))
        assert budget.live_bytes == 600
        with pytest.raises(torch.OutOfMemoryError):
            tensor.resize_(1000)
        assert budget.live_bytes == 600
    del tensor
    assert budget.live_bytes == 0


def test_growth_needs_only_what_is_added():
    budget, track = tracked(1000)
    with track.enter(Phase.FORWARD):
        tensor = torch.zeros(150)
        tensor.resize_(250)
    assert budget.live_bytes == budget.peak_bytes == 1000


def test_set_moves_the_charge_to_the_storage_that_is_kept():
    budget, track = tracked()
    with track.enter(Phase.FORWARD):
        first, second = torch.zeros(10), torch.zeros(20)
        first.set_(second)
        assert budget.live_bytes == 80


def test_phases_within_phases_and_two_guards_count_once():
    budget = Budget(ROOMY_BYTES)
    track = Track(guards=(budget, budget))
    with track.enter(Phase.EVALUATE), track.enter(Phase.FORWARD):
        tensor = torch.zeros(25)
        assert len(_get_current_dispatch_mode_stack()) == 1  # each further mode would cost its time in every operation
    assert budget.live_bytes == budget.peak_bytes == tensor.nbytes
    torch.zeros(25)
    assert budget.peak_bytes == tensor.nbytes


def test_phases_in_two_threads_are_both_counted():
    budget, track = tracked()
    made = []

    def work():
        with track.enter(Phase.EVALUATE):
            made.append(torch.zeros(30))

    with track.enter(Phase.FORWARD):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        made.append(torch.zeros(20))
    assert budget.live_bytes == 200


def test_paused_leaves_host_copies_uncounted_for_good():
    budget, track = tracked(100)
    with track.enter(Phase.OPTIMIZER):
        with budget.paused():
            copied = torch.ones(1000).clone()
        copied.mul_(2)
        small = copied[:10].clone()
    assert budget.live_bytes == budget.peak_bytes == small.nbytes


def test_adopt_charges_each_storage_once_and_whole():
    budget, track = tracked()
    with track.enter(Phase.BUILD):
        layer = nn.Linear(4, 4, bias=False)
    base, meta = torch.zeros(100), nn.Parameter(torch.zeros(5, device="meta"))
    budget.adopt([layer.weight, layer.weight.view(16), base[:10], base[50:], meta])
    budget.adopt([base])
    assert budget.live_bytes == 64 + 400
    del base
    assert budget.live_bytes == 64


def test_adopt_charges_what_wrappers_and_sparse_tensors_are_made_of():
    budget = Budget(ROOMY_BYTES)
    jagged = torch.nested.nested_tensor([torch.zeros(3, 2), torch.zeros(1, 2)], layout=torch.jagged)
    sparse = torch.eye(3).to_sparse()
    budget.adopt([jagged, sparse])
    offsets_bytes, values_bytes = 3 * 8, 4 * 2 * 4
    assert budget.live_bytes == offsets_bytes + values_bytes + 48 + 12


def test_adopting_too_much_raises_and_charges_nothing():
    budget = Budget(1000)
    tensors = [torch.zeros(100), torch.zeros(151)]
    with pytest.raises(torch.OutOfMemoryError, match=re.escape("Tried to allocate 1004 bytes.")):
        budget.adopt(tensors)
    assert budget.live_bytes == budget.peak_bytes == 0
    budget.adopt(tensors[:1])
    assert budget.live_bytes == 400


def test_hold_charges_the_elements_of_a_view_while_it_is_open():
    budget, track = tracked()
    dataset = torch.zeros(100, 10)
    with budget.hold([dataset[:5], dataset[5:10].t()]):
        assert budget.live_bytes == 400
        with track.enter(Phase.FORWARD):
            assert dataset[:5].view(50).sum() == 0
    assert budget.live_bytes == 0
    assert budget.peak_bytes == 400 + 4 + 1  # the sum and the answer


def test_hold_takes_nothing_for_what_is_on_the_device_already():
    budget, track = tracked()
    with track.enter(Phase.DATA):
        converted = torch.zeros(10, dtype=torch.int8).float()
    assert budget.live_bytes == 40
    with budget.hold([converted, converted]):
        assert budget.live_bytes == 40


def test_a_batch_that_does_not_fit_raises_on_entry_and_charges_nothing():
    budget = Budget(100)
    context = budget.hold([torch.zeros(26)])
    with pytest.raises(torch.OutOfMemoryError), context:
        pytest.fail("the batch was let in")
    assert budget.live_bytes == 0


def test_hold_ends_with_its_block_also_when_that_fails():
    budget = Budget(1000)
    with pytest.raises(KeyError), budget.hold([torch.zeros(26)]):
        raise KeyError
    assert budget.live_bytes == 0


def test_the_message_has_cudas_words_and_numbers():
    budget, track = tracked(64 * 2**20)
    kept = torch.empty(int(55.25 * 2**20), dtype=torch.uint8)
    budget.adopt([kept])
    with pytest.raises(torch.OutOfMemoryError) as raised, track.enter(Phase.FORWARD):
        torch.empty(20 * 2**20, dtype=torch.uint8)
    pattern = (
        r"^CPU out of memory\. Tried to allocate ([\d.]+) MiB\. CPU 0 has a total capacity of ([\d.]+) MiB of which "
        r"([\d.]+) MiB is free\. Of the allocated memory ([\d.]+) MiB is allocated by PyTorch, and 0 bytes is reserved by "
        r"PyTorch but unallocated\. .*memory_limit"
    )
    found = re.search(pattern, str(raised.value))
    assert found is not None
    assert [float(number) for number in found.groups()] == [20.0, 64.0, 8.75, 55.25]


def test_the_message_is_recognised_with_its_numbers():
    _, track = tracked(3 * 2**30)
    with pytest.raises(torch.OutOfMemoryError) as raised, track.enter(Phase.FORWARD), FakeTensorMode():
        torch.empty(5 * 2**30, dtype=torch.uint8)
    recognition = recognise(raised.value)
    assert recognition.verdict == "oom"
    assert not recognition.host
    numbers = recognition.numbers
    assert (numbers.requested_bytes, numbers.total_bytes, numbers.free_bytes) == (5 * 2**30, 3 * 2**30, 3 * 2**30)
    assert numbers.allocated_bytes == 0


MODELS = {
    "lstm": (lambda: nn.LSTM(6, 5, num_layers=2, dropout=0.3), lambda: torch.randn(7, 3, 6)),
    "batch_norm": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)),
        lambda: torch.randn(4, 2, 9, 9),
    ),
    "embedding": (
        lambda: nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 11), nn.Dropout(0.2)),
        lambda: torch.randint(11, (5, 4)),
    ),
    "transformer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True),
        lambda: torch.randn(3, 5, 8),
    ),
    "sparse_embedding": (lambda: nn.Embedding(11, 6, sparse=True), lambda: torch.randint(11, (5, 4))),
}


@pytest.mark.parametrize("name", MODELS)
def test_results_under_the_mode_are_bit_equal_to_those_without(name):
    def train(guards):
        torch.manual_seed(3)
        make_model, make_input = MODELS[name]
        model, x, track = make_model(), make_input(), Track(guards=guards)
        with track.enter(Phase.FORWARD):
            output = model(x)
            output = output[0] if isinstance(output, tuple) else output
            logits = output.flatten(1) if output.dim() != 3 else output.flatten(0, 1)
            loss = nn.functional.cross_entropy(logits, torch.arange(len(logits)) % logits.shape[1])
        with track.enter(Phase.BACKWARD):
            loss.backward()
        return [loss.detach(), *(parameter.grad.to_dense() for parameter in model.parameters()), *model.buffers()]

    budget = Budget(ROOMY_BYTES)
    plain, counted = train(()), train((budget,))
    assert budget.peak_bytes > 0
    assert len(plain) == len(counted)
    assert all(torch.equal(one, other) for one, other in zip(plain, counted, strict=True))


def deep_model_peak_bytes(*, recompute):
    torch.manual_seed(0)
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Tanh(), nn.Tanh()) for _ in range(6))
    budget, track = tracked()
    budget.adopt(blocks.parameters())
    x = torch.randn(256, 16)
    with track.enter(Phase.FORWARD):
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
        loss = x.sum()
    with track.enter(Phase.BACKWARD):
        loss.backward()
    return budget.peak_bytes, [parameter.grad for parameter in blocks.parameters()]


def test_gradient_checkpointing_lowers_the_peak_and_changes_nothing_else():
    peak_bytes, gradients = deep_model_peak_bytes(recompute=False)
    lower_bytes, same = deep_model_peak_bytes(recompute=True)
    assert lower_bytes < 0.6 * peak_bytes
    assert all(torch.equal(one, other) for one, other in zip(gradients, same, strict=True))


def test_fake_tensors_give_the_real_peak_to_the_byte():
    real = Run().phase_peaks()
    with FakeTensorMode(allow_non_fake_inputs=False):
        fake = Run().phase_peaks()
    assert fake == real


def test_meta_tensors_take_no_memory():
    assert count_allocations(lambda: nn.Linear(100, 100, device="meta"))[0] == []


def test_sparse_parts_are_counted():
    def compute():
        return torch.eye(3).to_sparse()

    sizes, made = count_allocations(compute)
    assert sizes[0] == 36
    assert sorted(sizes[1:]) == [12, 48]  # three values, and two int64 indices of each
    assert [part.nbytes for part in dense_parts(made)] == [48, 12]
    assert count_allocations(made.detach)[0] == []


@pytest.mark.filterwarnings("ignore")  # quantised and nested tensors are announced as leaving or as prototypes
@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x.to_sparse_csr(),
        lambda x: x.to_mkldnn().to_dense(),
        lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).dequantize(),
        lambda x: torch.nested.nested_tensor([x, x[:2]]),
        lambda x: torch.nested.nested_tensor([x, x[:2]], layout=torch.jagged).sin(),
        lambda x: torch.view_as_real(x.to(torch.complex64).conj().resolve_conj()),
        torch.func.vmap(torch.func.grad(lambda row: row.square().sum())),
        lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)),
    ],
    ids=["csr", "mkldnn", "quantised", "nested", "jagged", "complex", "functorch", "cond"],
)
def test_tensors_of_any_kind_pass_through(compute):
    x = torch.arange(12.0).reshape(4, 3)
    sizes, made = count_allocations(lambda: compute(x))
    assert isinstance(made, torch.Tensor)
    assert sizes
    assert all(size > 0 for size in sizes)


def test_numbers_pass_through_without_being_looked_at():
    x = torch.ones(3)
    assert count_allocations(lambda: (x.max().item(), x.tolist(), torch.equal(x, x)))[1] == (1.0, [1.0] * 3, True)


def test_what_on_allocate_raises_comes_out_and_the_mode_is_left():
    def refuse(_storage):
        raise torch.OutOfMemoryError("refused")

    with pytest.raises(torch.OutOfMemoryError, match="refused"), Allocations(refuse):
        torch.zeros(3)
    assert torch.zeros(3).sum() == 0
    assert sys.exc_info() == (None, None, None)
