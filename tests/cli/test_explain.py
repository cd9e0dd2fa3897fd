"""`explain`: what it prints, as text, JSON and a page, and what it refuses."""

from __future__ import annotations

import json

import pytest
from tvm.support import cc

from relax_fusion.cli import main
from relax_fusion.estimator import AttentionSize, Prediction, RangePrediction
from relax_fusion.estimator.tile_plan import Box, PlanTable, TilePlan
from relax_fusion.report import Decision
from relax_fusion.report.tables import fused_table
from relax_fusion.workload import Attention

from ..support.commands import CONFIG, write_json
from .test_cli import error

pytestmark = pytest.mark.usefixtures("quick_to_compile")


@pytest.mark.slow
def test_explain_as_text_and_as_json(tmp_path, capsys):
    config = write_json(tmp_path / "tiny" / "config.json", CONFIG)
    assert main(["explain", str(config), "-q"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("tiny, float32, batch 1, for ") and "FuseGatedFFN" in text
    assert "Kernels, by the rule that schedules them" in text and "CPUSpatialRule" in text
    assert "What each kernel computes" not in text and "checked" not in text
    for target, warned in (("a100", True), ("h100", False)):
        assert main(["explain", str(config), "--target", target, "-q"]) == 0
        heading = capsys.readouterr().out.splitlines()[0]
        assert (", whose prices were not measured: " in heading) == warned
    assert main(["explain", str(config), "--coverage", "--all", "-q"]) == 0
    covered = capsys.readouterr().out.split("Coverage (")[1]
    assert "total_len = 64" in covered and "2 of 2" in covered

    assert main(["explain", str(config), "--graphs", "--validate", "-q"]) == 0
    tables, graphs = capsys.readouterr().out.split("What each kernel computes\n\n")
    assert "acc0[i, j]     float32 = sum k: x_norm[i, k] * w0[j, k]" in graphs
    rows = [line.split() for line in tables.splitlines()]
    assert [int(row[0]) > 1 for row in rows if row[1:] == ["checked"]] == [True]

    arguments = ["--target", "a100", "--disable", "FuseGatedFFN", "--json", "--validate-strictly"]
    arguments += ["--quantization", "q4f16_1"]
    assert main(["explain", str(config), *arguments]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["dtype"], document["quantization"]) == ("float16", "q4f16_1")
    assert document["fused"] == sum(d["fused"] for d in document["decisions"]) > 0
    assert document["declined"] <= sum(not d["fused"] for d in document["decisions"])
    assert "FuseGatedFFN" not in {d["pattern"] for d in document["decisions"]}
    for decision in document["decisions"]:
        assert decision["fused"] or decision["decline"]["detail"]
        assert decision.get("validation") == ("checked" if decision["fused"] else None)
    for covered in document["coverage"]:
        assert covered["chains"]["attention"][0] == covered["chains"]["attention"][1]
        assert len(covered["launches"]) > covered["per_layer"] > 1
        appends = any(name.startswith("kv_append") for name in covered["launches"])
        assert appends == (covered["function"] != "decode")  # attention does it for a token
    switched_off = {x["reason"] for x in document["leftovers"] if x["kind"] == "activation"}
    assert switched_off <= {"FuseGatedFFN is switched off"}
    kernels = {d["kernel"] for d in document["decisions"]} - {""}
    rules = {s["function"]: s["rule"] for s in document["schedules"]}
    assert {rules[kernel] for kernel in kernels} <= {"Triton", "FusedRule"}
    assert "Triton" in rules.values() and "" not in rules.values()


def test_explain_is_narrow_ends_with_sums_and_tells_all_if_asked(tmp_path, capsys):
    config = write_json(tmp_path / "config.json", CONFIG | {"num_hidden_layers": 1})
    given = ["explain", str(config), "--target", "h200", "-q"]
    given += ["--always-fuse", "--dtype", "float32"]
    assert main([*given, "--coverage"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 120
    assert "12 chains fused, no operators of transformers left to TVM" in text
    assert "Left unfused" not in text  # FuseChains declined what other passes took
    sums = [line.split() for line in text.split("In all (")[1].splitlines()]
    found = {row[0]: row for row in sums if row and row[0] in ("prefill", "decode")}
    assert found.keys() == {"prefill", "decode"}
    for row in found.values():
        fused, apart = (float(row[i]) * {"us": 1.0, "ms": 1e3}[row[i + 1]] for i in (-5, -3))
        assert float(row[-1].removesuffix("x")) == pytest.approx(apart / fused, rel=0.02)
    assert main([*given, "--all"]) == 0
    every = capsys.readouterr().out
    assert "Declined by one pass, taken by a kernel of another" in every
    assert every.count("FuseChains") > text.count("FuseChains")


@pytest.mark.slow
def test_no_call_is_longer_than_the_longest_sequence(tmp_path, capsys):
    config = write_json(tmp_path / "config.json", CONFIG)
    for command in (["explain"], ["compile", "-o", str(tmp_path / "made")]):
        if command[0] == "compile" and not cc.get_cc():
            continue
        capsys.readouterr()
        options = ["--max-seq-len", "12", "--json", "-q"]
        assert main([command[0], str(config), *command[1:], *options]) == 0
        text = capsys.readouterr().out
        if command[0] == "compile":
            text = (tmp_path / "made" / "report.json").read_text()
        calls = json.loads(text)["calls"]
        assert max(c["sizes"]["seq_len"] for c in calls if c["function"] == "prefill") == 12


def test_explain_writes_a_page(tmp_path, capsys):
    config = write_json(tmp_path / "tiny" / "config.json", CONFIG)
    page = tmp_path / "page.html"
    page.write_text("what was there is replaced")
    assert main(["explain", str(config), "--html", str(page), "-q"]) == 0
    assert "Fused" in capsys.readouterr().out
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    for wrong in (tmp_path / "no" / "page.html", tmp_path, "-"):
        assert main(["explain", str(config), "--html", str(wrong), "-q"]) == 2
        assert "must be a file in a directory that exists" in error(capsys)
    assert main(["explain", str(config), "--html", str(config), "-q"]) == 2
    assert "would replace what is read" in error(capsys)
    assert json.loads(config.read_text()) == CONFIG


def test_explain_names_the_plan_of_the_keys_that_it_prices() -> None:
    work = Attention(1, None, None, 4, 2, 8, 8, 1.0, "bottom_right", None, "float16", "float16")
    few, many = TilePlan(16, 32, 8, family="cpu_tiles"), TilePlan(64, 64, 8, family="cpu_tiles")
    plans = PlanTable.of([(Box(rows=64, keys=512), few), (Box(), many)])
    cost = Prediction(1e-6, 1.0, 1.0, 1, "dram")
    priced = tuple(
        RangePrediction(64, AttentionSize(1, 64, keys), cost, cost, cost) for keys in (512, 4096)
    )
    made = Decision("P", "attention", "f", "x", "k", workload=work, plans=plans, predictions=priced)
    rows = [line for line in fused_table([made]).text().splitlines() if " keys " in line]
    assert few.text != many.text
    assert "64 x 512 keys" in rows[0] and few.text in rows[0]
    assert "64 x 4096 keys" in rows[1] and many.text in rows[1]


@pytest.mark.parametrize(
    "arguments, code, says",
    [
        (["/nonexistent/model"], 1, "neither a directory"),
        (["llama-3.1-8b", "--target", "nonsense"], 2, "h200"),
        (["llama-3.1-8b", "--disable", "FuseNothing"], 2, "FuseGatedFFN"),
        (["demo-gpt2", "--backend", "triton"], 1, "triton"),
        (["demo-gpt2", "--allow-tf32"], 1, "sm_80"),
        (["demo-gpt2", "--allow-int8-rows", "--target", "h200"], 1, "AVX-512 VNNI"),
        (["demo-gpt2", "--max-seq-len", "5000"], 1, "1024"),
        (["demo-gpt2", "--dtype", "int8"], 2, "float16"),
        (["demo-gpt2", "--quantization", "q4"], 2, "'q4f32_1', 'q8f16_1'"),
        (["demo-gpt2", "--quantization", "q4f32_1", "--dtype", "float16"], 1, "are of float32"),
        (["--validate", "demo-gpt2", "--dtype", "int8"], 2, "float16"),
        ([], 2, "SRC"),
    ],
)
def test_explain_refuses_arguments(capsys, arguments, code, says):
    assert main(["explain", *arguments]) == code
    assert says in error(capsys)
