"""A plan says how one optimizer step is executed here: its shape (micro-batch) and its build (all the rest).

The shape may change between two attempts of one engine. Another build needs another engine. Numbers that follow from
others, such as accumulation, are computed and never stored, so that they cannot disagree.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

if TYPE_CHECKING:
    from collections.abc import Mapping

Precision = Literal["fp32", "bf16", "fp16"]
Offload = Literal["none", "optimizer", "parameters"]

_PRECISIONS: tuple[str, ...] = get_args(Precision)
_OFFLOADS: tuple[str, ...] = get_args(Offload)


def sizes(num_samples: int, micro_batch: int | None, smallest: int = 1) -> tuple[int, ...]:
    """How many samples each piece of a batch has.

    ``ceil(num_samples / micro_batch)`` pieces as equal as possible, longer ones first, as ``torch.tensor_split`` cuts:
    10 samples at 4 are 4, 3, 3. No piece is shorter than ``smallest``, unless the whole batch is; there are fewer
    pieces then, and the longest may pass ``micro_batch``: 5 samples at 2 with ``smallest=2`` are 3, 2.
    """
    if micro_batch is None or num_samples <= micro_batch:
        return (num_samples,)
    num_pieces = min(-(-num_samples // micro_batch), max(1, num_samples // smallest))
    size, longer = divmod(num_samples, num_pieces)
    return (size + 1,) * longer + (size,) * (num_pieces - longer)


@dataclass(frozen=True, kw_only=True, slots=True)
class Build:
    """The part of a plan that an engine is built for."""

    gradient_checkpointing: bool = False
    precision: Precision = "fp32"
    zero_stage: int = 0
    offload: Offload = "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How one optimizer step is executed.

    Attributes:
        micro_batch: Samples per process and micro-batch; None is the whole batch at once.
        gradient_checkpointing: Whether repeated blocks are computed again in backward instead of being kept.
        precision: Autocast to bf16 or fp16 (fp16 with a gradient scaler), or plain fp32.
        zero_stage: Which of optimizer state (1), gradients (2) and parameters (3) are sharded over the processes.
        offload: What is kept in host memory.

    Raises:
        ValueError: A value is outside its range.
    """

    micro_batch: int | None = None
    gradient_checkpointing: bool = False
    precision: Precision = "fp32"
    zero_stage: int = 0
    offload: Offload = "none"

    def __post_init__(self) -> None:
        if self.micro_batch is not None and (type(self.micro_batch) is not int or self.micro_batch < 1):
            raise ValueError(
                f"micro_batch={self.micro_batch!r} is no number of samples; give 1 or more, or None for the whole batch"
            )
        if type(self.gradient_checkpointing) is not bool:
            raise ValueError(f"gradient_checkpointing={self.gradient_checkpointing!r}; give True or False")
        if self.precision not in _PRECISIONS:
            raise ValueError(f"precision={self.precision!r}; give one of {', '.join(_PRECISIONS)}")
        if self.zero_stage not in range(4):
            raise ValueError(f"zero_stage={self.zero_stage!r}; give 0, 1, 2 or 3")
        if self.offload not in _OFFLOADS:
            raise ValueError(f"offload={self.offload!r}; give one of {', '.join(_OFFLOADS)}")

    @property
    def build(self) -> Build:
        """What an engine is built for."""
        return _build_of(self)

    def accumulation(self, num_samples: int | None, smallest: int = 1) -> int | None:
        """The number of micro-batches for a process's ``num_samples`` of one step; None where that is unknown.

        ``smallest`` is what a micro-batch must have at least, as `sizes` takes it.
        """
        if self.micro_batch is None:
            return 1
        return None if num_samples is None else len(sizes(num_samples, self.micro_batch, smallest))

    def descends_from(self, old: Plan) -> bool:
        """Whether this plan is lower than ``old`` in one respect at least, and higher in none."""
        pairs = list(zip(_depth(self), _depth(old), strict=True))
        return any(new > before for new, before in pairs) and all(new >= before for new, before in pairs)

    def as_dict(self, num_samples: int | None = None, smallest: int = 1) -> dict[str, Any]:
        """The plan as the journal writes it, with the `accumulation` that it means."""
        row = asdict(self)
        return {"micro_batch": row.pop("micro_batch"), "accumulation": self.accumulation(num_samples, smallest), **row}

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> Self:
        """The plan that `as_dict` gave a row of the journal.

        Raises:
            ValueError: A value is none that a plan may have.
        """
        return cls(**{entry.name: row[entry.name] for entry in fields(cls) if entry.name in row})

    def __str__(self) -> str:
        parts = ["whole batch" if self.micro_batch is None else f"micro-batch {self.micro_batch}", self.precision]
        if self.gradient_checkpointing:
            parts.append("gradient checkpointing")
        if self.zero_stage:
            parts.append(f"ZeRO {self.zero_stage}")
        if self.offload != "none":
            parts.append(f"{self.offload} offloaded")
        return ", ".join(parts)


@cache  # asked before every step; a run has a handful of plans
def _build_of(plan: Plan) -> Build:
    return Build(**{entry.name: getattr(plan, entry.name) for entry in fields(Build)})


def _depth(plan: Plan) -> tuple[float, int, int, int, int]:
    """How far down a plan is in each respect; larger needs less memory."""
    shape = float("-inf") if plan.micro_batch is None else -float(plan.micro_batch)
    lower_precision = 0 if plan.precision == "fp32" else 1
    return shape, int(plan.gradient_checkpointing), lower_precision, plan.zero_stage, _OFFLOADS.index(plan.offload)
