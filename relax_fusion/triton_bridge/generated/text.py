"""The text of a Triton kernel: a block graph, done as a schedule says.

Each statement of the schedule is a few lines.  Tiles of intermediates are values of Triton, which
its compiler keeps in registers or in shared memory.  A sum over a loop is a float32 accumulator in
front of it; where a sum is over exponentials of differences to a maximum that still grows (online
softmax), it is multiplied by the exponential of each change of the maximum.
"""

from __future__ import annotations

import keyword
import re
from dataclasses import dataclass
from math import prod

from ...errors import TilingError
from ...tiling import Access, Compute, Load, Loop, Schedule
from ...tiling.structure import Node, refuse_blocks
from ...workload.graph import Graph
from ...workload.roofline import Sizes
from ...workload.values import At
from .statements import Statements
from .tiles import Blocks, box_of, bracketed, size_name
from .values import DTYPES, coordinate, inside

MOST_UNROLLED = 16
"""A loop without products is written out up to this many iterations: all of its loads are asked for
at once. (Triton's pipelines are for loops of products.)"""

_WIDE = 1 << 31  # elements from which an offset needs 64 bits


@dataclass(frozen=True)
class Means:
    """What of the device a kernel uses, beside what all have."""

    tensor_maps: bool = False
    """Whether tiles that are boxes of a tensor are loaded by the tensor memory accelerator."""
    waits: bool = False
    """Whether it is launched before the one in front of it has ended, and waits for that."""
    announces: bool = False
    """Whether it lets the next be launched while it runs."""


@dataclass(frozen=True)
class Parameter:
    """A parameter of a generated kernel."""

    tensor: str  # whose address it takes
    box: tuple[int, ...] = ()  # the tile of a tensor map, if it takes one instead


@dataclass(frozen=True)
class KernelText:
    """A generated kernel.

    It takes dynamic `sizes` behind the tensors.
    """

    name: str
    text: str
    operands: tuple[Parameter, ...]
    sizes: tuple[str, ...]


def kernel_text(
    graph: Graph, schedule: Schedule, sizes: Sizes | None = None, means: Means = Means()
) -> KernelText:
    """Return the Triton kernel that computes a graph as a schedule says.

    `graph`: what to compute.
    `schedule`: how; of its iteration space.
    `sizes`: sizes of the dynamic dimensions for which the schedule was made.  The kernel takes any.
    `means`: what of the device it may use.
    Raises `TilingError` if tiles of a tensor are kept for several iterations of a loop, if a tile
    of several is no power of two or is too large, if a tensor has a dtype that the kernel cannot
    make, or if a name cannot be one in the kernel.
    """
    blocks = Blocks.of(graph, schedule, sizes or {})
    refuse_blocks(schedule)
    refuse_names(graph, schedule)
    for block in graph.blocks:
        dtype = graph[block.out].dtype
        if dtype not in DTYPES or dtype.startswith(("float8", "bool")):
            raise TilingError(f"{block.out} is {dtype}, which no generated kernel makes")
    writer = _Writer(graph, schedule, blocks, means)
    lines = "\n".join(writer.lines())
    taken = ", ".join([*writer.parameters, *(f"{d}_size" for d in graph.dims)])
    text = f"@triton.jit\ndef chain({taken}):\n{lines}\n"
    return KernelText("chain", text, tuple(writer.parameters.values()), graph.dims)


