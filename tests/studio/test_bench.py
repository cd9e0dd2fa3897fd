"""``bench``: what is measured, against whom, what is refused, and what an interrupt leaves."""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
from functools import cache
from pathlib import Path

import pytest

import relax_fusion.cli.compile as compile_module
from relax_fusion.cli import main
from relax_fusion.cli.artifact import remove_stages
from relax_fusion.cli.build import build_default
from relax_fusion.studio.bench import contenders
from tests.support.commands import compiling_quickly, short, write_json
from tests.support.gpu import gpu
from tests.support.quick import quick_host

BERT = {
    "model_type": "bert",
    "architectures": ["BertForMaskedLM"],
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
    "hidden_act": "gelu",
}
QUICK = ("--repeat", "1", "-q")


@pytest.fixture(scope="module", autouse=True)
def quick_to_compile():
    """Compile for this machine without optimisations, which take long."""
    with pytest.MonkeyPatch.context() as patch, compiling_quickly():
        patch.setattr(compile_module, "build", short)
        made_once = cache(lambda config, target: build_default(exported_of[config], target))
        exported_of = {}

        def default(exported, target):
            exported_of[exported.config] = exported
            return made_once(exported.config, quick_host())

        patch.setattr(contenders, "build_default", default)
        yield


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("encoder")
    source = str(write_json(folder / "tiny" / "config.json", BERT))
    assert main(["compile", source, "-o", str(folder / "out"), "-q"]) == 0
    return folder / "out"


@pytest.mark.slow
def test_a_decoder_against_tvm_and_torch(compiled, tmp_path, capsys):
    file = tmp_path / "times.json"
    file.write_text("old")
    sizes = ("--prompt", "6", "--new-tokens", "4", "--against", "torch,tvm")
    files = ("--json", str(file), "--html", str(tmp_path / "times.html"))
    assert main(["bench", str(compiled), *sizes, *QUICK, *files]) == 0
    out, found = capsys.readouterr().out, json.loads(file.read_text())
    assert found["sizes"] == {"prompt": 6, "new_tokens": 4} and not found["is_interrupted"]
    assert list(found["contenders"]) == ["relax_fusion", "tvm", "torch"] and not found["failed"]
    for who, each in found["contenders"].items():
        steps = each["steps"]
        assert (steps["prefill"]["count"], steps["decode"]["count"]) == (1, 3)
        for size in ("seq_len = 6, total_len = 6", "seq_len = 1, total_len = 7..9"):
            assert any(line.startswith(f"{who} ") and size in line for line in out.splitlines())
        rate = 6 / steps["prefill"]["p50_s"]
        assert steps["prefill"]["tokens_per_s"] == pytest.approx(rate)
        assert each["is_warm"] and f"{who}: {each['about']}" in out
    for who in ("tvm", "torch"):
        assert found["contenders"][who]["agreement"]["agrees"], "all have the same weights"
    assert "LlamaForCausalLM of transformers" in out and "eager, a growing cache" in out
    attention = next(k for k in found["kernels"]["decode"] if "attention" in k["kernel"])
    assert attention["launches"] == 2 and attention["predicted_s"] > 0 and attention["p50_s"] > 0
    assert "each kernel by the host's clock" in out and attention["size"].count(" x ") == 2
    assert all(k["size"] for kernels in found["kernels"].values() for k in kernels)
    sums = [line.split()[-1] for line in out.splitlines() if "all with a prediction" in line]
    for ratio, step in zip(sums, ("prefill", "decode"), strict=True):
        both = [k for k in found["kernels"][step] if k["predicted_s"]]
        measured, predicted = (
            sum(k["launches"] * k[name] for k in both) for name in ("p50_s", "predicted_s")
        )
        assert float(ratio) == pytest.approx(measured / predicted, abs=0.006)
    page = (tmp_path / "times.html").read_text(encoding="utf-8")
    assert '<section id="measured">' in page and attention["kernel"] in page
    assert {each.name for each in tmp_path.iterdir()} == {"times.json", "times.html"}


