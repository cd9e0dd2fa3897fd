"""`scripts/check_models.py` on a module that stands for a model of MLC-LLM."""

from __future__ import annotations

import check_models as script
import pytest
import tvm
from tvm import ir, relax, tirx
from tvm.s_tir.dlight.base import ScheduleRule
from tvm.target import Target

from relax_fusion import FuseDequantize
from relax_fusion.dlight_rules import CPUSpatialRule
from relax_fusion.dlight_rules.safe_rule import SafeRule

from ..support import generic_cases as cases
from ..support.broken_rules import Raising, Wrong
from ..support.written_weights import written_weights

MODELS = {"exponential": "preset"}
JOB = (script.mlc.Variant("exponential", "preset", "q0f32"), "llvm")


def lowered(variant: script.mlc.Variant, target: Target) -> ir.IRModule:
    if variant.quantization == "none":
        raise ValueError("no such quantisation")
    return cases.module([cases.Input(("b", 64))], relax.op.exp)


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(script.mlc, "load", lambda path: None)
    monkeypatch.setattr(script.mlc, "models", lambda: MODELS)
    monkeypatch.setattr(script.mlc, "quantizations", lambda model: ["q0f32", "none"])
    monkeypatch.setattr(script.mlc, "lowered", lowered)
    monkeypatch.setattr(script.mlc, "through_our_pipeline", lambda *job, **_: lowered(*job))


def test_rows(fake) -> None:
    row = script.row_of(JOB, check=True, pipeline=True)
    assert row.functions == 1 and row.scheduled == {"CPUSpatialRule": 1}
    assert row.checked == 1 and row.pipeline and not row.raised and not row.wrong


class Nothing(SafeRule):
    def schedule(self, func: tirx.PrimFunc, target: Target) -> None:
        return None


@pytest.mark.parametrize(
    ("rule", "raised", "wrong"),
    [(Nothing(), "", ""), (Raising(), "KeyError", ""), (Wrong(), "", "Error")],
)
def test_mistakes_are_noted(fake, monkeypatch, rule: ScheduleRule, raised: str, wrong: str) -> None:
    monkeypatch.setattr(script, "RULES", (rule, CPUSpatialRule()))
    row = script.row_of(JOB, check=True, pipeline=True)
    assert bool(row.raised) == bool(raised) and all(raised in said for said in row.raised)
    assert bool(row.wrong) == bool(wrong) and all(wrong in said for said in row.wrong)


def test_inputs_have_exact_sums() -> None:
    from _model_numbers import few_integers

    x, w = (few_integers((n, 2048), "float16", n, 1) for n in (4, 64))
    sums = x.astype("float64") @ w.astype("float64").T
    assert sums.any() and abs(sums).max() < 2048
    assert few_integers((50,), "int32", 0, 2).max() == 1


@pytest.mark.parametrize(("passes", "written"), [([], 1), ([FuseDequantize()], 0)])
def test_weights_that_are_written_are_counted(passes: list, written: int) -> None:
    text = """
@I.ir_module
class Module:
    @R.function
    def main(x: R.Tensor((3, 32), "float16"), w: R.Tuple(R.Tensor((32, 48), "int8"))):
        R.func_attr({"num_input": 1})
        with R.dataflow():
            q = w[0]
            wide = R.astype(x, "float32")
            y = R.matmul(wide, R.astype(q, "float32"))
            R.output(y)
        return y
"""
    lower = [*passes, relax.transform.LegalizeOps()]
    mod = tvm.transform.Sequential(lower)(tvm.script.from_source(text))
    assert len(written_weights(mod)) == written
