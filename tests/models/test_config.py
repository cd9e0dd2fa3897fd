"""Configurations: both spellings of each field, the bundled ones, and refusals."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from relax_fusion.models import (
    ConfigError,
    LlamaConfig,
    ModelError,
    RopeScaling,
    UnknownArchitectureError,
    UnsupportedFeatureError,
    config_from_dict,
    load_config,
    zoo_config,
)
from relax_fusion.models.rope import inverse_frequencies, rope_table
from relax_fusion.models.zoo import CONFIGS

from ..support import models

LLAMA = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512}
SCALING = {key: value for key, value in models.LLAMA3_ROPE.items() if key != "rope_theta"}


def test_old_and_new_rope_spellings_agree():
    old = config_from_dict(LLAMA | {"rope_theta": 500000.0, "rope_scaling": SCALING})
    new = config_from_dict(LLAMA | {"rope_parameters": models.LLAMA3_ROPE})
    assert old == new
    assert new.rope_theta == 500000.0 and new.rope_scaling.kind == "llama3"
    linear = config_from_dict(LLAMA | {"rope_scaling": {"type": "linear", "factor": 2}})
    assert linear.rope_scaling == RopeScaling("linear", factor=2.0)


def test_defaults_of_a_short_llama_config():
    config = config_from_dict(LLAMA | {"rope_scaling": None, "num_key_value_heads": None})
    assert (config.num_kv_heads, config.head_dim, config.rope_theta) == (4, 16, 10000.0)
    assert config.rope_scaling == RopeScaling()


@pytest.mark.parametrize("name", CONFIGS)
def test_bundled_configs_are_valid(name):
    config = zoo_config(name)
    assert config.num_heads * config.head_dim >= config.hidden_size


def test_bundled_sizes():
    config = zoo_config("llama-3.1-8b")
    assert (config.num_kv_heads, config.head_dim, config.num_layers) == (8, 128, 32)
    with pytest.raises(ConfigError, match="no bundled config is called 'llama-9'"):
        zoo_config("llama-9")


def test_architectures_decide_before_model_type(tmp_path):
    transformers.BertModel(models.bert().config).config.save_pretrained(tmp_path)
    assert load_config(tmp_path).masked_lm
    data = json.loads((tmp_path / "config.json").read_text())
    assert not config_from_dict(data | {"architectures": ["BertModel"]}).masked_lm


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, UnknownArchitectureError, "Mamba.*LlamaForC"),
        ({"model_type": "mamba"}, UnknownArchitectureError, "'mamba'.*llama, gpt2, bert"),
        ({"model_type": None}, UnknownArchitectureError, "None"),
        ({"architectures": "LlamaForCausalLM"}, ConfigError, "must be a list of names"),
        ({"hidden_size": None}, ConfigError, "the field 'hidden_size' is missing"),
        ({"hidden_size": "wide"}, ConfigError, "hidden_size is 'wide'; must be a valid integer"),
        ({"hidden_size": [64]}, ConfigError, r"hidden_size is \[64\]; must be a valid integer"),
        ({"hidden_size": 32.5}, ConfigError, "hidden_size is 32.5; must be a valid integer"),
        ({"vocab_size": 10**20}, ConfigError, "must be less than or equal to 2147483647"),
        ({"vocab_size": True}, ConfigError, "vocab_size is True"),
        ({"rms_norm_eps": float("nan")}, ConfigError, "rms_norm_eps is nan; must be a finite"),
        ({"rope_theta": "x"}, ConfigError, "rope_theta is 'x'; must be a valid number"),
        ({"rope_theta": 0}, ConfigError, "rope_theta is 0; must be greater than 1"),
        ({"rope_scaling": [1]}, ConfigError, r"rope_scaling is \[1\]; must be a mapping"),
        ({"eos_token_id": "x"}, ConfigError, r"eos_token_id\[0\] is 'x'; must be a valid integer"),
        ({"eos_token_id": [[1]]}, ConfigError, r"eos_token_id\[0\] is \[1\]"),
        ({"tie_word_embeddings": "no"}, ConfigError, "tie_word_embeddings is 'no'"),
        ({"partial_rotary_factor": 0.5}, UnsupportedFeatureError, "partial_rotary_factor is 0.5"),
        ({"quantization_config": {"bits": 4}}, UnsupportedFeatureError, "quantization_config"),
        (
            {"rope_scaling": SCALING | {"high_freq_factor": 1.0}},
            ConfigError,
            "high_freq_factor is 1.0; must be greater than low_freq_factor 1.0",
        ),
        ({"num_hidden_layers": 0}, ConfigError, "num_hidden_layers is 0; must be greater than or"),
        ({"num_key_value_heads": 3}, ConfigError, "4 is not divisible by key/value heads 3"),
        ({"hidden_act": "swoosh"}, ConfigError, "'swoosh'.*silu"),
        (
            {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}},
            UnsupportedFeatureError,
            "'longrope' is not supported; known types: default, linear, llama3, yarn",
        ),
        ({"rope_scaling": YARN | {"beta_fast": 0.5}}, ConfigError, "beta_fast is 0.5; must be"),
        ({"rope_scaling": {"rope_type": "llama3"}}, ConfigError, "needs the field 'factor'"),
        (
            {"rope_scaling": YARN | {"mrope_section": [16, 24, 24]}},
            UnsupportedFeatureError,
            r"rope scaling 'yarn' with mrope_section \[16, 24, 24\] is not supported",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "factor": 8.0}},
            UnsupportedFeatureError,
            "rope scaling 'default' with factor 8.0 is not supported",
        ),
    ],
)
def test_refusals_say_what_is_wrong(changes, error, message):
    with pytest.raises(error, match=message) as caught:
        config_from_dict(LLAMA | changes)
    assert isinstance(caught.value, ModelError)


def test_a_config_made_by_hand_is_checked_too():
    with pytest.raises(ConfigError, match=r"LLaMA config: num_layers is 1\.5"):
        replace(config_from_dict(LLAMA), num_layers=1.5)
    assert config_from_dict(LLAMA | {"eos_token_id": [7, 9]}).end_tokens == (7, 9)
    assert config_from_dict(LLAMA | {"eos_token_id": 7}).end_tokens == (7,)


@pytest.mark.parametrize(
    "changes",
    [
        {"is_decoder": True},
        {"position_embedding_type": "relative_key"},
        {"tie_word_embeddings": False},
    ],
)
def test_bert_variants_that_are_not_built(changes):
    with pytest.raises(UnsupportedFeatureError, match="not supported"):
        config_from_dict(CONFIGS["bert-base"] | changes)


@pytest.mark.parametrize("text", ["", "{", "[1]", "\udcff"])
def test_unreadable_config_files(tmp_path, text):
    (tmp_path / "config.json").write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_config(tmp_path)


def test_missing_config_file(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        load_config(tmp_path)


@pytest.mark.parametrize("scaling", [None, SCALING, {"rope_type": "linear", "factor": 4.0}])
def test_frequencies_match_the_definition(scaling):
    config = LlamaConfig.from_dict(LLAMA | {"rope_theta": 500000.0, "rope_scaling": scaling})
    rope = {"rope_theta": 500000.0, "rope_type": "default"} | (scaling or {})
    reference = transformers.LlamaConfig(head_dim=64, rope_parameters=rope)
    freq = inverse_frequencies(config.rope_theta, 64, config.rope_scaling)
    expected = models.Float64Rope(reference).freq.numpy()
    # Both are float64 and differ by the order of a few operations.
    np.testing.assert_allclose(freq, expected, rtol=16 * np.finfo(np.float64).eps)
    cos, sin = rope_table(freq, 5), rope_table(freq, 5, np.sin)
    for table in (cos, sin):
        assert table.shape == (5, 64) and table.dtype == np.float32
        assert (table[:, :32] == table[:, 32:]).all()
    assert (cos[0] == 1).all() and (sin[0] == 0).all()
    np.testing.assert_allclose(sin[1, :32], np.sin(freq), rtol=2 * np.finfo(np.float32).eps)


@pytest.mark.parametrize(
    "changes",
    [
        {"truncate": False},
        {"beta_fast": 16, "beta_slow": 2.5, "mscale": 0.7, "mscale_all_dim": 1.2},
        {"factor": 1.0},
        {"attention_factor": 1.5, "mscale": 0.7},
    ],
)
def test_yarn_is_that_of_transformers(changes):
    scaling = {"rope_theta": 500000.0, **YARN, **changes}
    config = LlamaConfig.from_dict(LLAMA | {"rope_parameters": scaling})
    reference = transformers.LlamaConfig(head_dim=64, rope_parameters=scaling)
    expected, magnitude = ROPE_INIT_FUNCTIONS["yarn"](reference, "cpu")
    freq = inverse_frequencies(config.rope_theta, 64, config.rope_scaling)
    np.testing.assert_allclose(freq, expected.numpy(), rtol=1e-5)  # theirs are float32
    assert config.rope_scaling.magnitude == pytest.approx(magnitude)
    assert rope_table(freq, 1, magnitude=magnitude)[0] == pytest.approx(magnitude)


def test_the_theta_of_rope_parameters_comes_first():
    """As transformers reads a file that has both."""
    both = LLAMA | {"rope_theta": 7.0, "rope_parameters": {"rope_type": "default", "rope_theta": 5}}
    assert config_from_dict(both).rope_theta == 5.0
    reference = transformers.LlamaConfig(**both)
    assert reference.rope_parameters["rope_theta"] == 5
