"""Options and targets, malformed: each is one line of a typed error, and nothing is compiled."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_fusion import (
    FuseGatedFFN,
    FuseOptions,
    PipelineError,
    RelaxFusionError,
    Report,
    TilePlan,
    TilePlanError,
    device,
    make_target,
    relax_fusion_pipeline,
)
from relax_fusion.errors import TargetError
from relax_fusion.hardware import generic_cpu
from relax_fusion.hardware.target import device_of
from relax_fusion.models import ModelError, load_config
from relax_fusion.options import make_options
from relax_fusion.validation import shown

from ..support.malformed import CYCLE, HUGE, LONG, STRANGER, Rude, assert_one_line

PLAN = TilePlan(4, 64, 64, family="cpu_tiles")

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
    *({n: v} for n in ("dump_functions", "dump_phases") for v in (3, [3], "main", [None], Rude())),
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
        *({"always_fuse": "no"}, {"backend": "mixed"}, {"allow_tf32": 1}),
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
