"""Input that is data, malformed: each is one line of a typed error, and nothing is compiled."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from relax_fusion import (
    FuseGatedFFN,
    FuseOptions,
    PipelineError,
    PlanTable,
    RelaxFusionError,
    Report,
    TilePlan,
    TilePlanError,
    device,
    host_target,
    make_target,
    relax_fusion_pipeline,
)
from relax_fusion.cli import main, manifest, run
from relax_fusion.cli.source import open_source
from relax_fusion.errors import LoweringError, TargetError
from relax_fusion.hardware import generic_cpu
from relax_fusion.hardware.target import device_of
from relax_fusion.models import (
    ModelError,
    config_from_dict,
    export,
    load_config,
    random_weights,
    zoo_config,
)
from relax_fusion.models.checkpoint import INDEX, Checkpoint
from relax_fusion.models.zoo import CONFIGS
from relax_fusion.options import make_options
from relax_fusion.validation import shown
from relax_fusion.workload.json import from_json, to_json

from .support.estimator_cases import norm_matmul


class Stranger:
    """Of no use as an option; its repr is the same in every process, for the names of tests."""

    def __repr__(self) -> str:
        return "Stranger()"


STRANGER = Stranger()
HUGE, LONG = 10**20, 10**5000
PLAN = TilePlan(4, 64, 64)
CYCLE: dict[str, Any] = {}
CYCLE["itself"] = CYCLE


class Rude:
    """A value that cannot even be shown."""

    def __repr__(self) -> str:
        raise ZeroDivisionError


def assert_one_line(err: BaseException) -> None:
    assert str(err) and "\n" not in str(err) and len(str(err)) < 600


# --- the pipeline ----------------------------------------------------------------------------

OPTIONS: list[dict[Any, Any]] = [
    *({"variable_bounds": v} for v in (3, "n", ["n"], {3: 1}, {None: 1}, {("n",): 1}, Rude())),
    *({"variable_bounds": {"n": v}} for v in (2**62, 2**63, HUGE, LONG, -LONG, 0, -1, True, 1.0)),
    *({"variable_bounds": {"n": v}} for v in (float("nan"), "8", None, [8], Rude())),
    *({"target": v} for v in (3, 3.5, {}, {"kind": "nothing"}, {3: 4}, ["llvm"], STRANGER, "")),
    *({"target": v} for v in ("{", "{}", "[1]", "llvm -mcpu", "a\0b", "[" * 99999, '{"kind": 3}')),
    *({"disable": v} for v in (["Nope", 3], [3], 3, "Nope", [["FuseGatedFFN"]], [None], Rude())),
    *({"metadata": v} for v in (3, "a", [1], {3: 1}, {"a": STRANGER}, {"a": {1, 2}}, CYCLE)),
    *({"metadata": {"a": v}} for v in (float("nan"), b"x", np.ones(2), {(1, 2): 3})),
    *({"debug_dump": v} for v in ("a\0b", "\ud800", 3, ["a"], b"a", Path("a\0b"))),
    *({"additional_tirs": v} for v in ({"foo": None}, {"foo": 3}, {"a b": None}, 3, ["foo"])),
    *({"report": v} for v in ("x", 3, [], dict, type)),
    *({"cuda_graph_symbolic_capture_hints": {"main": v}} for v in ("n", 3, [3], {"n": 1}, None)),
    *({"cuda_graph_symbolic_capture_hints": v} for v in ("main", ["main"], {3: ["n"]})),
    *({name: "no"} for name in ("always_fuse", "allow_tf32", "use_cuda_graph", "cublas_gemm")),
    *({name: 1} for name in ("always_fuse", "allow_tf32", "use_cuda_graph", "flashinfer")),
    *({"allreduce_strategy": v} for v in (-1, "1", 1.5, HUGE, True)),
    *({"backend": v} for v in ("cutlass", 3, ["tir"], "")),
    *({"plans": v} for v in ([1], 3, "x", {"FuseGatedFNN": PLAN}, {3: PLAN}, {None: PLAN})),
    *({"plans": {"FuseGatedFFN": v}} for v in (5, "x", {}, [PLAN], Rude())),
    *({"ext_mods": v} for v in ([3], ["x"], 3, "lib.so")),
    *({"progress": v} for v in (3, "x", [print])),
    *({name: 3} for name in ("traget", "", "__init__")),
    *({"flashinfer": True}, {"faster_transformer": True}, {"allow_tf32": True}),
]


@pytest.mark.parametrize("options", OPTIONS, ids=shown)
def test_options_of_the_pipeline(options: dict[Any, Any]) -> None:
    with pytest.raises(RelaxFusionError) as caught:
        relax_fusion_pipeline(**{"target": "llvm", **options})
    assert_one_line(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        *({"target": v} for v in ("h200", 3, {"kind": "llvm"})),
        *({"bounds": v} for v in ({"n": 2**62}, {"n": 1.5}, {3: 1}, 3, "n")),
        *({"plans": 3}, {"plans": {"FuseGatedFFN": 3}}, {"decisions": 3}, {"decisions": ()}),
        *({"always_fuse": "no"}, {"backend": "auto"}, {"allow_tf32": 1}),
    ],
    ids=shown,
)
def test_options_of_a_pass(options: dict[str, Any]) -> None:
    with pytest.raises((PipelineError, TilePlanError)) as caught:
        FuseOptions(**options)
    assert_one_line(caught.value)


@pytest.mark.parametrize("fields", [{"decisions": 3}, {"schedules": ()}], ids=shown)
def test_reports(fields: dict[str, Any]) -> None:
    with pytest.raises(PipelineError) as caught:
        Report(**fields)
    assert_one_line(caught.value)


def test_integers_and_paths_of_other_classes(tmp_path: Path) -> None:
    """What NumPy computes, and what names a path, is taken as Python's own."""
    with os.scandir(tmp_path.parent) as entries:
        entry = next(entries)
    given = {"variable_bounds": {"n": np.int64(5), "m": 6}, "debug_dump": entry}
    options = make_options("llvm", given)
    assert [type(bound) for bound in options.variable_bounds.values()] == [int, int]
    assert options.variable_bounds == {"n": 5, "m": 6} and options.debug_dump == Path(entry)


