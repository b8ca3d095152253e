"""Gradient checkpointing put on and taken off any module: repeated blocks are computed again in backward.

A model with a switch of its own (Hugging Face) is switched; of any other the repeated blocks get a `forward` attribute
of their own for the time. Names, state dict, class and identity of all modules stay. How a block is computed again,
and what makes that exact, is `rerun`'s.

In a compiled model the blocks run as they are written, so there bits may differ from the compiled ones.

Not exact, because it cannot be seen from a block: state that its forward changes outside its own modules (a global, a
cache object among its arguments, a list that a hook on an inner module appends to), and values that it changes in place
where `snapshot` cannot see them. A tensor that turns out to have been written into in between raises torch's
``CheckpointError`` in backward and is never computed with.
"""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from adaptive_trainer.rerun import run

if TYPE_CHECKING:
    from collections.abc import Callable


def find_blocks(model: nn.Module) -> tuple[nn.Module, ...]:
    """The repeated blocks of a model, outermost first, each once.

    They are the members of a ModuleList or Sequential: all of them if they are two or more of one class and have
    parameters; else those of a class that occurs twice at least and is made of modules with parameters. The inside of
    a block is not searched.
    """
    found: dict[nn.Module, None] = {}
    seen: set[nn.Module] = set()

    def search(module: nn.Module) -> None:
        if module in seen:
            return
        seen.add(module)
        blocks = set(_repeated(module)) if isinstance(module, nn.ModuleList | nn.Sequential) else set()
        for member in module.children():
            if member in blocks:
                found[member] = None
            else:
                search(member)

    search(model)
    return tuple(found)


def _repeated(container: nn.ModuleList | nn.Sequential) -> list[nn.Module]:
    # Not children(): the same block registered six times is six members.
    members: list[nn.Module | None] = [*container._modules.values()]  # noqa: SLF001  see above
    able = [member for member in members if member is not None and _runs(member) and _has_parameters(member)]
    if len(able) == len(members) >= 2 and len({type(member) for member in members}) == 1:
        return able
    composite = [member for member in able if any(map(_has_parameters, member.children()))]
    occurrences = Counter(map(type, composite))
    return [member for member in composite if occurrences[type(member)] >= 2]


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _runs(module: nn.Module) -> bool:
    """Whether the module has a forward that can be put aside: lists have none, scripted modules keep theirs."""
    own = type(module).forward is not nn.Module.forward or "forward" in module.__dict__
    return own and not isinstance(module, torch.jit.ScriptModule)


def _switched(model: nn.Module) -> nn.Module:
    """The module that has the switch: what adapters (peft) are wrapped around, or the model itself."""
    base = getattr(model, "get_base_model", None)
    return base() if callable(base) else model


def has_switch(model: nn.Module) -> bool:
    """Whether the model has a switch for gradient checkpointing, as Hugging Face's have, and can use it."""
    base = _switched(model)
    return callable(getattr(base, "gradient_checkpointing_enable", None)) and bool(
        getattr(base, "supports_gradient_checkpointing", False)
    )


def _is_switched_on(model: nn.Module) -> bool:
    return any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules())


