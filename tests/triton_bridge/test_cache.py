"""Compiled kernels on disk: whatever happens to a file, no wrong kernel comes out of it."""

from __future__ import annotations

import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from relax_fusion.target import user_cache_directory
from relax_fusion.triton_bridge import KernelCache
from relax_fusion.triton_bridge.compile import compile_kernels
from relax_fusion.triton_bridge.kernel import CompiledKernel

from .common import add_source, copy_tile_source

KEY = "0123456789abcdef"


@pytest.fixture(scope="module")
def kernel() -> CompiledKernel:
    return compile_kernels([copy_tile_source()])[0]


@pytest.fixture
def cache(tmp_path: Path, kernel: CompiledKernel) -> KernelCache:
    cache = KernelCache(tmp_path / "made" / "later")
    cache.put(KEY, kernel)
    return cache


def test_a_kernel_comes_back_as_it_was(cache: KernelCache, kernel: CompiledKernel) -> None:
    found = cache.get(KEY)
    assert found == kernel and found is not kernel
    assert found.tensor_maps and found.image[:4] == b"\x7fELF"
    assert kernel.ptx and found.ptx == kernel.ptx


def test_an_absent_kernel_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert KernelCache(tmp_path / "nothing").get(KEY) is None
    assert not (tmp_path / "nothing").exists() and not caplog.records


def test_putting_again_replaces(cache: KernelCache, kernel: CompiledKernel) -> None:
    other = replace(kernel, symbol="other", image=b"\x00\n\xff" * 5, ptx=b"")
    cache.put(KEY, other)
    assert cache.get(KEY) == other


def test_nothing_but_the_entry_is_left(cache: KernelCache) -> None:
    assert [path.name for path in cache.directory.iterdir()] == [f"{KEY}.kernel"]


def test_a_truncated_file_is_absent(cache: KernelCache, caplog: pytest.LogCaptureFixture) -> None:
    whole = cache.path(KEY).read_bytes()
    for length in [*range(120), *range(120, len(whole), 97), len(whole) - 1]:
        caplog.clear()
        cache.path(KEY).write_bytes(whole[:length])
        assert cache.get(KEY) is None, length
        assert "is damaged" in caplog.text, length


def test_a_longer_file_is_absent(cache: KernelCache) -> None:
    cache.path(KEY).write_bytes(cache.path(KEY).read_bytes() + b"\0")
    assert cache.get(KEY) is None


@pytest.mark.parametrize("flip", [0x01, 0x80, 0xFF])
def test_a_changed_byte_makes_it_absent(
    cache: KernelCache, caplog: pytest.LogCaptureFixture, flip: int
) -> None:
    whole = cache.path(KEY).read_bytes()
    for position in [*range(400), *range(400, len(whole), 53), len(whole) - 1]:
        caplog.clear()
        changed = bytearray(whole)
        changed[position] ^= flip
        cache.path(KEY).write_bytes(changed)
        assert cache.get(KEY) is None, position
        assert "it will be made again" in caplog.text, position


def test_an_entry_under_another_name_is_refused(
    cache: KernelCache, caplog: pytest.LogCaptureFixture
) -> None:
    cache.path(KEY).rename(cache.path("f" * 16))
    assert cache.get("f" * 16) is None
    assert f"it holds the kernel {KEY}" in caplog.text


@pytest.mark.parametrize("content", [b"", b"\n\n", b"a\nb\nc", b"\xff\n\xff\n\xff", b"{}"])
def test_another_file_is_no_kernel(cache: KernelCache, content: bytes) -> None:
    cache.path(KEY).write_bytes(content)
    assert cache.get(KEY) is None


def test_a_directory_that_is_a_file_warns(
    tmp_path: Path, kernel: CompiledKernel, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    for directory in (tmp_path / "file", tmp_path / "file" / "below"):
        caplog.clear()
        cache = KernelCache(directory)
        cache.put(KEY, kernel)
        assert "kernels are not kept" in caplog.text
        assert cache.get(KEY) is None
        cache.clear()
    assert (tmp_path / "file").read_text() == "in the way"


def test_an_entry_that_is_a_directory_warns(
    cache: KernelCache, kernel: CompiledKernel, caplog: pytest.LogCaptureFixture
) -> None:
    cache.path(KEY).unlink()
    cache.path(KEY).mkdir()
    cache.put(KEY, kernel)
    assert "kernels are not kept" in caplog.text
    assert cache.get(KEY) is None
    assert [path.name for path in cache.directory.iterdir()] == [f"{KEY}.kernel"]


def test_a_directory_that_nobody_may_write_to_warns(
    kernel: CompiledKernel, caplog: pytest.LogCaptureFixture
) -> None:
    cache = KernelCache(Path("/proc/self/nothing"))  # not even root may write there
    cache.put(KEY, kernel)
    assert "kernels are not kept" in caplog.text and cache.get(KEY) is None


def test_compiling_needs_no_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RELAX_FUSION_CACHE_DIR", "/proc/self/nothing")
    with caplog.at_level(logging.WARNING):
        kernel = compile_kernels([add_source(block=32)])[0]
    assert kernel.image and "kernels are not kept" in caplog.text


def test_clear(cache: KernelCache) -> None:
    (cache.directory / "tmpabc").write_text("an interrupted writer")
    (cache.directory / "notes.txt").write_text("somebody else's")
    cache.clear()
    assert [path.name for path in cache.directory.iterdir()] == ["notes.txt"]
    assert cache.get(KEY) is None
    KernelCache(cache.directory / "nothing").clear()


def test_the_directory_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RELAX_FUSION_CACHE_DIR", str(tmp_path / "ours"))
    assert KernelCache().directory == user_cache_directory() == tmp_path / "ours"
    monkeypatch.delenv("RELAX_FUSION_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert KernelCache().directory == tmp_path / "relax_fusion"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert KernelCache().directory == tmp_path / ".cache" / "relax_fusion"


_LOOP = """
import logging, os, sys
from dataclasses import replace
from pathlib import Path
from relax_fusion.triton_bridge import KernelCache
cache = KernelCache(Path(sys.argv[1]))
kernel = cache.get("start")
def loop(number):
    seen = []
    handler = logging.Handler()
    handler.emit = seen.append
    logging.getLogger("relax_fusion").addHandler(handler)
    for step in range(150):
        cache.put("shared", replace(kernel, image=bytes([number]) * (5000 * number + step)))
        found = cache.get("shared")
        assert found is not None and set(found.image) == {found.image[0]}, step
    assert not seen, seen
children = []
for number in range(1, 5):
    child = os.fork()
    if child == 0:
        try:
            loop(number)
            os._exit(0)
        finally:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
    children.append(child)
sys.exit(max(os.waitpid(child, 0)[1] for child in children) != 0)
"""


def test_processes_that_write_at_once_never_see_half_an_entry(
    tmp_path: Path, kernel: CompiledKernel
) -> None:
    KernelCache(tmp_path).put("start", kernel)
    command = [sys.executable, "-c", _LOOP, str(tmp_path)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["shared.kernel", "start.kernel"]