def test_everybody_runs_in_the_threads_that_suit_it(compiled, monkeypatch, capsys):
    """The first turn of each warms up, one is with one thread, and one with two."""
    used: list[tuple[str, int]] = []
    turn = contenders.Contender.turn

    def timed(self, number=0):
        used.append((self.name, self.threads))
        (found,) = turn(self, number)
        better = {"relax_fusion": 2, "torch": 1}[self.name]
        return [{step: [1.0 if self.threads == better else 2.0] for step in found}]

    monkeypatch.setattr(contenders.Contender, "turn", timed)
    monkeypatch.setattr(contenders.Contender, "set_threads", lambda self: None)
    monkeypatch.setattr("relax_fusion.studio.bench.command.thread_count", lambda: 2)
    monkeypatch.setattr("os.getloadavg", lambda: (99.5, 0, 0))
    arguments = ["bench", str(compiled), "--against", "torch", "--no-kernels", *QUICK]
    assert main(arguments) == 0
    told = capsys.readouterr()
    rows = {line.split()[0]: line.split()[1] for line in told.out.splitlines() if "1.00x" in line}
    assert rows == {"relax_fusion": "2", "torch": "1"}
    assert used[:6] == [(who, n) for who in ("relax_fusion", "torch") for n in (2, 1, 2)]
    assert "load average before 99.5" in told.out and "the machine is busy" in told.err
    del used[:]
    assert main([*arguments, "--threads", "1"]) == 0
    assert {threads for _, threads in used} == {1} and len(used) == 4
    assert main([*arguments, "--threads", "3"]) == 2


def test_an_encoder_at_the_size_that_was_asked_for(encoder, capsys):
    def predicted(size: int) -> float:
        arguments = ["--size", f"seq_len={size}", "--against", "none", "--json", "-"]
        assert main(["bench", str(encoder), *arguments, *QUICK]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["sizes"] == {"seq_len": size}
        assert found["contenders"]["relax_fusion"]["steps"]["encode"]["count"] == 10
        kernels = [k for k in found["kernels"]["encode"] if "attention" in k["kernel"]]
        return kernels[0]["predicted_s"]

    assert predicted(2) < predicted(16), "attention is predicted at the keys of the call"


def test_an_encoder_against_torch(encoder, capsys):
    assert main(["bench", str(encoder), "--against", "torch", "--no-kernels", *QUICK]) == 0
    out = capsys.readouterr().out
    assert "BertForMaskedLM of transformers" in out and "results agree" in out
    assert "kernels of" not in out


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--prompt", "16", "--new-tokens", "2"], "--prompt 16 and --max-new-tokens 2 do not fit"),
        (["--size", "seq_len=4"], "--size seq_len: tiny generates text, and takes --prompt"),
        (["--dtype", "float16"], "--dtype says how a model is compiled, but"),
        (["--target", "h200"], "--target says how a model is compiled, but"),
        (["--backend", "tir"], "--backend says how a model is compiled, but"),
        (["--device", "1"], "--device 1 must be 0: the target is this machine's CPU"),
        (["--html", "-"], "--html - must be a file in a directory that exists"),
        (["--against", "jax"], "'jax' is none of tvm, torch, torch-compile, torch-graphs, none"),
        (["--json", "/no/such/folder/x.json"], "must be a file in a directory that exists"),
    ],
)
def test_what_is_refused_of_a_decoder(compiled, capsys, arguments, says):
    assert main(["bench", str(compiled), *arguments]) == 2
    assert says in capsys.readouterr().err


def test_a_damaged_report_is_told_before_anything_is_measured(compiled, tmp_path, capsys):
    out = tmp_path / "out"
    shutil.copytree(compiled, out)
    report = json.loads((out / "report.json").read_text())
    text = json.dumps({**report, "decisions": [{}]})
    (out / "report.json").write_text(text)
    manifest = json.loads((out / "manifest.json").read_text())
    sums = {"bytes": len(text), "sha256": hashlib.sha256(text.encode()).hexdigest()}
    manifest["files"]["report.json"] = sums
    (out / "manifest.json").write_text(json.dumps(manifest))
    assert main(["bench", str(out), "--against", "none"]) == 2
    told = capsys.readouterr()
    assert "is damaged" in told.err and "compile again" in told.err
    assert "loading the library" not in told.err


