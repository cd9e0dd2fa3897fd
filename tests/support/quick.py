"""Compiling in little time, for tests of what code does and not of how fast it does it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import tvm
from tvm import relax, tirx
from tvm.s_tir.schedule import _type_checker
from tvm.script.parser.core import doc, evaluator
from tvm.target import Target

from relax_fusion.hardware.target import host_target


def quick(target: Target) -> Target:
    """Return `target` without LLVM's optimisations, on its host if it is a device."""
    if target.kind.name == "llvm":
        return Target({**target.export(), "opt-level": 0})
    return target.with_host(quick(target.host or Target("llvm")))


def quick_host() -> Target:
    """Return this machine's processor, without LLVM's optimisations."""
    return quick(host_target())


NOT_NEEDED = (
    *("s_tir.HoistIfThenElse", "s_tir.InsertHoistIfThenElse", "s_tir.RenormalizeSplitPattern"),
    *("s_tir.InjectPermutedLayout", "s_tir.InjectVirtualThread", "tirx.CommonSubexprElim"),
)
"""Passes of TVM that only make code faster, or that lower what no kernel for a CPU has.

They take a fifth of the time."""


@contextmanager
def quick_passes() -> Iterator[None]:
    """Compile without TVM's passes that change nothing of what a kernel for a CPU computes."""
    now = tvm.transform.PassContext.current()
    level, config = now.opt_level, dict(now.config)
    with tvm.transform.PassContext(level, disabled_pass=NOT_NEEDED, config=config):
        yield


def quickly(
    mod: tvm.IRModule | tirx.PrimFunc, relax_pipeline: Any = "default", target: Target | None = None
) -> Any:
    """Compile for this machine in little time."""
    with quick_passes():
        return tvm.compile(mod, target=target or quick_host(), relax_pipeline=relax_pipeline)


@contextmanager
def quick_scripts() -> Iterator[None]:
    """Parse TVMScript without compiling each attribute and call by itself, a third of the time."""
    by_python, call = evaluator._eval_expr, compile("__call__()", "<ast>", "eval")

    def evaluated(node: doc.expr, names: dict[str, Any]) -> Any:
        def of(part: doc.expr) -> Any:
            if type(part) is doc.Name and part.id in names:
                return names[part.id]
            return part.value if type(part) is doc.Constant else by_python(part, names)

        if type(node) is doc.Attribute:
            return getattr(of(node.value), node.attr)
        unpacks = type(node) is doc.Call and any(k.arg is None for k in node.keywords)
        if type(node) is not doc.Call or unpacks or doc.Starred in map(type, node.args):
            return of(node)
        given = map(of, node.args), {k.arg: of(k.value) for k in node.keywords}
        names["__call__"] = partial(of(node.func), *given[0], **given[1])
        return eval(call, names)  # macros look for the parser among the globals of their callers

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluator, "_eval_expr", evaluated)
        yield


@contextmanager
def quick_checks() -> Iterator[None]:
    """Check what schedules are given without asking each time what its hint means."""
    checks, of_union = _type_checker._TYPE_CHECK, _type_checker._TYPE_CHECK["union"]

    def checked(value: Any, name: str, *kinds: Any) -> str | None:
        """Let a value pass that is of a class of a union, without the sentence that others fail."""
        classes = tuple(kind for kind in kinds if type(kind) is type)
        return None if isinstance(value, classes) else of_union(value, name, *kinds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_type_checker, "_dispatcher", cache(_type_checker._dispatcher))
        patch.setitem(checks, "union", checked)
        yield


LIBRARIES = ["-nostdlib", "-lm", "-lgcc"]
"""What compiled code may call; to look through those of C++ takes longer than all the rest."""


def loaded(compiled: Any) -> tvm.runtime.Module:
    """Return what TVM compiled as a shared library.

    LLVM's JIT, which would compile it when a machine is made, takes longer.
    """
    with TemporaryDirectory() as directory:
        path = Path(directory) / "lib.so"
        compiled.export_library(str(path), options=LIBRARIES)
        return tvm.runtime.load_module(str(path))


def machine(executable: Any) -> relax.VirtualMachine:
    """Return a virtual machine that runs an executable on this machine's processor."""
    return relax.VirtualMachine(loaded(executable), tvm.cpu())
