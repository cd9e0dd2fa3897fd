"""``diff``: what it finds between two compilations, and its exit code."""

from __future__ import annotations

import copy
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relax_fusion.cli import main
from relax_fusion.report.sizes import sizes_text

from ..support.commands import links, write_json

pytestmark = pytest.mark.usefixtures("quick_to_compile")


KNOWN: dict[tuple[str, ...], str] = {}


@pytest.fixture
def explained(config, tmp_path: Path, capsys) -> Callable[..., str]:
    """Return what writes the report of ``explain``, and its file."""

    def explain(name: str, *options: str) -> str:
        if options not in KNOWN:
            capsys.readouterr()
            assert main(["explain", config, "--max-seq-len", "8", *options, "--json", "-q"]) == 0
            KNOWN[options] = capsys.readouterr().out
        (tmp_path / name).write_text(KNOWN[options])
        return str(tmp_path / name)

    return explain


@pytest.fixture
def diff(capsys) -> Callable[[str, str, int], dict[str, Any]]:
    """Return what compares, and checks the exit code."""

    def compare(a: str, b: str, code: int) -> dict[str, Any]:
        capsys.readouterr()
        assert main(["diff", a, b, "--json", "-q"]) == code
        return json.loads(capsys.readouterr().out)

    return compare


def test_chains_lost_and_gained(explained, diff, capsys) -> None:
    a, b = explained("a.json"), explained("b.json", "--disable", "FuseGatedFFN")
    gated = {"chain": "FuseGatedFFN: rms_norm merged silu"}
    merged = {"chain": "FuseRMSNormMatmul: rms_norm matmul NT"}
    found = diff(a, b, 1)
    times = [[each.pop("seconds") for each in found[part]] for part in ("lost", "gained")]
    for of in times:  # of decode, then of prefill, whose last layer comes first
        assert list(of[0]) == list(of[1]) == ["1 row"] and len(of[2]) > 1
        assert all(s > 0 for each in of for s in each.values())
    sizes = [("decode", "1", 2), ("prefill", "1", 1), ("prefill", "seq_len", 1)]
    assert found["lost"] == [
        {"function": f, **gated, "count": n, "sizes": f"{m} x 128 x 64, {m} x 128 x 64"}
        for f, m, n in sizes
    ]
    assert found["gained"] == [
        {"function": f, **merged, "count": n, "sizes": f"{m} x 256 x 64"} for f, m, n in sizes
    ]
    assert [(x["a"], x["b"], x["reason"]) for x in found["left"]] == [
        (0, 2, "FuseGatedFFN is switched off")
    ] * 2
    back = diff(b, a, 0)  # all its operations are in other kernels
    assert [[c.pop("seconds") for c in back[p]] for p in ("gained", "replaced")] == times
    assert found["calls"] == back["calls"] == []  # fused kernels of other chains
    assert back["lost"] == [] and back["replaced"] == found["gained"] and not back["equal"]
    assert back["gained"] == found["lost"]
    assert main(["diff", a, b, "-q"]) == 1
    text = capsys.readouterr().out
    assert "Lost: chains of A that are no kernels in B" in text and "Gained" in text
    assert found["facts"] == {"disable": {"a": "as by default", "b": "FuseGatedFFN"}}
    assert text.startswith("disable differs: A 'as by default', B 'FuseGatedFFN'\n")
    old = json.loads(Path(b).read_text())  # of before there were options in reports
    del old["options"]
    assert diff(a, str(write_json(Path(b), old)), 1)["facts"] == {}
    assert "predicted, each" in text and "s at 1 row" in text


def test_equal_reports(explained, diff, capsys) -> None:
    a, b = explained("a.json"), explained("b.json")
    found = diff(a, b, 0)
    assert found["equal"] and not found["kernels"]["known"]
    assert found["both"]["dtype"] == "float32" and found["both"].keys() >= {"source", "device"}
    assert main(["diff", a, b]) == 0
    told = capsys.readouterr().out
    assert "are equal in all that was compared" in told and "Code of kernels was not" in told


