"""What tests of commands have in common: a model of a few thousand weights, compiled quickly."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tvm import relax
from tvm.support import cc
from tvm.target import Target

from relax_fusion import models
from relax_fusion.cli import build, main
from relax_fusion.cli import compile as compile_module

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


def checkpoint_tensors() -> dict[str, np.ndarray]:
    """Random weights by the names that Hugging Face gives them."""
    shapes = {"model.norm": (64,), "model.embed_tokens": (96, 64), "lm_head": (96, 64)}
    for layer in ("model.layers.0.", "model.layers.1."):
        shapes |= {layer + name: (64,) for name in ("input_layernorm", "post_attention_layernorm")}
        rows = zip("qkvo", (64, 32, 32, 64), strict=True)
        shapes |= {f"{layer}self_attn.{name}_proj": (n, 64) for name, n in rows}
        shapes |= {f"{layer}mlp.{name}_proj": (128, 64) for name in ("gate", "up")}
        shapes[f"{layer}mlp.down_proj"] = (64, 128)
    rng = np.random.default_rng(7)
    weights = {n: rng.standard_normal(s, "float32") * 0.1 for n, s in shapes.items()}
    return {f"{n}.weight": w if w.ndim > 1 else np.ones(64, "float32") for n, w in weights.items()}


def short(exported: models.ExportedModel, target: Target, **options: Any) -> relax.VMExecutable:
    """Do what the command does, for prompts that have kernels of two ranges of rows."""
    return build.build(exported, target, variable_bounds={"seq_len": POSITIONS}, **options)


@contextmanager
def compiling_quickly() -> Iterator[None]:
    """Compile for this machine without optimisations, which take long."""
    made = quick_host()
    with pytest.MonkeyPatch.context() as patch, quick_passes():
        patch.setattr("relax_fusion.hardware.target.host_target", lambda: made)
        yield


@pytest.fixture(scope="module")
def quick_to_compile() -> Iterator[None]:
    """Compile quickly in all tests of a module."""
    with compiling_quickly():
        yield


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the file of `CONFIG`."""
    return str(write_json(tmp_path_factory.mktemp("tiny") / "config.json", CONFIG))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a Hugging Face directory with a word tokenizer: ``w5`` is token 5."""
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers import models as kinds

    path = tmp_path_factory.mktemp("checkpoint") / "tiny"
    write_json(path / "config.json", CONFIG)
    save_file(checkpoint_tensors(), path / "model.safetensors")
    words = {f"w{i}": i for i in range(96)}
    tokenizer = Tokenizer(kinds.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="session")
def compiled(checkpoint: Path, shared: Path) -> Path:
    """Return what ``compile`` makes of the checkpoint, once for all workers of a run."""
    out = shared / "compiled" / "tiny"
    out.parent.mkdir(exist_ok=True)
    with (shared / "compiled.lock").open("w") as lock, pytest.MonkeyPatch.context() as patch:
        fcntl.flock(lock, fcntl.LOCK_EX)
        patch.setattr(compile_module, "build", short)
        if not out.exists():
            with compiling_quickly():
                assert main(["compile", str(checkpoint), "-o", str(out), "-q"]) == 0
    return out
