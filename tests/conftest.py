"""What all tests share: a cache of compiled kernels that is not the user's, and their order."""

from __future__ import annotations

import gc
import inspect
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from relax_fusion import PipelineOptions

os.environ.setdefault("TVM_NUM_THREADS", "1")  # the workers of a run share the processors
os.environ.setdefault("OMP_NUM_THREADS", "1")  # so do numpy and torch, whose threads spin
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # or each process of a test compiles the library

# TVMScript's parser asks for the source of every frame on the stack.  Those without a file would be
# looked for among all modules that are loaded, each time.
inspect.modulesbyfile |= {
    "<ast>": "builtins",  # which has no source
    "<string>": "builtins",
    "<frozen runpy>": "runpy",
    "<frozen importlib._bootstrap>": "importlib._bootstrap",
    "<frozen importlib._bootstrap_external>": "importlib._bootstrap_external",
}
if "PYTEST_XDIST_WORKER" in os.environ:
    import xdist

    # A worker runs this file without importing it as a module
    inspect.modulesbyfile[str(Path(xdist.__file__).with_name("remote.py"))] = "xdist"


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory that all workers of a run share."""
    root = tmp_path_factory.getbasetemp()
    return root.parent if "PYTEST_XDIST_WORKER" in os.environ else root


@pytest.fixture(scope="session", autouse=True)
def kernel_cache(shared: Path) -> Iterator[None]:
    """Share one cache among the workers of a run: they need the same kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RELAX_FUSION_CACHE_DIR", str(shared / "kernels"))
        yield


@pytest.fixture
def without_cuda_matmul(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave out the matmul kernel in CUDA C++: for what was timed before there was one."""
    from relax_fusion.estimator import registry
    from relax_fusion.estimator.families.cuda_matmul.family import CudaMatmul

    others = [f for f in registry.FAMILIES if not isinstance(f, CudaMatmul)]
    with monkeypatch.context() as patch:
        patch.setattr(registry, "FAMILIES", others)
        for forget in registry.ON_CHANGE:
            forget()
        yield
    for forget in registry.ON_CHANGE:
        forget()


@pytest.fixture(scope="session", autouse=True)
def validated() -> Iterator[None]:
    """Have the pipeline check every match, unless a test says otherwise.

    And have it leave CUDA kernels as source, whether NVRTC is here or not, and TVM parse quickly.
    """
    from relax_fusion import pipeline  # not above: the process that starts the workers needs no TVM

    from .support.quick import quick_checks, quick_scripts

    make_options = pipeline.make_options

    def strict(target: Any, kwargs: dict[str, Any]) -> PipelineOptions:
        return make_options(target, {"validate": "strict", **kwargs})

    with pytest.MonkeyPatch.context() as patch, quick_scripts(), quick_checks():
        patch.setattr(pipeline, "make_options", strict)
        yield


LONGEST = (
    *("benchmarks/test_bench_matmul.py", "cli/test_cli.py"),
    *("benchmarks/test_bench_decode.py", "models/test_llama.py", "models/test_bert.py"),
    *("models/test_gpt2.py", "triton_bridge/test_attention.py", "test_examples.py"),
)
"""Files that take long, which come first: one that comes last keeps one worker alone."""

TOGETHER = ("tests/numerics/",)
"""Folders of which one worker has all files: their back ends compile what all of them compute."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ranks = {Path(__file__).parent / name: rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(item.path, len(LONGEST)))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Look for garbage among what tests make: what is loaded for them stays, and is much."""
    gc.disable()
    found = yield
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)  # graphs and traces are many objects, few of them garbage
    gc.enable()
    return found


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give workers whole files, or folders, so that what the tests of one share is made once.

    Tests of the GPU alone are few files, which would leave most workers without work.
    """
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return next((f for f in TOGETHER if nodeid.startswith(f)), super()._split_scope(nodeid))

    if config.getvalue("dist") != "load" or config.option.markexpr == "gpu":
        return None  # xdist's own choice
    config.option.loadscopereorder = False  # not by the number of tests, but as they are collected
    return Scheduling(config, log)
