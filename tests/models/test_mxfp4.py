"""A checkpoint of gpt-oss whose experts are in MXFP4, against transformers' decoding of it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from relax_fusion import dequantize
from relax_fusion.models import (
    ConfigError,
    Generator,
    WeightsError,
    config_from_dict,
    export,
    load_config,
    load_weights,
)
from relax_fusion.models.checkpoint import Checkpoint
from relax_fusion.models.mxfp4 import stacked

from ..support import models
from .test_decoders import config_of, make_generator

NAMES, PARTS = (None, "mxfp4"), ("weight", "scale")
STORED = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}


def packed(path: Path) -> tuple[torch.nn.Module, Path]:
    """Write a model with random words for its experts, and return it with what they mean."""
    model = models.decoder("GptOss", intermediate_size=64)
    file = models.save(model, path) / "model.safetensors"
    tensors, rng = load_file(file), np.random.default_rng(1)
    for name in [n for n in tensors if n.endswith("_proj") and ".experts." in n]:
        experts, k, n = tensors.pop(name).shape
        blocks = rng.integers(0, 256, (experts, n, k // 32, 16), "uint8")
        scales = rng.integers(122, 126, (experts, n, k // 32), "uint8")
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        given = map(torch.from_numpy, (blocks, scales))
        with torch.no_grad():
            value = convert_moe_packed_tensors(*given, dtype=torch.float32)
            model.get_parameter(name).copy_(value.reshape(experts, k, n))
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text()) | {"quantization_config": STORED}
    (path / "config.json").write_text(json.dumps(config))
    return model, path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_what_transformers_decodes(tmp_path: Path, dtype: str) -> None:
    model, path = packed(tmp_path)
    exported = export(load_config(path), dtype=dtype)
    arrays = dict(zip((p.name for p in exported.params), load_weights(path, exported), strict=True))
    experts = model.model.layers[1].mlp.experts
    up, bias = (x.detach().numpy() for x in (experts.gate_up_proj, experts.gate_up_proj_bias))
    got = arrays["model.layers.1.mlp.gate_up_proj.weight"].reshape(6, 2, 64, 64)
    for part in range(2):  # gate and up
        wanted = up[:, :, part::2].swapaxes(1, 2)
        np.testing.assert_array_equal(got[:, part].astype("float32"), wanted)
    down = arrays["model.layers.1.mlp.down_proj.weight"].reshape(6, 64, 64)
    wanted = experts.down_proj.detach().numpy().swapaxes(1, 2)
    np.testing.assert_array_equal(down.astype("float32"), wanted)
    if dtype == "float32":
        got = arrays["model.layers.1.mlp.gate_up_bias"]
        np.testing.assert_array_equal(got, np.hstack([bias[:, ::2], bias[:, 1::2]]))


@pytest.mark.slow
def test_logits_match_transformers(tmp_path: Path) -> None:
    model, path = packed(tmp_path)
    models.check_decoder(make_generator(path), model)


def test_words_are_kept(tmp_path: Path) -> None:
    """Only experts are stored in it, and mean what they meant in the checkpoint."""
    _, path = packed(tmp_path)
    dense, stored = (export(load_config(path), dtype="bfloat16", quantization=q) for q in NAMES)
    whole, few = (
        dict(zip((p.name for p in e.params), load_weights(path, e), strict=True))
        for e in (dense, stored)
    )
    for name, array in whole.items():
        if name in few:
            np.testing.assert_array_equal(array, few.pop(name))
            continue
        assert "mlp" in name
        words, scales = (few.pop(name.replace("weight", f"q_{part}")) for part in PARTS)
        assert words.dtype == scales.dtype == "uint8"
        np.testing.assert_array_equal(dequantize(words, scales, "mxfp4"), array)
    assert few == {}
    with pytest.raises(ConfigError, match="for experts alone; the model has none"):
        export(config_from_dict(config_of("Mistral")), quantization="mxfp4")


@pytest.mark.slow
def test_logits_of_words(tmp_path: Path) -> None:
    model, path = packed(tmp_path)
    exported = export(load_config(path), max_seq_len=16, quantization="mxfp4")
    weights = load_weights(path, exported)
    generator = Generator(models.compile_for_test(exported), exported, weights)
    models.check_decoder(generator, model.bfloat16(), "bfloat16")


def test_every_number_and_scale(tmp_path: Path) -> None:
    blocks = np.arange(256, dtype="uint8").reshape(256, 1, 1, 1).repeat(16, 3)
    scales = np.arange(256, dtype="uint8").reshape(256, 1, 1)
    file = tmp_path / "model.safetensors"
    save_file({"w_blocks": blocks, "w_scales": scales}, file)
    got = stacked(Checkpoint(file), "w", (256, 32, 1))[:, :, 0]
    assert np.isnan(got[255]).all()
    with np.errstate(under="ignore"):
        given = map(torch.from_numpy, (blocks[:255], scales[:255]))
        wanted = convert_moe_packed_tensors(*given, dtype=torch.float32).numpy()[:, :, 0]
    np.testing.assert_array_equal(got[:255], wanted)


def test_groups_that_are_not_full(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    blocks, scales = (np.zeros((1, 4, 2, *more), "uint8") for more in ((16,), ()))
    save_file({"w_blocks": blocks, "w_scales": scales}, file)
    with pytest.raises(WeightsError, match=r"^w_blocks has 48 features .*; MXFP4 has 32 in each"):
        stacked(Checkpoint(file), "w", (1, 48, 4))


def test_either_name_of_gpt_oss_will_do() -> None:
    for missing in ("model_type", "architectures"):
        config = config_of("GptOss", intermediate_size=64) | {"quantization_config": STORED}
        config |= {"architectures": ["GptOssForCausalLM"]}
        del config[missing]
        assert config_from_dict(config).experts is not None


@pytest.mark.parametrize(
    "name, stored", [("GptOss", {"quant_method": "awq"}), ("Mixtral", STORED), ("GptOss", [1])]
)
def test_other_stored_weights_are_refused(name: str, stored: object) -> None:
    with pytest.raises(ConfigError, match="quantization_config"):
        config_from_dict(config_of(name) | {"quantization_config": stored})
