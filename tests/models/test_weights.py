"""The loader: merging, converting, sharding, and what it says about a damaged checkpoint."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_torch

from relax_fusion.models import (
    CheckpointFileError,
    MissingTensorError,
    NotFiniteWarning,
    TensorShapeError,
    UnusedTensorsWarning,
    WeightsError,
    export,
    load_config,
    load_weights,
    random_weights,
)

from ..support import models

DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def saved(tmp_path):
    """A LLaMA directory, its model, and its export."""
    model = models.llama()
    models.save(model, tmp_path)
    return tmp_path, model, export(load_config(tmp_path), max_seq_len=32)


def by_name(exported, arrays):
    return {param.name: value for param, value in zip(exported.params, arrays, strict=True)}


def test_projections_are_merged_in_order(saved):
    path, model, exported = saved
    state = {name: value.numpy() for name, value in model.state_dict().items()}
    got = by_name(exported, load_weights(path, exported))
    attn, mlp = "model.layers.1.self_attn.", "model.layers.1.mlp."
    qkv = [state[f"{attn}{part}_proj.weight"] for part in "qkv"]
    assert np.array_equal(got[f"{attn}qkv_proj.weight"], np.concatenate(qkv))
    gate_up = [state[f"{mlp}{part}_proj.weight"] for part in ("gate", "up")]
    assert np.array_equal(got[f"{mlp}gate_up_proj.weight"], np.concatenate(gate_up))
    for param in exported.params:
        assert got[param.name].shape == param.shape and got[param.name].dtype == param.dtype


def test_shards_give_the_same_arrays_as_one_file(saved, tmp_path_factory):
    path, model, exported = saved
    parts = models.save(model, tmp_path_factory.mktemp("shards"), max_shard_size="100KB")
    assert len(list(parts.glob("*.safetensors"))) > 2
    for a, b in zip(load_weights(parts, exported), load_weights(path, exported), strict=True):
        assert np.array_equal(a, b)


def test_one_file_can_be_named(saved):
    path, _, exported = saved
    assert len(load_weights(path / "model.safetensors", exported)) == len(exported.params)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_bfloat16_is_converted(saved, dtype):
    path, model, _ = saved
    models.save(model.bfloat16(), path)
    exported = export(load_config(path), dtype=dtype, max_seq_len=32)
    got = by_name(exported, load_weights(path, exported))[DOWN]
    expected = model.state_dict()[DOWN].to(getattr(torch, dtype)).float().numpy()
    assert got.dtype == dtype and np.array_equal(got.astype("float32"), expected)


def test_values_beyond_float16_are_refused(saved):
    path = saved[0]
    rewrite(path, lambda tensors: tensors[DOWN].__setitem__((0, 0), 1e6))
    exported = export(load_config(path), dtype="float16", max_seq_len=32)
    with pytest.raises(WeightsError, match=f"{DOWN}.*range of float16.*float32"):
        load_weights(path, exported)


def test_values_beyond_float32_are_refused_without_a_way_out(saved):
    path, model, exported = saved
    state = {name: value.clone() for name, value in model.state_dict().items()}
    state[DOWN] = state[DOWN].double() * 1e300
    save_torch(state, path / "model.safetensors")
    with pytest.raises(WeightsError, match=f"{DOWN}.*beyond the range of float32$"):
        load_weights(path, exported)


def rewrite(path, change):
    file = path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def test_missing_tensor_is_named(saved):
    path, _, exported = saved
    rewrite(path, lambda tensors: tensors.pop(DOWN))
    with pytest.raises(MissingTensorError, match=f"{DOWN}.*{path.name}"):
        load_weights(path, exported)


@pytest.mark.parametrize("name", [DOWN, "model.layers.0.self_attn.k_proj.weight"])
def test_wrong_shape_names_both(saved, name):
    path, _, exported = saved
    rewrite(path, lambda tensors: tensors.__setitem__(name, tensors[name][:-2]))
    with pytest.raises(TensorShapeError, match=rf"{name}.*\[62, \d+\].*\[64, \d+\]"):
        load_weights(path, exported)


def test_unknown_tensors_warn_and_known_ones_do_not(saved):
    path, _, exported = saved
    extra = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(path, lambda tensors: tensors.update({extra: np.ones(16, np.float32)}))
    load_weights(path, exported)
    rewrite(path, lambda tensors: tensors.update({"adapter.weight": np.ones(1, np.float32)}))
    with pytest.warns(UnusedTensorsWarning, match=r"1 tensor\(s\).*adapter.weight"):
        load_weights(path, exported)


@pytest.mark.parametrize("keep", [0, 4, 100, -1000])
def test_truncated_file_is_named(saved, keep):
    path, _, exported = saved
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointFileError, match=r"model\.safetensors is truncated"):
        load_weights(path, exported)


def test_missing_file_missing_shard_and_bad_index(saved, tmp_path_factory):
    path, model, exported = saved
    (path / "model.safetensors").unlink()
    with pytest.raises(CheckpointFileError, match=r"model\.safetensors does not exist"):
        load_weights(path, exported)
    parts = models.save(model, tmp_path_factory.mktemp("shards"), max_shard_size="100KB")
    shard = sorted(parts.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointFileError, match=f"{shard.name} does not exist"):
        load_weights(parts, exported)
    for text in (
        *("{", "[]", "[" * 99999, '{"weight_map": [1]}', '{"weight_map": {"a": 1}}'),
        '{"weight_map": {"a": "../model.safetensors"}}',
    ):
        (parts / "model.safetensors.index.json").write_text(text)
        with pytest.raises(CheckpointFileError, match=r"index\.json is not a safetensors index"):
            load_weights(parts, exported)


def test_index_that_names_the_wrong_shard(saved, tmp_path_factory):
    _, model, exported = saved
    parts = models.save(model, tmp_path_factory.mktemp("shards"), max_shard_size="100KB")
    index = parts / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    shards = sorted(set(data["weight_map"].values()))
    data["weight_map"][DOWN] = next(s for s in shards if s != data["weight_map"][DOWN])
    index.write_text(json.dumps(data))
    with pytest.raises(MissingTensorError, match=f"says that '{DOWN}' is in"):
        load_weights(parts, exported)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_no_numbers_warn(saved, value):
    path, _, exported = saved
    rewrite(path, lambda tensors: tensors[DOWN].__setitem__((0, 0), value))
    with pytest.warns(NotFiniteWarning, match=rf"NaN or infinities in 1 weight\(s\): {DOWN}"):
        load_weights(path, exported)


def test_quantised_tensors_are_refused(saved):
    path, model, exported = saved
    state = {name: value.clone() for name, value in model.state_dict().items()}
    state[DOWN] = state[DOWN].to(torch.int8)
    save_torch(state, path / "model.safetensors")
    with pytest.raises(WeightsError, match=f"{DOWN}.* as I8, which is not supported"):
        load_weights(path, exported)


def test_random_weights_follow_the_specification(saved):
    exported = saved[2]
    first, again, other = (random_weights(exported, seed) for seed in (3, 3, 4))
    named = by_name(exported, first)
    assert (named["model.norm.weight"] == 1).all()
    assert 0.018 < named["lm_head.weight"].std() < 0.022
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not np.array_equal(first[0], other[0])
    for param, value in zip(exported.params, first, strict=True):
        assert value.shape == param.shape and value.dtype == param.dtype
