"""What a page shows beside decisions: the graphs, the device, the texts of kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from ..estimator.family import Backend
from ..hardware import DeviceSpec

Language = Literal["TVMScript", "Triton", "CUDA C++"]


@dataclass(frozen=True)
class Node:
    """One binding of a Relax function: an operator, or the launch of a kernel."""

    name: str
    op: str
    """The variable, and what makes it: an operator without ``relax.``, or a kernel's name."""
    reads: tuple[str, ...] = ()
    """Variables of the same function, in the order of the arguments."""
    weights: tuple[str, ...] = ()
    """Parameters of the function, and constants, among what it reads."""
    shape: str = ""
    dtype: str = ""
    """Of the result; of a tuple those of its first field."""
    read_bytes: int = 0
    written_bytes: int = 0
    """Of all operands and results, each counted once, at `FunctionGraph.symbols`."""
    flops: float = 0.0
    """Of a matmul, a convolution or an attention; 0 for the rest."""
    is_kernel: bool = False
    """Whether it calls a kernel."""
    copied: int = 0
    """Of a kernel that only moves or casts elements, the bytes that it reads and writes."""

    @property
    def moved(self) -> int:
        """Bytes that it reads and writes."""
        return self.read_bytes + self.written_bytes


@dataclass(frozen=True)
class FunctionGraph:
    """The bindings of one Relax function, in order."""

    function: str
    nodes: tuple[Node, ...]
    """What it computes."""
    symbols: tuple[tuple[str, int], ...] = ()
    """The values of symbolic sizes for which bytes were counted."""
    limits: tuple[tuple[str, int], ...] = ()
    """The largest values of those that have one."""


@dataclass(frozen=True)
class Text:
    """The source of one kernel."""

    title: str
    language: Language
    text: str


@dataclass(frozen=True)
class Source:
    """Where the texts of a PrimFunc's kernels come from; `load` writes them once it is called."""

    function: str
    load: Callable[[], Sequence[Text]] = field(compare=False, repr=False)

    @cached_property
    def texts(self) -> Sequence[Text]:
        """What `load` returns, which is called once."""
        return self.load()


@dataclass
class Material:
    """What the pipeline adds to a report so that a page can be made of it."""

    model: str = ""
    """What was compiled, for the title; empty if nobody said."""
    spec: DeviceSpec | None = None
    """The device whose numbers priced the kernels."""
    backend: Backend = "auto"
    """Who was to emit fused kernels."""
    before: list[FunctionGraph] = field(default_factory=list)
    after: list[FunctionGraph] = field(default_factory=list)
    """Each Relax function as the fusing passes met it, and with the kernels that it launches."""
    sources: list[Source] = field(default_factory=list)
    """Texts of kernels."""
    most: dict[str, int] = field(default_factory=dict)
    """Largest values of symbolic sizes that nothing in the module tells, such as the length of the
    longest sequence."""
    memory: dict[str, int] = field(default_factory=dict)
    """By function the bytes that it takes for all that it computes."""
    tvm_memory: dict[str, int] | None = None
    """Those that TVM's default pipeline would take, where it has an answer.  Give an empty one to
    ask for them: planning for TVM, too, takes a few percent of the time of compiling."""
