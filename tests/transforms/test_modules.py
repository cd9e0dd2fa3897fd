"""What a module carries besides its functions outlives every pass; nothing else makes modules."""

from __future__ import annotations

import ast
from pathlib import Path

import tvm
import tvm_ffi
from tvm import ir, tirx

import relax_fusion
from relax_fusion.transforms.modules import with_external_module, with_functions

ROOT = Path(relax_fusion.__file__).parent


MAKERS = ("IRModule", "from_expr", "ir_module")


def _is_module(call: ast.AST) -> bool:
    """Tell whether a node of the source makes an IRModule."""
    if not isinstance(call, ast.Call):
        return False
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return name in MAKERS


def test_modules_are_copied_not_made() -> None:
    files = sorted(ROOT.rglob("*.py"))
    assert files
    for path in files:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text if any(name in text for name in MAKERS) else "")
        made = [n.lineno for n in ast.walk(tree) if _is_module(n)]
        own = path.relative_to(ROOT) == Path("transforms/modules.py")
        assert len(made) == own, f"{path.name}: {made}"


def test_all_that_a_module_carries_is_kept() -> None:
    source = """
@I.ir_module
class Module:
    I.module_attrs({"mine": 5})
    I.module_global_infos({"vdevice": [I.vdevice("llvm", 0), I.vdevice("llvm", 1)]})
    @T.prim_func(s_tir=True)
    def first(x: T.Buffer((4,), "float32")):
        T.evaluate(0)
    @T.prim_func(s_tir=True)
    def second(x: T.Buffer((4,), "float32")):
        T.evaluate(0)
"""
    mod = tvm.script.from_source(source)
    make = tvm_ffi.get_global_func("runtime.CSourceModuleCreate")
    libraries = [make(f"int f{i}(void) {{ return 0; }}\n", "c", [f"f{i}"], None) for i in (0, 1)]
    before = with_external_module(mod, libraries[0])
    first, second = (before.get_global_var(name) for name in ("first", "second"))
    other = tirx.PrimFunc([], tirx.Evaluate(1))
    added = {first: other, ir.GlobalVar("second"): other, ir.GlobalVar("third"): other}
    after = with_external_module(with_functions(before, added, without=[second]), libraries[1])
    assert [g.name_hint for g in after.get_global_vars()] == ["first", "second", "third"]
    assert all(f.same_as(other) for f in after.functions.values())
    assert int(after.attrs["mine"]) == 5 and len(after.global_infos["vdevice"]) == 2
    assert all(a.same_as(b) for a, b in zip(after.attrs["external_mods"], libraries, strict=True))
    assert len(before.attrs["external_mods"]) == 1 and not before["first"].same_as(other)
    assert "external_mods" not in mod.attrs
