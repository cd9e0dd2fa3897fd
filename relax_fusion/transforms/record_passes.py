"""What each pass of a phase changes, recorded while passes run one by one."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from functools import cached_property

from tvm import ir, relax, tirx
from tvm.ir.transform import Pass

from ..report.passes import FunctionChange, PassRecord
from ..report.text_changes import Hunk, Kind, added, changes, shortened
from ..tvm_ir import structural_equal
from .running import name_of, run_pass


@dataclass(frozen=True)
class FunctionText:
    """A function as text."""

    kind: Kind
    """``graph`` of a Relax function, ``kernel`` of a PrimFunc, ``other`` of what is elsewhere."""
    lines: tuple[str, ...]
    """TVMScript; constants are left out of it."""
    bindings: int = 0
    """Of a Relax function: how many values it names."""


def kind_of(func: ir.BaseFunc) -> Kind:
    """Return what a function is: ``graph``, ``kernel`` or ``other``."""
    if isinstance(func, relax.Function):
        return "graph"
    return "kernel" if isinstance(func, tirx.PrimFunc) else "other"


def function_text(func: ir.BaseFunc) -> FunctionText:
    """Return the text of a function, without the printer's remarks about imports."""
    lines = func.script(show_meta=False).splitlines()
    kept = [line for line in lines if line and not line.startswith("# ")]
    return FunctionText(kind_of(func), tuple(kept), _bindings(func))


def _bindings(func: ir.BaseFunc) -> int:
    body = func.body if isinstance(func, relax.Function) else None
    blocks = body.blocks if isinstance(body, relax.SeqExpr) else ()
    return sum(len(block.bindings) for block in blocks)


_KINDS = ("graph", "kernel", "other")


class _Seen:
    """A function; its text is written when it is asked for, its size may be known before."""

    def __init__(self, func: ir.BaseFunc, size: tuple[int, int] | None = None):
        self.func = func
        self._size = size

    @cached_property
    def text(self) -> FunctionText:
        """The function as text."""
        return function_text(self.func)

    @property
    def size(self) -> tuple[int, int]:
        """How many lines and bindings."""
        return self._size or (len(self.text.lines), self.text.bindings)

    def followed_by(self, func: ir.BaseFunc) -> _Seen:
        """Return what is known of `func`, which is as this function, or says the same."""
        return self if func.same_as(self.func) else _Seen(func, self.size)


class PassRecorder:
    """Runs passes one by one, and tells what each of them changed.

    Passes within a pass count as that pass.  A function is printed where it changed, and for its
    size when it is met first; one that is the same object, or says the same, is not.

    `mod`: what the first pass is given.
    `queue`: compares and prints, one pass after the other: it has one thread.  Passes run
    meanwhile.
    `functions`: names of functions: only their changes are told, and those of what they call; of
    all by default.
    """

    def __init__(self, mod: ir.IRModule, queue: Executor, functions: Sequence[str] = ()):
        first = functions_by_name(mod)
        self._seen = {name: _Seen(func) for name, func in first.items()}
        self._queue = queue
        self._functions = functions
        self._told = reached(first, functions)

    def run(
        self, passes: Sequence[Pass], mod: ir.IRModule, records: list[Future[PassRecord]]
    ) -> ir.IRModule:
        """Run passes in turn, as `tvm.transform.Sequential` does, and return the module behind.

        They are given the module of the call before.  `records` gets the future of a `PassRecord`
        for each pass as soon as it has run.
        """
        for each in passes:
            start = time.perf_counter()
            mod = run_pass(each, mod)
            seconds = time.perf_counter() - start
            record = PassRecord(name_of(each), seconds)
            records.append(self._queue.submit(self._record, functions_by_name(mod), record))
        return mod

    def _record(self, functions: Mapping[str, ir.BaseFunc], record: PassRecord) -> PassRecord:
        """Compare functions with those before a pass, and add what it changed to its record."""
        before, self._seen, found = self._seen, {}, []
        told, self._told = self._told, reached(functions, self._functions)
        told |= self._told
        for name, func in functions.items():
            old = before.get(name)
            if old is not None and _says_the_same(old.func, func):
                self._seen[name] = old.followed_by(func)
                continue
            if old is not None and _has_the_same_body(old.func, func):
                self._seen[name] = new = old.followed_by(func)
                change = _of_attributes(name, old, new)
            else:
                self._seen[name] = new = _Seen(func)
                change = _change(name, old.text if old is not None else None, new.text)
            found += [change] if name in told else []
        gone = [name for name in before if name in told and name not in self._seen]
        found += [_removed(name, before[name].text) for name in gone]
        kinds = [kind_of(seen.func) for seen in self._seen.values()]
        sizes = [seen.size for seen in self._seen.values()]
        return replace(
            record,
            graphs=kinds.count("graph"),
            kernels=kinds.count("kernel"),
            lines=sum(lines for lines, _ in sizes),
            bindings=sum(bindings for _, bindings in sizes),
            changes=tuple(sorted(found, key=lambda c: (_KINDS.index(c.kind), c.function))),
        )