@pytest.mark.parametrize("options", [3, {"target": "llvm"}, None], ids=shown)
def test_a_pass_takes_no_other_options(options: object) -> None:
    with pytest.raises(PipelineError, match="must be FuseOptions"):
        FuseGatedFFN(options).transform_module(None, None)


TARGETS = [
    *({"kind": "llvm", "num-cores": v} for v in (-1, HUGE, "x")),
    *({"kind": "cuda", "arch": v} for v in (3, None, "", "sm", "sm_x", "sm_9999", "gfx90")),
    *({"kind": "metal", "max_threads_per_block": v} for v in (0, -1, HUGE, "x")),
    *({"kind": "vulkan", "thread_warp_size": v} for v in (0, 3, 256)),
    *({"kind": "c"}, {"kind": "hexagon"}, {"kind": "llvm", "mcpu": 3}),
]


@pytest.mark.parametrize("arch", ["sm_9999", "sm_91a", "sm_8", "sm_90b", "sm_"])
def test_architectures_that_there_are_not(arch: str) -> None:
    with pytest.raises(
        TargetError, match=f"arch is '{arch}', must be of .*sm_90, sm_100"
    ) as caught:
        device_of(make_target({"kind": "cuda", "arch": arch}))
    assert_one_line(caught.value)


@pytest.mark.parametrize("value", ["3", 3.5, None])
def test_processors_and_paths_of_other_types(value: object) -> None:
    with pytest.raises(TargetError, match=r"cores is .*, must be an integer"):
        generic_cpu(value)
    if not isinstance(value, str):
        with pytest.raises(ModelError, match=r"path is .*, must be a directory or a file"):
            load_config(value)


@pytest.mark.parametrize(
    "attribute, value",
    [*(("num-cores", v) for v in (-1, 2**31, 2**63 - 1)), ("mtriple", "x"), ("mtriple", "sm_90")],
)
def test_processors_that_there_are_not(attribute: str, value: object) -> None:
    with pytest.raises(TargetError, match=attribute) as caught:
        device_of(make_target({"kind": "llvm", attribute: value}))
    assert_one_line(caught.value)


