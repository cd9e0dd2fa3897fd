"""Models of transformers, unmodified, by ``torch.compile(backend="relax_fusion")`` on the CPU.

All but two are marked slow: each takes about eight seconds of compilation.
"""

from __future__ import annotations

import logging

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import relax_fusion.torch as door  # noqa: E402

from ..support.slow import quick_if  # noqa: E402
from .small_models import DECODERS, ENCODERS, t5, whisper  # noqa: E402

QUICK = ("bert", "llama")


@pytest.fixture(autouse=True)
def fresh(quick_to_compile, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("RELAX_FUSION_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    caplog.set_level(logging.INFO, "relax_fusion.torch")
    yield
    assert not torch._dynamo.utils.counters["graph_break"]
    torch._dynamo.reset()


@pytest.mark.parametrize("name", quick_if(QUICK.__contains__, ENCODERS))
def test_an_encoder_is_one_piece_and_agrees(name, caplog):
    model = ENCODERS[name].make().eval()
    fast = torch.compile(model, backend=door.relax_fusion, options={"strict": True})
    with torch.inference_mode():
        inputs = ENCODERS[name].inputs()
        expected, found = model(**inputs), fast(**inputs)
    assert caplog.text.count("1 piece compiled") == 1
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(found[key], value, atol=1e-5, rtol=1e-4)


def generated(model, inputs, fast=None):
    """Return greedy ids, and the logits that they were chosen by."""
    kwargs = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": "static"}
    kwargs |= {"disable_compile": True, "output_logits": True, "return_dict_in_generate": True}
    if fast is not None:
        model.forward = fast
    with torch.inference_mode():
        found = model.generate(**inputs, **kwargs)
    return found.sequences, torch.stack(found.logits)


@pytest.mark.parametrize("name", quick_if(QUICK.__contains__, [*DECODERS, "t5", "whisper"]))
def test_a_decoder_with_a_static_cache_chooses_the_same(name, caplog):
    make = {**DECODERS, "t5": t5, "whisper": whisper}[name]
    model, inputs = make().eval(), {"input_ids": torch.randint(3, 96, (2, 5))}
    if name == "whisper":
        inputs = {"input_features": torch.randn(1, 8, 32)}
    ids, logits = generated(model, inputs)
    fast = torch.compile(model.forward, backend=door.relax_fusion, options={"strict": True})
    found, theirs = generated(model, inputs, fast)
    torch.testing.assert_close(theirs, logits, atol=1e-4, rtol=1e-4)
    assert torch.equal(found, ids)
    assert caplog.text.count("1 piece compiled") == 2  # of the prompt, and of a token
