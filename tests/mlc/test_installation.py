"""Our pipeline in the place of the one that MLC-LLM registers, whatever was imported first."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import tvm
from tvm import relax
from tvm.relax.frontend.nn import op as nn_op
from tvm.relax.pipeline import PIPELINE_MAP

from relax_fusion import PipelineError
from relax_fusion.errors import MissingPackageError, RelaxFusionError, VersionError
from relax_fusion.mlc import aliases, install, package, uninstall
from relax_fusion.mlc.phases import make_pipeline


def is_ours() -> bool:
    return getattr(PIPELINE_MAP["mlc_llm"], "func", None) is make_pipeline


def test_ours_stands_in_before_and_after_the_import_and_twice(stub: Path) -> None:
    install()
    importlib.import_module("mlc_llm.compiler_pass")
    assert is_ours()
    install(backend="tir")
    assert is_ours() and PIPELINE_MAP["mlc_llm"].args[1] == {"backend": "tir"}
    uninstall()
    assert not is_ours()
    install()
    assert is_ours()


def test_after_the_import(stub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLC_LIBRARY_PATH", "libmlc_llm_module.so")
    flags = importlib.import_module("mlc_llm.interface.compiler_flags").OptimizationFlags
    importlib.import_module("mlc_llm.compiler_pass")
    own, update = PIPELINE_MAP["mlc_llm"], flags.update
    install()
    assert is_ours()
    uninstall()
    uninstall()
    assert PIPELINE_MAP["mlc_llm"] is own and flags.update is update


def test_the_package_itself_is_imported_where_its_library_is(
    stub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLC_LIBRARY_PATH", "libmlc_llm_module.so")
    install()
    assert sys.modules["mlc_llm"].LIBRARY == ["libmlc_llm_module.so"]


def test_only_the_compiler_is_imported_where_the_library_is_missing(stub: Path) -> None:
    with pytest.raises(RuntimeError, match="Cannot find libraries"):
        importlib.import_module("mlc_llm")
    install()
    assert not hasattr(sys.modules["mlc_llm"], "LIBRARY") and is_ours()


def test_without_mlc_llm() -> None:
    with pytest.raises(MissingPackageError, match=r"mlc_llm cannot be imported .*git clone"):
        install()


def test_another_tvm(stub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tvm, "__version__", "0.31.0")
    with pytest.raises(VersionError, match=r"TVM is 0\.31\.0; relax_fusion\.mlc knows 0\.27"):
        install()


@pytest.mark.parametrize("change", ["lacks the pass AttachMemoryPlanAttr", "has the pass FuseAll"])
def test_another_mlc_llm(stub: Path, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    install()
    uninstall()
    pipeline, name = sys.modules["mlc_llm.compiler_pass.pipeline"], change.rpartition(" ")[2]
    if change.startswith("lacks"):
        monkeypatch.delattr(pipeline, name)
    else:
        another = sys.modules["mlc_llm.compiler_pass.passes"].make(name)
        monkeypatch.setattr(pipeline, name, another, raising=False)
    with pytest.raises(VersionError, match=rf"mlc_llm {change}.*79d603f"):
        install()
    assert not is_ours()


def test_a_choice_that_is_none(stub: Path) -> None:
    with pytest.raises(PipelineError, match="no choice 'metadata'; it takes backend, plans"):
        install(metadata={})


def test_a_failed_installation_leaves_tvm_as_it_was(
    stub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(relax, "Constant", raising=False)
    monkeypatch.setattr(nn_op, "tensor_ir_op", aliases._tensor_ir_op)
    monkeypatch.setattr(package, "PASSES", ("AttachNothing",))
    with pytest.raises(VersionError, match="lacks the pass AttachNothing"):
        install()
    assert not hasattr(relax, "Constant") and nn_op.tensor_ir_op is aliases._tensor_ir_op
    with pytest.raises(RuntimeError, match="Cannot find libraries"):
        importlib.import_module("mlc_llm")


@pytest.mark.parametrize(
    "raised, kind",
    [
        (TypeError("f() missing an argument"), VersionError),
        (KeyError("T"), VersionError),
        (RuntimeError("no such op"), VersionError),
        (ImportError("cannot import name 'x'"), MissingPackageError),
    ],
)
def test_an_mlc_llm_that_fails_while_it_is_imported(
    stub: Path, monkeypatch: pytest.MonkeyPatch, raised: Exception, kind: type
) -> None:
    class Failing:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "mlc_llm.compiler_pass.pipeline":
                raise raised

    monkeypatch.setattr(sys, "meta_path", [Failing(), *sys.meta_path])
    with pytest.raises(kind, match=str(raised.args[0]).replace("(", r"\(").replace(")", r"\)")):
        install()


def test_an_mlc_llm_without_what_is_replaced(stub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install()
    uninstall()
    with monkeypatch.context() as patch:
        patch.delitem(PIPELINE_MAP, "mlc_llm")
        with pytest.raises(VersionError, match=r"registers no pipeline 'mlc_llm'.*79d603f"):
            install()
    flags = sys.modules["mlc_llm.interface.compiler_flags"]
    monkeypatch.delattr(flags, "OptimizationFlags")
    with pytest.raises(VersionError, match=r"lacks mlc_llm\.interface\.compiler_flags\.Opt"):
        install()


@pytest.mark.parametrize(
    "choice",
    [{"backend": "cuda"}, {"validate": "yes"}, {"disable": ["Nope"]}, {"plans": {"Nope": None}}],
)
def test_choices_are_checked_before_anything_is_compiled(stub: Path, choice: dict) -> None:
    with pytest.raises(RelaxFusionError, match=next(iter(choice))):
        install(**choice)
    assert "mlc_llm" not in PIPELINE_MAP
