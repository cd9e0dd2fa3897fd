"""The command line, through `main` on models of a few thousand weights."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tvm
from safetensors import safe_open
from safetensors.numpy import save_file

from relax_fusion import dequantize, models, quantize
from relax_fusion.canonical import CANONICAL
from relax_fusion.cli import argument_types, console, explain, main, parser
from relax_fusion.cli import compile as compile_module
from relax_fusion.cli.model_arguments import asked
from relax_fusion.cli.run import _generate
from relax_fusion.hardware import target
from relax_fusion.models import zoo
from relax_fusion.passes import PATTERNS
from relax_fusion.transforms.whole_graph import RUN_OR_CAPTURE

from ..support.commands import CONFIG, POSITIONS, checkpoint_tensors, links, short, write_json
from ..support.processes import without_torch
from ..support.quick import quick_host


@pytest.fixture(scope="module", autouse=True)
def short_prompts(quick_to_compile):
    """Compile for short prompts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile_module, "build", short)
        yield


@pytest.fixture
def damaged(compiled, tmp_path) -> Path:
    """A copy that a test may damage."""
    out = tmp_path / "copy"
    out.mkdir()
    for file in compiled.iterdir():
        (out / file.name).write_bytes(file.read_bytes())
    return out


def error(capsys) -> str:
    """Return the one line of the error."""
    lines = [x for x in capsys.readouterr().err.splitlines() if x.startswith("relax-fusion: err")]
    assert len(lines) == 1
    return lines[0]


# --- compile and run -------------------------------------------------------------------------


@links
def test_compile_writes_library_weights_tokenizer_and_manifest(compiled):
    assert sorted(file.name for file in compiled.iterdir()) == [
        "lib.so",
        "manifest.json",
        "params.safetensors",
        "report.json",
        "tokenizer.json",
    ]
    manifest = json.loads((compiled / "manifest.json").read_text())
    assert manifest["config"] == CONFIG
    assert manifest["functions"] == ["prefill", "decode"]
    assert manifest["max_seq_len"] == POSITIONS
    assert set(manifest["files"]) == {path.name for path in compiled.iterdir()} - {"manifest.json"}
    assert len({file.stat().st_mode & 0o666 for file in compiled.iterdir()}) == 1
    assert list(compiled.parent.iterdir()) == [compiled]  # no temporary directory is left