@pytest.mark.parametrize("triple", ["x86_64-linux-gnu", "aarch64-linux-gnu"])
def test_processors_that_llvm_does_not_know(triple: str) -> None:
    """TVM compiles for a generic one, and says so in its log only."""
    known = {"x86_64-linux-gnu": "skylake", "aarch64-linux-gnu": "apple-m1"}
    for mcpu in ("unknown", *known.values(), "native"):
        config = {"kind": "llvm", "mtriple": triple, "mcpu": mcpu, "num-cores": 3}
        if mcpu == known[triple]:
            assert device_of(make_target(config)).sm_count == 3
            continue
        for wrong in (config, {"kind": "cuda", "arch": "sm_90a", "host": config}):
            with pytest.raises(TargetError, match=f"mcpu '{mcpu}' of mtriple '{triple}'"):
                device_of(make_target(wrong))


@pytest.mark.parametrize("config", TARGETS, ids=shown)
def test_targets_are_described_or_refused(config: dict[str, Any]) -> None:
    try:
        device_of(make_target(config))
    except RelaxFusionError as err:
        assert_one_line(err)


@pytest.mark.parametrize("name", [3, None, b"h200", ["h200"], np.array(["llvm", "x"]), Rude()])
def test_names_of_devices(name: Any) -> None:
    for read in (device, make_target):
        with pytest.raises(TargetError) as caught:
            read(name)
        assert_one_line(caught.value)


# --- plans -----------------------------------------------------------------------------------

WRONG_COUNTS = (0, -1, 1.0, 1.5, float("nan"), "4", None, True, HUGE, LONG, [4], Rude())


@pytest.mark.parametrize(
    "changes",
    [
        *({"block_m": v} for v in WRONG_COUNTS),
        *({"num_warps": v} for v in (-1, 1.5, "4", HUGE)),
        *({"num_stages": v} for v in (0, "x", 1.5)),
        *({"backend": v} for v in ("cuda", 3)),
        *({"family": v} for v in (3, ["mma"])),
        *({"reg_m": 3}, {"surprise": 1}),
    ],
    ids=shown,
)
def test_plans_as_attributes(changes: dict[str, Any]) -> None:
    with pytest.raises(TilePlanError) as caught:
        TilePlan.from_attr({**PLAN.to_attr(), **changes})
    assert_one_line(caught.value)


@pytest.mark.parametrize(
    "attr",
    [
        *(3, None, "plan", [3], [[]], [{}], ["x"], [{"upper": -1}], []),
        *([{**PLAN.to_attr(), "upper": v}] for v in (0, 4, "x", None, True, 1.5, HUGE, LONG)),
        [PLAN.to_attr()],
        [{**PLAN.to_attr(), "upper": upper} for upper in (8, 4, -1)],
    ],
    ids=shown,
)
def test_tables_as_attributes(attr: object) -> None:
    if attr == [{**PLAN.to_attr(), "upper": None}]:
        return  # the open range, as it is called in Python
    with pytest.raises(TilePlanError) as caught:
        PlanTable.from_attr(attr)
    assert_one_line(caught.value)


def test_a_table_of_rows_that_come_once() -> None:
    table = PlanTable.single(TilePlan(8, 8, 8))
    assert PlanTable.from_attr(row for row in table.to_attr()) == table


@pytest.mark.parametrize("entries", [3, None, (), ((None, 3),), ((4, PLAN),), [(None, PLAN)]])
def test_tables(entries: object) -> None:
    with pytest.raises(TilePlanError) as caught:
        PlanTable(entries)
    assert_one_line(caught.value)


WORKLOAD = json.loads(to_json(norm_matmul()))


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "3", "null", "[]", "{}", '{"type": 3}', '{"type": []}', "[" * 99999),
        *(json.dumps(WORKLOAD | c) for c in ({"k": "x"}, {"k": 1.5}, {"outputs": 3})),
        *(json.dumps(WORKLOAD | c) for c in ({"rows": [1]}, {"norm": 3}, {"type": "Nothing"})),
        json.dumps({k: v for k, v in WORKLOAD.items() if k != "k"}),
    ],
    ids=shown,
)
def test_workloads_as_json(text: str) -> None:
    with pytest.raises(LoweringError) as caught:
        from_json(text)
    assert_one_line(caught.value)


