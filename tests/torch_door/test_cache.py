"""Compiled graphs on disk: whatever is wrong with the files, graphs are compiled again."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from copy import deepcopy

import pytest

torch = pytest.importorskip("torch")

from relax_fusion.torch import library_cache, pieces  # noqa: E402
from relax_fusion.torch.library_cache import LibraryCache  # noqa: E402
from relax_fusion.torch.record import GraphRecord, PieceRecord  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("RELAX_FUSION_CACHE_DIR", str(tmp_path))
    caplog.set_level(logging.INFO, "relax_fusion.torch")
    return tmp_path / "torch"


def multiplied(x):
    return (x @ x).relu() + 1


def called():
    """Compile a function, as another process would, and compare what it returns."""
    torch._dynamo.reset()
    x = torch.randn(4, 4)
    with torch.no_grad():
        fast = torch.compile(multiplied, backend="relax_fusion", options={"strict": True})
        torch.testing.assert_close(fast(x), multiplied(x))


def written(change):
    """Return what changes a record, and makes its checksum right."""

    def damage(path):
        told = json.loads(path.read_text())
        change(told)
        told["checksum"] = library_cache._checksum(told)
        path.write_text(json.dumps(told))

    return damage


def cut_elsewhere(told):
    told["record"]["operators"] = [[999]]


def cut_twice(told):
    for name in ("operators", "pieces", "verdicts"):
        told["record"][name] *= 2
    told["libraries"] *= 2


def again(path, data):
    path.unlink()  # the code of the file is in use
    path.write_bytes(data)


def as_folder(path):
    path.unlink()
    path.mkdir()


DAMAGE = {
    "cut off": ("json", lambda path: path.write_bytes(path.read_bytes()[:100])),
    "empty": ("json", lambda path: path.write_bytes(b"")),
    "no text": ("json", lambda path: path.write_bytes(b"\xff\xfe\x00")),
    "a list": ("json", lambda path: path.write_text("[]")),
    "one letter": ("json", lambda path: path.write_text(path.read_text().replace("Fuse", "Fuze"))),
    "writable": ("json", lambda path: path.chmod(0o666)),
    "another version": ("json", written(lambda told: told.update(version=1))),
    "no pieces": ("json", written(lambda told: told["record"].update(pieces=[]))),
    "of another graph": ("json", written(cut_elsewhere)),
    "a piece twice": ("json", written(cut_twice)),
    "code cut off": ("so", lambda path: again(path, path.read_bytes()[:100])),
    "no code": ("so", lambda path: again(path, b"")),
    "code is a folder": ("so", as_folder),
}


@pytest.fixture(scope="module")
def asked():
    """Return the key and the graph that a cache was asked for."""
    return []


@pytest.fixture(scope="module")
def sound(asked, tmp_path_factory):
    """Return files that were written once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RELAX_FUSION_CACHE_DIR", str(made := tmp_path_factory.mktemp("sound")))
        patch.setattr(LibraryCache, "get", lambda _, *given: asked.extend(deepcopy(given)))
        called()
    return made / "torch"


def damaged(name, sound, folder):
    suffix, damage = DAMAGE[name]
    shutil.copytree(sound, folder)
    (file,) = folder.glob(f"*.{suffix}")
    damage(file)


def test_a_sound_file_is_read(sound, asked, folder):
    shutil.copytree(sound, folder)
    assert LibraryCache(CPU).get(*asked) is not None


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_is_told(name, sound, asked, folder, caplog):
    damaged(name, sound, folder)
    assert LibraryCache(CPU).get(*asked) is None and "is damaged" in caplog.text


@pytest.mark.parametrize("name", ["cut off", "code cut off", "code is a folder"])
def test_what_a_damaged_file_had_is_made_again(name, sound, folder, caplog):
    damaged(name, sound, folder)
    caplog.clear()
    called()
    assert "is damaged" in caplog.text and "compiled in" in caplog.text
    if name == "code is a folder":  # which nothing can replace
        return
    caplog.clear()
    called()
    assert "taken from the cache" in caplog.text


def test_code_that_is_gone_is_made_again(sound, folder, caplog):
    shutil.copytree(sound, folder)
    for file in folder.glob("*.so"):
        file.unlink()
    caplog.clear()
    called()
    assert "compiled in" in caplog.text


def test_llvm_writes_code_once(monkeypatch):
    monkeypatch.setattr("tvm.relax.VMExecutable.jit", None)
    called()


def test_what_is_in_the_cache_needs_no_compiler(sound, folder, caplog, monkeypatch):
    shutil.copytree(sound, folder)
    monkeypatch.setattr(pieces, "compile_pieces", None)
    called()
    assert "taken from the cache" in caplog.text


SECOND = f"""
import sys, torch
torch.set_num_threads({torch.get_num_threads()})
options = {{"strict": True}}
fast = torch.compile(lambda x: (x @ x).relu() + 1, backend="relax_fusion", options=options)
with torch.no_grad():
    fast(torch.randn(4, 4))
print("tvm" in sys.modules)
"""


def test_another_process_imports_no_compiler_and_logs_as_pytorch_does(sound, folder):
    shutil.copytree(sound, folder)
    env = os.environ | {"TORCH_LOGS": "+relax_fusion.torch"}
    done = subprocess.run([sys.executable, "-c", SECOND], env=env, capture_output=True, text=True)
    assert "taken from the cache" in done.stderr and done.stdout == "False\n", done.stderr


class Code:
    """Has a text in the place of compiled code."""

    def __init__(self, text):
        self.text = text

    def export_library(self, path):
        with open(path, "w") as file:
            file.write(self.text)


def one_piece(count):
    """Return a record that says `count` in several places."""
    piece = PieceRecord((0,) * count, 0, (), (), (), (), ())
    return GraphRecord(((0,),), (piece,), (str(count),), ())


@pytest.fixture
def cache(monkeypatch, folder):
    monkeypatch.setattr(library_cache, "load_library", lambda path, device: path.read_text())
    monkeypatch.setattr(library_cache, "check_cut", lambda module, operators: None)
    return LibraryCache(CPU)


def forked(work):
    """Run something in another process, and return that process's number."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(1)
    return child


def test_a_process_that_is_killed_leaves_nothing_that_is_taken(cache, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(
            library_cache, "replace_file", lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        )
        _, status = os.waitpid(forked(lambda: cache.put("k", one_piece(1), [Code("1")])), 0)
    assert os.WTERMSIG(status) == signal.SIGKILL and list(cache.directory.glob("*.so"))
    assert cache.get("k", None) is None
    cache.put("k", one_piece(1), [Code("1")])
    assert cache.get("k", None) == (one_piece(1), ["1"])


def test_processes_that_write_at_once_do_not_mix(cache):
    def work(count):
        for _ in range(30):
            cache.put("k", one_piece(count), [Code(str(count))])

    cache.put("k", one_piece(1), [Code("1")])
    children = [forked(lambda count=count: work(count)) for count in (1, 2, 3)]
    seen = [cache.get("k", None) for _ in range(60)]
    for child in children:
        os.waitpid(child, 0)
    assert all(found == (one_piece(int(found[1][0])), found[1]) for found in seen)


def test_without_a_compiler_graphs_are_compiled_and_not_kept(folder, caplog, monkeypatch):
    monkeypatch.setattr("tvm.support.cc.get_cc", lambda: None)
    called()
    assert "not kept" in caplog.text and "no C++ compiler" in caplog.text
    assert not list(folder.iterdir())
