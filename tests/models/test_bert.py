"""BERT against transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from relax_fusion.models import Encoder, InputError, export, load_config, load_weights

from ..support import models
from ..support.accuracy import assert_accurate


def make_encoder(path, dtype="float32", length=models.MAX_SEQ_LEN, only=None):
    config = load_config(path)
    exported = export(config, dtype=dtype, max_seq_len=length, batch=2, seq_len=only)
    return Encoder(models.compile_for_test(exported), exported, load_weights(path, exported))


def inputs(length):
    """Two sequences with two segments, the second one padded."""
    rng = np.random.default_rng(length)
    ids = rng.integers(0, models.VOCAB, (2, length))
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
    model = models.bert()
    path = models.save(model, tmp_path_factory.mktemp("bert"))
    return model, make_encoder(path)


@pytest.fixture(scope="module")
def headless(tmp_path_factory):
    model = models.bert(transformers.BertModel)
    path = models.save(model, tmp_path_factory.mktemp("headless"))
    return model, make_encoder(path, length=models.SHORT_SEQ_LEN)


def check(encoder: Encoder, model: transformers.PreTrainedModel, dtype: str) -> None:
    """Compare every length that fits, or the only one, with float64."""
    exact_model, moved_model = models.to_float64(model), models.nudge(model, dtype)
    terms = models.longest_sum(model.config) if dtype == "float32" else 0
    short, only = encoder.exported.max_seq_len < models.MAX_SEQ_LEN, encoder.exported.seq_len
    lengths = models.SHORT_LENGTHS if short else models.PROMPT_LENGTHS
    for length in lengths if only is None else (only,):
        batch = inputs(length)
        exact, moved = (torch_output(m, *batch) for m in (exact_model, moved_model))
        assert_accurate(encoder.encode(*batch), exact, moved, dtype, terms)


@pytest.mark.parametrize("name", ["headless", pytest.param("plain", marks=pytest.mark.slow)])
def test_float32_output_matches_transformers(name, request):
    model, encoder = request.getfixturevalue(name)
    check(encoder, model, "float32")


def test_an_encoder_of_one_length_matches_transformers(tmp_path):
    model = models.bert()
    path = models.save(model, tmp_path)
    check(make_encoder(path, length=models.SHORT_SEQ_LEN, only=6), model, "float32")


@pytest.mark.slow
def test_half_is_accurate(tmp_path):
    model = models.bert().to(torch.bfloat16)
    path = models.save(model, tmp_path)
    check(make_encoder(path, "bfloat16", models.SHORT_SEQ_LEN), model, "bfloat16")


def test_old_norm_names_load_and_the_pooler_is_ignored(tmp_path, recwarn):
    """bert-base-uncased was converted from TensorFlow: gamma and beta, and two unused heads."""
    model = models.bert(transformers.BertForPreTraining)
    file = models.save(model, tmp_path) / "model.safetensors"
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


def test_defaults_keep_everything_and_bad_masks_are_refused(headless):
    encoder = headless[1]
    ids = inputs(7)[0]
    zeros, ones = np.zeros_like(ids), np.ones_like(ids)
    assert np.array_equal(encoder.encode(ids), encoder.encode(ids, zeros, ones))
    with pytest.raises(InputError, match="attention_mask has shape"):
        encoder.encode(ids, attention_mask=ones[:, :3])
    with pytest.raises(InputError, match=r"attention_mask must be in 0\.\.1"):
        encoder.encode(ids, attention_mask=ones * 2)
