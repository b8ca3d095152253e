"""What holds for every test: one thread, so that tests beside each other do not wait for each other; no failure left on."""

import os

# For the processes that tests start, too; read when torch is first imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from adaptive_trainer import phases

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _no_guard_is_left():
    """A rehearsed failure that outlives its test would strike in the next one."""
    yield
    left, phases.everywhere[:] = list(phases.everywhere), []
    assert not left, "the test has left guards in phases.everywhere"
