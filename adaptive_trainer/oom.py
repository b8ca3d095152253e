"""Which exceptions mean that memory ran out, and which only sound like it: one table of spellings and look-alikes.

"Out of memory" has no single type and no single text. An allocator of torch raises a class of its own; a library below
it (cuBLAS, cuDNN, NCCL, Triton, the driver) raises a plain ``RuntimeError`` in its own words; the host raises
``MemoryError`` or an errno. Other errors borrow the words: a kernel that wants too much *shared* memory, a data
loader's full ``/dev/shm``, a remote worker that "ran out of memory". Taking one of those for an out-of-memory walks the
whole ladder for nothing and buries the true error; missing one ends a run that a smaller micro-batch would have saved.
So all that is known stands in one table, ``RULES``, read from top to bottom; the first row that fits decides:

1.  *Hopeless.* A request that no plan can meet ("more than 1EB") comes from a wrong size, not from a small device. It
    arrives in the class ``OutOfMemoryError``, so it has to come before everything that would believe the class.
2.  *Look-alikes.* Texts with the words, or of the class, of a row further down. Triton's "out of resource" reaches the
    user as an ``OutOfMemoryError`` of torch's compiler; a killed worker's report speaks of shared *memory*.
3.  *Out of memory by text.* Each row is anchored on what the library prints around the words. The three words alone
    are no row: they occur in people's own sentences. Within this part the row that knows more stands first:
    page-locked host memory fails in the words of the device, and RMM's device memory fails with ``MemoryError``.
4.  *Out of memory by class.* Any class named ``OutOfMemoryError`` in the type's ancestry, found by name: so torch need
    not be imported, a class that moved is still found, and CuPy's counts too. The class alone is believed only here,
    because 1 and 2 have shown what else carries it; and before 5, because it says more than a library's vague status.
5.  *Suspected.* cuDNN and others report a failed workspace as "not supported" or "internal error", the very words of a
    wrong shape or type. Some of these are memory, so they deserve one smaller retry, but not the ladder.
6.  *The rest of a family.* "CUDA error: ..." and "NCCL error ..." in words that no row above knows. To know that they
    are not memory matters in a chain: raised while an out-of-memory was handled, it is they that are to be reported.

What no pattern can say is in ``_recognise_one``: a row of 3 to 5 whose request is one PiB or more is hopeless too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from fractions import Fraction


class Verdict(StrEnum):
    """What is to be done about an exception: the ladder, one smaller retry, or nothing."""

    OOM = "oom"
    SUSPECTED = "suspected"
    HOPELESS = "hopeless"
    NOT_OOM = "not_oom"


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """The figures of a message in bytes; None where it has none.

    Attributes:
        requested_bytes: The allocation that failed.
        allocated_bytes: Held by live tensors of this process.
        reserved_bytes: Held by the allocator of this process, live tensors included.
        free_bytes: Free on the device.
        total_bytes: The whole device, or the limit where the message gives only that.
        other_processes_bytes: Held by other processes; where the message names none, what neither it nor this process
            accounts for, from one GiB upwards (less is what a driver takes for itself).
    """

    requested_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    free_bytes: int | None = None
    total_bytes: int | None = None
    other_processes_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recognition:
    """What the table says about an exception.

    Attributes:
        verdict: What is to be done.
        flavour: Who said it, such as "cuda allocator", "cublas", "cpu"; "unknown" where no row fits.
        message: The text of the exception in the chain that decided, else that of the outermost one.
        type_name: The class of that exception, without its module.
        numbers: The figures in the message.
        host: Whether it is the host's memory that ran out.
    """

    verdict: Verdict
    flavour: str
    message: str
    type_name: str
    numbers: Numbers
    host: bool


@dataclass(frozen=True, slots=True)
class Rule:
    """One row: it fits when the pattern is found in the text and, if a class is named, the type descends from it."""

    verdict: Verdict
    flavour: str
    pattern: re.Pattern[str]
    class_name: str | None = None
    host: bool = False

    def fits(self, text: str, class_names: frozenset[str]) -> bool:
        return (self.class_name is None or self.class_name in class_names) and self.pattern.search(text) is not None


def _row(verdict: Verdict, flavour: str, *spellings: str, class_name: str | None = None, host: bool = False) -> Rule:
    # Gaps inside a spelling are bounded ({0,80}), so that no text, however long, takes more than linear time.
    return Rule(verdict, flavour, re.compile("|".join(spellings), re.MULTILINE | re.ASCII), class_name, host)


# The short form "CUDA out of memory" counts where a message begins and ends, not in the middle of somebody's sentence.
_BEGIN = r"""(?:^|[:("'|>]\s?)"""
_END = r"""(?=\s*$|[.,;:!)\]"'\\]|\s\()"""

_HOPELESS, _NOT, _OOM, _SUSPECTED = Verdict.HOPELESS, Verdict.NOT_OOM, Verdict.OOM, Verdict.SUSPECTED

RULES: tuple[Rule, ...] = (
    # 1. Hopeless.
    _row(_HOPELESS, "absurd size", r"more than 1EB memory"),
    # 2. Look-alikes. "device-side assert triggered" in full: the hint under every CUDA error speaks of "assertions".
    _row(_NOT, "sticky error", "illegal memory access", "device-side assert triggered", "unspecified launch failure",
         "cudaErrorIllegalAddress", "CUDA_ERROR_ILLEGAL_ADDRESS", "misaligned address"),
    _row(_NOT, "launch limit", "invalid configuration argument", "too many resources requested for launch"),
    _row(_NOT, "device lost", r"ERROR_DEVICE_LOST\b", "DXGI_ERROR_DEVICE_REMOVED", r"\bGPU is lost\b",
         r"(?:CUDA|HIP) error: (?:context is destroyed|invalid device context|device lost)"),
    _row(_NOT, "triton", r"\bout of resource: "),
    _row(_NOT, "triton", "", class_name="OutOfResources"),
    _row(_NOT, "xla", r"memory space [vs]mem\b"),
    _row(_NOT, "shared memory", "out of shared memory", "killed by signal: Bus error", "No space left on device",
         r"unable to (?:write to|open|resize|allocate)[^\n]{0,80}(?:shared memory|</?torch_)",
         "creating shared memory segment", "failed to extend /dev/shm"),
    _row(_NOT, "host killer", "killed by signal: ", r"DataLoader worker [^\n]{0,80}exited unexpectedly",
         r"\b(?i:oom)[-_ ]kill", r"\bOut of memory: Kill", "node running low on memory", "due to memory pressure"),
    _row(_NOT, "other words", r"\b(?i:workers?|actors?|tasks?|nodes?)\b[^\n]{0,60}\bran out of memory"),
    _row(_NOT, "batch norm", "Expected more than 1 value per channel"),
    _row(_NOT, "integer limit", "canUse32BitIndexMath", "integer out of range", "out of range integral type",
         "Storage size calculation overflowed"),
    _row(_NOT, "index", r"\bindex(?: -?\d+)?(?: is)? out of (?:bounds|range)"),
    _row(_NOT, "loss scale", "loss scale already at minimum"),
    _row(_NOT, "recomputation differs", "", class_name="CheckpointError"),
    # 3. Out of memory by text: the allocators of devices,
    _row(_OOM, "cuda allocator", _BEGIN + "(?i:cuda) out of memory" + _END, r"CUDA out of memory\. Tried to allocate"),
    _row(_OOM, "cudaMallocAsync", r"would exceed allowed memory\. \(out of memory\)"),
    _row(_OOM, "hip", _BEGIN + "HIP out of memory" + _END, r"\bHIP out of memory\. Tried to allocate"),
    _row(_OOM, "xpu", _BEGIN + "XPU out of memory" + _END, r"\bXPU out of memory\. Tried to allocate",
         "Allocation is out of device memory", "can NOT allocate memory block with size larger than",
         r"_ERROR_OUT_OF_DEVICE_MEMORY\b", "PI_ERROR_MEM_OBJECT_ALLOCATION_FAILURE"),
    _row(_OOM, "mps", "MPS backend out of memory", r"Invalid buffer size: [\d.]+ ?[KMGTPE]i?B",
         "Failed to allocate (?:private|shared) MTLBuffer", "CommandBufferCallbackErrorOutOfMemory"),
    _row(_OOM, "directml", r"Could not allocate tensor with \d+ bytes\. There is not enough GPU"),
    _row(_OOM, "hpu", r"PT_DEVMEM\b[^\n]{0,40}Allocation failed for size"),
    _row(_OOM, "npu", r"\bMemory_Allocation_Failure\b", r"\bNPU out of memory\. Tried to allocate"),
    _row(_OOM, "other allocator", r"\b[A-Z][A-Za-z0-9]{1,15} out of memory\. Tried to allocate"),
    _row(_OOM, "xla", r"(?:RESOURCE_EXHAUSTED|Resource exhausted): "
         r"(?:Out of memory|Attempting to (?:reserve|allocate)|Failed to allocate request)", "memory space hbm"),
    _row(_OOM, "rmm", r"\bRMM failure at:[^\n]{0,300}Maximum pool size exceeded", r"\bout_of_memory: (?:RMM|CUDA)"),
    _row(_OOM, "cupy", r"Out of memory allocating [\d,]+ bytes"),
    # the runtime, the driver and what calls them (page-locked host memory fails in the same words, so it is first),
    _row(_OOM, "nccl", r"(?:Cuda|HIP|hip) failure(?: \d+)? 'out of memory'", r"Failed to CUDA [cm]alloc\b"),
    _row(_OOM, "page-locked memory", r"(?:cudaHost|hipHost|cuMemHost)\w+[^\n]{0,200}(?:out of m|M)emory",
         r"\bout of memory\b[^\n]{0,200}(?:cudaHost|hipHost|cuMemHost)(?:Alloc|Malloc|Register)",
         r"in pin memory thread(?s:.{0,8000}?)error: out of memory", r"\bbytes on host: CUDA_ERROR_OUT_OF_MEMORY",
         r"[Ff]ailed to (?:allocate|register) (?:pinned|page-locked)", "Failed to CUDA host alloc", host=True),
    _row(_OOM, "triton", r"Triton Error \[\w+\]:[^\n]{0,80}out of memory"),
    _row(_OOM, "cuda driver", "CUDA driver error: out of memory", "CUDA_ERROR_OUT_OF_MEMORY"),
    _row(_OOM, "cuda runtime", r"(?i:cuda)(?: runtime)? error(?: ?\(2\))? ?: ?out of memory",
         "cudaErrorMemoryAllocation", r"\berror=2 : out of memory", r"CUDA failure 2: out of memory",
         r"^Error out of memory at line \d+ in file"),
    _row(_OOM, "hip", "HIP (?:runtime )?error: ?out of memory", "hipErrorOutOfMemory", "hipErrorMemoryAllocation"),
    # libraries that could not get a workspace,
    _row(_OOM, "cublas", r"(?:CUBLAS|HIPBLAS)_STATUS_ALLOC_FAILED", "rocblas_status_memory_error"),
    _row(_OOM, "cudnn", "CUDNN_STATUS_ALLOC_FAILED", "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
         "miopenStatusAllocFailed"),
    _row(_OOM, "cudnn", "CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED", host=True),
    _row(_OOM, "cuda library", r"\b(?:CUSPARSE_STATUS|CUSOLVER_STATUS|CUFFT|HIPFFT)_ALLOC_FAILED",
         "CURAND_STATUS_ALLOCATION_FAILED"),
    # and the host.
    _row(_OOM, "cpu", r"DefaultCPUAllocator: (?:can't allocate|not enough) memory",
         "not enough memory: you tried to allocate", host=True),
    _row(_OOM, "numpy", r"Unable to allocate (?:[\d.]+ \w+ for an )?array with shape", host=True),
    _row(_OOM, "c++", r"\bstd::bad_alloc\b", "^bad allocation$", host=True),
    _row(_OOM, "xpu", r"_ERROR_OUT_OF_HOST_MEMORY\b", host=True),
    _row(_OOM, "operating system", r"\[Errno 12\]", r"\bCannot allocate memory(?: \(12\))?$", r"\[WinError 1455\]",
         host=True),
    # 4. Out of memory by class.
    _row(_OOM, "out-of-memory class", "", class_name="OutOfMemoryError"),
    _row(_OOM, "python", "", class_name="MemoryError", host=True),
    # 5. Suspected.
    _row(_SUSPECTED, "cudnn", r"CUDNN_STATUS_(?:NOT_SUPPORTED|INTERNAL_ERROR|NOT_INITIALIZED|EXECUTION_FAILED)",
         "[Uu]nable to find a valid cuDNN algorithm", "[Nn]o valid convolution algorithms available",
         "unable to find an engine to execute this computation", "No valid execution plans built",
         r"miopenStatus(?:Unknown|Internal)Error"),
    _row(_SUSPECTED, "cublas", "(?:CUBLAS|HIPBLAS)_STATUS_NOT_INITIALIZED"),
    _row(_SUSPECTED, "cuda library", r"\b(?:CUSOLVER_STATUS|CUFFT)_INTERNAL_ERROR"),
    _row(_SUSPECTED, "allocator assert", r'INTERNAL ASSERT FAILED at "[^"\n]{0,300}CachingAllocator\.cpp"'),
    # Level Zero says it for exhausted memory and for a kernel that needs too many registers.
    _row(_SUSPECTED, "xpu", r"\b(?:UR_RESULT|ZE_RESULT|PI)_ERROR_OUT_OF_RESOURCES\b"),
    _row(_SUSPECTED, "onednn", r"could not (?:create|execute) a (?:primitive|memory)"),
    # 6. The rest of a family.
    _row(_NOT, "nccl", r"\b[NR]CCL error\b", "ncclUnhandledCudaError", "ncclInternalError", "ncclSystemError"),
    _row(_NOT, "cuda runtime", r"\b(?i:cuda)(?: runtime| driver)? error\b[^\n]{0,10}:", r"\bHIP error: "),
)  # fmt: skip

# What one device may hold is far below; what a wrong size, a wrapped negative or "no limit" prints is above.
_ABSURD_BYTES = 2**50
_LEAST_OTHERS_BYTES = 2**30

# Libraries print powers of 1024, whether they write GiB, GB or G. NumPy ends a whole number with a point: "512. TiB".
_UNITS = "BKMGTPE"
_COUNT = r"(?P<number>\d{1,40})(?P<unit>)"
_SIZE = r"(?P<number>\d[\d,]{0,40}(?:\.\d{0,40})?)\s?(?P<unit>bytes?|[KMGTPE]i?B|[BKMGTPE](?![A-Za-z]))"

# Which words stand around which figure. Of several spellings of one figure the first that is found counts.
_FIGURES: dict[str, tuple[re.Pattern[str], ...]] = {
    name: tuple(
        re.compile(spelling.replace("SIZE", _SIZE).replace("COUNT", _COUNT), re.MULTILINE | re.ASCII)
        for spelling in spellings
    )
    for name, spellings in {
        "requested": (
            r"\b[Tt]ried to allocate SIZE", r"^Requested\s{0,40}: SIZE", r"Invalid buffer size: SIZE",
            r"Unable to allocate SIZE for an array", r"Failed to CUDA (?:[cm]|host )alloc(?: async)? SIZE",
            r"allocate tensor with SIZE", r"trying to allocate SIZE", r"Out of memory allocating SIZE",
            r"allocate request for SIZE", r"Attempting to (?:reserve|allocate) SIZE",
            r"Allocation failed for size::COUNT", r"unable to mmap SIZE", r"[Ff]ailed to alloc(?:ate)? SIZE",
        ),
        "allocated": (
            r"Of the allocated memory SIZE is allocated by PyTorch", r"SIZE already allocated",
            r"^Currently allocated\s{0,40}: SIZE", r"MPS allocated: SIZE", r"allocated so far: SIZE",
        ),
        "reserved": (r"SIZE reserved in total by PyTorch",),
        "unallocated": (r"SIZE is reserved by PyTorch but unallocated", r"SIZE cached\b"),
        "free": (r"of which SIZE is free", r"SIZE free[;,)]", r"^Free \(according to CUDA\): SIZE"),
        "total": (
            r"total capacity of SIZE", r"SIZE total capacity", r"^Device limit\s{0,40}: SIZE", r"max allowed: SIZE",
            r"HBM capacity SIZE",
        ),
        "this_process": (r"this process has SIZE memory in use",),
        "other_processes": (r"Process \d{1,20} has SIZE memory in use",),
    }.items()
}  # fmt: skip


def recognise(error: BaseException, handled: BaseException | None = None) -> Recognition:
    """What the table says about an exception and what it was raised from or in.

    The chain is walked as a traceback shows it: the exception, then its cause, else its context unless that is
    suppressed. The outermost exception that the table knows decides; one that it does not know, such as a library's
    "step failed", lets the next be looked at. A group is out-of-memory only if every member is. Never raises.

    Args:
        error: The exception.
        handled: What was being handled already when the failed work began. Python makes it the context of whatever is
            raised in that time, but it is an older story, so the walk ends there.
    """
    older = frozenset() if handled is None or handled is error else frozenset({id(handled)})
    return _first_known(error, older, 0) or _unknown(_text(error), type(error).__name__)


def recognise_text(text: str, type_name: str = "RuntimeError") -> Recognition:
    """The same for one message out of a log; ``type_name`` is the class as a traceback's last line names it."""
    name = type_name.rpartition(".")[2]
    return _recognise_one(text, name, frozenset({name})) or _unknown(text, name)


def parse_numbers(text: str) -> Numbers:
    """The figures of a message in bytes; fractions of a unit are added up first and cut to whole bytes last."""
    figures = {name: _amounts(text, spellings) for name, spellings in _FIGURES.items()}
    requested = figures.pop("requested")
    # A process or a limit of a million GiB is a driver that cannot know (WSL, containers), or "no limit".
    known = {name: [amount for amount in amounts if amount < _ABSURD_BYTES] for name, amounts in figures.items()}
    first = {name: amounts[0] for name, amounts in known.items() if amounts}
    if "reserved" not in first and {"allocated", "unallocated"} <= first.keys():
        first["reserved"] = first["allocated"] + first["unallocated"]
    if known["other_processes"]:
        first["other_processes"] = sum(known["other_processes"], Fraction())
    elif not figures["other_processes"]:
        first |= _unaccounted(first)
    if requested:
        first["requested"] = requested[0]
    reported = [entry.name for entry in fields(Numbers)]
    return Numbers(**{f"{name}_bytes": int(first[name]) for name in first if f"{name}_bytes" in reported})


def _unaccounted(first: dict[str, Fraction]) -> dict[str, Fraction]:
    # Older messages name no process. What is neither free nor this process's is then others'. Some quoted messages
    # have less reserved than allocated; the larger one is in use.
    in_use = first.get("this_process")
    if in_use is None and "reserved" in first:
        in_use = max(first["reserved"], first.get("allocated", Fraction()))
    if in_use is None or not {"total", "free"} <= first.keys():
        return {}
    others = first["total"] - first["free"] - in_use
    return {"other_processes": others} if others >= _LEAST_OTHERS_BYTES else {}


def _amounts(text: str, spellings: tuple[re.Pattern[str], ...]) -> list[Fraction]:
    for spelling in spellings:
        if matches := list(spelling.finditer(text)):
            return [_amount(match["number"], match["unit"]) for match in matches]
    return []


def _amount(number: str, unit: str) -> Fraction:
    return Fraction(number.replace(",", "")) * Fraction(1024) ** _UNITS.index(unit[:1].upper() or "B")


def _first_known(error: BaseException, above: frozenset[int], depth: int) -> Recognition | None:
    seen = set(above)
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        if isinstance(current, BaseExceptionGroup):
            found = _recognise_group(current, frozenset(seen), depth + 1)
        else:
            names = frozenset(ancestor.__name__ for ancestor in type(current).__mro__)
            found = _recognise_one(_text(current), type(current).__name__, names)
        if found is not None:
            return found
        if current.__cause__ is not None:
            current = current.__cause__
        else:
            current = None if current.__suppress_context__ else current.__context__
    return None


# Of a group the member speaks that allows least: one that is no out-of-memory makes the whole group none.
_LEAST_FIRST = (Verdict.NOT_OOM, Verdict.HOPELESS, Verdict.SUSPECTED, Verdict.OOM)
_DEEPEST_GROUP = 50


def _recognise_group(group: BaseExceptionGroup[BaseException], seen: frozenset[int], depth: int) -> Recognition | None:
    if depth > _DEEPEST_GROUP:  # each level recurses; nobody nests groups this deep by intent
        return None
    members = [_first_known(member, seen, depth) for member in group.exceptions]
    known = [member for member in members if member is not None]
    if not known:
        return None
    least = min(known, key=lambda member: _LEAST_FIRST.index(member.verdict))
    if len(known) < len(members) and least.verdict is not Verdict.NOT_OOM:
        return replace(least, verdict=Verdict.NOT_OOM, flavour="mixed group")
    return least


def _recognise_one(text: str, type_name: str, class_names: frozenset[str]) -> Recognition | None:
    for rule in RULES:
        if rule.fits(text, class_names):
            break
    else:
        return None
    verdict, flavour, numbers = rule.verdict, rule.flavour, parse_numbers(text)
    if verdict is not Verdict.NOT_OOM and (numbers.requested_bytes or 0) >= _ABSURD_BYTES:
        verdict, flavour = Verdict.HOPELESS, "absurd size"
    return Recognition(
        verdict=verdict, flavour=flavour, message=text, type_name=type_name, numbers=numbers, host=rule.host
    )


def _unknown(text: str, type_name: str) -> Recognition:
    return Recognition(
        verdict=Verdict.NOT_OOM, flavour="unknown", message=text, type_name=type_name, numbers=Numbers(), host=False
    )


def _text(error: BaseException) -> str:
    # A class of the user's may print something else than what it was made from, or fail to print at all.
    try:
        shown = str(error)
    except Exception:  # noqa: BLE001  a broken __str__ must not replace the error that is being looked at
        shown = ""
    # Asked of BaseException itself: a subclass may have an ``args`` of its own that is no tuple.
    given: tuple[object, ...] = vars(BaseException)["args"].__get__(error)
    hidden = [entry for entry in given if isinstance(entry, str) and entry not in shown]
    return "\n".join([shown, *hidden] if shown else hidden)