def test_plans_and_times(explained, diff, capsys) -> None:
    a, b = explained("a.json", "--target", "h200"), explained("b.json", "--target", "a100")
    found = diff(a, b, 0)
    assert (
        set(found["facts"]) == {"target"}
        and "device" not in found["both"]
        and found["plans"]
        and found["times"]
    )
    assert all(each["a"] != each["b"] for each in found["plans"])
    one = json.loads(Path(a).read_text())
    calls = {(c["function"], sizes_text(c["sizes"])): c for c in one["calls"]}
    assert {c["function"] for c in found["calls"]} == {"decode", "prefill"}
    assert all(c["a"] == calls[c["function"], c["sizes"]]["fused_s"] for c in found["calls"])
    assert all(c["b"] > c["a"] for c in found["calls"])
    fused = [d for d in one["decisions"] if d["fused"]]
    seconds = {p["fused_s"] for d in fused for p in d["predictions"]}
    assert {each["fused_s"]["a"] for each in found["times"] if "fused_s" in each} <= seconds
    for decision in fused:
        for prediction in decision["predictions"]:
            prediction["measured_s"] = 2e-6
    measured = str(write_json(Path(a).with_name("measured.json"), one))
    times = diff(a, measured, 0)["times"]
    assert times and all(t["measured_s"] == {"a": None, "b": 2e-6} for t in times)
    assert main(["diff", a, b, "-q"]) == 0
    text = capsys.readouterr().out
    assert "Predicted time of all fused kernels of a call" in text
    assert text.startswith("targets differ") and "tiles of A" in text and "B / A" in text


def test_a_plan_of_a_wider_range_serves_a_narrower_one(explained, tmp_path: Path, diff) -> None:
    report = json.loads(Path(explained("a.json")).read_text())
    decision = next(d for d in report["decisions"] if d["fused"] and d["function"] == "prefill")
    open_end = {**decision["plans"][-1], "upper": -1}
    other = {**open_end, "block_k": 2 * open_end["block_k"]}

    def with_plans(name: str, *plans: dict[str, Any]) -> str:
        decision["plans"] = list(plans)
        return str(write_json(tmp_path / name, report))

    a = with_plans("a.json", {**other, "upper": 16}, {**open_end, "upper": 64}, open_end)
    assert diff(a, with_plans("b.json", {**other, "upper": 16}, open_end), 0)["plans"] == []
    b = with_plans("b.json", {**other, "upper": 4}, {**open_end, "upper": 128}, open_end)
    (found,) = diff(a, b, 0)["plans"]
    assert found["range"] == "rows <= 16" and found["a"] != found["b"] is not None


def test_kernels_are_the_same_whose_code_is_whatever_they_are_called(
    explained, tmp_path: Path, diff
) -> None:
    """One more kernel of a name gives the kernels behind it other numbers."""
    report = json.loads(Path(explained("a.json")).read_text())
    old = {"slice": "1", "slice1": "2", "slice2": "3", "append": "4", "twice": "5", "last": "6"}
    new = {"slice": "1", "slice1": "9", "slice2": "2", "slice3": "3", "append": "8"}
    new |= {"twice": "5", "twice1": "5"}
    a = write_json(tmp_path / "a.json", {**report, "kernels": old})
    b = write_json(tmp_path / "b.json", {**report, "kernels": new})
    found = diff(str(a), str(b), 0)["kernels"]
    assert found.pop("known")
    assert found == {"new": ["slice1", "twice1"], "gone": ["last"], "changed": ["append"]}
    shifted = write_json(tmp_path / "c.json", {**report, "kernels": {"x": "1", "y": "2"}})
    other = write_json(tmp_path / "d.json", {**report, "kernels": {"x": "2", "z": "1"}})
    assert diff(str(shifted), str(other), 0)["equal"]


@links
def test_directories(compiled, tmp_path: Path, diff, capsys) -> None:
    a, b = (shutil.copytree(compiled, tmp_path / name) for name in "ab")
    assert diff(str(a), str(b / "manifest.json"), 0)["equal"]
    manifest = json.loads((b / "manifest.json").read_text())
    size = manifest["files"]["lib.so"]["bytes"]
    manifest["files"]["lib.so"]["bytes"] = size + 5
    write_json(b / "manifest.json", manifest)
    report = json.loads((b / "report.json").read_text())
    names = sorted(name for name in report["kernels"] if name.startswith("fuse_"))
    report["kernels"][names[0]] = "0" * 16
    del report["kernels"][names[1]]
    report["kernels"]["other"] = "1" * 16
    write_json(b / "report.json", report)
    page = tmp_path / "diff.html"
    assert main(["diff", str(a), str(b), "--html", str(page), "-q"]) == 0
    assert "Its text is in neither report." in page.read_text(encoding="utf-8")  # of "other"
    texts = {each["function"]: each["texts"] for each in report["sources"]}
    texts[names[0]][0]["text"] += "a line that A does not have\n"
    write_json(b / "report.json", report)
    assert main(["diff", str(a), str(b), "--html", str(page), "-q"]) == 0
    assert "<ins>+a line that A does not have</ins>" in page.read_text(encoding="utf-8")
    write_json(b / "report.json", {**report, "sources": [{"function": 3}]})
    assert main(["diff", str(a), str(b), "--html", str(page), "-q"]) == 2
    assert "is damaged: a record is not as expected" in capsys.readouterr().err
    write_json(b / "report.json", report)
    assert main(["diff", str(a), str(b), "--html", str(a), "-q"]) == 2
    assert "must be a file in a directory that exists" in capsys.readouterr().err
    found = diff(str(a), str(b), 0)
    assert found["files"] == {"lib.so": {"a": size, "b": size + 5}}
    assert found["kernels"] == {
        "known": True,
        "new": ["other"],
        "gone": [names[1]],
        "changed": [names[0]],
    }
    report["decisions"] = [{"function": "main"}]
    write_json(b / "report.json", report)
    assert main(["diff", str(a), str(b)]) == 2
    assert "damaged" in capsys.readouterr().err
    (a / "report.json").unlink()
    assert main(["diff", str(a), str(b)]) == 2