class _Writer:
    """The lines so far."""

    def __init__(self, graph: Graph, schedule: Schedule, blocks: Blocks, means: Means):
        self.graph, self.schedule, self.blocks, self.means = graph, schedule, blocks, means
        self.parameters: dict[str, Parameter] = {}
        self.statements = Statements(graph, schedule, blocks)
        self.written: list[str] = []
        self.depth = 1

    def lines(self) -> list[str]:
        """Return the lines of the function."""
        self._write('"""Compute, tile by tile:', "")
        self._write(*str(self.graph).splitlines(), "", *str(self.schedule).splitlines(), '"""')
        if self.means.waits:
            self._write("tl.extra.cuda.gdc_wait()")
        if self.means.announces:
            self._write("tl.extra.cuda.gdc_launch_dependents()")
        self._grid()
        self._body(self.schedule.structure.body, ())
        return self.written

    def _write(self, *lines: str) -> None:
        self.written += ["    " * self.depth + line if line else "" for line in lines]

    def _grid(self) -> None:
        """Tell a program its tiles, and the places along the loops that are none."""
        axes = self.schedule.structure.grid
        for number, loop in enumerate(axes):
            tile, block = "program", self.blocks.block[loop]
            if number == 0:
                self._write("program = tl.program_id(0)")
            if number < len(axes) - 1:
                tile = f"(program % {self.blocks.tiles(loop)})"
            self._write(f"{loop}_start = {tile}{f' * {block}' if block > 1 else ''}")
            if number < len(axes) - 1:
                self._write(f"program = program // {self.blocks.tiles(loop)}")
            self._places(loop, f"{loop}_start")
        there = {name for _, around in self.schedule.structure.statements for name in around}
        for each in self.schedule.space.loops:
            if each.name not in there:
                self._places(each.name, "")

    def _places(self, loop: str, start: str) -> None:
        """Write the places of a tile, and which of them there are."""
        block = self.blocks.block[loop]
        numbers = f"tl.arange(0, {block})" if block > 1 else ""
        places = " + ".join(t for t in (start, numbers) if t)
        self._write(f"{loop}_at = {places or 'tl.cast(0, tl.int32)'}")
        if self.blocks.is_padded(loop):
            self._write(f"{loop}_in = {loop}_at < {size_name(self.blocks.size[loop])}")

    def _body(self, nodes: tuple[Node, ...], around: tuple[str, ...]) -> None:
        """Write statements, inside loops."""
        for node in nodes:
            if isinstance(node, Loop):
                self._loop(node, around)
            elif isinstance(node, Compute):
                self._write(*self.statements.compute(node.tensor))
            elif isinstance(node, Load):
                self._load(node.what, around)
            else:
                address, mask = self._address(node.what)
                mask = f", mask={mask}" if mask else ""
                self._write(f"tl.store({address}, {node.tensor}{mask})")

    def _load(self, what: Access, around: tuple[str, ...]) -> None:
        """Write a load: of a box of a tensor map, or of addresses."""
        name = self.statements.load(what)
        box = box_of(self.graph[what.tensor], self.blocks, what) if self.means.tensor_maps else None
        if box is None:
            address, mask = self._address(what)
            nothing = "0.0" if self.graph[what.tensor].dtype.startswith("float8") else "0"
            mask = f", mask={mask}, other={nothing}" if mask else ""
            self._write(f"{name} = tl.load({address}{mask})")
            return
        starts = ", ".join(self._start(place, around) for place in what.at)
        self.parameters[f"{name}_map"] = Parameter(what.tensor, box)
        tile = f"{name}_map.load([{starts}])"
        frame = self.blocks.frame(what.loops)
        shape = self.blocks.shape(frame)
        self._write(
            f"{name} = {tile}" if len(frame) == len(box) else f"{name} = {tile}.reshape({shape})"
        )

    def _start(self, place: At, around: tuple[str, ...]) -> str:
        """Return where a box begins along a coordinate."""
        terms = []
        for loop, stride in place.terms:
            moves = loop in around or loop in self.schedule.structure.grid
            if moves:
                terms.append(f"{loop}_start" if stride == 1 else f"{loop}_start * {stride}")
        terms += [str(place.start)] if place.start or not terms else []
        return " + ".join(terms)

    def _loop(self, loop: Loop, around: tuple[str, ...]) -> None:
        """Write a loop, with the sums over it that begin in front of it."""
        step = self.schedule.space.step
        begun = [
            name
            for name in _computed(loop.body)
            if loop.name in step[name].reduced and not step[name].reduced & {*around}
        ]
        self._write(*map(self.statements.begin, begun))
        count, block = size_name(self.blocks.size[loop.name]), self.blocks.block[loop.name]
        few = self.schedule.trips[loop.name] <= MOST_UNROLLED and count.isdecimal()
        products = any(step[name].dtype for name in _computed(loop.body))
        how = "tl.static_range" if few and not products else "range"
        self._write(f"for {loop.name}_start in {how}(0, {count}, {block}):")
        self.depth += 1
        constant = how == "tl.static_range" and block == 1
        start = f"{loop.name}_start"
        self._places(loop.name, f"tl.cast({start}, tl.int32)" if constant else start)
        self._body(loop.body, (*around, loop.name))
        self.depth -= 1
        self._write(*map(self.statements.end, begun))

    def _address(self, what: Access) -> tuple[str, str]:
        """Return the addresses of a tile, and which of its elements there are."""
        frame, shape = self.blocks.frame(what.loops), self.graph[what.tensor].shape
        known = [size for size in shape if isinstance(size, int)]
        is_wide = len(known) < len(shape) or prod(known) >= _WIDE
        terms = [f"{what.tensor}_ptr"]
        self.parameters[f"{what.tensor}_ptr"] = Parameter(what.tensor)
        for axis, place in enumerate(what.at):
            text = coordinate(self.blocks, place, frame)
            behind = [size_name(size) for size in shape[axis + 1 :] if size != 1]
            if is_wide and place.terms and behind:
                text = f"{bracketed(text)}.to(tl.int64)"
            if text != "0":
                terms.append(" * ".join([bracketed(text), *behind]) if behind else text)
        return " + ".join(terms), " & ".join(inside(self.blocks, what.loops, frame))


def _computed(nodes: tuple[Node, ...]) -> list[str]:
    found: list[str] = []
    for node in nodes:
        if isinstance(node, Loop):
            found += _computed(node.body)
        elif isinstance(node, Compute):
            found.append(node.tensor)
    return found


HELPERS = ("activate", "finite", "ratio", "quotient", "remainder", "largest")
"""Functions of `relax_fusion.triton_bridge.math` that a kernel calls."""

_KNOWN = {"tl", "triton", "range", "float", "program", *HELPERS}

_OF_TENSOR = ("", "_ptr", "_map", "_acc", "_before", "_finite", "_scale")

_NUMBER = re.compile(r"_\d+$")
"""The second tile of a tensor has this behind its name."""

_OF_LOOP = ("_start", "_at", "_in")


def refuse_names(graph: Graph, schedule: Schedule) -> None:
    """Refuse, by a `TilingError`, names that Python lacks or that a kernel would have twice."""
    tensors = [tensor.name for tensor in graph.tensors]
    loops = [loop.name for loop in schedule.space.loops]
    taken = set(_KNOWN)
    for names, endings in ((tensors, _OF_TENSOR), (loops, _OF_LOOP), (graph.dims, ("_size",))):
        for name in names:
            own = {name + ending for ending in endings}
            first = _NUMBER.sub("", name)
            if not name.isidentifier() or keyword.iskeyword(name):
                raise TilingError(f"{name!r} is no name of Python; a kernel is written in it")
            if own & taken or (names is tensors and first != name and first in tensors):
                raise TilingError(f"{name!r} is, in a kernel, the name of something else as well")
            taken |= own
