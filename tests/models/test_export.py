"""What an exported module looks like, before any weight is read."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tvm
from tvm import relax

from relax_fusion.models import ConfigError, export, zoo_config


def operators(func: relax.Function) -> list[str]:
    """Names of the operators of a function, in order."""
    names: list[str] = []

    def visit(expr):
        if isinstance(expr, relax.Call) and isinstance(expr.op, tvm.ir.Op):
            names.append(expr.op.name)

    relax.analysis.post_order_visit(func, visit)
    return names


@pytest.mark.parametrize("name", ["demo-llama", "demo-gpt2"])
def test_decoder_functions(name):
    config = zoo_config(name)
    exported = export(config, dtype="float16", max_seq_len=256)
    assert exported.functions == ("prefill", "decode")
    cache = (1, 256, config.num_kv_heads, config.head_dim)
    assert exported.cache_shapes == (cache,) * 4
    for function in exported.functions:
        func = exported.mod[function]
        steps = function == "decode"
        assert [p.name.split("_1")[0] for p in func.params] == [
            "input_ids",
            *["length"] * steps,
            "total_len",
            "caches",
            "packed_params",
        ]
        assert len(func.params[-1].ty.fields) == len(exported.params)
        found = operators(func)
        assert found.count("relax.call_tir_inplace") == config.num_layers + steps
        assert found.count("relax.nn.attention") == config.num_layers * (not steps)
        assert found.count("relax.nn.softmax") == config.num_layers * steps


def test_the_chains_that_passes_match_are_plain_operators():
    exported = export(zoo_config("demo-llama"), max_seq_len=64)
    found = operators(exported.mod["decode"])
    for name, count in {
        "relax.take": 1,  # of the embedding
        "relax.call_tir": 1,  # the rows of both tables of angles
        "relax.nn.rms_norm": 5,
        "relax.matmul": 9 + 2 * 2,  # two of each layer's attention
        "relax.permute_dims": 9 + 2 * 4,
        "relax.split": 2 + 4,  # gate and up; of each layer's heads: those to rotate, their halves
        "relax.negative": 2,
        "relax.nn.silu": 2,
        "relax.multiply": 2 + 4 + 2,
        "relax.add": 4 + 2,
    }.items():
        assert found.count(name) == count, name


def test_encoder_function():
    exported = export(zoo_config("bert-base"), batch="batch_size")
    assert exported.functions == ("encode",) and exported.cache_shapes == ()
    found = operators(exported.mod["encode"])
    assert found.count("relax.nn.attention_bias") == 12
    assert found.count("relax.nn.gelu") == 13


def test_parameter_shapes_of_llama_8b():
    config = zoo_config("llama-3.1-8b")
    assert config.num_layers == 32
    exported = export(replace(config, num_layers=2), dtype="float16", max_seq_len=4096)
    shapes = {param.name: param.shape for param in exported.params}
    assert shapes["model.layers.1.self_attn.qkv_proj.weight"] == (6144, 4096)
    assert shapes["model.layers.1.mlp.gate_up_proj.weight"] == (28672, 4096)
    assert shapes["model.rope_cos"] == shapes["model.rope_sin"] == (4096, 128)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("demo-llama", {"dtype": "int8"}, "dtype 'int8' is not supported"),
        ("demo-llama", {"max_seq_len": 0}, "max_seq_len is 0; must be an integer between 1 and"),
        (
            "demo-gpt2",
            {"max_seq_len": 4096},
            "max_seq_len is 4096; must be an integer between 1 and 1024",
        ),
        ("demo-gpt2", {"batch": 0}, "batch is 0; must be an integer between 1 and"),
    ],
)
def test_refusals(name, options, message):
    with pytest.raises(ConfigError, match=message):
        export(zoo_config(name), **options)
