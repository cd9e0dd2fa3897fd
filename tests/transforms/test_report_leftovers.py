"""Nothing that transformers are made of is left without a word: `tests/data/leftovers.txt`.

It has for each case its name, parameters, statements (``a @ b`` is a matmul) and what is left:
kind, variable, the chain that it would have been part of, and the reason.
``RELAX_FUSION_REWRITE=1 python -m pytest tests/transforms/test_report_leftovers.py`` writes what is
left anew.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import tvm
from tvm import ir
from tvm.target import Target

from relax_fusion import Report
from relax_fusion.options import make_options
from relax_fusion.pipeline import phase0_annotate, phase1_fuse
from relax_fusion.transforms.report_leftovers import ReportLeftovers

from ..canonical.common import module

CPU = Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "haswell", "num-cores": 2})
TEXT = Path(__file__).parents[1] / "data" / "leftovers.txt"
ROWS_AND = "x float32[b, s, 64], w float32[64, 64], g float32[64]"
HEADS = ", ".join(f"{name} float32[b, 2, s, 32]" for name in "qkv")


def leftovers(mod: ir.IRModule, **kwargs) -> list[tuple[str, str, str, str]]:
    """Return what is left behind the patterns: kind, variable, reason, chain."""
    report = Report()
    options = make_options(CPU, {"report": report, **kwargs})
    with CPU:
        tvm.transform.Sequential([*phase0_annotate(options), *phase1_fuse(options)])(mod)
    return [(x.kind, x.where, x.reason, x.chain) for x in report.leftovers]


def cases() -> dict[str, list[str]]:
    """Return the lines of each case by its name."""
    parts = TEXT.read_text(encoding="utf-8").split("== ")[1:]
    return {name: lines for name, *lines in (part.strip().splitlines() for part in parts)}


def module_of(params: str, *statements: str) -> ir.IRModule:
    """Return the module of a case."""
    sizes = re.sub(r"\b([bs])\b(?=[,\]])", r"'\1'", params)
    typed = re.sub(r"(\w+) (\w+)\[(.*?)\]", r"\1: R.Tensor((\3,), '\2')", sizes)
    written = [re.sub(r"= (.*) @ (\w+)$", r"= R.matmul(\1, \2)", line) for line in statements]
    return module(typed, "\n".join(written))


def test_one_line_for_each() -> None:
    known, made = cases(), []
    assert len(known) > 30
    for name, (params, *lines) in known.items():
        statements = [line for line in lines if not line.startswith("-> ")]
        told = [
            f"-> {kind} {where}{f' [{chain}]' if chain else ''}: {reason}"
            for kind, where, reason, chain in leftovers(module_of(params, *statements))
        ]
        made += [f"== {name}", params, *statements, *told, ""]
    text = "\n".join(made)
    if os.environ.get("RELAX_FUSION_REWRITE"):
        TEXT.write_text(text, encoding="utf-8")
    assert text.splitlines() == TEXT.read_text(encoding="utf-8").splitlines()


def test_a_pass_that_is_switched_off() -> None:
    (found,) = leftovers(module_of(ROWS_AND, "y = x @ w"), disable=["FuseMatmulEpilogue"])
    assert found == ("matmul", "y", "FuseMatmulEpilogue is switched off", "projection")


def test_a_soft_cap_of_scores_is_no_activation_of_a_projection() -> None:
    body = """c = R.tanh(R.matmul(q, R.permute_dims(k, axes=[0, 1, 3, 2])))
    y = R.matmul(R.nn.softmax(c, axis=-1), v)"""
    mod = module_of(HEADS, *body.splitlines())
    found = leftovers(mod, disable=["FuseAttentionChain", "FuseChains"])
    reason = "FuseAttentionChain is switched off"
    assert [(kind, chain) for kind, _, _, chain in found if kind != "matmul"] == [
        ("activation", ""),
        ("softmax", "attention"),
    ]
    assert [why for kind, _, why, _ in found if kind == "matmul"] == [reason, reason]


def test_attention_is_told_once_and_its_matmuls_by_it() -> None:
    body = """p = R.nn.softmax(R.matmul(q, R.permute_dims(k, axes=[0, 1, 3, 2])), axis=-2)
    y = R.matmul(p, v)"""
    found = leftovers(module_of(HEADS, *body.splitlines()))
    assert [(kind, chain) for kind, _, _, chain in found] == [
        ("matmul", ""),
        ("softmax", "attention"),
        ("matmul", ""),
    ]
    (reason,) = {reason for _, _, reason, _ in found}
    assert reason.startswith("FuseAttentionChain: ")


def test_an_expert_s_softmax_is_no_attention() -> None:
    body = """p = R.nn.softmax(R.matmul(x, w), axis=-1)
    e = R.strided_slice(p, axes=[2], begin=[0], end=[1])
    m = R.multiply(x, e)
    y = R.matmul(m, w)"""
    found = leftovers(module_of(ROWS_AND, *body.splitlines()))
    assert [(kind, chain) for kind, _, _, chain in found] == [("softmax", "")]


BRANCHES = """
@I.ir_module
class Module:
    @R.function
    def main(yes: R.Tensor((), "bool"), x: R.Tensor((4, 8), "float32")):
        if yes:
            y = R.nn.softmax(x)
        else:
            y = R.nn.relu(x)
        return y

    @R.function
    def theirs(x: R.Tensor((4, 8), "float32"), w: R.Tensor((8, 8), "float32")):
        R.func_attr({"Codegen": "blas"})
        y = R.matmul(x, w)
        return y
"""


def test_branches_and_libraries() -> None:
    report = Report()
    mod = tvm.script.from_source(BRANCHES)
    assert ReportLeftovers(report.leftovers)(mod).same_as(mod)
    branch = "it stands in a branch of a condition, which no pass looks into"
    assert [(x.kind, x.reason) for x in report.leftovers] == [
        ("softmax", branch),
        ("activation", branch),
        ("matmul", "it belongs to a library, blas"),
    ]
