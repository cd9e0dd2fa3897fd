"""Models over several workers, from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from relax_fusion.cli import compile as compile_module
from relax_fusion.cli import main
from relax_fusion.studio.bench import command as bench

from ..support.commands import links, short

RUN = ("--prompt-ids", "1,2,3", "--max-new-tokens", "5", "--json", "-q")


@pytest.fixture(scope="module")
def spread(checkpoint: Path, quick_to_compile: None, tmp_path_factory: pytest.TempPathFactory):
    """A directory of two workers."""
    out = tmp_path_factory.mktemp("spread") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile_module, "build", short)
        command = ["compile", str(checkpoint), "--tensor-parallel", "2", "-o", str(out), "-q"]
        assert main(command) == 0
    return out


def tokens(out: Path, capsys: pytest.CaptureFixture[str]) -> list[int]:
    assert main(["run", str(out), *RUN]) == 0
    return json.loads(capsys.readouterr().out)["tokens"]


@links
def test_two_workers_generate_what_one_does(
    spread: Path, compiled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert tokens(spread, capsys) == tokens(compiled, capsys)
    record = json.loads((spread / "report.json").read_text())
    assert record["options"]["tensor_parallel"] == "2"
    assert json.loads((spread / "manifest.json").read_text())["shards"] == 2


@links
def test_a_manifest_says_how_many_workers_the_library_is_for(
    spread: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "edited"
    out.mkdir()
    for file in spread.iterdir():
        (out / file.name).write_bytes(file.read_bytes())
    manifest = json.loads((out / "manifest.json").read_text())
    (out / "manifest.json").write_text(json.dumps({**manifest, "shards": 1}))
    assert main(["run", str(out), *RUN]) == 1
    told = capsys.readouterr().err
    assert "manifest.json has shards 1, but" in told and "was compiled with 2" in told


@links
@pytest.mark.slow
def test_a_bench_of_several_workers(spread: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", str(spread), "--prompt", "4", "--new-tokens", "4", "--json", "-", "-q"]
    capsys.readouterr()
    assert main([*command, "--repeat", "2", "--seconds", "5"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert list(record["contenders"]) == ["relax_fusion"] and record["kernels"] == {}
    assert record["contenders"]["relax_fusion"]["about"].endswith("on 2 workers")
    assert main([*command, "--against", "tvm"]) == 2
    assert "is spread over 2 workers, and peers run on one" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "text"),
    [
        (
            ["explain", "demo-llama", "--tensor-parallel", "3"],
            "attention heads cannot be spread evenly over 3 workers",
        ),
        (["explain", "demo-llama", "--tensor-parallel", "0"], "--tensor-parallel"),
        (["bench", "demo-llama", "--tensor-parallel", "2", "--against", "tvm"], "peers run on one"),
        (
            ["workloads", "demo-llama", "--tensor-parallel", "2", "--quantization", "q3f16_1"],
            "which are no multiple of the 40 that share a scale",
        ),
    ],
)
def test_what_cannot_be_spread(
    command: list[str],
    text: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench, "compile_to", lambda *_: pytest.fail("it is told before compiling"))
    try:
        assert main(command) != 0
    except SystemExit as err:
        assert err.code == 2
    assert text in capsys.readouterr().err


def test_explain_and_workloads_tell_of_one_worker(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("explain", "workloads"):
        assert main([command, "demo-llama", "--tensor-parallel", "2"]) == 0
        assert "float32, batch 1, 2 workers" in capsys.readouterr().out