def test_the_page_replaces_nothing_that_is_read(tmp_path: Path, capsys) -> None:
    made = tmp_path / "made"
    made.mkdir()
    link = tmp_path / "link.json"
    link.symlink_to(made / "report.json")
    for file in (made / "report.json", made / "manifest.json", link):
        (made / "report.json").write_text("{}")
        (made / "manifest.json").write_text("{}")
        assert main(["diff", str(made), str(made), "--html", str(file), "-q"]) == 2
        assert f"--html {file} would replace what is read" in capsys.readouterr().err
        assert file.read_text() == "{}"


@pytest.mark.parametrize(
    "name, content, says",
    [
        ("nowhere", None, "nowhere does not exist"),
        ("config.json", "{}", "has no list of decisions"),
        ("x.json", "[", "is no JSON"),
        ("x.json", '{"decisions": [1]}', "has no list of decisions"),
        ("x.json", '{"decisions": []}', "is damaged: a record is not as expected"),
    ],
)
def test_bad_input(tmp_path: Path, capsys, name: str, content: str | None, says: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    assert main(["diff", str(tmp_path / name), str(tmp_path / name), "-q"]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    "part, name, value",
    [
        ("predictions", "measured_s", "fast"),
        ("predictions", "fused_s", -1.0),
        ("predictions", "fused_s", math.nan),
        ("predictions", "size", {"batch": 1}),
        ("calls", "fused_s", None),
        ("schedules", "refusals", 3),
        ("work", "products", [{"m": 1.5}]),
        ("work", "count", "two"),
    ],
)
def test_a_damaged_record_is_named(
    explained, tmp_path: Path, capsys, part: str, name: str, value: Any
) -> None:
    sound = explained("sound.json")
    record = json.loads(Path(sound).read_text())
    fused = next(d for d in record["decisions"] if d["fused"])
    records = fused["predictions"] if part == "predictions" else record[part]
    records[0][name] = value
    damaged = str(write_json(tmp_path / "damaged.json", record))
    assert main(["diff", sound, damaged, "-q"]) == 2
    told = capsys.readouterr().err
    assert damaged in told and told.count("\n") == 1


def test_every_kernel_of_one_chain_is_compared(explained, diff, tmp_path: Path) -> None:
    """Two kernels of chains that look alike: the second is another, and only it changes."""
    record = json.loads(Path(explained("a.json")).read_text())
    item = next(w for w in record["work"] if w["status"] == "fused")
    decision = next(d for d in record["decisions"] if d["kernel"] == item["kernel"])
    record["work"].append({**item, "kernel": "another"})
    again = copy.deepcopy({**decision, "kernel": "another"})
    record["decisions"].append(again)
    a = str(write_json(tmp_path / "both.json", record))
    again["predictions"][0]["fused_s"] *= 2
    b = str(write_json(tmp_path / "slower.json", record))
    (changed,) = diff(a, b, 0)["times"]
    assert changed["fused_s"]["b"] == 2 * changed["fused_s"]["a"]


def test_directories_that_are_no_compilations(config, tmp_path: Path, capsys) -> None:
    (tmp_path / ".out.1.part").mkdir()
    for folder, says in (
        (Path(config).parent, "it is a model, which `compile` takes"),
        (tmp_path, "an interrupted compile left .out.1.part in it"),
        (tmp_path / ".out.1.part", "is what an interrupted compile left"),
    ):
        assert main(["diff", str(folder), str(folder), "-q"]) == 2
        assert says in capsys.readouterr().err
