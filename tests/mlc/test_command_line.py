"""MLC-LLM's command line with our phases: devices, errors in one line, and what is absent."""

from __future__ import annotations

import argparse
import importlib
import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tvm
from tvm.error import DiagnosticError
from tvm.target import Target

from relax_fusion.errors import ModelFileError, TargetError
from relax_fusion.hardware.target import device_of, make_target
from relax_fusion.mlc import __main__ as command_line
from relax_fusion.mlc import install
from relax_fusion.mlc.__main__ import main
from relax_fusion.mlc.tokenizer import Tokenizer
from relax_fusion.transforms.running import enter, run_pass

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(stub: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return what runs a function in the place of MLC-LLM's, and gives the code and stderr."""

    def run_it(function: Callable[[], Any], *arguments: str) -> tuple[int, str]:
        install()
        monkeypatch.setattr(sys, "argv", [])
        enter("")
        monkeypatch.setattr(importlib.import_module("mlc_llm.__main__"), "main", function)
        return main(arguments or ["compile"]), capsys.readouterr().err

    return run_it


def test_the_command_line(
    stub: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["-m", "compile", "--traceback", "model"])
    monkeypatch.delitem(sys.modules, "relax_fusion.mlc.__main__")
    with pytest.raises(SystemExit) as end:
        runpy.run_module("relax_fusion.mlc", run_name="__main__")
    assert end.value.code == 0
    assert capsys.readouterr().out == "['mlc_llm', 'compile', 'model'] relax_fusion.mlc.phases\n"


def test_without_mlc_llm(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile"]) == 1
    assert capsys.readouterr().err.startswith("relax_fusion.mlc: error: mlc_llm cannot be imported")


@pytest.mark.parametrize(
    "raised, advice",
    [
        (ModuleNotFoundError("No module named 'a_b.c'", name="a_b.c"), "pip install a_b"),
        (ModuleNotFoundError("No module named 'mlc_llm.x'", name="mlc_llm.x"), "79d603f"),
        (ModuleNotFoundError("No module named 'tvm.x'", name="tvm.x"), "79d603f"),
        (ModuleNotFoundError("gone"), "79d603f"),
        (ImportError("cannot import name 'x' from 'tvm'", name="tvm"), "79d603f"),
    ],
)
def test_what_helps_where_something_is_not_imported(
    run: Run, raised: ImportError, advice: str
) -> None:
    code, said = run(lambda: raises(raised))
    assert code == 1
    assert str(raised) in said and advice in said.rpartition(";")[2] and "None" not in said


def raises(err: BaseException) -> None:
    raise err


DIAGNOSTIC = "error: T.writes must be\n called first\n --> /a/b c/crop.py:117:9\n  |\n117| T.wr"


@pytest.mark.parametrize(
    "raised, code, said",
    [
        (ValueError("Check failed:\n  a == b\nstack"), 1, "ValueError: Check failed:; "),
        (DiagnosticError(DIAGNOSTIC), 1, "DiagnosticError: T.writes must be (crop.py:117); "),
        (AssertionError(), 1, "AssertionError: raise err (test_command_line.py:"),
        (TargetError("no device"), 1, "no device\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_an_error_is_one_line(run: Run, raised: BaseException, code: int, said: str) -> None:
    found = run(lambda: raises(raised))
    assert found[0] == code and found[1].startswith(f"relax_fusion.mlc: error: {said}")
    assert found[1].count("\n") == 1
    assert "Traceback" in run(lambda: raises(raised), "compile", "--traceback")[1] or code == 130


@tvm.transform.module_pass(opt_level=0, name="FuseTooMuch")
class FuseTooMuch:
    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        return raises(ValueError("no such tile"))


def test_the_pass_that_failed_is_named(run: Run) -> None:
    failed = "the pass FuseTooMuch failed: ValueError: no such tile; --traceback shows where\n"
    wanted = f"relax_fusion.mlc: error: {failed}"
    assert run(lambda: run_pass(FuseTooMuch(), tvm.IRModule())) == (1, wanted)


def test_subcommands_that_need_the_native_library(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, said = run(lambda: None, "chat", "--help")
    assert code == 1 and "chat needs MLC-LLM's native library" in said
    monkeypatch.setattr(command_line, "has_native_library", lambda: True)
    assert run(lambda: None, "chat", "--help") == (0, "")


@pytest.mark.parametrize("name", ["h200", "H200", "a100", "llvm"])
def test_devices_by_name(run: Run, name: str) -> None:
    run(lambda: None)
    targets = importlib.import_module("mlc_llm.support.auto_target")
    target, host = targets.detect_target_and_host(name, "x86_64")
    assert isinstance(target, Target) and host == "x86_64" and target.host is None
    assert device_of(target) == device_of(make_target(name.lower()))
    assert targets.detect_target_and_host("c")[0].kind.name == "c"


@pytest.mark.parametrize("name", ["cuda:x", "nosuch", ""])
def test_what_is_no_device_is_told_with_those_that_are(run: Run, name: str) -> None:
    run(lambda: None)
    targets = importlib.import_module("mlc_llm.support.auto_target")
    with pytest.raises(TargetError, match=rf"--device {name}: Invalid target.* llvm, a100.* h200"):
        targets.detect_target_and_host(name)


def test_devices_of_this_machine_are_found(run: Run) -> None:
    run(lambda: None)
    exists = importlib.import_module("mlc_llm.support.auto_device")._device_exists
    assert exists(tvm.cpu()) and not exists(tvm.device("metal", 0))


def test_why_an_argument_is_refused(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run(lambda: None)

    def existing(path: str) -> None:
        raise ValueError(f"{path} does not exist")

    parser: argparse.ArgumentParser = sys.modules["mlc_llm.support.argparse"].ArgumentParser()
    parser.add_argument("--opt", action="store_true")
    parser.add_argument("model", type=existing)
    with pytest.raises(SystemExit):
        parser.parse_args(["--opt", "there"])
    assert capsys.readouterr().err.endswith("argument model: there does not exist\n")


BYTES, STRIP = {"type": "ByteLevel"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}
FALLBACK, PREPEND = {"type": "ByteFallback"}, {"type": "Prepend", "prepend": "\u2581"}


@pytest.mark.parametrize(
    "given, info",
    [
        ({}, ("byte_fallback", False, False)),
        ({"decoder": None, "normalizer": None}, ("byte_fallback", False, False)),
        ({"decoder": BYTES}, ("byte_level", False, False)),
        ({"decoder": {"type": "WordPiece"}}, ("byte_fallback", False, False)),
        (
            {
                "decoder": {"type": "Sequence", "decoders": [BYTES, FALLBACK, STRIP]},
                "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, PREPEND]},
            },
            ("byte_fallback", True, True),
        ),
        (
            {"decoder": STRIP | {"stop": 1}, "normalizer": PREPEND | {"prepend": "_"}},
            ("byte_fallback", False, False),
        ),
    ],
)
def test_what_a_tokenizer_is(given: dict, info: tuple, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(given))
    found = Tokenizer.detect_tokenizer_info(str(tmp_path))
    named = ("token_postproc_method", "prepend_space_in_encode", "strip_space_in_decode")
    assert vars(found) == dict(zip(named, info, strict=True))


def test_a_tokenizer_that_is_absent_or_broken(tmp_path: Path) -> None:
    assert Tokenizer.detect_tokenizer_info(str(tmp_path)).token_postproc_method == "byte_fallback"
    for text, why in (("{", "is no JSON"), ("[]", "holds list, not an object")):
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(ModelFileError, match=why):
            Tokenizer.detect_tokenizer_info(str(tmp_path))