@links
def test_run_generates_the_tokens_of_a_generator(compiled, checkpoint, capsys):
    exported = models.export(models.load_config(checkpoint), max_seq_len=POSITIONS)
    executable = tvm.compile(exported.mod, target=quick_host())  # TVM's own pipeline
    generator = models.Generator(executable, exported, models.load_weights(checkpoint, exported))
    expected = generator.generate([5, 6, 7], 6)[0].tolist()

    arguments = ["run", str(compiled), "--max-new-tokens", "6", "--json"]
    assert main([*arguments, "--prompt-ids", "5,6,7"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["tokens"] == expected
    assert result["prefill_ms"] > 0 and result["decode_ms_per_token"] > 0

    assert main([*arguments, "--prompt", "w5 w6 w7"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["prompt_ids"], result["tokens"]) == ([5, 6, 7], expected)
    assert result["text"].split() == [f"w{i}" for i in expected]


def test_unused_tensors_are_a_warning_of_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compile_module, "require_linker", lambda: None)
    monkeypatch.setattr(compile_module, "_write_library", lambda *_: (0, 0))
    write_json(tmp_path / "hf" / "config.json", CONFIG)
    surplus = {"vision.weight": np.ones(3, "float32")}
    save_file(checkpoint_tensors() | surplus, tmp_path / "hf" / "model.safetensors")
    assert main(["compile", str(tmp_path / "hf"), "-o", str(tmp_path / "out"), "-q"]) == 0
    warned = capsys.readouterr().err.strip()
    assert warned.startswith("relax-fusion: warning: ") and "vision.weight" in warned


@pytest.mark.slow
@links
def test_config_alone_runs_with_random_weights_of_a_seed(tmp_path, capsys):
    config = write_json(tmp_path / "tiny" / "config.json", CONFIG)
    out = tmp_path / "out"
    assert main(["compile", str(config), "-o", str(out), "--batch", "2", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["weights"], facts["source"]) == ("random", "tiny")

    def run(seed: str) -> list[int]:
        arguments = ["--prompt-ids", "1 2", "--max-new-tokens", "5", "--seed", seed, "--json"]
        assert main(["run", str(out), *arguments]) == 0
        return json.loads(capsys.readouterr().out)["tokens"]

    assert run("1") == run("1") != run("2")


@pytest.mark.slow
@links
def test_bfloat16_weights_are_stored_and_run(checkpoint, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["compile", str(checkpoint), "-o", str(out), "--dtype", "bfloat16", "-q"]) == 0
    with safe_open(out / "params.safetensors", framework="numpy") as handle:
        kinds = {handle.get_slice(name).get_dtype() for name in handle.keys()}  # noqa: SIM118
    assert kinds == {"BF16", "F32"}, "the table of rotations stays in float32"
    capsys.readouterr()
    arguments = ["run", str(out), "--prompt-ids", "5", "--max-new-tokens", "4", "--json"]
    assert main(arguments) == 0
    assert len(json.loads(capsys.readouterr().out)["tokens"]) == 4


@pytest.mark.slow
@links
def test_quantised_weights_are_stored_and_run(checkpoint, compiled, tmp_path, capsys):
    out, name = tmp_path / "out", "q4f32_1"
    arguments = ["compile", str(checkpoint), "-o", str(out), "--quantization", name, "--json"]
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["quantization"] == name
    files = (json.loads((d / "manifest.json").read_text())["files"] for d in (out, compiled))
    stored, whole = (file["params.safetensors"]["bytes"] for file in files)
    assert stored < 0.3 * whole

    # The weights that these are decoded to, by the model that is not quantised
    exported = models.export(models.load_config(checkpoint), max_seq_len=POSITIONS)
    weights = models.load_weights(checkpoint, exported)
    for i, (param, w) in enumerate(zip(exported.params, weights, strict=True)):
        if w.ndim == 2 and "rope" not in param.name:
            weights[i] = dequantize(*quantize(w, name), name)
    library = tvm.runtime.load_module(str(compiled / "lib.so"))
    expected = models.Generator(library, exported, weights).generate([5, 6, 7], 6)[0].tolist()
    arguments = ["run", str(out), "--prompt-ids", "5,6,7", "--max-new-tokens", "6", "--json"]
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == expected


def test_generation_stops_at_the_end_token():
    class Counting:
        batch, last = 1, 0

        def prefill(self, ids):
            return np.eye(96)[ids[:, -1] + 1]

        def decode(self, ids):
            return np.eye(96)[ids + 1]

    assert _generate(Counting(), [3, 4], 8, (7, 90)).tokens == [5, 6, 7]
    assert _generate(Counting(), [3, 4], 3, ()).tokens == [5, 6, 7]


@links
@pytest.mark.parametrize("graphs", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_cross_compile_for_a_gpu_that_is_not_here(tmp_path, capsys, graphs):
    quick = {"vocab_size": 256, "hidden_size": 256, "intermediate_size": 512}
    quick |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
    # The model of the quick demo, whose kernels are the same
    config = write_json(tmp_path / "tiny" / "config.json", zoo.CONFIGS["demo-llama"] | quick)
    out = tmp_path / "out"
    dump = tmp_path / "dump"
    arguments = ["--target", "h200", "--no-weights", "--debug-dump", str(dump)]
    arguments += ["--max-seq-len", "1024"]
    arguments += [] if graphs else ["--no-cuda-graph"]
    assert main(["compile", str(config), "-o", str(out), *arguments]) == 0
    assert re.search(r"CUDA +\d+ kernels; TVM compiles \d+ of them", capsys.readouterr().out)
    manifest = json.loads((out / "manifest.json").read_text())
    assert (manifest["dtype"], manifest["weights"]) == ("float16", "none")
    assert "sm_90a" in manifest["target"]
    assert b"__global__" in (out / "lib.so").read_bytes()
    assert (dump / "debug-phase0.py").is_file()
    told = json.loads((dump / "passes.json").read_text())["options"]
    assert told["model"] == "tiny, float16, batch 1"
    both = [json.loads((where / "report.json").read_text()) for where in (dump, out)]
    assert both[0]["decisions"] == both[1]["decisions"]
    assert (RUN_OR_CAPTURE in (dump / "debug-final.py").read_text()) == graphs


@pytest.mark.parametrize("stop, code", [(KeyboardInterrupt(), 130), (OSError("disk full"), 1)])
def test_interrupted_compile_leaves_nothing(checkpoint, tmp_path, monkeypatch, stop, code):
    monkeypatch.setattr(compile_module, "require_linker", lambda: None)

    def fail(*_args, **_options):
        raise stop

    monkeypatch.setattr(compile_module, "build", fail)
    assert main(["compile", str(checkpoint), "-o", str(tmp_path / "out")]) == code
    assert list(tmp_path.iterdir()) == []


@links
def test_an_encoder_has_no_generation(damaged, capsys):
    edit_manifest(source="bert", functions=["encode"])(damaged)
    assert main(["run", str(damaged), "--prompt-ids", "1"]) == 2
    assert "Encoder" in error(capsys)


# --- damaged directories ---------------------------------------------------------------------


def cut(name: str):
    def damage(out: Path) -> None:
        data = (out / name).read_bytes()
        (out / name).write_bytes(data[: len(data) // 2])

    return damage


def flip_library(out: Path) -> None:
    data = bytearray((out / "lib.so").read_bytes())
    data[len(data) // 2] ^= 0xFF
    (out / "lib.so").write_bytes(bytes(data))


def edit_manifest(**changes):
    def damage(out: Path) -> None:
        manifest = json.loads((out / "manifest.json").read_text())
        write_json(out / "manifest.json", manifest | changes)

    return damage


@links
@pytest.mark.parametrize(
    "damage, says",
    [
        (cut("manifest.json"), "manifest.json is damaged"),
        (cut("lib.so"), "lib.so has"),
        (cut("params.safetensors"), "params.safetensors has"),
        (flip_library, "SHA-256 differs"),
        (lambda out: (out / "lib.so").unlink(), "lib.so is missing"),
        (lambda out: (out / "manifest.json").unlink(), "has no manifest.json"),
        (shutil.rmtree, "does not exist; give a directory"),
        (edit_manifest(format=99), "format 99"),
        (edit_manifest(surprise=1), "there is no field 'surprise'"),
        (edit_manifest(versions={"tvm": "0.1.0", "relax_fusion": "0"}), "compiled with TVM 0.1.0"),
        (edit_manifest(parameters=[]), "other parameters"),
        (edit_manifest(weights="none"), "files has params.safetensors"),
        (edit_manifest(max_seq_len=17), "has max_seq_len 17, but"),
        (edit_manifest(source="other"), "has source 'other', but"),
        (edit_manifest(quantization="q4"), "has quantization 'q4', but"),
        (edit_manifest(weights="random"), "files has params.safetensors"),
    ],
)
def test_run_refuses_a_damaged_directory(damaged, capsys, damage, says):
    damage(damaged)
    assert main(["run", str(damaged), "--prompt-ids", "1"]) == 1
    assert says in error(capsys)


@links
@pytest.mark.parametrize(
    "arguments, code, says",
    [
        (["--prompt-ids", "1,x"], 2, "token numbers"),
        (["--prompt-ids", "96"], 1, "must be in 0..95"),
        (["--prompt-ids", "99999999999999"], 1, "must be in 0..95"),
        (["--prompt-ids", "99999999999999999999"], 2, "token numbers"),
        (["--prompt-ids", "1", "--seed", "9" * 5000], 2, "is not an integer between 0 and"),
        (["--prompt-ids", "1", "--seed", "-1"], 2, "is not an integer between 0 and"),
        (["--prompt-ids", "1", "--max-new-tokens", "17"], 1, "do not fit the 16"),
        (["--prompt-ids", "1", "--max-new-tokens", "0"], 2, "is not an integer between 1 and"),
        (["--prompt-ids", "1", "--seed", "1"], 2, "--seed"),
        ([], 2, "--prompt-ids"),
    ],
)
def test_run_refuses_arguments(compiled, capsys, arguments, code, says):
    assert main(["run", str(compiled), *arguments]) == code
    assert says in error(capsys)


@links
def test_text_prompt_needs_a_tokenizer(damaged, capsys):
    (damaged / "tokenizer.json").unlink()
    assert main(["run", str(damaged), "--prompt", "hello"]) == 2
    assert "--prompt-ids" in error(capsys)


# --- errors ----------------------------------------------------------------------


def test_what_others_print_is_no_result(capsys, monkeypatch):
    def talkative(result):
        print("ROCm not detected")
        return result

    monkeypatch.setattr(target, "make_target", talkative)
    monkeypatch.setattr(
        explain, "explain_command", lambda args, console: talkative(console.json({})) or 0
    )
    assert main(["explain", "gpt2", "--target", "rocm", "--json"]) == 0
    assert capsys.readouterr().out == "{}\n"


def test_all_fusing_passes_can_be_disabled():
    assert (*CANONICAL, "RouteExperts", *PATTERNS) == argument_types.PASSES
    given = ["explain", "gpt2", "--disable", "LayOutWeights", "--disable", "0123abcd"]
    assert parser.make_parser().parse_args(given).disable == ["LayOutWeights", "0123abcd"]


@pytest.mark.parametrize("load, warns", [(0.0, 0), (1e3, 1)])
def test_a_busy_machine_is_told(capsys, monkeypatch, load, warns):
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    assert console.Console().load() == load
    assert capsys.readouterr().err.count("warning: the machine is busy") == warns


def test_options_that_change_what_is_compiled_are_told() -> None:
    made = parser.make_parser()
    given = ["--bound", "n=8", "--bound", "m=4", "--disable", "FuseChains", "--validate-strictly"]
    told = asked(made.parse_args(["compile", "x.onnx", "-o", "x", "--no-cuda-graph", *given]))
    assert told == {
        "bound": "m=4, n=8",
        "disable": "FuseChains",
        "validate": "strict",
        "no_cuda_graph": "yes",
    }
    assert asked(made.parse_args(["explain", "gpt2", "--dtype", "float16", "--json"])) == {}


@pytest.mark.parametrize(
    "config, says",
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        (CONFIG | {"hidden_size": None}, "hidden_size"),
        ([], "not an object"),
    ],
)
def test_a_config_that_cannot_be_used(tmp_path, capsys, config, says):
    write_json(tmp_path / "config.json", config)
    assert main(["explain", str(tmp_path)]) == 1
    assert says in error(capsys)


def test_a_directory_without_weights_is_refused_before_compiling(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compile_module, "require_linker", lambda: None)
    write_json(tmp_path / "hf" / "config.json", CONFIG)
    assert main(["compile", str(tmp_path / "hf"), "-o", str(tmp_path / "out")]) == 1
    assert "--no-weights" in error(capsys)
    assert not (tmp_path / "out").exists()


def test_an_unexpected_error_is_one_line_and_its_traceback_an_option(monkeypatch, capsys):
    def fail(_text):
        raise ZeroDivisionError("what\na surprise")

    monkeypatch.setattr("relax_fusion.cli.source.open_source", fail)
    assert main(["explain", "gpt2"]) == 1
    assert "ZeroDivisionError: what a surprise" in error(capsys)
    assert main(["explain", "gpt2", "--traceback"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_missing_compiler_is_named_before_anything_is_compiled(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("relax_fusion.cli.build.cc.get_cc", lambda: None)
    assert main(["compile", "demo-gpt2", "-o", str(tmp_path / "out")]) == 1
    assert "g++" in error(capsys)


# --- the process ---------------------------------------------------------------------


def test_the_process_prints_results_to_stdout_only(tmp_path):
    config = write_json(tmp_path / "tiny" / "config.json", CONFIG | {"num_hidden_layers": 1})
    command = [sys.executable, "-m", "relax_fusion_command", "explain", str(config), "--json"]
    done = subprocess.run(
        command, env=without_torch(), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["source"] == "tiny"
    assert "looking for chains" in done.stderr


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["compile", "--help"]])
def test_help_and_version_exit_with_0(capsys, arguments):
    assert main(arguments) == 0
    assert "relax-fusion" in capsys.readouterr().out
