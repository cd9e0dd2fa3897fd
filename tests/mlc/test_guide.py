"""Every command of docs/mlc.md is run as it is written, where MLC-LLM's sources are at hand.

RELAX_FUSION_MLC=PATH of a checkout at 79d603f stands for what the page clones; packages that it
installs are expected to be there.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from ..support import mlc_llama as llama
from ..support.code_blocks import ROOT, Block, blocks_of

PAGE = ROOT / "docs" / "mlc.md"
BLOCKS = [block for block in blocks_of(PAGE) if block.language in ("bash", "python")]
LONG = ("scripts/check_mlc.py", "-m pytest")
"""What takes hours, or is run by itself."""
OUTSIDE = os.environ.get("PYTHONPATH", "")
CHECKOUT = os.environ.get("RELAX_FUSION_MLC", "")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where the page is followed: with a model, and programs that clone and install."""
    if not CHECKOUT:
        pytest.skip("set RELAX_FUSION_MLC to a checkout of MLC-LLM at 79d603f")
    for names in re.findall(r"pip install ([\w ]+)", PAGE.read_text(encoding="utf-8")):
        for name in names.split():
            pytest.importorskip(name)
    made = tmp_path_factory.mktemp("guide")
    (made / "bin").mkdir()
    for name, does in (
        ("git", f'[ "$1" != clone ] || ln -s {Path(CHECKOUT).resolve()} mlc-llm'),
        ("pip", ":"),
        ("python", f'PYTHONPATH={ROOT}:$PYTHONPATH:{OUTSIDE} exec {sys.executable} "$@"'),
    ):
        program = made / "bin" / name
        program.write_text(f"#!/bin/sh\n{does}\n")
        program.chmod(0o755)
    write_model(made / "path" / "to" / "model")
    return made


def write_model(directory: Path) -> None:
    """Write a small LLaMA as Hugging Face does."""
    directory.mkdir(parents=True)
    config = llama.CONFIG | {"model_type": "llama", "max_position_embeddings": llama.CONTEXT}
    (directory / "config.json").write_text(json.dumps(config))
    rows = np.cumsum([llama.HIDDEN, llama.KV_HEADS * llama.HEAD_DIM])
    weights = {}
    for name, value in llama.weights().items():
        for joint, parts in (
            ("qkv_proj", "q_proj k_proj v_proj"),
            ("gate_up_proj", "gate_proj up_proj"),
        ):
            if joint in name:
                cuts = rows if joint == "qkv_proj" else [llama.INNER]
                for part, piece in zip(parts.split(), np.split(value, cuts), strict=True):
                    weights[name.replace(joint, part)] = np.ascontiguousarray(piece, "float16")
                break
        else:
            weights[name] = value.astype("float16")
    save_file(weights, directory / "model.safetensors")


def followed(block: Block, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a block from top to bottom; Python where the first block has set its path."""
    program, path = ("bash", "") if block.language == "bash" else ("python", "mlc-llm/python")
    words = [program, "-ec" if program == "bash" else "-c", "\n".join(block.code)]
    variables = os.environ | {"PYTHONPATH": path, "TVM_NUM_THREADS": "2"}
    variables["PATH"] = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    words[0] = shutil.which(program, path=variables["PATH"]) or program
    return subprocess.run(words, cwd=folder, env=variables, capture_output=True, text=True)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_a_block_runs(number: int, folder: Path) -> None:
    block = BLOCKS[number]
    if any(each in "\n".join(block.code) for each in LONG):
        pytest.skip("needs hours (a survey), or is this suite itself: run the command by hand")
    done = followed(block, folder)
    assert done.returncode == 0, f"{PAGE.name}:{block.line}\n{done.stdout}\n{done.stderr}"
    commands = " ".join(block.code).split()
    for made in (commands[n + 1] for n, word in enumerate(commands) if word == "-o"):
        assert (folder / made).exists()


def test_what_takes_long_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [line for block in BLOCKS for line in block.code if any(each in line for each in LONG)]
    assert len(lines) == 3
    for line in lines:
        words = shlex.split(line)
        if "pytest" in words:
            assert all((ROOT / word).is_file() for word in words[words.index("pytest") + 1 :])
        else:
            monkeypatch.setattr(sys, "argv", words[1:])
            monkeypatch.syspath_prepend(str(ROOT / "scripts"))
            given = runpy.run_path(str(ROOT / words[1]))["arguments"]()
            assert given.commit == "79d603f"