# --- models ----------------------------------------------------------------------------------

COUNTS = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
CHANGES: list[dict[str, Any]] = [
    *({name: v} for name in COUNTS for v in (0, -1, 1.5, "x", True, HUGE, [1], float("nan"))),
    *({"rms_norm_eps": v} for v in (float("nan"), float("inf"), -1.0, "x", LONG)),
    *({"rope_theta": v} for v in (float("nan"), 0, -1.0, "x", [1])),
    *({"rope_scaling": v} for v in (3, "x", [1], {"rope_type": 3}, {"rope_type": ["linear"]})),
    *({"rope_scaling": {"rope_type": "linear", "factor": v}} for v in ("x", 0, float("nan"))),
    *({"eos_token_id": v} for v in ("x", {"a": 1}, [[1]], -1, 1.5, HUGE)),
    *({"architectures": v} for v in (3, "LlamaForCausalLM", [3], [None], {"a": 1}, [[]])),
    *({"hidden_act": v} for v in (3, "swoosh", None.__class__, ["silu"])),
    *({"tie_word_embeddings": v} for v in ("no", 1, [])),
    *({"head_dim": 3}, {"num_key_value_heads": 7}, {"head_dim": 2**23}, {"head_dim": HUGE}),
    *({"quantization_config": {"bits": 4}}, {"partial_rotary_factor": 0.5}),
]


@pytest.mark.parametrize("changes", CHANGES, ids=shown)
def test_configurations(changes: dict[str, Any]) -> None:
    with pytest.raises(ModelError) as caught:
        config_from_dict(CONFIGS["llama-3.2-1b"] | changes)
    assert_one_line(caught.value)


@pytest.mark.parametrize(
    "data", [None, 3, "x", [], {}, {"model_type": ["llama"]}, {3: 4}], ids=shown
)
def test_configurations_that_are_none(data: object) -> None:
    with pytest.raises(ModelError) as caught:
        config_from_dict(data)
    assert_one_line(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        *({"batch": v} for v in (0, -1, 1.5, True, None, "a b", "", HUGE, LONG)),
        *({"batch": v} for v in ("seq_len", "total_len")),
        *({"max_seq_len": v} for v in (0, "64", 1.5, True, HUGE, 2**31, 2**30)),
        *({"dtype": v} for v in ("int8", 3, None, ["float32"], np.array(["float32", "x"]))),
    ],
    ids=shown,
)
def test_exports(options: dict[str, Any]) -> None:
    with pytest.raises(ModelError) as caught:
        export(zoo_config("demo-gpt2"), **options)
    assert_one_line(caught.value)


@pytest.mark.parametrize("batch, length", [(2**31 - 1, 2**31 - 1), (1, 2**31), (2**20, 2**30)])
def test_caches_that_64_bits_cannot_count(batch: int, length: int) -> None:
    with pytest.raises(ModelError, match="max_seq_len"):
        export(zoo_config("demo-llama"), batch=batch, max_seq_len=length)


def nested(depth: int) -> Any:
    """Return objects in objects."""
    return {"a": nested(depth - 1)} if depth else 1


@pytest.mark.parametrize(
    "extra", ["\ud800", nested(250), nested(900)], ids=["\\ud800", "250", "900"]
)
def test_configurations_that_no_manifest_can_hold(
    tmp_path: Path, capsys, monkeypatch, extra: object
) -> None:
    """They are refused before anything is compiled, for `run` could not read them again."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"extra": extra}))
    monkeypatch.setattr("relax_fusion.cli.compile._write_library", lambda *_: reached())
    source, out = str(tmp_path / "config.json"), str(tmp_path / "out")
    assert "cannot be kept" in failed(["compile", source, "-o", out], capsys)


def test_a_configuration_from_a_pipe() -> None:
    reader, writer = os.pipe()
    os.write(writer, json.dumps(CONFIG).encode())
    os.close(writer)
    try:
        assert open_source(f"/dev/fd/{reader}").data == CONFIG
    finally:
        os.close(reader)


def test_a_directory_whose_name_is_no_text(tmp_path: Path) -> None:
    directory = Path(os.fsdecode(os.fsencode(tmp_path) + b"/m\xff"))
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    assert open_source(str(directory)).name == "m\ufffd"


# --- manifests -------------------------------------------------------------------------------

CONFIG = {
    "model_type": "gpt2",
    "vocab_size": 96,
    "n_embd": 32,
    "n_layer": 1,
    "n_head": 2,
    "n_positions": 64,
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A directory such as ``compile`` makes, and the content of its manifest."""
    out = tmp_path_factory.mktemp("out")
    exported = export(config_from_dict(CONFIG))
    names = [param.name for param in exported.params]
    weights = dict(zip(names, random_weights(exported), strict=True))
    save_file(weights, out / manifest.PARAMS)
    (out / manifest.LIBRARY).write_bytes(b"a library")
    made = manifest.Manifest(
        source="tiny",
        config=CONFIG,
        dtype=exported.dtype,
        max_seq_len=64,
        batch=1,
        target=str(host_target()),
        functions=exported.functions,
        weights="file",
        versions=manifest.versions(),
        parameters=manifest.parameters(exported),
        files=manifest.file_sums(out),
    )
    manifest.write_manifest(out, made)
    return out, json.loads((out / manifest.MANIFEST).read_text())


