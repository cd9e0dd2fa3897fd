"""What tests of commands have in common: a model of a few thousand weights, compiled quickly."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tvm.support import cc

from .quick import quick_host, quick_passes

POSITIONS = 16
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "tie_word_embeddings": False,
}
links = pytest.mark.skipif(not cc.get_cc(), reason="TVM links libraries with a C++ compiler")


def write_json(path: Path, data: dict) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data))
    return path


@pytest.fixture(scope="module")
def quick_to_compile() -> Iterator[None]:
    """Compile for this machine without optimisations, which take long."""
    made = quick_host()
    with pytest.MonkeyPatch.context() as patch, quick_passes():
        patch.setattr("relax_fusion.hardware.target.host_target", lambda: made)
        yield


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the file of `CONFIG`."""
    return str(write_json(tmp_path_factory.mktemp("tiny") / "config.json", CONFIG))
