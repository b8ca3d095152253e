"""The random streams that a step may draw from: Python's, NumPy's, torch's on the host and on the device.

Those are everybody's. A module may also have generators of its own.
"""

from __future__ import annotations

import ctypes
import random
import sys
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from adaptive_trainer import memory

if TYPE_CHECKING:
    from collections.abc import Callable


#: Bytes by which a Mersenne twister is known again: its position and 15 of its 624 words, next to each other. A draw
#: moves the position, and after the last word, or by a seed, all words are others.
_WINDOW = 64
_WORDS = 624


def _window(address: int) -> memoryview:
    return memoryview((ctypes.c_char * _WINDOW).from_address(address))


class _Python:
    """Python's global stream, read cheaply.

    Asking for it makes 625 numbers, which a step of 10 ms would feel. CPython keeps them behind the object's head, the
    position and then the words, so that one look tells whether any was drawn since the last time. Whether they really
    are there is tried once; where they are not, Python is asked every time.
    """

    def __init__(self) -> None:
        self._stream: Any = getattr(random.getstate, "__self__", None)
        self._state: tuple[Any, ...] = ()
        self._seen = b""
        self._window: memoryview | None = None
        if sys.implementation.name == "cpython" and isinstance(self._stream, random.Random):
            address = id(self._stream) + object.__basicsize__
            position, *words = memoryview(ctypes.string_at(address, (1 + _WORDS) * 4)).cast("I")
            if (*words, position) == random.getstate()[1]:
                self._window = _window(address)

    def take(self) -> tuple[Any, ...]:
        """The stream's state."""
        if self._window is None:
            return random.getstate()
        seen = self._window.tobytes()
        if seen != self._seen or self._stream.gauss_next is not self._state[2]:
            self._state, self._seen = random.getstate(), seen
        return self._state


class _NumPy:
    """NumPy's global stream, read cheaply.

    Asking NumPy for it takes 30 microseconds, which a step of 10 ms would feel. Its generator's own memory, the words
    and then the position, tells that nothing was drawn since the last time. Only the half of a normal pair that NumPy
    may keep beside it does not show there; so while one is kept, NumPy is asked.
    """

    def __init__(self) -> None:
        self._generator: Any = None
        self._window = memoryview(b"")
        self._seen = b""
        self._state: dict[str, Any] = {}

    def take(self) -> dict[str, Any] | None:
        """The stream's state; None as long as nobody has imported NumPy's random numbers."""
        module = sys.modules.get("numpy.random")
        if module is None:
            return None
        generator = module.get_bit_generator()
        if generator is self._generator:
            seen = self._window.tobytes()
            if seen == self._seen:
                return self._state
            self._seen = seen
        return self._ask(module, generator)

    def put(self, state: dict[str, Any]) -> None:
        """Put the stream back, and look at all of it the next time: the window is the same with half a pair or none."""
        sys.modules["numpy.random"].set_state(state)
        self._generator = None

    def _ask(self, module: Any, generator: Any) -> dict[str, Any]:
        self._state = module.get_state(legacy=False)
        self._generator = None
        if type(generator).__name__ == "MT19937" and not self._state["has_gauss"]:
            # A generator that is held here keeps the memory where it is.
            self._generator = generator
            self._window = _window(generator.ctypes.state_address + (_WORDS + 1) * 4 - _WINDOW)
            self._seen = self._window.tobytes()
        return self._state


_python, _numpy = _Python(), _NumPy()


@dataclass(slots=True, eq=False)  # not frozen, which would take three times as long to make, in every step
class HostStreams:
    """The random streams of Python and, once somebody has imported it, of NumPy."""

    python: tuple[Any, ...]
    numpy: dict[str, Any] | None

    @classmethod
    def take(cls) -> HostStreams:
        """The streams as they are now."""
        return cls(_python.take(), _numpy.take())

    def restore(self) -> None:
        """Put the streams back."""
        random.setstate(self.python)
        if self.numpy is not None:
            _numpy.put(self.numpy)

    def equal_to(self, other: HostStreams) -> bool:
        """Whether both would give the same numbers."""
        return self.python == other.python and _plain(self.numpy) == _plain(other.numpy)


def _plain(state: Any) -> Any:
    """NumPy's state with its arrays as bytes, so that it can be compared."""
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    return state.tobytes() if hasattr(state, "tobytes") else state


@dataclass(slots=True, eq=False)
class RandomStreams:
    """All random streams that a step draws from: Python, NumPy, torch on the host, torch on the process's device."""

    host: HostStreams
    cpu: Tensor
    device: torch.device
    own: Tensor | None

    @classmethod
    def take(cls, device: torch.device) -> RandomStreams:
        """The streams as they are now, that of ``device`` included."""
        own = None if device.type == "cpu" else memory.rng_state(device)
        return cls(HostStreams(_python.take(), _numpy.take()), torch.default_generator.get_state(), device, own)

    def restore(self) -> None:
        """Put all streams back."""
        self.host.restore()
        torch.set_rng_state(self.cpu)
        memory.set_rng_state(self.device, self.own)

    def moved(self) -> bool:
        """Whether a random number was drawn, on the host or on the device, since these were taken."""
        if not (torch.equal(self.cpu, torch.get_rng_state()) and self.host.equal_to(HostStreams.take())):
            return True
        own = None if self.own is None else memory.rng_state(self.device)
        return self.own is not None and own is not None and not torch.equal(self.own, own)


def is_generator(value: Any) -> bool:
    """Whether an object is a random stream of somebody's own: torch's, Python's or NumPy's."""
    if isinstance(value, torch.Generator | random.Random):
        return True
    kind = type(value)
    return kind.__module__.startswith("numpy.random") and kind.__name__ in {"Generator", "RandomState"}


def rewinding(generator: Any) -> Callable[[], object]:
    """A function that puts such a stream back to where it is now."""
    if isinstance(generator, random.Random):
        return partial(generator.setstate, generator.getstate())
    if hasattr(generator, "bit_generator"):
        return partial(setattr, generator.bit_generator, "state", generator.bit_generator.state)
    return partial(generator.set_state, generator.get_state())


def seed_everything(seed: int) -> None:
    """Seed the streams of Python, of NumPy, and of torch on all devices."""
    random.seed(seed)
    # NumPy loads this part when it is first used. Were that in the first step, its stream would begin anywhere.
    import_module("numpy.random").seed(seed % 2**32)
    torch.manual_seed(seed)
