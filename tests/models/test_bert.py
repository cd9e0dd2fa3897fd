"""BERT against transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from relax_fusion.models import Encoder, InputError, export, load_config, load_weights

from . import common


def make_encoder(path, dtype="float32", compiler=common.compile_for_test):
    exported = export(load_config(path), dtype=dtype, batch=2)
    return Encoder(compiler(exported.mod), exported, load_weights(path, exported))


def inputs(length):
    """Two sequences with two segments, the second one padded."""
    rng = np.random.default_rng(length)
    ids = rng.integers(0, common.VOCAB, (2, length))
    types = (np.arange(length) >= length // 2).astype(np.int64) * np.ones((2, 1), np.int64)
    mask = np.ones_like(ids)
    mask[1, (length + 1) // 2 :] = 0
    return ids, types, mask


@torch.no_grad()
def torch_output(model, ids, types, mask):
    out = model(
        torch.from_numpy(ids),
        token_type_ids=torch.from_numpy(types),
        attention_mask=torch.from_numpy(mask),
    )
    return out[0].double().numpy()


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A model with a head, compiled once for all tests that only run it."""
    model = common.bert()
    path = common.save(model, tmp_path_factory.mktemp("bert"))
    return model, make_encoder(path, compiler=common.compile_as_users_do)


@pytest.fixture(scope="module")
def headless(tmp_path_factory):
    model = common.bert(transformers.BertModel)
    return model, make_encoder(common.save(model, tmp_path_factory.mktemp("headless")))


@pytest.mark.parametrize("name", ["plain", "headless"])
def test_float32_output_matches_transformers(name, request):
    model, encoder = request.getfixturevalue(name)
    exact_model = common.to_float64(model)
    for length in common.PROMPT_LENGTHS:
        batch = inputs(length)
        peer, exact = torch_output(model, *batch), torch_output(exact_model, *batch)
        common.assert_as_accurate(encoder.encode(*batch), peer, exact, "float32")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_is_as_accurate_as_unfused(dtype, tmp_path):
    model = common.bert().to(getattr(torch, dtype))
    common.save(model, tmp_path)
    tested = make_encoder(tmp_path, dtype)
    others = [] if dtype == "bfloat16" else [common.compile_unfused]
    unfused = [make_encoder(tmp_path, dtype, c) for c in others]
    exact_model, gain = common.to_float64(model), common.half_gain(model.config)
    for length in common.PROMPT_LENGTHS:
        batch = inputs(length)
        got, exact = tested.encode(*batch), torch_output(exact_model, *batch)
        for other in unfused:
            common.assert_as_accurate(got, other.encode(*batch), exact, dtype)
        common.assert_as_accurate(got, torch_output(model, *batch), exact, dtype, gain)


def test_old_norm_names_load_and_the_pooler_is_ignored(tmp_path, recwarn):
    """bert-base-uncased was converted from TensorFlow: gamma and beta, and two unused heads."""
    model = common.bert(transformers.BertForPreTraining)
    file = common.save(model, tmp_path) / "model.safetensors"
    exported = export(load_config(tmp_path))
    expected = load_weights(tmp_path, exported)
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    tensors = load_file(file)
    for new, greek in old.items():
        tensors = {name.replace(new, greek): value for name, value in tensors.items()}
    save_file(tensors, file)
    for a, b in zip(load_weights(tmp_path, exported), expected, strict=True):
        assert (a == b).all()
    assert not recwarn.list


def test_defaults_keep_everything_and_bad_masks_are_refused(plain):
    encoder = plain[1]
    ids = inputs(7)[0]
    zeros, ones = np.zeros_like(ids), np.ones_like(ids)
    assert np.array_equal(encoder.encode(ids), encoder.encode(ids, zeros, ones))
    with pytest.raises(InputError, match="attention_mask has shape"):
        encoder.encode(ids, attention_mask=ones[:, :3])
    with pytest.raises(InputError, match=r"attention_mask must be in 0\.\.1"):
        encoder.encode(ids, attention_mask=ones * 2)
