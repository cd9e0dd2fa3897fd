"""Configurations and checkpoints, malformed: each is one line of a typed error."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_fusion.cli.source import open_source
from relax_fusion.models import (
    ModelError,
    RopeScaling,
    config_from_dict,
    decoders,
    export,
    zoo_config,
)
from relax_fusion.models.checkpoint import INDEX, Checkpoint
from relax_fusion.models.rope import inverse_frequencies, rope_table
from relax_fusion.models.zoo import CONFIGS
from relax_fusion.validation import shown

from ..support.malformed import CONFIG, HUGE, LONG, assert_one_line, failed, reached

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


ODD = (0, -1, 1, 1.5, 1e308, 5e-324, float("nan"), 2**63, "x", True, None)
ODD += ([], [1], [[], []], {}, {"a": 1}, {"rope_type": "yarn"})
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
SMALL = dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 4)
SMALL |= {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}


@pytest.mark.parametrize("family", decoders._FAMILIES, ids=lambda family: family.model_type)
def test_a_key_of_any_value_is_read_or_refused(family: decoders._Family) -> None:
    """What is read has angles that are numbers."""
    whole = SMALL | {"architectures": [family.architecture], "rope_scaling": YARN}
    whole |= {key: 2 for key in family.fields if key == "num_experts_per_tok"}
    assert config_from_dict(whole).rope_scaling.kind == "yarn"
    given = [whole | {key: odd} for key in (*decoders._COMMON, *family.fields) for odd in ODD]
    for key in (*RopeScaling.NEEDS["yarn"], *RopeScaling.MAY_HAVE["yarn"]):
        given += [whole | {"rope_scaling": YARN | {key: odd}} for odd in ODD]
    for data in given:
        try:
            config = config_from_dict(data)
        except ModelError as err:
            assert_one_line(err)
            continue
        freq = inverse_frequencies(config.rope_theta, config.rotated, config.rope_scaling)
        assert np.isfinite(rope_table(freq, 4, magnitude=config.rope_scaling.magnitude)).all()


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
        *({"dtype": v} for v in ("int8", 3, ["float32"], np.array(["float32", "x"]))),
        {"seq_len": 4},
        *({"model": "bert-base", "seq_len": v} for v in (0, 513, "4", 1.5, True)),
    ],
    ids=shown,
)
def test_exports(options: dict[str, Any]) -> None:
    name = options.pop("model", "demo-gpt2")
    with pytest.raises(ModelError) as caught:
        export(zoo_config(name), **options)
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


@pytest.mark.parametrize("shard", ["a\0b", "\ud800", "..", 3], ids=shown)
def test_names_of_shards(tmp_path: Path, shard: object) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(ModelError) as caught:
        Checkpoint(tmp_path)
    assert_one_line(caught.value)
