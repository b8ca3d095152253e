"""Ten of the trials that `scripts/crash_trials` runs by the hundred: kill -9 at random moments, start again, compare."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("numbers", [range(5), range(5, 10)], ids=["first", "second"])
def test_a_run_that_is_killed_and_started_again_ends_as_the_undisturbed_one(numbers):
    for number in numbers:
        command = [sys.executable, "scripts/crash_trials.py", "--seed", "7", "--only", str(number)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
        assert done.stdout.splitlines()[-1:] == ["tried=1 held=1 lost=0"], done.stdout + done.stderr
        assert done.returncode == 0
