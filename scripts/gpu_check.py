"""Proves on an NVIDIA GPU, with the real allocator, what the tests prove on a CPU with a counted limit.

A limit is set for this process's share of the device (`memory_limit`), between what a plan needs and what the next
lower one needs, both measured here first. Then each rung is taken for real. Every check asks for the same things:

- the rungs taken are those expected, and every step's peak stays within the limit;
- when a retry begins, the device holds what it held before the failed step, to the byte, and after the run what it held
  before the run;
- the end (losses, parameters, optimizer state, random streams) is bit-equal to that of an undisturbed run of the plan
  that the walk came to, under torch's deterministic algorithms.

``--cpu`` rehearses the same checks on a CPU under a counted limit. That says something about this script and the
trainer, and nothing about a GPU.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only so; read once, at its start

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from adaptive_trainer import AdaptiveTrainer, Event, Fallback, FitResult, LadderExhausted, OutOfMemory, Plan, Step
from adaptive_trainer.plan import Precision
from adaptive_trainer.testing import inject_oom
from adaptive_trainer.units import format_bytes

sys.path.append(str(Path(__file__).resolve().parents[1] / "recipes"))
import byte_lm

PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "fp16")
STEPS = 3


@dataclass(frozen=True)
class Machine:
    """Where the checks run, and how large the model is there: a few GiB on a GPU, a few MiB on a CPU.

    Attributes:
        device: ``cuda`` or ``cpu``.
        context: Bytes of a sample.
        width: Features of the model.
        depth: Blocks of the model.
        batch_size: Samples of a step.
    """

    device: torch.device
    context: int
    width: int
    depth: int
    batch_size: int

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    def start_afresh(self) -> None:
        """No limit, no cache, and a peak that begins here."""
        gc.collect()
        if self.is_gpu:
            torch.cuda.set_per_process_memory_fraction(1.0)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def allocated_bytes(self) -> int | None:
        """What tensors hold on the device; None on a CPU, where only the trainer's own limit counts."""
        gc.collect()
        return torch.cuda.memory_allocated() if self.is_gpu else None

    def random_state(self) -> list[Tensor]:
        return [torch.get_rng_state(), *([torch.cuda.get_rng_state().cpu()] if self.is_gpu else [])]


GPU = Machine(torch.device("cuda"), context=512, width=384, depth=8, batch_size=8)
CPU = Machine(torch.device("cpu"), context=96, width=32, depth=4, batch_size=8)


@dataclass
class Watch:
    """A callback that reads the device at every event.

    Attributes:
        held: For each fallback, what the device held beyond what it held when the last step was done.
        num_steps: Steps done.
    """

    machine: Machine
    held: list[int] = field(default_factory=list)
    num_steps: int = 0
    mark: int | None = None

    def on_event(self, event: Event) -> None:
        now = self.machine.allocated_bytes() if isinstance(event, Step | Fallback) else None
        if isinstance(event, Fallback) and now is not None and self.mark is not None:
            self.held.append(now - self.mark)
        if isinstance(event, Step):
            self.mark = now
            self.num_steps = event.step


@dataclass(frozen=True)
class Outcome:
    """What a run leaves: ``state`` is all that must be bit-equal, by name."""

    result: FitResult
    state: dict[str, Tensor]
    need_bytes: int
    leftovers: tuple[str, ...] = ()

    @property
    def first_peak_bytes(self) -> int:
        """The first step's, which is without the optimizer's moments."""
        return next(event.peak_bytes or 0 for event in self.result.events if isinstance(event, Step))

    @property
    def rungs(self) -> list[str]:
        return [event.rung for event in self.result.fallbacks]


