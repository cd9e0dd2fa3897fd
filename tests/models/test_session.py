"""What a session says about weights and tokens that do not fit, without running a model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm

from relax_fusion.models import (
    Encoder,
    Generator,
    InputError,
    NotFiniteWarning,
    config_from_dict,
    export,
    random_weights,
    runner,
)

SIZES = {"vocab_size": 8, "n_embd": 4, "n_layer": 1, "n_head": 1, "n_positions": 8}
EXPORTED = export(config_from_dict({"model_type": "gpt2", **SIZES}))
WEIGHTS = random_weights(EXPORTED)


def generator(monkeypatch: pytest.MonkeyPatch, logit: float = 0.0, **options: Any) -> Generator:
    """A session of a model whose logits are all `logit`."""
    logits = tvm.runtime.tensor(np.full((1, 1, 8), logit, "float32"))
    functions = dict.fromkeys(("prefill", "decode"), lambda *_: (logits, None))
    monkeypatch.setattr(runner.relax, "VirtualMachine", lambda *_: functions)
    return Generator(None, EXPORTED, options.pop("weights", WEIGHTS), **options)


def test_an_encoder_of_one_length_is_given_the_same_memory(monkeypatch) -> None:
    sizes = {"vocab_size": 8, "hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = {"model_type": "bert", **sizes, "intermediate_size": 4, "max_position_embeddings": 8}
    exported, given = export(config_from_dict(config), seq_len=3), []

    def encode(*args: Any) -> tvm.runtime.Tensor:
        given.append([(x.numpy().tolist(), np.from_dlpack(x).ctypes.data) for x in args[:3]])
        return args[0]

    monkeypatch.setattr(runner.relax, "VirtualMachine", lambda *_: {"encode": encode})
    encoder = Encoder(None, exported, random_weights(exported))
    for ids in ([1, 2, 3], [4, 5, 6]):
        assert encoder.encode(ids).tolist() == [ids]
    first, second = ([address for _, address in call] for call in given)
    assert first == second
    with pytest.raises(InputError, match="was exported for 3 tokens, got 2"):
        encoder.encode([1, 2])


@pytest.mark.parametrize("logit", [np.nan, np.inf, -np.inf])
def test_logits_that_are_no_numbers_warn(monkeypatch, logit: float) -> None:
    with pytest.warns(NotFiniteWarning, match="logits hold NaN or infinities"):
        generator(monkeypatch, logit).generate([1, 2], 1)


@pytest.mark.parametrize(
    "weights, says",
    [
        (WEIGHTS[:-1], f"takes {len(WEIGHTS)} weights, got {len(WEIGHTS) - 1}"),
        ([*WEIGHTS, WEIGHTS[0]], "got more"),
        ([3, *WEIGHTS[1:]], "must be a NumPy array"),
        ([WEIGHTS[0].astype("float16"), *WEIGHTS[1:]], "must be float32"),
    ],
)
def test_weights_of_another_model(monkeypatch, weights: list[Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        generator(monkeypatch, weights=weights)


@pytest.mark.parametrize(
    "options, says",
    [
        ({"compiled": "lib.so"}, "compiled is 'lib.so'"),
        ({"exported": "out"}, "exported is 'out'"),
        ({"weights": None}, "weights is None"),
        ({"device": "cpu"}, "device is 'cpu'"),
        ({"device": tvm.runtime.device("ext_dev")}, "does not find"),
    ],
)
@pytest.mark.parametrize("kind", [Generator, Encoder])
def test_what_is_no_model(monkeypatch, kind, options: dict[str, Any], says: str) -> None:
    bert = {"model_type": "bert", "vocab_size": 8, "hidden_size": 4, "intermediate_size": 4}
    config = config_from_dict(bert | {"num_hidden_layers": 1, "num_attention_heads": 1})
    exported = EXPORTED if kind is Generator else export(config)
    if "compiled" not in options:
        functions = dict.fromkeys(exported.functions, print)
        monkeypatch.setattr(runner.relax, "VirtualMachine", lambda *_: functions)
    given = {"compiled": None, "exported": exported, "weights": []} | options
    with pytest.raises(InputError, match=says):
        kind(**given)


def test_a_library_of_another_model(monkeypatch) -> None:
    monkeypatch.setattr(runner.relax, "VirtualMachine", lambda *_: {"prefill": print})
    with pytest.raises(InputError, match="no function 'decode'"):
        Generator(None, EXPORTED, WEIGHTS)


def test_what_is_refused_leaves_the_context(monkeypatch) -> None:
    made = generator(monkeypatch)
    made.prefill([1, 2])
    with pytest.raises(InputError):
        made.generate([1], 100)
    assert made.length == 2


def test_integers_of_numpy(monkeypatch) -> None:
    assert generator(monkeypatch, batch=np.int64(1)).batch == 1
    made = export(EXPORTED.config, max_seq_len=np.int32(4), batch=np.int8(2))
    assert repr((made.max_seq_len, made.batch)) == "(4, 2)"


@pytest.mark.parametrize("batch", [0, -1, 1.0, "1", True, 2])
def test_batches(monkeypatch, batch: object) -> None:
    with pytest.raises(InputError, match="batch"):
        generator(monkeypatch, batch=batch)


@pytest.mark.parametrize(
    "ids",
    [[], [[]], [8], [-1], [10**20], [1.0], ["a"], [[1], [2, 3]], None, {}, [[[1]]], [[1], [2]]],
)
def test_tokens(monkeypatch, ids: object) -> None:
    with pytest.raises(InputError):
        generator(monkeypatch).prefill(ids)
    with pytest.raises(InputError):
        generator(monkeypatch).generate(ids, 1)


@pytest.mark.parametrize("count", [0, -1, 1.5, "1", None])
def test_numbers_of_new_tokens(monkeypatch, count: object) -> None:
    with pytest.raises(InputError, match="max_new_tokens"):
        generator(monkeypatch).generate([1], count)
