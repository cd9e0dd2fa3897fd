"""LLaMA against transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from relax_fusion.models import (
    ContextOverflowError,
    Encoder,
    Generator,
    InputError,
    ModelError,
    export,
    load_config,
    load_weights,
    random_weights,
)

from ..support import models
from ..support.accuracy import assert_accurate

VARIANTS = {
    "gqa-llama3-rope": {},
    "tied-default-rope": {
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "biases-linear-rope": {
        "attention_bias": True,
        "mlp_bias": True,
        "num_key_value_heads": 4,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    },
}


def make_generator(
    path, dtype="float32", length=models.MAX_SEQ_LEN, compiler=models.compile_for_test
):
    exported = export(load_config(path), dtype=dtype, max_seq_len=length)
    return Generator(compiler(exported), exported, load_weights(path, exported))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The first variant, compiled once for all tests that only run it."""
    model, compiled = models.llama(), []

    def compiler(exported):
        compiled.append(models.compile_as_users_do(exported.mod))
        return compiled[0]

    path = models.save(model, tmp_path_factory.mktemp("llama"))
    return model, make_generator(path, compiler=compiler), compiled[0]


def test_float32_logits_match_transformers(plain):
    models.check_decoder(plain[1], plain[0])


@pytest.mark.slow
@pytest.mark.parametrize("variant", list(VARIANTS)[1:])
def test_variants_match_transformers(variant, tmp_path):
    model = models.llama(**VARIANTS[variant])
    path = models.save(model, tmp_path)
    models.check_decoder(make_generator(path, length=models.SHORT_SEQ_LEN), model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "length"), [("float16", models.SHORT_SEQ_LEN), ("bfloat16", models.MAX_SEQ_LEN)]
)
def test_half_is_accurate(dtype, length, tmp_path):
    models.check_half_decoder(make_generator, models.llama(), tmp_path, dtype, length)


def test_prefill_in_pieces_equals_one_prefill(plain):
    model, generator, _ = plain
    tokens = models.prompt(33)[:33]
    generator.reset()
    generator.prefill(tokens[:20])
    got = generator.prefill(tokens[20:])
    both = models.to_float64(model), models.nudge(model, "float32")
    exact, moved = (models.torch_logits(m, tokens, 33) for m in both)
    assert_accurate(got, exact, moved, "float32", models.longest_sum(model.config))


def test_generate_is_greedy_and_starts_afresh(plain):
    model, generator, _ = plain
    ids = models.prompt(7)[:7]
    new = generator.generate(ids, 6)
    assert new.shape == (1, 6) and new.dtype == np.int32
    assert np.array_equal(new, generator.generate(ids, 6))
    expected = model.generate(torch.from_numpy(ids)[None], max_new_tokens=6, do_sample=False)
    assert np.array_equal(new[0], expected[0, 7:].numpy())


@pytest.mark.slow
def test_symbolic_batch_gives_each_row_its_own_answer(tmp_path):
    model = models.llama()
    config = load_config(models.save(model, tmp_path))
    exported = export(config, max_seq_len=models.SHORT_SEQ_LEN, batch="batch_size")
    compiled = models.compile_for_test(exported, batch_size=4)
    generator = Generator(compiled, exported, load_weights(tmp_path, exported), batch=3)
    ids = np.random.default_rng(1).integers(0, models.VOCAB, (3, 9))
    got = [generator.prefill(ids[:, :8]), generator.decode(ids[:, 8])]
    both = models.to_float64(model), models.nudge(model, "float32")
    terms = models.longest_sum(model.config)
    for row in range(3):
        exact, moved = (models.torch_logits(m, ids[row], 8) for m in both)
        assert_accurate(np.stack([g[row] for g in got]), exact, moved, "float32", terms)


def test_context_overflow_names_the_limit(plain):
    generator = plain[1]
    generator.reset()
    generator.prefill(models.prompt(150))
    caches = [cache.numpy() for cache in generator._caches]
    with pytest.raises(ContextOverflowError, match=r"161 tokens .* max_seq_len=160"):
        generator.decode(1)
    np.testing.assert_array_equal([cache.numpy() for cache in generator._caches], caches)
    assert generator.length == 160
    with pytest.raises(ContextOverflowError, match="165 tokens"):
        generator.generate(models.prompt(1), 155)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([models.VOCAB], "must be in 0..159"),
        ([-1], "must be in 0..159"),
        ([], "not empty"),
        ([0.5], "must be integers"),
        ([[1], [2]], "batch 1, got 2"),
    ],
)
def test_bad_tokens_are_refused(plain, ids, message):
    plain[1].reset()
    with pytest.raises(InputError, match=message):
        plain[1].prefill(ids)


def test_a_decoder_is_not_an_encoder(plain):
    with pytest.raises(ModelError, match="run it with Generator"):
        Encoder(plain[2], plain[1].exported, [])


def test_weights_of_the_wrong_shape_are_refused(plain):
    exported = plain[1].exported
    weights = random_weights(exported)
    weights[0] = weights[0][:-1]
    with pytest.raises(InputError, match=r"model.embed_tokens.weight"):
        Generator(plain[2], exported, weights)
