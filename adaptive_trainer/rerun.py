"""One forward through one block, and how backward computes it again, exactly.

The second computation starts from what the first one started from (inputs, buffers, attributes of the block's modules,
random streams of torch, Python and NumPy, autocast), and side effects happen once because all of that is put back as it
was before it. That is done by exchanging tensor objects and not by writing into them, so no graph sees its tensors
change.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointError, checkpoint

from adaptive_trainer.snapshot import SMALL_BYTES, AttributeSnapshot, version
from adaptive_trainer.streams import HostStreams

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from types import TracebackType

# What the first forward of a block taught: the tensors that it writes into, as `_Held` names them.
_written: WeakKeyDictionary[nn.Module, set[object]] = WeakKeyDictionary()


# A compiler left to itself would compile this bookkeeping again for every block, up to its limit. Handed to it as
# torch's own gradient checkpointing, blocks that write in place, stash or draw from Python's stream come out wrong.
# Not torch.compiler.disable, which imports the whole compiler at once: this waits for the first call.
@_disable_dynamo
def run(block: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute ``forward``, a function of ``block``, so that backward computes it again."""
    passage = _Passage(block, forward, args, kwargs)
    # In this form torch finds the devices of all tensors, keyword and nested ones included, whose streams to keep.
    tensors = [leaf for leaf in passage.leaves if isinstance(leaf, Tensor)]
    return checkpoint(
        passage.compute, tensors, use_reentrant=False, preserve_rng_state=True, context_fn=passage.contexts
    )


class _Held:
    """A tensor as a forward found it: a copy, or the tensor itself as long as nobody writes into it.

    Without its graph: an input that is written into has the very graph that holds it here, and would never be freed.
    """

    __slots__ = ("_always", "_live", "_needs", "_version", "copy", "key")

    def __init__(self, key: object, tensor: Tensor, *, copy: bool, always: bool = False) -> None:
        self.key = key
        self._always = always
        self._needs = tensor.requires_grad
        self._version = version(tensor)
        self._live = tensor.detach()
        self.copy = self._live.clone() if copy or always else None

    def settle(self) -> bool:
        """After the forward, keep only what is needed; whether the tensor has to be copied the next time."""
        written = version(self._live) != self._version
        if self.copy is not None and not (written or self._always):
            self.copy = None
        if self.copy is not None:
            self._live = self.copy
        return written and not self._always

    def tensor(self) -> Tensor:
        """The tensor with the value that the forward found, another copy each time if it may be written into."""
        if self.copy is not None:
            # Torch forbids to write into leaves that need gradients, so this one is none.
            return self.copy.detach().requires_grad_(self._needs).clone()
        if version(self._live) != self._version:
            raise CheckpointError(
                f"a tensor of shape {tuple(self._live.shape)} that a block under gradient checkpointing reads was"
                " changed in place between the block's forward and its backward, so the block cannot be computed again;"
                " change a copy of the tensor instead, or leave gradient_checkpointing out of the ladder"
            )
        return self._live.detach().requires_grad_(self._needs)


class _Again(NamedTuple):
    """One computation of a forward in backward: its tensors, and what there is to put back after it."""

    fresh: dict[_Held, Tensor]
    now: AttributeSnapshot
    streams: HostStreams | None


class _Passage:
    """One forward through one block, with all that computing it again takes.

    It is itself the context that lies around each of the later computations: before them the block is put back to
    where the forward found it, after them to where it is now, also when torch stops one half-way.
    """

    def __init__(
        self, block: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._block = block
        self._forward = forward
        self._given: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        self.leaves, self._spec = tree_flatten((args, kwargs))
        self._start = AttributeSnapshot(block)
        self._start.take()
        self._held: dict[int, _Held] = {}
        for place, leaf in enumerate(self.leaves):
            if isinstance(leaf, Tensor):
                self._hold(leaf, place)
        self._inputs = [self._held.get(id(leaf), leaf) for leaf in self.leaves]
        self._state = [
            (mapping, name, self._hold(tensor, (id(mapping), name), always=persistent or tensor.nbytes <= SMALL_BYTES))
            for mapping, name, tensor, persistent in self._start.state_tensors()
            if not tensor.requires_grad
        ]
        self._streams: HostStreams | None = HostStreams.take()
        self._around: list[_Again] = []

    def _hold(self, tensor: Tensor, key: object, *, always: bool = False) -> _Held:
        """What is held of a tensor, once however often it occurs."""
        known = _written.get(self._block)  # None at a block's first forward: that copies everything, and so learns
        if id(tensor) not in self._held:
            self._held[id(tensor)] = _Held(key, tensor, copy=known is None or key in known, always=always)
        return self._held[id(tensor)]

    def contexts(self) -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
        """The contexts for the forward and for each later computation, as torch asks for them."""
        return nullcontext(), self

    def compute(self, tensors: list[Tensor]) -> Any:
        """The forward itself at the first call, and its repetition at later ones."""
        if self._given is not None:
            (args, kwargs), self._given = self._given, None
            output = self._forward(*args, **kwargs)
            self._settle()
            tensors.clear()  # torch keeps the list
            return output
        fresh = self._around[-1].fresh
        leaves = [fresh[leaf] if isinstance(leaf, _Held) else leaf for leaf in self._inputs]
        args, kwargs = tree_unflatten(leaves, self._spec)
        return self._forward(*args, **kwargs)

    def _settle(self) -> None:
        self.leaves.clear()
        held = {entry.key: entry.settle() for entry in self._held.values()}
        _written.setdefault(self._block, set()).update(key for key, written in held.items() if written)
        if self._streams is not None and self._streams.equal_to(HostStreams.take()):
            self._streams = None  # nothing was drawn, so nothing will be

    def __enter__(self) -> None:
        fresh = {held: held.tensor() for held in self._held.values()}
        now = AttributeSnapshot(self._block, histories=True)
        now.take()
        self._around.append(_Again(fresh, now, self._streams and HostStreams.take()))
        try:
            self._go_back()
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def _go_back(self) -> None:
        self._start.restore()
        for mapping, name, held in self._state:
            if held.copy is not None:
                mapping[name] = self._around[-1].fresh[held]
        if self._streams is not None:
            self._streams.restore()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        again = self._around.pop()
        again.now.restore()
        if again.streams is not None:
            again.streams.restore()