def _parts(model: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """The outermost modules with a switch, and the blocks that neither hold one nor lie in one."""
    switches: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        if module not in inside and has_switch(module):
            switches.append(module)
            inside.update(module.modules())
    blocks = [block for block in find_blocks(model) if inside.isdisjoint(block.modules())]
    return switches, blocks


def drops_cache(model: nn.Module) -> bool:
    """Whether a model's own gradient checkpointing trains it without the cache of keys and values it has without."""
    return any(
        has_switch(module) and getattr(getattr(module, "config", None), "use_cache", False) is True
        for module in model.modules()
    )


def possible(model: nn.Module) -> str | None:
    """None if gradient checkpointing can be put on, else the reason why not, as a sentence."""
    switches, blocks = _parts(model)
    if blocks or any(not _is_switched_on(module) for module in switches):
        return None
    if switches:
        return "the model's own gradient checkpointing is on already"
    return "the model has no repeated blocks: no ModuleList or Sequential with two or more members of one class"


class Recomputation:
    """Gradient checkpointing on one model, from `put_on` to `take_off`.

    What was on before, by the user's hand or by another Recomputation, is left alone and stays on afterwards.
    """

    def __init__(self, model: nn.Module) -> None:
        switches, blocks = _parts(model)
        self._parts: list[_Switch | _Forward] = [_Switch(part) for part in switches if not _is_switched_on(part)]
        self._parts += [_Forward(block) for block in blocks if not _is_on(block)]

    @classmethod
    def put_on(cls, model: nn.Module) -> Recomputation:
        """Put gradient checkpointing on wherever ``model`` lends itself to it; where it does not, do nothing."""
        recomputation = cls(model)
        for part in recomputation._parts:
            part.put_on()
        return recomputation

    def take_off(self) -> None:
        """Undo `put_on`. Doing it again does nothing. Graphs that exist already can still be run backward."""
        while self._parts:
            self._parts.pop().take_off()


class _Switch:
    """The switch of one model: thrown, and put back with all that it sets."""

    _SETS = ("gradient_checkpointing", "_gradient_checkpointing_func")

    def __init__(self, model: nn.Module) -> None:
        self._model = _switched(model)
        self._before = [
            (module, {name: module.__dict__[name] for name in self._SETS if name in module.__dict__})
            for module in self._model.modules()
        ]

    def _call(self, *names: str, **arguments: Any) -> None:
        for name in names:
            method = getattr(self._model, name, None)
            if callable(method):
                method(**arguments)
                return

    def put_on(self) -> None:
        exact = {"use_reentrant": False}
        wanted = bool(getattr(self._model, "_require_grads_hooks", None))
        # The newer name comes first: since transformers 5 the older one warns and leads to it.
        if hasattr(self._model, "activation_checkpointing_enable"):
            self._call("activation_checkpointing_enable", activation_checkpointing_kwargs=exact)
        else:
            self._call("gradient_checkpointing_enable", gradient_checkpointing_kwargs=exact)
        if not wanted:
            # It makes the embeddings' output require gradients, which only reentrant checkpointing needs.
            self._call("disable_input_require_grads")
        for module in self._model.modules():
            if "_gradient_checkpointing_func" in module.__dict__:
                module.__dict__["_gradient_checkpointing_func"] = run_switched

    def take_off(self) -> None:
        self._call("activation_checkpointing_disable", "gradient_checkpointing_disable")
        for module, values in self._before:
            for name in self._SETS:
                module.__dict__.pop(name, None)
            module.__dict__.update(values)


def run_switched(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a model with a switch calls for each of its blocks; ``function`` computes the block.

    It takes the place of torch's own function, which lets BatchNorm statistics move a second time.
    """
    inner, bound = (function.func, function.args) if isinstance(function, partial) else (function, ())
    owner = bound[0] if bound else getattr(inner, "__self__", None)
    if not isinstance(owner, nn.Module):
        return checkpoint(function, *args, use_reentrant=False, **kwargs)
    given = function.keywords if isinstance(function, partial) else {}
    return run(owner, inner, (*bound, *args), {**given, **kwargs})


def _is_on(block: nn.Module) -> bool:
    return isinstance(block.__dict__.get("forward"), _Forward)


class _Forward:
    """A block's forward, computed again in backward; `put_on` puts it in the place of the block's own.

    An object and no closure, so that a deep copy of the model gets one that belongs to the copy's own block. In a
    pickle it is the forward that it stands for: a model that was saved can be loaded where this package is not.
    """

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._previous: Callable[..., Any] | None = block.__dict__.get("forward")
        self._active = False

    def put_on(self) -> None:
        self._active = True
        self._block.__dict__["forward"] = self

    def take_off(self) -> None:
        self._active = False  # for those who have wrapped it meanwhile
        if self._block.__dict__.get("forward") is not self:
            return
        del self._block.__dict__["forward"]
        if self._previous is not None:
            self._block.__dict__["forward"] = self._previous

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self._previous or MethodType(type(self._block).forward, self._block)
        if not (self._active and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        return run(self._block, forward, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Forward:
        copied = _Forward(deepcopy(self._block, memo))
        copied._previous = deepcopy(self._previous, memo)
        copied._active = self._active
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        return (getattr, (self._block, "forward")) if self._previous is None else (partial, (self._previous,))