@pytest.fixture
def library(compiled: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The library says what the manifest does, and the model is never run."""
    inside = manifest.read_manifest(compiled[0])
    told = manifest.Compiled(**{name: getattr(inside, name) for name in COMPILED})
    monkeypatch.setattr(run.tvm.runtime, "load_module", lambda _: None)
    made = {"_metadata": lambda: json.dumps(told.to_metadata())}
    monkeypatch.setattr(manifest.relax, "VirtualMachine", lambda *_: made)
    monkeypatch.setattr(run, "Generator", lambda *_: reached())


COMPILED = tuple(manifest.Compiled.__dataclass_fields__)


def reached() -> None:
    raise manifest.CliError("everything is right")


FORGED: list[dict[str, Any]] = [
    *({"files": v} for v in ({}, None, [1, 2], "x", {"lib.so": {}}, {"lib.so": None})),
    *({"files/../../etc/hostname": {"bytes": 1, "sha256": "0" * 64}}, {"files/a": None}),
    *({"files/lib.so": {"bytes": v, "sha256": "0" * 64}} for v in (-1, "9", 9.5, HUGE, True, 9)),
    *({"files/lib.so": {"bytes": 9, "sha256": v}} for v in ("", 3, None, "0" * 63, "G" * 64)),
    *({"functions": v} for v in (None, [], "decode", [3], ["decode"], ["decode", "prefill"])),
    *({"max_seq_len": v} for v in ("64", -5, 0, 100000, 63, 1.5, HUGE, True, None)),
    *({"batch": v} for v in (0, 2, "1", None, 1.5)),
    *({"dtype": v} for v in ("float16", "floatx", 3, None)),
    *({"target": v} for v in ("zzz", "cuda", "h200", [1], None, "", '{"kind": "c"}', "llvm -x")),
    *({"config": v} for v in ([1], None, "x", {}, {"model_type": "gpt2"})),
    *({f"config/{k}": v} for k, v in (("n_embd", 64), ("n_layer", "x"), ("eos_token_id", [[1]]))),
    *({"config/eos_token_id": v} for v in (7, "x", {"a": 1})),
    *({"versions": v} for v in (None, ["a"], {}, {"tvm": "0.27.0"}, {"tvm": 3})),
    *({"versions/tvm": v} for v in (3, "0.1.0", "0.27.999", None)),
    *({"weights": v} for v in ("zzz", "random", "none", None, 3, ["file"])),
    *({"parameters": v} for v in ([1], None, "x", [], [{}])),
    *({"source": v} for v in (3, None, "other")),
    *({"format": v} for v in (True, "3", 2, 4, None, 2.5, HUGE)),
    *({"signature": v} for v in ("x", [], {}, {"inputs": [], "outputs": []}, {"inputs": 3})),
    {"signature": {"inputs": [], "outputs": [], "sizes": {}}},
    {"surprise": 1},
]


def edited(data: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return a copy with changes; ``files/name`` is a field of a field."""
    copy = json.loads(json.dumps(data))
    for key, value in changes.items():
        field, _, inner = key.partition("/")
        (copy[field] if inner else copy)[inner or field] = value
    return copy


@pytest.mark.parametrize("changes", [*FORGED, {}], ids=shown)
def test_manifests(compiled, library, tmp_path: Path, capsys, changes: dict[str, Any]) -> None:
    for name in (manifest.LIBRARY, manifest.PARAMS):
        (tmp_path / name).symlink_to(compiled[0] / name)
    (tmp_path / manifest.MANIFEST).write_text(json.dumps(edited(compiled[1], changes)))
    line = failed(["run", str(tmp_path), "--prompt-ids", "1"], capsys)
    assert ("everything is right" in line) == (changes == {})


@pytest.mark.parametrize("text", ["", "{", "[1]", "3", "null", '"x"', "\udcff", "[" * 99999])
def test_manifests_that_are_none(tmp_path: Path, capsys, text: str) -> None:
    (tmp_path / manifest.MANIFEST).write_text(text, encoding="utf-8", errors="surrogateescape")
    assert "is damaged" in failed(["run", str(tmp_path), "--prompt-ids", "1"], capsys)


def test_a_library_that_says_nothing(compiled, library, capsys, monkeypatch) -> None:
    for told in ({}, {"_metadata": lambda: "{"}, {"_metadata": lambda: "{}"}):
        monkeypatch.setattr(manifest.relax, "VirtualMachine", lambda *_, told=told: told)
        line = failed(["run", str(compiled[0]), "--prompt-ids", "1"], capsys)
        assert "does not say what it was compiled for" in line


def failed(arguments: list[str], capsys) -> str:
    """Run the command line; return its one line, which calls nothing unexpected."""
    assert main([*arguments, "-q"]) in (1, 2)
    lines = capsys.readouterr().err.splitlines()
    errors = [line for line in lines if line.startswith("relax-fusion: error: ")]
    assert len(errors) == 1 and lines[-1:] == errors
    assert "--traceback shows where" not in errors[0] and len(errors[0]) < 700
    return errors[0]


# --- the command line ------------------------------------------------------------------------

COMMANDS = [
    *(["explain", "demo-gpt2", "--max-seq-len", v] for v in ("0", "-1", "x", "1.5", str(HUGE))),
    *(["explain", "demo-gpt2", "--batch", v] for v in ("0", "x", str(HUGE), "9" * 5000)),
    *(["explain", "demo-gpt2", "--target", v] for v in ("", "{", "nothing", '{"kind": "c"}')),
    *(["explain", v] for v in ("", "/nothing", "a\0b", "x" * 5000, ".", "/dev/null")),
    *(["run", v, "--prompt-ids", "1"] for v in ("", "/nothing", ".", "/dev/null", "x" * 5000)),
    *(["run", ".", "--prompt-ids", v] for v in ("", "x", "-1", "1.5", str(HUGE), "9" * 5000)),
    *(["compile", "demo-gpt2", "-o", v] for v in (".", "/", "/proc", "/dev/null", "/dev/null/x")),
    *([], ["nothing"], ["run"], ["compile", "demo-gpt2"], ["demo", "--surprise"]),
]


@pytest.mark.parametrize("arguments", COMMANDS, ids=shown)
def test_command_lines(arguments: list[str], capsys, monkeypatch) -> None:
    monkeypatch.setattr("relax_fusion.cli.compile._write_library", lambda *_: (0, 0))
    failed(arguments, capsys)


@pytest.mark.parametrize("dump", ["out", "out/dump", "link/../out"])
def test_a_dump_that_would_be_in_the_way(tmp_path: Path, capsys, monkeypatch, dump: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deep").mkdir()
    (tmp_path / "link").symlink_to("deep")
    line = failed(["compile", "demo-gpt2", "-o", "out", "--debug-dump", dump], capsys)
    assert "is within -o" in line and not (tmp_path / "out").exists()


@pytest.mark.parametrize("variable", ["CXX", "CC"])
def test_compilers_that_are_no_program(capsys, monkeypatch, variable: str) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv(variable, "ccache g++")
    line = failed(["compile", "demo-gpt2", "-o", "/dev/shm/nothing"], capsys)
    assert "the C++ compiler is 'ccache g++'" in line


def test_a_tokenizer_that_panics(compiled, library, capsys, monkeypatch) -> None:
    """What Rust's panics raise is no Exception."""

    class Panic(BaseException):
        """As pyo3's."""

    class Panics:
        def encode(self, _: str) -> None:
            raise Panic("no entry found for key")

    monkeypatch.setattr(run, "_tokenizer", lambda *_: Panics())
    assert "no entry found" in failed(["run", str(compiled[0]), "--prompt", "a"], capsys)


def test_a_file_that_is_too_long_for_a_configuration(capsys) -> None:
    assert "has more than" in failed(["explain", "/dev/zero"], capsys)


@pytest.mark.parametrize("arguments", [["-o", ""], ["-o", "/dev/null", "--debug-dump", ""]])
def test_empty_names_of_directories(arguments: list[str], capsys) -> None:
    """As a variable gives that is not set; they are not the working directory."""
    assert "it is empty" in failed(["compile", "demo-gpt2", *arguments], capsys)


def test_prompts_are_checked_before_weights_are_read(compiled, library, capsys) -> None:
    for ids, says in (("96", "96 must be in 0..95"), ("1 2 96", "96"), ("1," * 64 + "1", "fit")):
        assert says in failed(["run", str(compiled[0]), "--prompt-ids", ids], capsys)


def test_prompts_that_are_no_text(compiled, library, capsys, tmp_path: Path, monkeypatch) -> None:
    for prompt, says in (("a\udcff", "UTF-8"), ("b", "cannot read")):
        tokenizer = Tokenizer(WordLevel({"a": 0}, unk_token="[UNK]"))
        monkeypatch.setattr(run, "_tokenizer", lambda *_, made=tokenizer: made)
        assert says in failed(["run", str(compiled[0]), "--prompt", prompt], capsys)


def test_a_prompt_is_neither_cut_nor_padded(tmp_path: Path) -> None:
    """As many tokenizer.json of Hugging Face's ask for, for the sake of batches."""
    tokenizer = Tokenizer(WordLevel({"a": 1}, unk_token="a"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(tmp_path / manifest.TOKENIZER))
    named = SimpleNamespace(files={manifest.TOKENIZER: None})
    assert run._encoded(run._tokenizer(tmp_path, named), "a a a a") == [1] * 4


def test_weights_of_types_that_numpy_lacks(compiled, tmp_path: Path) -> None:
    made = manifest.read_manifest(compiled[0])
    header = {}
    for n, p in enumerate(made.parameters):
        header[p.name] = {"dtype": "F8_E4M3", "shape": [1], "data_offsets": [n, n + 1]}
    text = json.dumps(header).encode()
    data = len(text).to_bytes(8, "little") + text + bytes(len(header))
    (tmp_path / manifest.PARAMS).write_bytes(data)
    with pytest.raises(manifest.CliError, match="cannot be read"):
        next(manifest.stored_weights(tmp_path, made))


@pytest.mark.parametrize("shard", ["a\0b", "\ud800", "..", 3], ids=shown)
def test_names_of_shards(tmp_path: Path, shard: object) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(ModelError) as caught:
        Checkpoint(tmp_path)
    assert_one_line(caught.value)


def spoil(file: Path, kind: str) -> Path:
    """Make a file that cannot be read as a whole."""
    if kind == "pipe":
        os.mkfifo(file)
    else:
        file.touch()
        os.truncate(file, 2**42)
    return file


@pytest.mark.parametrize("kind", ["pipe", "huge"])
def test_files_that_cannot_be_read_as_a_whole(tmp_path: Path, kind: str) -> None:
    spoil(tmp_path / manifest.MANIFEST, kind)
    unread = "it is no regular file|it has 4398046511104 bytes"
    with pytest.raises(OSError, match=unread):
        manifest.read_manifest(tmp_path)
    index = tmp_path / INDEX
    if kind == "huge":
        spoil(index, kind)
    else:
        index.write_text(json.dumps({"weight_map": {"a": spoil(tmp_path / "shard", kind).name}}))
    with pytest.raises(ModelError, match=unread):
        Checkpoint(tmp_path)


def test_a_manifest_is_what_was_written(compiled) -> None:
    again = json.loads(json.dumps(asdict(manifest.read_manifest(compiled[0]))))
    assert again == compiled[1]
