"""GPT-2 against transformers."""

from __future__ import annotations

import pytest
from safetensors.numpy import load_file, save_file

from relax_fusion.models import Generator, export, load_config, load_weights

from ..support import models


def make_generator(path, dtype="float32", length=models.MAX_SEQ_LEN):
    exported = export(load_config(path), dtype=dtype, max_seq_len=length)
    compiled = models.compile_for_test(exported)
    return Generator(compiled, exported, load_weights(path, exported))


ODD = {"scale_attn_by_inverse_layer_idx": True, "n_inner": 96}


@pytest.mark.parametrize(
    ("changes", "length"),
    [pytest.param({}, models.MAX_SEQ_LEN, marks=pytest.mark.slow), (ODD, models.SHORT_SEQ_LEN)],
    ids=["plain", "odd"],
)
def test_float32_logits_match_transformers(changes, length, tmp_path):
    model = models.gpt2(**changes)
    path = models.save(model, tmp_path)
    models.check_decoder(make_generator(path, length=length), model)


@pytest.mark.slow
def test_half_is_accurate(tmp_path):
    length = models.SHORT_SEQ_LEN
    models.check_half_decoder(make_generator, models.gpt2(), tmp_path, "float16", length)


def test_names_without_prefix_and_mask_buffers_load(tmp_path, recwarn):
    """The published GPT-2 checkpoints were saved from the bare model by an old version."""
    file = models.save(models.gpt2(), tmp_path) / "model.safetensors"
    exported = export(load_config(tmp_path))
    expected = load_weights(tmp_path, exported)
    tensors = {name.removeprefix("transformer."): value for name, value in load_file(file).items()}
    tensors["h.0.attn.bias"] = tensors["ln_f.bias"]
    save_file(tensors, file)
    for a, b in zip(load_weights(tmp_path, exported), expected, strict=True):
        assert (a == b).all()
    assert not recwarn.list