def test_times_are_printed_though_a_file_cannot_be_written(compiled, tmp_path, monkeypatch, capsys):
    def full(file: str, _text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", file)

    monkeypatch.setattr("relax_fusion.studio.bench.command.write_file", full)
    arguments = ["--against", "none", "--json", str(tmp_path / "times.json"), "--no-kernels"]
    assert main(["bench", str(compiled), *arguments, *QUICK]) == 1
    told = capsys.readouterr()
    assert "time to first token" in told.out and "No space left" in told.err


def test_a_compiled_directory_is_not_written_to(compiled, tmp_path, capsys):
    for option, name in (("--html", "report.json"), ("--json", "manifest.json")):
        before = (compiled / name).read_bytes()
        assert main(["bench", str(compiled), option, str(compiled / name)]) == 2
        assert "would replace what is read" in capsys.readouterr().err
        assert (compiled / name).read_bytes() == before
    both = str(tmp_path / "both")
    assert main(["bench", str(compiled), "--json", both, "--html", both]) == 2
    assert f"--json and --html are both {both}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--prompt", "4"], "tiny generates no text: --prompt and --max-new-tokens are for models"),
        (["--size", "rows=4"], "--size names 'rows'; the symbolic sizes of tiny are seq_len"),
        (["--size", "seq_len=17"], "--size seq_len=17: tiny takes from 1 to 16"),
        (["--size", "seq_len=3", "--size", "seq_len=4"], "--size: 'seq_len' is given twice"),
    ],
)
def test_what_is_refused_of_an_encoder(encoder, capsys, arguments, says):
    assert main(["bench", str(encoder), *arguments]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.skipif(gpu(), reason="there is a GPU here")
@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--target", "h200"], "TVM finds no such device here"),
        (["--prompt", "4097"], "--prompt 4097 and --max-new-tokens 32 do not fit the 2048 tokens"),
        (["--size", "seq_len=8"], "--size seq_len: demo-llama generates text"),
    ],
)
def test_what_is_refused_before_anything_is_compiled(monkeypatch, capsys, arguments, says):
    monkeypatch.setattr(compile_module, "build", None)
    assert main(["bench", "demo-llama", *arguments]) in (1, 2)
    assert says in capsys.readouterr().err


def test_a_peer_that_cannot_run_says_why(compiled, monkeypatch, capsys):
    def fail(*_):
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(contenders, "build_default", fail)
    assert main(["bench", str(compiled), "--against", "tvm", "--no-kernels", *QUICK]) == 0
    assert "tvm: not measured: RuntimeError: no kernel image" in capsys.readouterr().out


def test_other_results_are_called_a_disagreement(compiled, monkeypatch, capsys):
    turns = contenders.Contender.turn

    def wrong(self, number=0):
        found = turns(self, number)
        self.results = [r + (self.name == "torch") for r in self.results]
        return found

    monkeypatch.setattr(contenders.Contender, "turn", wrong)
    assert main(["bench", str(compiled), "--against", "torch", "--no-kernels", *QUICK]) == 1
    assert "results DISAGREE" in capsys.readouterr().out


@pytest.mark.parametrize("is_watched", [True, False])
def test_an_interrupted_run_tells_what_it_has(compiled, tmp_path, monkeypatch, capsys, is_watched):
    """Whether by the thread that watches over the process, or by an exception."""
    turn, turns = contenders.Contender.turn, []

    def interrupted(self, number=0):
        turns.append(number)
        if len(turns) > 2:
            if is_watched:
                remove_stages()
            raise KeyboardInterrupt
        return turn(self, number)

    monkeypatch.setattr(contenders.Contender, "turn", interrupted)
    file = tmp_path / "times.json"
    arguments = ["--against", "none", "-q", "--json", str(file)]
    assert main(["bench", str(compiled), *arguments]) == 130
    out, err = capsys.readouterr()
    assert out.count("INTERRUPTED: these are the times until then") == 1
    assert "time to first token" in out and err.endswith("error: interrupted\n")
    assert json.loads(file.read_text())["is_interrupted"]
    remove_stages()
    assert capsys.readouterr().out == "", "it is told once"
