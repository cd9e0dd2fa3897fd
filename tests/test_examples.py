"""The programs in `examples/` run by themselves, and print what they are there to show."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .support.processes import without_torch

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def printed(name: str, directory: Path, environment: dict[str, str]) -> str:
    """Return what an example prints, started in a directory of its own."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", EXAMPLES / name],
        cwd=directory,
        env={**environment, "RELAX_FUSION_CACHE_DIR": str(directory / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def value(text: str, words: str) -> float:
    """Return the number at the end of the line that begins with words."""
    (found,) = re.findall(rf"^{words}.*: (\S+)$", text, re.MULTILINE)
    return float(found)


@pytest.mark.slow
def test_as_a_pipeline(tmp_path: Path) -> None:
    text = printed("as_a_pipeline.py", tmp_path, without_torch())
    assert value(text, "chains fused") == 2
    assert re.findall(r"^forward +(Fuse\w+)", text, re.MULTILINE) == [
        "FuseGatedFFN",
        "FuseMatmulEpilogue",
    ]
    assert value(text, "largest difference from TVM's default pipeline") < 1e-5


@pytest.mark.slow
def test_passes_alone(tmp_path: Path) -> None:
    text = printed("passes_alone.py", tmp_path, without_torch())
    assert value(text, "calls of fused kernels") == 2 and "inner = R.call_tir(" in text
    assert value(text, "largest difference from NumPy") < 1e-5


@pytest.mark.slow
def test_imported_model(tmp_path: Path) -> None:
    text = printed("imported_model.py", tmp_path, dict(os.environ))
    assert value(text, "chains fused") == 5
    assert re.search("^main +FuseAttentionChain +decomposed", text, re.MULTILINE)
    assert value(text, "largest difference from PyTorch") < 1e-4


def test_imported_model_without_torch(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"needs PyTorch: pip install 'relax-fusion\[torch\]'"):
        printed("imported_model.py", tmp_path, without_torch())


@pytest.mark.slow
def test_quantised_llama(tmp_path: Path) -> None:
    text = printed("quantised_llama.py", tmp_path, without_torch())
    (tokens,) = re.findall("^tokens: (.*)$", text, re.MULTILINE)
    assert len(tokens.split()) == 8
    assert value(text, "the last of them") == int(tokens.split()[-1])
    (share,) = re.findall(r"^weights: .* (\d+)%$", text, re.MULTILINE)
    assert int(share) < 35


@pytest.mark.slow  # docs/writing_a_kernel.md has such a kernel, and is run
def test_own_kernel(tmp_path: Path) -> None:
    text = printed("own_kernel.py", tmp_path, without_torch())
    assert re.findall(r"^launches of (\w+): True$", text, re.MULTILINE) == ["unit_rows", "matmul"]
    assert b"launch_unit_rows" in (tmp_path / "own_kernel.so").read_bytes()


@pytest.mark.slow
def test_new_device(tmp_path: Path) -> None:
    a10, h200 = printed("new_device.py", tmp_path, without_torch()).split("For ")[1:]
    assert a10.startswith("A10, whose prices were not measured") and h200.startswith("H200")
    for function in ("prefill", "decode"):
        slow, fast = (
            int(re.findall(rf"{function}: (\d+) us, limited by", text)[0]) for text in (a10, h200)
        )
        assert slow > 3 * fast
    assert "cuda" in h200 and "cuda" not in a10


def test_all_are_listed_and_run_here() -> None:
    listed = re.findall(r"^\| \[(.*?)\]\(\1\)", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    there = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".cc")}
    assert set(listed) == there and len(listed) == len(there)
    run = {f"{name.removeprefix('test_')}.py" for name in globals() if name.startswith("test_")}
    assert {name for name in there if name.endswith(".py")} <= run


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_they_are_short_and_say_how_to_run(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 60
    assert f"\npython {path.name}\n" in text.split('"""')[1]


@pytest.mark.slow
def test_torch_diffusion_block(tmp_path: Path) -> None:
    text = printed("torch_diffusion_block.py", tmp_path, dict(os.environ))
    assert "6 fused kernels" in text
    assert value(text, "largest difference") < 1e-5


@pytest.mark.slow
def test_torch_bert(tmp_path: Path) -> None:
    text = printed("torch_bert.py", tmp_path, dict(os.environ))
    errors = re.findall(r"^length \d+: largest difference from PyTorch (\S+)$", text, re.MULTILINE)
    assert len(errors) == 3 and max(map(float, errors)) < 1e-5


@pytest.mark.slow
def test_torch_generate(tmp_path: Path) -> None:
    text = printed("torch_generate.py", tmp_path, dict(os.environ))
    assert "the same tokens as PyTorch: True" in text
