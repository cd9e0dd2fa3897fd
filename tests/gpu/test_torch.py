"""``torch.compile(backend="relax_fusion")`` on a GPU."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import relax_fusion.torch as door  # noqa: E402
from tests.torch_door.small_models import DECODERS, ENCODERS, t5, whisper  # noqa: E402


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    monkeypatch.setenv("RELAX_FUSION_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    torch.manual_seed(0)


def on_gpu(tensors):
    half = {k: v.half() if v.is_floating_point() else v for k, v in tensors.items()}
    return {k: v.cuda() for k, v in half.items()}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_agrees_launched_captured_and_replayed(name):
    model = ENCODERS[name].make().eval().cuda().half()
    fast = torch.compile(model, backend=door.relax_fusion, options={"strict": True})
    with torch.inference_mode():
        for _ in range(4):
            inputs = on_gpu(ENCODERS[name].inputs())
            expected, found = model(**inputs), fast(**inputs)
            for key, value in expected.items():
                if isinstance(value, torch.Tensor):
                    torch.testing.assert_close(found[key], value, atol=1e-2, rtol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*DECODERS, "t5", "whisper"])
def test_a_decoder_chooses_the_same(name):
    model = {**DECODERS, "t5": t5, "whisper": whisper}[name]().eval().cuda().half()
    given = {"input_ids": torch.randint(3, 96, (1, 5)).cuda()}
    if name == "whisper":
        given = on_gpu({"input_features": torch.randn(1, 8, 32)})
    given |= {"max_new_tokens": 12, "do_sample": False, "cache_implementation": "static"}
    with torch.inference_mode():
        expected = model.generate(**given, disable_compile=True)
        model.forward = torch.compile(model.forward, backend=door.relax_fusion)
        for _ in range(2):
            assert torch.equal(model.generate(**given, disable_compile=True), expected)


@pytest.mark.gpu
def test_work_is_put_on_the_callers_stream():
    weight = torch.randn(512, 512, device="cuda")
    fast = torch.compile(lambda x: torch.relu(x @ weight) + 1, backend=door.relax_fusion)
    stream = torch.cuda.Stream()
    for _ in range(4):
        with torch.no_grad(), torch.cuda.stream(stream):
            x = torch.zeros(512, 512, device="cuda")
            torch.cuda._sleep(20_000_000)
            x.copy_(torch.eye(512, device="cuda"))
            found = fast(x)
        stream.synchronize()
        torch.testing.assert_close(found, torch.relu(weight) + 1, atol=1e-2, rtol=1e-2)


@pytest.mark.gpu
def test_changed_weights_are_seen_by_graphs():
    model = torch.nn.Linear(64, 64).cuda().half().eval()
    fast = torch.compile(lambda x: torch.relu(model(x)) * 2, backend=door.relax_fusion)
    x = torch.randn(8, 64, device="cuda").half()
    with torch.no_grad():
        for n in range(6):
            if n == 3:
                model.weight.mul_(-1)
            if n == 4:
                model.weight = torch.nn.Parameter(torch.randn(64, 64, device="cuda").half())
            torch.testing.assert_close(fast(x), torch.relu(model(x)) * 2, atol=1e-2, rtol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_whole_powers_of_negative_numbers(dtype):
    x = torch.randn(2, 64, device="cuda").to(dtype)
    fast = torch.compile(lambda x: torch.pow(x, 2) + torch.pow(x, 3), backend=door.relax_fusion)
    torch.testing.assert_close(fast(x), torch.pow(x, 2) + torch.pow(x, 3), atol=2e-2, rtol=2e-2)
