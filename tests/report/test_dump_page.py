"""The page of a dump: its data, its text without a browser, and in a browser."""

from __future__ import annotations

import re
from dataclasses import replace
from html import unescape

from relax_fusion.report.html.dump_page import dump_data, dump_html
from relax_fusion.report.passes import DumpRecord, FunctionChange, PassRecord, PhaseRecord
from relax_fusion.report.text_changes import Hunk

from .page_support import NASTY

FILES = ("debug-phase0.py", "debug-phase1.py")


def change(name: str, kind: str = "kernel", operand: str = "x") -> FunctionChange:
    lines = (f" def {name}():", "-    old", f"+    new({operand})")
    return FunctionChange(name, kind, "changed", 3, 3, (Hunk(1, 1, lines, 2),))


def record() -> DumpRecord:
    """Two phases: passes with and without changes, kernels that changed alike, a nasty name."""
    quiet = [PassRecord(f"Quiet{i}", 0.001, 1, 0, 30, 4) for i in range(3)]
    graph = change("main", "graph", NASTY)
    kernels = (change("add"), change("add1"), change("mul", operand="y"))
    gone = (FunctionChange("f", "kernel", "removed", 7, 0),)
    gone += (FunctionChange("g", "kernel", "removed", 9, 0),)
    fusing = PassRecord("Fuse", 0.5, 1, 3, 40, 3, (graph, *kernels))
    removing = PassRecord("Remove", 0.25, 1, 1, 24, 3, gone)
    return DumpRecord(
        (
            PhaseRecord(FILES[0], "annotating", 0.002, tuple(quiet[:2])),
            PhaseRecord(FILES[1], "fusing", 0.751, (fusing, quiet[2], removing)),
        ),
        {"target": NASTY},
    )


def test_passes_without_changes_are_one_line() -> None:
    first, second = dump_data(record(), FILES)["phases"]
    assert [[one["name"] for one in part["quiet"]] for part in first["parts"]] == [
        ["Quiet0", "Quiet1"]
    ]
    assert [bool(part["quiet"]) for part in second["parts"]] == [False, True, False]
    text = dump_html(record(), FILES)
    assert "2 passes changed nothing" in text and "Quiet2 changed nothing" in text


def test_totals_and_what_was_slowest() -> None:
    data = dump_data(record(), FILES)
    assert (data["ran"], data["changing"], data["slowest"]["name"]) == (5, 2, "Fuse")
    assert data["last"]["lines"] == 24 and abs(data["seconds"] - 0.753) < 1e-9
    fuse = data["phases"][1]["passes"][0]
    assert fuse["told"] == "main, 3 kernels changed"
    assert fuse["more"] == "" and data["phases"][1]["passes"][2]["more"] == "−16 lines"


def test_kernels_that_changed_alike_are_shown_once() -> None:
    fuse, _, remove = dump_data(record(), FILES)["phases"][1]["passes"]
    told = [(g["change"].function, g["others"]) for g in fuse["kernel_groups"]]
    assert told == [("add", ["add1"]), ("mul", [])]
    assert [g["others"] for g in remove["kernel_groups"]] == [["g"]]
    assert dump_html(record(), FILES).count("new(x)") == 1


def test_what_a_model_says_is_text() -> None:
    text = dump_html(record(), FILES)
    assert NASTY not in text and NASTY in unescape(text)


def test_links_are_to_files_that_are_there() -> None:
    def links(text: str) -> set[str]:
        return {link for link in re.findall(r'href="([^"#]+)"', text) if link != "data:,"}

    assert links(dump_html(record(), FILES, "report.html")) == {
        *FILES,
        "passes.json",
        "report.html",
    }
    assert links(dump_html(record(), FILES[:1])) == {FILES[0], "passes.json"}


def test_a_compilation_that_failed() -> None:
    failed = replace(record(), failed="FuseMore")
    assert "FuseMore</span> raised an error" in dump_html(failed, FILES)
    assert "raised an error" not in dump_html(record(), FILES)


def test_a_dump_of_nothing_has_a_page() -> None:
    assert "No pass ran" in dump_html(DumpRecord((PhaseRecord("a.py", "doing", 0.0),)), ())
    assert "</html>" in dump_html(DumpRecord(()), ())
