"""Kills training runs with signal 9 at random moments, starts them again, and compares the ends bit for bit.

A trial trains one of the zoo's models for two epochs, with a checkpoint after each step or each few, so that many kills
fall into the writing of one; in half of the trials memory also runs out at some step. The run is killed one to three
times, each time after a random part of what the undisturbed run takes, and then left to end. Held is a trial whose
parameters, buffers, optimizer state, schedule and random streams are those of the undisturbed run, and whose folder of
checkpoints holds nothing but good ones.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from adaptive_trainer import AdaptiveTrainer, saving  # noqa: E402  the zoo lies in the checkout
from adaptive_trainer.testing import inject_oom  # noqa: E402
from tests.zoo import OPTIMIZERS, ZOO, decay, loss, state_of  # noqa: E402

#: Seconds after which a run that does not end is taken for lost.
PATIENCE = 120.0


@dataclass(frozen=True)
class Trial:
    """What is trained, and what happens to it.

    Attributes:
        kind: Of the zoo.
        optimizer: Of the zoo.
        every: Steps between checkpoints.
        fails_at: The step at which memory runs out; 0 for none.
        kills: After which part of the undisturbed run's time each kill comes.
    """

    kind: str
    optimizer: str
    every: int
    fails_at: int
    kills: tuple[float, ...]

    @classmethod
    def drawn(cls, seed: int, number: int) -> Trial:
        """The trial of that number."""
        draw = random.Random(f"{seed}/{number}")
        return cls(
            kind=draw.choice(sorted(ZOO)),
            optimizer=draw.choice(sorted(OPTIMIZERS)),
            every=draw.choice((1, 1, 2, 3)),
            fails_at=draw.choice((0, draw.randint(1, 16))),
            kills=tuple(draw.uniform(0.0, 1.0) for _ in range(draw.randint(1, 3))),
        )


def train(trial: Trial, run_dir: Path) -> None:
    """Train to the end, and leave a digest of it."""
    trainer = AdaptiveTrainer(
        ZOO[trial.kind].make(), ZOO[trial.kind].data(60),
        loss=loss, batch_size=8, epochs=2, optimizer=OPTIMIZERS[trial.optimizer], scheduler=decay, progress=False,
        run_dir=run_dir, checkpoint_steps=trial.every,
    )  # fmt: skip
    with inject_oom(step=trial.fails_at or 10**6, phase="backward", times=2):
        trainer.fit()
    digest = hashlib.sha256()
    for piece in _pieces(state_of(trainer)):
        digest.update(piece)
    (run_dir / "digest").write_text(digest.hexdigest())


def _pieces(value: Any) -> Iterator[bytes]:
    """The bytes of a nested value, one after the other."""
    if isinstance(value, Tensor):
        yield f"{value.dtype}{tuple(value.shape)}".encode()
        yield value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    elif isinstance(value, dict):
        for key, entry in value.items():
            yield repr(key).encode()
            yield from _pieces(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _pieces(entry)
    else:
        yield repr(value).encode()


def _started(trial: Trial, run_dir: Path) -> int:
    """The id of a new process that trains. It is forked, so that torch need not be loaded again."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.dup2(os.open(run_dir / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
        train(trial, run_dir)
        code = 0
    finally:
        os._exit(code)  # the parent's own clean-up is not the child's


def _waited(child: int, seconds: float) -> int | None:
    """The exit status of a child that ends within so many seconds; None if it does not."""
    end = time.monotonic() + seconds
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= end:
            return None
        time.sleep(0.0005)


def _killed(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def run(trial: Trial, folder: Path) -> str:
    """Run a trial; empty if it held, else what was wrong."""
    plain, run_dir = folder / "plain", folder / "killed"
    plain.mkdir()
    run_dir.mkdir()
    started = time.monotonic()
    child = _started(trial, plain)
    if _waited(child, PATIENCE) != 0:
        return f"the undisturbed run failed: {(plain / 'output').read_text()[-500:]}"
    seconds = time.monotonic() - started
    for part in trial.kills:
        child = _started(trial, run_dir)
        if _waited(child, part * seconds) is None:
            _killed(child)
    child = _started(trial, run_dir)
    code = _waited(child, PATIENCE)
    if code is None:
        _killed(child)
        return f"it did not end within {PATIENCE:.0f} s"
    if code != 0:
        return f"exit code {code}: {(run_dir / 'output').read_text()[-500:]}"
    if (run_dir / "digest").read_text() != (plain / "digest").read_text():
        return "it ended otherwise than the undisturbed run"
    return _left_over(run_dir / "checkpoints")


def _left_over(checkpoints: Path) -> str:
    """What lies in a folder of checkpoints that is none, or no good one; empty if nothing does."""
    for path in checkpoints.iterdir():
        if path not in saving.checkpoints(checkpoints):
            return f"{path.name} was left"
        warnings: list[str] = []
        alone = checkpoints.with_name("alone")
        shutil.copytree(path, alone / path.name)
        saving.open_newest(alone, warnings.append)
        shutil.rmtree(alone)
        if warnings:
            return f"{path.name} is no good checkpoint: {warnings[0]}"
    return ""


def main() -> int:
    """Run the trials; 0 if all held."""
    parser = argparse.ArgumentParser(prog="scripts/crash_trials", description=__doc__)
    parser.add_argument("--trials", type=int, default=100, help="how many (default 100)")
    parser.add_argument("--seed", type=int, default=0, help="the same seed tries the same trials (default 0)")
    parser.add_argument("--only", type=int, metavar="K", help="only the trial of this number")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    numbers = range(arguments.trials) if arguments.only is None else [arguments.only]
    held, started = 0, time.monotonic()
    for number in numbers:
        trial = Trial.drawn(arguments.seed, number)
        with tempfile.TemporaryDirectory(prefix="crash-trial-") as folder:
            wrong = run(trial, Path(folder))
        held += not wrong
        if wrong:
            print(f"lost: {trial}: {wrong}")
            print(f"  again: scripts/crash_trials --seed {arguments.seed} --only {number}", flush=True)
    print(f"{len(numbers)} runs were killed and started again in {time.monotonic() - started:.0f} s")
    print(f"tried={len(numbers)} held={held} lost={len(numbers) - held}")
    return 0 if held == len(numbers) else 1


if __name__ == "__main__":
    sys.exit(main())
