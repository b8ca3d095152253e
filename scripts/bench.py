"""Measures what the trainer costs. Each benchmark prints a table for people and one line of JSON for machines.

`overhead`: a hand-written torch loop against `AdaptiveTrainer` without limit and without failure, same model, data and
seeds, in one process, turns of a few steps after one another: the loop's turns are played in a callback of the trainer.
Timed is the stretch from the end of one step to the end of a later one, which holds all that a step costs: fetching,
preparing, training, recording. What a call of `fit` costs once is left out. The figure is the median over all turns of
trainer time to loop time, and beside it stand the bounds between which it lies in 95 of 100 repetitions. The C library
is told to keep the memory that is freed: else it gives pages back to the system and fetches them again, a thousand a
step, and who of the two has more of that is chance.

`import`: what `import adaptive_trainer` and `from adaptive_trainer import AdaptiveTrainer` cost in a new process, in
seconds beyond `import torch`: differences of medians, the three taking turns.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from adaptive_trainer import AdaptiveTrainer, Event, Step

sys.path.append(str(Path(__file__).resolve().parents[1] / "recipes"))
import byte_lm


@dataclass(frozen=True)
class Workload:
    """A model and a batch that make an optimizer step last about as long as the name says, on one thread.

    Attributes:
        context: Bytes of a sample.
        width: Features of the model.
        depth: Blocks of the model; what the trainer asks of a module costs a microsecond or two each step.
        batch_size: Samples of a step.
        turns: How often each contestant is on.
    """

    name: str
    context: int
    width: int
    depth: int
    batch_size: int
    turns: int


WORKLOADS = (
    Workload("10ms", context=32, width=128, depth=2, batch_size=10, turns=400),
    Workload("10ms_deep", context=32, width=64, depth=4, batch_size=9, turns=400),
    Workload("100ms", context=128, width=128, depth=4, batch_size=12, turns=100),
)
#: Steps of a turn. The first one is not timed: it finds the caches that the other contestant has left.
STEPS = 6
#: Turns that are not counted.
WARM_UP = 5


def overhead() -> dict[str, float]:
    """Trainer time to loop time for each workload."""
    torch.set_num_threads(1)
    _keep_freed_memory()
    found = {}
    print(f"{'workload':<10}{'loop':>12}{'trainer':>12}{'ratio':>9}{'95 % between':>18}{'per step':>12}")
    for workload in WORKLOADS:
        by_hand, by_trainer = _compare(workload)
        ratios = sorted(ours / theirs for ours, theirs in zip(by_trainer, by_hand, strict=True))
        middle = statistics.median(ratios)
        low, high = _bounds_of_median(ratios)
        loop, trainer = statistics.median(by_hand), statistics.median(by_trainer)
        found[f"overhead_{workload.name}"] = round(middle, 4)
        print(
            f"{workload.name:<10}{loop * 1e3:>9.2f} ms{trainer * 1e3:>9.2f} ms{middle:>9.4f}"
            f"{low:>9.4f}{high:>9.4f}{(middle - 1) * loop * 1e6:>9.0f} us",
            flush=True,
        )
    return found


def _bounds_of_median(ordered: list[float]) -> tuple[float, float]:
    """Between which the median of what was sampled lies with 95 %, by the binomial's normal approximation."""
    reach = 0.98 * len(ordered) ** 0.5
    middle = (len(ordered) - 1) / 2
    return ordered[max(0, math.floor(middle - reach))], ordered[min(len(ordered) - 1, math.ceil(middle + reach))]


def _keep_freed_memory() -> None:
    """Where the C library has a call for it (glibc)."""
    if sys.platform == "linux":
        tune = getattr(ctypes.CDLL(None), "mallopt", None)
        if tune is not None:
            trim_threshold, mmap_threshold = -1, -3
            tune(mmap_threshold, 32 * 2**20)
            tune(trim_threshold, 2**31 - 1)


def _compare(workload: Workload) -> tuple[list[float], list[float]]:
    """Seconds of a step by hand and by the trainer, turn by turn."""
    by_hand: list[float] = []
    by_trainer: list[float] = []
    ends: list[float] = []
    play = _by_hand(workload)

    def note(event: Event) -> None:
        if type(event) is Step:
            ends.append(time.perf_counter())
            if len(ends) == STEPS:
                by_trainer.append(_per_step(ends))
                by_hand.append(play())
                ends.clear()

    model, loader = _made(workload)
    steps = STEPS * (workload.turns + WARM_UP)
    AdaptiveTrainer(model, loader, loss=byte_lm.loss, steps=steps, progress=False, callbacks=[note], device="cpu").fit()
    return by_hand[WARM_UP:], by_trainer[WARM_UP:]


def _made(workload: Workload) -> tuple[nn.Module, DataLoader[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    model = byte_lm.make_model(context=workload.context, width=workload.width, depth=workload.depth)
    data = byte_lm.make_data(context=workload.context, max_bytes=1_000_000)
    generator = torch.Generator().manual_seed(0)
    return model, DataLoader(data, batch_size=workload.batch_size, shuffle=True, drop_last=True, generator=generator)


def _by_hand(workload: Workload) -> Callable[[], float]:
    """What people write."""
    model, loader = _made(workload)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = _for_ever(loader)

    def turn() -> float:
        ends = []
        for _ in range(STEPS):
            inputs, targets = next(batches)
            optimizer.zero_grad(set_to_none=True)
            loss: Tensor = byte_lm.loss(model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            optimizer.step()
            loss.item()
            ends.append(time.perf_counter())
        return _per_step(ends)

    return turn


def _for_ever(loader: DataLoader[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        yield from loader


def _per_step(ends: list[float]) -> float:
    return (ends[-1] - ends[0]) / (len(ends) - 1)


IMPORTS = {
    "torch": "import torch",
    "package": "import torch, adaptive_trainer",
    "trainer": "from adaptive_trainer import AdaptiveTrainer",
}


def importing(turns: int = 9) -> dict[str, float]:
    """Seconds beyond `import torch`."""
    seconds: dict[str, list[float]] = {name: [] for name in IMPORTS}
    for turn in range(turns + 1):
        for name, code in IMPORTS.items():
            started = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], check=True)
            if turn:  # the first turn fills the page cache
                seconds[name].append(time.perf_counter() - started)
    middles = {name: statistics.median(found) for name, found in seconds.items()}
    for name, code in IMPORTS.items():
        print(f"{code:<45}{middles[name]:>7.3f} s")
    return {f"import_{name}_seconds": round(middles[name] - middles["torch"], 4) for name in ("package", "trainer")}


BENCHMARKS: dict[str, Callable[[], dict[str, float]]] = {"overhead": overhead, "import": importing}


def main() -> int:
    """Run one benchmark."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=BENCHMARKS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the last line to this file, too")
    arguments = parser.parse_args()
    found = json.dumps(BENCHMARKS[arguments.name]())
    if arguments.json is not None:
        arguments.json.write_text(f"{found}\n", encoding="utf-8")
    print(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
