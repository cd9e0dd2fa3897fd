"""Compiled kernels on disk: whatever happens to a file, no wrong kernel comes out of it."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from relax_fusion.files import user_cache_directory
from relax_fusion.launch.kernel import CompiledKernel
from relax_fusion.triton_bridge import KernelCache
from relax_fusion.triton_bridge.compile import compile_kernels

from ..support.processes import without_torch
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


@pytest.mark.parametrize(
    "changes",
    [
        *(
            {name: v}
            for name in ("capability", "num_warps", "shared_bytes")
            for v in ("x", 1.5, True)
        ),
        *(
            {name: v}
            for name in ("symbol", "entry")
            for v in (3, None, ["a"], 'x"; system("y")', "")
        ),
        *({name: v} for name in ("params", "aligned") for v in ([3], ["x", None], [[]])),
        {"constants": [["BLOCK", 3]]},
        *({"num_warps": warps} for warps in (0, 33, 10**20)),
        {"shared_bytes": -1},
    ],
    ids=str,
)
def test_a_field_of_another_type_is_no_kernel(
    cache: KernelCache, kernel: CompiledKernel, changes: dict
) -> None:
    """Though the checksum is right: whoever changes a file can compute one."""
    record = json.dumps(json.loads(kernel.to_json()) | changes)
    cache.put(KEY, SimpleNamespace(to_json=lambda: record, image=kernel.image, ptx=kernel.ptx))
    assert cache.get(KEY) is None


def test_what_others_can_write_is_not_read(
    cache: KernelCache, kernel: CompiledKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cache.directory.stat().st_mode & 0o077 == 0
    for mode in (0o620, 0o602):
        cache.path(KEY).chmod(mode)
        assert cache.get(KEY) is None
    cache.put(KEY, kernel)
    assert cache.get(KEY) == kernel
    if os.geteuid() == 0:
        os.chown(cache.path(KEY), 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
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


@pytest.mark.parametrize("other", ["pipe", "device", "dangling", "link", "huge"])
def test_an_entry_that_is_no_file_is_replaced(
    cache: KernelCache, kernel: CompiledKernel, other: str
) -> None:
    path, elsewhere = cache.path(KEY), cache.directory.parent / "elsewhere"
    if other == "link":  # to a kernel of another key
        path.rename(elsewhere)
        cache.put("f" * 16, kernel)
        elsewhere.write_bytes(cache.path("f" * 16).read_bytes())
    else:
        path.unlink()
    if other == "pipe":
        os.mkfifo(path)
    elif other == "huge":
        path.touch()
        os.truncate(path, 2**42)
    else:
        path.symlink_to("/dev/zero" if other == "device" else elsewhere)
    assert cache.get(KEY) is None
    cache.put(KEY, kernel)
    assert cache.get(KEY) == kernel and not path.is_symlink()


@pytest.mark.parametrize("failing", ["write", "replace"])
def test_a_full_disk_keeps_nothing_and_the_next_run_does(
    tmp_path: Path,
    kernel: CompiledKernel,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    failing: str,
) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    cache = KernelCache(tmp_path)
    with monkeypatch.context() as patch:
        if failing == "replace":
            patch.setattr(os, "replace", Mock(side_effect=full))
        else:
            patch.setattr("relax_fusion.launch.cache._encode", Mock(side_effect=full))
        cache.put(KEY, kernel)
    assert "No space left" in caplog.text and list(tmp_path.iterdir()) == []
    cache.put(KEY, kernel)
    assert cache.get(KEY) == kernel


def test_an_interrupted_writer_leaves_nothing(
    tmp_path: Path, kernel: CompiledKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "replace", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        KernelCache(tmp_path).put(KEY, kernel)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "header",
    [
        *([], 3, None, {}, {"key": KEY}, {"key": KEY, "kernel": 3, "blobs": [0, 0]}),
        *({"key": KEY, "kernel": "{}", "blobs": blobs} for blobs in ([-1, 1], ["a", "b"], [0], 3)),
        *({"key": KEY, "kernel": text, "blobs": [0, 0]} for text in ("[", "3", "[]", "[" * 99999)),
    ],
    ids=lambda header: repr(header)[:60],
)
def test_a_forged_header_with_its_checksum_is_absent(cache: KernelCache, header: object) -> None:
    body = json.dumps(header).encode() + b"\n"
    data = b"\n".join([b"relax_fusion kernel 1", hashlib.sha256(body).hexdigest().encode(), body])
    cache.path(KEY).write_bytes(data)
    assert cache.get(KEY) is None


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RELAX_FUSION_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", Mock(side_effect=RuntimeError("no home")))
    assert KernelCache().get(KEY) is None


def test_compiling_needs_no_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RELAX_FUSION_CACHE_DIR", "/proc/self/nothing")
    with caplog.at_level(logging.WARNING):
        kernel = compile_kernels([add_source(block=32)])[0]
    assert kernel.image and "kernels are not kept" in caplog.text


def test_clear(cache: KernelCache) -> None:
    (cache.directory / ".0123abcd.part").write_text("an interrupted writer")
    for name in ("notes.txt", "tmpabc"):
        (cache.directory / name).write_text("somebody else's")
    cache.clear()
    assert sorted(path.name for path in cache.directory.iterdir()) == ["notes.txt", "tmpabc"]
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
from types import SimpleNamespace
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
    done = subprocess.run(
        command, env=without_torch(), stderr=subprocess.PIPE, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["shared.kernel", "start.kernel"]


def test_a_directory_that_nobody_may_write_to_warns(
    kernel: CompiledKernel, caplog: pytest.LogCaptureFixture
) -> None:
    cache = KernelCache(Path("/proc/self/nothing"))  # not even root may write there
    cache.put(KEY, kernel)
    assert "kernels are not kept" in caplog.text and cache.get(KEY) is None