def train(
    machine: Machine,
    *,
    plan: Plan | None = None,
    ladder: Sequence[str] | None = None,
    limit_bytes: int | None = None,
    trash_bytes: int = 0,
) -> Outcome:
    """A short run from a fresh start, and whatever it has left behind on the device."""
    machine.start_afresh()
    before = machine.allocated_bytes()
    watch = Watch(machine)
    model = make_model(machine)
    if trash_bytes:
        litter_once(model, watch, trash_bytes)
    result, state = _fit(machine, model, watch, plan, ladder, limit_bytes)
    del model
    need_bytes = torch.cuda.max_memory_reserved() if machine.is_gpu else result.peak_bytes or 0
    after = machine.allocated_bytes()
    leftovers = [f"{event.rung} left {event.held_bytes} bytes" for event in result.fallbacks if event.held_bytes != 0]
    leftovers += [f"a retry began with {num_bytes} bytes too many" for num_bytes in watch.held if num_bytes > 0]
    if after != before:
        leftovers.append(f"the device held {before} bytes before the run and {after} after it")
    peaks = [event.peak_bytes or 0 for event in result.events if isinstance(event, Step)]
    if limit_bytes is not None and max(peaks, default=0) > limit_bytes:
        leftovers.append(f"a step's peak of {max(peaks)} bytes is over the limit of {limit_bytes}")
    return Outcome(result, state, need_bytes, tuple(leftovers))


def _fit(
    machine: Machine,
    model: nn.Module,
    watch: Watch,
    plan: Plan | None,
    ladder: Sequence[str] | None,
    limit_bytes: int | None,
) -> tuple[FitResult, dict[str, Tensor]]:
    made: list[torch.optim.Optimizer] = []

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        made.append(torch.optim.AdamW(parameters, lr=1e-3))
        return made[-1]

    trainer = AdaptiveTrainer(
        model,
        make_data(machine.context),
        loss=byte_lm.loss,
        optimizer=optimizer,
        batch_size=machine.batch_size,
        steps=STEPS,
        plan=plan,
        ladder=ladder,
        # On a CPU nobody counts without a limit; this one is never reached.
        memory_limit=limit_bytes if limit_bytes is not None or machine.is_gpu else 0.9,
        device=machine.device,
        callbacks=[watch],
        progress=False,
    )
    result = trainer.fit()
    state = dict(_named(trainer.model, made[-1]))
    state |= {f"random stream {index}": stream for index, stream in enumerate(machine.random_state())}
    return result, state


def make_model(machine: Machine) -> nn.Module:
    """A byte-level GPT whose blocks draw random numbers."""
    torch.manual_seed(0)
    model = byte_lm.make_model(machine.context, machine.width, machine.depth)
    for block in model.blocks:
        assert isinstance(block, byte_lm.Block)
        block.mlp.append(nn.Dropout(0.1))
    return model


@cache
def make_data(context: int) -> byte_lm.Windows:
    """Text enough for all steps, read once."""
    return byte_lm.make_data(context=context, max_bytes=200_000)


def litter_once(model: nn.Module, watch: Watch, num_bytes: int) -> None:
    """Let the second step's forward begin by leaving memory that only a cycle of garbage holds."""
    left: list[bool] = []

    def litter(_model: nn.Module, _inputs: Any) -> None:
        if watch.num_steps == 1 and not left:
            left.append(True)
            trash: list[Any] = [torch.empty(num_bytes, dtype=torch.uint8, device=watch.machine.device)]
            trash.append(trash)

    model.register_forward_pre_hook(litter)