def functions_by_name(mod: ir.IRModule) -> dict[str, ir.BaseFunc]:
    """Return the functions of a module, sorted by name."""
    found = {gvar.name_hint: func for gvar, func in mod.functions_items()}
    return dict(sorted(found.items()))


def reached(functions: Mapping[str, ir.BaseFunc], names: Sequence[str]) -> set[str]:
    """Return the names of functions and of all that they call; without names, those of all."""
    if not names:
        return set(functions)
    found: set[str] = set()
    left = [name for name in names if name in functions]
    while left:
        found.add(name := left.pop())
        if isinstance(func := functions[name], relax.Function):
            called = (gvar.name_hint for gvar in relax.analysis.all_global_vars(func))
            left += [own for own in called if own in functions and own not in found]
    return found


def _says_the_same(one: ir.BaseFunc, other: ir.BaseFunc) -> bool:
    """Tell whether functions are the same but for names of variables and values of constants."""
    return one.same_as(other) or structural_equal(one, other, skip_tensor_content=True)


def _has_the_same_body(one: ir.BaseFunc, other: ir.BaseFunc) -> bool:
    """Tell whether functions have no other difference than their attributes."""
    if kind_of(one) != kind_of(other) or kind_of(one) == "other":
        return False
    pure = [getattr(func, "is_pure", None) for func in (one, other)]
    names = [n for n in ("params", "body", "buffer_map", "ret_ty", "ret_type") if hasattr(one, n)]
    return pure[0] == pure[1] and all(getattr(one, n).same_as(getattr(other, n)) for n in names)


def _of_attributes(name: str, old: _Seen, new: _Seen) -> FunctionChange:
    """Return the change of a function whose attributes alone differ, without printing it."""
    before, after = (dict(seen.func.attrs or {}) for seen in (old, new))
    same = {n for n in before if n in after and structural_equal(before[n], after[n])}
    signs = ("-", before), ("+", after)
    told = [f"{s}attribute {n} = {of[n]}" for s, of in signs for n in sorted(of) if n not in same]
    lines = tuple(shortened(line) for line in told)
    size = old.size[0]
    hunks = (Hunk(1, 1, lines),) if lines else ()
    return FunctionChange(name, kind_of(new.func), "changed", size, size, hunks)


def _change(name: str, old: FunctionText | None, new: FunctionText) -> FunctionChange:
    if old is None:
        hunks, left = added(new.lines, new.kind)
        return FunctionChange(name, new.kind, "added", 0, len(new.lines), hunks, left)
    hunks, left = changes(old.lines, new.lines, new.kind)
    sizes = len(old.lines), len(new.lines)
    return FunctionChange(name, new.kind, "changed", *sizes, hunks, left)


def _removed(name: str, old: FunctionText) -> FunctionChange:
    return FunctionChange(name, old.kind, "removed", len(old.lines), 0)
