"""``workloads``, on a model of a few thousand weights."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from relax_fusion import make_target
from relax_fusion.cli import compile as compile_module
from relax_fusion.cli import main
from relax_fusion.estimator import format_seconds
from relax_fusion.hardware import DEVICES

from ..support.commands import CONFIG, POSITIONS, links, short, write_json

pytestmark = pytest.mark.usefixtures("quick_to_compile")


def told(arguments: list[str], capsys) -> str:
    capsys.readouterr()
    assert main(["workloads", *arguments, "-q"]) == 0
    return capsys.readouterr().out


def error(arguments: list[str], capsys) -> str:
    capsys.readouterr()
    assert main(["workloads", *arguments, "-q"]) == 2
    return capsys.readouterr().err


def record(arguments: list[str], capsys) -> dict[str, Any]:
    return json.loads(told([*arguments, "--json", "-"], capsys))


def both(arguments: list[str], file: Path, capsys) -> tuple[dict[str, Any], str]:
    """Return what one run writes, and what it prints."""
    text = told([*arguments, "--json", str(file)], capsys)
    return json.loads(file.read_text()), text


def test_table_csv_and_json_agree(config, tmp_path: Path, capsys) -> None:
    files = [str(tmp_path / name) for name in ("a.csv", "a.json")]
    for name in files:  # which are replaced
        Path(name).write_text("what was there before, which is longer\n" * 1000)
    arguments = [config, "--seq", "3..16", "--csv", files[0], "--json", files[1]]
    table = told(arguments, capsys)
    assert "prefill: 11 calls a run" in table and "at seq_len = 3..16, total_len = 3..16" in table
    rows = list(csv.DictReader(Path(files[0]).read_text().splitlines()))
    found = json.loads(Path(files[1]).read_text())
    functions = {f["function"]: f for f in found["functions"]}
    assert [at["sizes"]["seq_len"] for at in functions["prefill"]["at"]] == [3, 4, 8, 16]
    for name, function in functions.items():
        for at in function["at"]:
            sizes = " ".join(f"{n}={v}" for n, v in at["sizes"].items())
            own = [r for r in rows if r["function"] == name and r["sizes"] == sizes]
            # Of a prompt, attention and three projections of the last layer have one row
            assert len(own) == len(function["items"]) == (10 if name == "prefill" else 6)
            assert sum(int(r["count"]) * int(r["flops"]) for r in own) == at["flops"]
            assert sum(int(r["count"]) * int(r["bytes"]) for r in own) == at["bytes"]
    down = [r for r in rows if r["function"] == "prefill" and r["k"] == "128"]
    assert [(r["m"], r["n"], r["count"]) for r in down] == [
        (m, "64", "1") for m in ("3", "4", "8", "16", *4 * ["1"])
    ]


def test_sizes_stay_symbolic_or_are_static(config, capsys) -> None:
    items = record([config, "--batch", "1..4"], capsys)["functions"][1]["items"]
    assert items[0]["products"][0]["m"] == "batch * seq_len"
    found = record([config, "--batch", "3"], capsys)["functions"][0]
    assert found["function"] == "decode" and found["items"][0]["products"][0]["m"] == 3
    assert found["at"][0]["sizes"] == {"total_len": POSITIONS}


def test_what_is_not_fused_is_counted_with_its_reason(config, tmp_path: Path, capsys) -> None:
    fused = record([config], capsys)
    arguments = [config, "--disable", "FuseMatmulEpilogue", "--disable", "FuseAttentionChain"]
    apart, text = both(arguments, tmp_path / "a.json", capsys)
    for one, two in zip(fused["functions"], apart["functions"], strict=True):
        assert {i["status"] for i in one["items"]} == {"fused"}
        left = [i for i in two["items"] if i["status"] == "left"]
        attention = {"prefill": 1, "decode": 2}[two["function"]]  # whose products count apart
        assert sum(i["count"] for i in left) == (2 + attention) * 2
        assert all(i["reason"] for i in left)
        assert one["at"][0]["flops"] == two["at"][0]["flops"]
    text = text.partition("In no kernel of ours\n\n")[2]
    rows = text.partition("\n\n")[0].splitlines()[2:]
    assert len(rows) > 3 and all(row.count(" x ") == 2 for row in rows), "each has its size"
    assert "decode    softmax  2" in text, "softmax has none"


def test_devices_are_priced_and_marked(config, tmp_path: Path, capsys) -> None:
    names = ["h100", "a100", "llvm"]
    arguments = [config, "--target", "h100", "--seq", "16", "--on", ",".join(names)]
    found, text = both(arguments, tmp_path / "a.json", capsys)
    found = found["devices"]
    assert [d["name"] for d in found] == names
    for device in found[:2]:
        assert device["measured"] is DEVICES[device["name"]].measured
    for device in found:
        for function in device["functions"]:
            priced = [i["seconds"] for i in function["items"]]
            assert all(s > 0 for s in priced) and function["unpriced_calls"] == 0
            assert function["seconds"] == pytest.approx(sum(priced))
            assert sum(function["shares"].values()) == pytest.approx(1)
            assert function["limit"] == max(function["shares"], key=function["shares"].get)
    times = {d["name"]: d["functions"][0]["seconds"] for d in found}
    assert "a100 *" in text and "h100 *" not in text and "prices were not compared" in text
    rows = [row for row in text.splitlines() if row.startswith("decode    total_len = 16")]
    for row, name in zip(rows, names, strict=True):
        assert f"  {name} " in row and format_seconds(times[name]) in row


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--seq", "4..2"], "ends before it begins"),
        (["--seq", "0"], "not an integer between 1 and"),
        (["--seq", "17"], "seq_len is at most 16"),
        (["--size", "rows=3"], "the symbolic sizes are seq_len, total_len"),
        (["--on", "h100,,a100"], "no list of devices"),
        (["--csv", "-", "--json", "-"], "cannot both be stdout"),
        (["--size", "seq_len=1..4", "--size", "seq_len=3"], "--size: 'seq_len' is given twice"),
    ],
)
def test_refusals(config, capsys, arguments: list[str], says: str) -> None:
    assert says in error([config, *arguments], capsys)


def test_tables_are_of_the_first_device_that_is_priced(config, capsys) -> None:
    found = record([config, "--seq", "16", "--on", "h100,llvm"], capsys)
    assert found["dtype"] == "float16" and "H100" in found["device"]
    assert record([config, "--seq", "16"], capsys)["dtype"] == "float32"


def test_chains_are_looked_for_once(config, capsys) -> None:
    assert main(["workloads", config, "--seq", "16", "--on", "h100,a100,llvm", "--json", "-"]) == 0
    told = capsys.readouterr()
    assert told.err.count("looking for chains") == 1
    assert len(json.loads(told.out)["devices"]) == 3


def test_a_model_without_work(tmp_path: Path, capsys) -> None:
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [2, 3]) for n in "xy")
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "g", [x], [y])
    file = str(tmp_path / "add.onnx")
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), file)
    text = told([file, "--on", "h100"], capsys)
    assert "It has no matmul" in text and "Predicted" not in text
    assert record([file], capsys)["functions"] == []
    assert len(told([file, "--csv", "-"], capsys).splitlines()) == 1


@pytest.mark.parametrize(
    "part, value, says",
    [
        ("work", [{"function": "main"}], "is damaged: a record is not as expected"),
        ("work", 3, "is damaged: a record is not as expected"),
        ("leftovers", [{"function": "main"}], "leftovers"),
        ("leftovers", {"function": "main"}, "leftovers"),
    ],
)
@links
def test_a_damaged_report_is_named(
    compiled, tmp_path: Path, capsys, part: str, value: Any, says: str
) -> None:
    out = tmp_path / "damaged"
    shutil.copytree(compiled, out)
    report = json.loads((out / "report.json").read_text())
    write_json(out / "report.json", report | {part: value})
    told = error([str(out)], capsys)
    assert says in told and str(out) in told


@pytest.mark.parametrize("name", ["dims", "workload"])
@links
def test_a_damaged_workload_is_named(compiled, tmp_path: Path, capsys, name: str) -> None:
    out = tmp_path / "damaged"
    shutil.copytree(compiled, out)
    report = json.loads((out / "report.json").read_text())
    for item in report["work"] if name == "dims" else ():
        item["dims"] = []
    for decision in report["decisions"] if name == "workload" else ():
        decision.get("workload", {})["dtype"] = "float5"
    write_json(out / "report.json", report)
    for arguments in ([], ["--on", "h100"]):
        told = error([str(out), *arguments], capsys)
        assert "is damaged: a record is not as expected" in told and str(out) in told


@pytest.mark.parametrize(
    "option, given", [("target", "h200"), ("dtype", "float16"), ("disable", "FuseGatedFFN")]
)
@links
def test_what_is_compiled_is_not_chosen_anew(compiled, capsys, option: str, given: str) -> None:
    told = error([str(compiled), f"--{option}", given], capsys)
    assert f"--{option} says how a model is compiled, but {compiled} is compiled already" in told


@links
def test_files_that_are_read_are_not_replaced(compiled, config, tmp_path: Path, capsys) -> None:
    for source in (str(compiled), f"{compiled}/manifest.json"):
        before = {path: path.read_bytes() for path in compiled.iterdir()}
        for name in ("manifest.json", "report.json", "lib.so"):
            command = "diff" if source.endswith("json") else "workloads"
            others = ["--csv"] if command == "workloads" else [source, "--html"]
            file = f"{compiled}/{name}"
            assert main([command, source, *others, file, "-q"]) == 2
            assert f"{others[-1]} {file} would replace what is read" in capsys.readouterr().err
        assert {path: path.read_bytes() for path in compiled.iterdir()} == before
    folder = str(Path(config).parent)
    assert "would replace what is read" in error([folder, "--json", config], capsys)
    assert main(["explain", folder, "--html", config, "-q"]) == 2
    assert "would replace what is read" in capsys.readouterr().err
    assert json.loads(Path(config).read_text()) == CONFIG


def test_two_results_do_not_go_to_one_file(config, tmp_path: Path, capsys) -> None:
    file = tmp_path / "both"
    told = error([config, "--csv", str(file), "--json", str(file.parent / "." / "both")], capsys)
    assert f"--csv and --json are both {file}" in told and not file.exists()
    assert "must be a file in a directory" in error([config, "--csv", str(file / "x")], capsys)


EXPERTS = CONFIG | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 32,
    "num_experts": 12,
    "num_experts_per_tok": 3,
    "head_dim": 16,
}


@links
def test_rows_are_counted_by_expert(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(compile_module, "build", short)
    source, out = write_json(tmp_path / "config.json", EXPERTS), tmp_path / "out"
    assert main(["compile", str(source), "-o", str(out), "-q"]) == 0
    file, prompt = tmp_path / "load.json", ["--prompt-ids", "1,2,3,4,5", "--max-new-tokens", "4"]
    text = told([str(out), "--record", str(file), *prompt], capsys)
    assert "Rows by expert, 3 each; skew" in text
    load = json.loads(file.read_text())
    assert load["chosen"] == 3 and [len(layer) for layer in load["counts"]] == [12, 12]
    assert all(sum(layer) == 3 * (5 + 3) for layer in load["counts"])  # the last is not fed back
    file.write_text(json.dumps({"chosen": 3, "counts": [[8, 8, 8, *(0,) * 9]]}))
    arguments = ["explain", str(source), "--expert-load", str(file), "--json", "-q"]
    capsys.readouterr()
    assert main(arguments) == 0
    made = json.loads(capsys.readouterr().out)["decisions"]
    works = [d["workload"] for d in made if (d.get("workload") or {}).get("type") == "ExpertMatmul"]
    assert works and all(work["skew"] > 1 for work in works)
    for wrong, message in {
        (): "--record needs --prompt or --prompt-ids",
        ("--prompt-ids", "1,2000"): "prompt token 2000 must be in 0..95",
    }.items():
        assert main(["workloads", str(out), "--record", str(file), *wrong, "-q"]) != 0
        assert message in capsys.readouterr().err


@links
def test_what_has_no_rows_to_count(compiled: Path, config: str, tmp_path: Path, capsys) -> None:
    more = ["--record", str(tmp_path / "load.json"), "--prompt-ids", "1"]
    assert "has no layers of experts" in error([str(compiled), *more], capsys)
    assert f"`relax-fusion compile` made; {config} is not one" in error([config, *more], capsys)
    assert "--record takes no --csv" in error([str(compiled), *more, "--json", "-"], capsys)
    assert not (tmp_path / "load.json").exists()
    for option in (more[2:], ["--prompt", "a"], ["--seed", "0"], ["--max-new-tokens", "1"]):
        refused = f"{option[0]} is for --record FILE; without it nothing is run"
        assert refused in error([str(compiled), *option], capsys)

    gpu, manifest = tmp_path / "gpu", json.loads((compiled / "manifest.json").read_text())
    gpu.mkdir()
    write_json(gpu / "manifest.json", manifest | {"target": str(make_target("h200"))})
    refused = error([str(gpu), *more], capsys)
    assert f"decoders that were compiled for a CPU; {gpu} is " in refused and "for H200" in refused