def _named(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        yield name, parameter.detach().cpu().clone()
        for key, value in optimizer.state[parameter].items():
            yield f"{name}, optimizer's {key}", value.cpu().clone()


# Judging. A verdict is a list of sentences about what is wrong.


def differences(run: Outcome, reference: Outcome) -> list[str]:
    """Where a run's end differs from the one that it must be bit-equal to."""
    wrong = [name for name, value in reference.state.items() if not torch.equal(value, run.state[name])]
    found = [f"{len(wrong)} of {len(reference.state)} tensors differ, first {wrong[0]}"] if wrong else []
    if run.result.losses != reference.result.losses:
        found.append(f"losses {run.result.losses} are not {reference.result.losses}")
    return found


def peaks(run: Outcome) -> str:
    """What stood when memory ran out, and the peak of the first step that got through."""
    failed = [event.allocated_bytes for event in run.result.events if isinstance(event, OutOfMemory)]
    passed = [event.peak_bytes for event in run.result.events if isinstance(event, Step)]
    return f"failed at {format_bytes(failed[0])}, then a peak of {format_bytes(passed[0])}" if failed else "no failure"


class Checks:
    """Runs checks, prints a line for each, and counts."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.num_checks = 0
        self.num_passed = 0
        self.undisturbed = cache(self._undisturbed)

    def _undisturbed(self, plan: Plan) -> Outcome:
        return train(self.machine, plan=plan, ladder=[])

    def run(self, name: str, check: Callable[[], tuple[list[str], str]]) -> None:
        """Do one check: it returns what is wrong, and what was seen."""
        self.num_checks += 1
        try:
            wrong, seen = check()
        except Exception as error:  # noqa: BLE001  a check that breaks is a check that fails; the others still count
            traceback.print_exc()
            wrong, seen = [f"{type(error).__name__}: {error}"], ""
        self.num_passed += not wrong
        print(f"{'FAILED' if wrong else 'passed'}  {name:<44} {'; '.join(wrong) or seen}", flush=True)

    def between(self, high: Plan, low: Plan) -> int:
        """A limit that the second plan keeps and the first does not."""
        # Already the first step has to fail: the run is then one of the lower plan from its beginning.
        above, below = self.undisturbed(high).first_peak_bytes, self.undisturbed(low).need_bytes
        if above <= below * 1.05:
            raise RuntimeError(f"{high} needs {format_bytes(above)}, {low} {format_bytes(below)}: no room between them")
        return (above + below) // 2

    # The checks.

    def replay(self, precision: Precision, phase: str) -> tuple[list[str], str]:
        """Failures of the first two steps leave no trace."""
        plan = Plan(precision=precision)
        with ExitStack() as failures:
            struck = [failures.enter_context(inject_oom(step=step, phase=phase)) for step in (1, 2)]
            run = train(self.machine, plan=plan)
        wrong = [*run.leftovers, *differences(run, self.undisturbed(plan))]
        if [entry.fired for entry in struck] != [1, 1] or run.rungs != ["empty_cache"] * 2:
            wrong.append(f"the rungs were {run.rungs}")
        return wrong, f"{len(run.rungs)} failed attempts, bit-equal"

    def rung(self, name: str, start: Plan, end: Plan) -> tuple[list[str], str]:
        """A rung is taken for real, in the first step, and is enough."""
        limit_bytes = self.between(start, end)
        run = train(self.machine, plan=start, ladder=["empty_cache", name], limit_bytes=limit_bytes)
        wrong = [*run.leftovers, *differences(run, self.undisturbed(end))]
        if run.result.plan != end or run.rungs != ["empty_cache", name]:
            wrong.append(f"the rungs {run.rungs} led to {run.result.plan}")
        needs = [format_bytes(self.undisturbed(plan).need_bytes) for plan in (start, end)]
        return wrong, f"limit {format_bytes(limit_bytes)} between {needs[0]} and {needs[1]}; {peaks(run)}; bit-equal"

    def garbage(self) -> tuple[list[str], str]:
        """Memory that only unreachable objects hold is found by the first rung."""
        plan = Plan()
        need_bytes = self.undisturbed(plan).need_bytes
        limit_bytes = need_bytes + need_bytes // 4

        gc.disable()
        try:
            run = train(self.machine, plan=plan, limit_bytes=limit_bytes, trash_bytes=need_bytes // 2)
        finally:
            gc.enable()
        wrong = [*run.leftovers, *differences(run, self.undisturbed(plan))]
        if run.rungs != ["empty_cache"]:
            wrong.append(f"the rungs were {run.rungs}")
        return wrong, f"limit {format_bytes(limit_bytes)}; {peaks(run)}; bit-equal"

    def walk(self) -> tuple[list[str], str]:
        """The default ladder, under a limit that one sample keeps only with gradient checkpointing."""
        one = Plan(micro_batch=1)
        low = replace(one, gradient_checkpointing=True)
        limit_bytes = (self.undisturbed(one).need_bytes + self.undisturbed(low).need_bytes) // 2
        run = train(self.machine, limit_bytes=limit_bytes)
        wrong = list(run.leftovers)
        expected = ["empty_cache", "halve_batch", "gradient_checkpointing"]
        if list(dict.fromkeys(run.rungs))[:3] != expected or not run.result.plan.gradient_checkpointing:
            wrong.append(f"the rungs {run.rungs} led to {run.result.plan}")
        return wrong, f"limit {format_bytes(limit_bytes)}; {' '.join(run.rungs)}; {run.result.plan}"

    def exhausted(self) -> tuple[list[str], str]:
        """A limit that not even the model's state keeps ends in `LadderExhausted`, and everything is given back."""
        self.machine.start_afresh()
        before = self.machine.allocated_bytes()
        state_bytes = sum(parameter.nbytes for parameter in make_model(self.machine).parameters())
        try:
            train(self.machine, limit_bytes=state_bytes * 2)
        except LadderExhausted as error:
            num_failures = len(error.trail)
        else:
            return ["it was trained within twice its parameters' size"], ""
        after = self.machine.allocated_bytes()
        wrong = [] if after == before else [f"the device held {before} bytes before and {after} after"]
        return wrong, f"{num_failures} entries in the trail"


def check_everything(checks: Checks) -> None:
    """All checks, one line each."""
    half = checks.machine.batch_size // 2
    checks.undisturbed(Plan())  # also lets cuBLAS get its workspaces, which then count as held before every later run
    for precision in PRECISIONS:
        for phase in ("forward", "backward", "optimizer"):
            checks.run(f"replay, {precision}, {phase}", partial(checks.replay, precision, phase))
    checks.run("empty_cache finds garbage", checks.garbage)
    for precision in PRECISIONS:
        plan = Plan(precision=precision)
        for name, end in (
            ("halve_batch", replace(plan, micro_batch=half)),
            ("gradient_checkpointing", replace(plan, gradient_checkpointing=True)),
        ):
            checks.run(f"{name}, {precision}", partial(checks.rung, name, plan, end))
    checks.run("amp, fp32 to bf16", partial(checks.rung, "amp", Plan(), Plan(precision="bf16")))
    checks.run("the default ladder", checks.walk)
    checks.run("ladder exhausted", checks.exhausted)


def main() -> int:
    """Check, if there is something to check on."""
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cpu", action="store_true", help="rehearse on the CPU under a counted limit")
    arguments = parser.parse_args()
    if not arguments.cpu and not (torch.cuda.is_available() and torch.version.hip is None):
        print("no NVIDIA GPU here: nothing was checked")
        return 0
    torch.use_deterministic_algorithms(mode=True)
    if arguments.cpu:
        torch.set_num_threads(1)
        print("a REHEARSAL on the CPU under a counted limit: it says nothing about a GPU")
    else:
        name, total = torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory
        print(f"{name}, {format_bytes(total)}, torch {torch.__version__}")
    checks = Checks(CPU if arguments.cpu else GPU)
    # The one implementation of attention whose backward is deterministic on every GPU.
    with nullcontext() if arguments.cpu else sdpa_kernel(SDPBackend.MATH):
        check_everything(checks)
    print(f"checks={checks.num_checks} passed={checks.num_passed}")
    return 0 if checks.num_passed == checks.num_checks else 1


if __name__ == "__main__":
    sys.exit(main())
