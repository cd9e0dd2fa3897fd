"""``bench`` on a GPU: kernels, replayed graphs and peers.

Its kernels take about a microsecond, and other tests run beside it: times are only looked for.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from relax_fusion.cli import main
from tests.support.gpu import gpu_target, needs_gpu

pytestmark = [pytest.mark.gpu, needs_gpu]

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "vocab_size": 1024,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize("graphs", [True, False])
def test_a_decoder(tmp_path: Path, graphs: bool) -> None:
    source, file = tmp_path / "tiny" / "config.json", tmp_path / "times.json"
    source.parent.mkdir()
    source.write_text(json.dumps(CONFIG))
    arguments = ["--target", str(gpu_target()), "--prompt", "64", "-q"]
    arguments += ["--against", "tvm,torch" if graphs else "none", "--json", str(file)]
    arguments += [] if graphs else ["--no-cuda-graph"]
    assert main(["bench", str(source), *arguments]) == 0
    found = json.loads(file.read_text())
    assert found["machine"]["gpu"] and not found["failed"]
    kernels = {each["kernel"]: each for each in found["kernels"]["decode"]}
    assert any("cuda_graph" in name for name in kernels) == graphs
    fused = [k for k in found["kernels"]["prefill"] if k["predicted_s"] is not None]
    assert fused and all(0 <= k["p50_s"] < 1 and k["resolution_s"] > 0 for k in fused)
