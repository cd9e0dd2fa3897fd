"""Command lines and prompts, malformed: each is one line of an error."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from relax_fusion.cli import manifest, run
from relax_fusion.validation import shown

from ..support.malformed import HUGE, failed

COMMANDS = [
    *(["explain", "demo-gpt2", "--max-seq-len", v] for v in ("0", "-1", "x", "1.5", str(HUGE))),
    *(["explain", "demo-gpt2", "--batch", v] for v in ("0", "x", str(HUGE), "9" * 5000)),
    *(["explain", "demo-gpt2", "--target", v] for v in ("", "{", "nothing", '{"kind": "c"}')),
    *(["explain", v] for v in ("", "/nothing", "a\0b", "x" * 5000, ".", "/dev/null")),
    *(["run", v, "--prompt-ids", "1"] for v in ("", "/nothing", ".", "/dev/null", "x" * 5000)),
    *(["run", ".", "--prompt-ids", v] for v in ("", "x", "-1", "1.5", str(HUGE), "9" * 5000)),
    *(["compile", "demo-gpt2", "-o", v] for v in (".", "/", "/proc", "/dev/null", "/dev/null/x")),
    *(["tune", "demo-gpt2", "--database", v] for v in ("", ".", "/nothing/x", "/dev/null")),
    *(["tune", "demo-gpt2", "--database", "/dev/shm/x", "--rpc", v] for v in ("", "x", "x:y:z")),
    *(["tune", "demo-gpt2", "--database", "x", "--seconds", v] for v in ("-1", "x", "")),
    *(["tune", "demo-gpt2", "--database", "x", "--most", v] for v in ("0", "x", str(HUGE))),
    *(["explain", "demo-gpt2", "--database", v] for v in ("", ".", "/nothing", "/dev/null")),
    *(
        [],
        ["tune", "demo-gpt2"],
        ["nothing"],
        ["run"],
        ["compile", "demo-gpt2"],
        ["demo", "--surprise"],
    ),
]


@pytest.mark.parametrize("arguments", COMMANDS, ids=shown)
def test_command_lines(arguments: list[str], capsys, monkeypatch) -> None:
    monkeypatch.setattr("relax_fusion.cli.compile._write_library", lambda *_: (0, 0))
    failed(arguments, capsys)


@pytest.mark.parametrize("dump", ["out", "out/dump", "link/../out"])
def test_a_dump_that_would_be_in_the_way(tmp_path: Path, capsys, monkeypatch, dump: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deep").mkdir()
    (tmp_path / "link").symlink_to("deep")
    line = failed(["compile", "demo-gpt2", "-o", "out", "--debug-dump", dump], capsys)
    assert "is within -o" in line and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--dump-phases", "1"], "dump_phases needs debug_dump"),
        (["--dump-functions", "decode,,"], "'decode,,' is no list of names"),
        (
            ["--dump-phases", "9", "--debug-dump", "dump"],
            "dump_phases names '9'; there are 0, 1, 2",
        ),
        (
            ["--dump-functions", "x", "--debug-dump", "dump"],
            "dump_functions names 'x'; the module has",
        ),
    ],
    ids=shown,
)
def test_dumps_of_what_there_is_not(
    tmp_path: Path, capsys, monkeypatch, arguments: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert says in failed(["explain", "demo-gpt2", *arguments], capsys)
    assert not (tmp_path / "dump").exists()


@pytest.mark.parametrize("variable", ["CXX", "CC"])
def test_compilers_that_are_no_program(capsys, monkeypatch, variable: str) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv(variable, "ccache g++")
    line = failed(["compile", "demo-gpt2", "-o", "/dev/shm/nothing"], capsys)
    assert "the C++ compiler is 'ccache g++'" in line


def test_a_tokenizer_that_panics(compiled, library, capsys, monkeypatch) -> None:
    """What Rust's panics raise is no Exception."""

    class Panic(BaseException):
        """As pyo3's."""

    class Panics:
        def encode(self, _: str) -> None:
            raise Panic("no entry found for key")

    monkeypatch.setattr(run, "_tokenizer", lambda *_: Panics())
    assert "no entry found" in failed(["run", str(compiled[0]), "--prompt", "a"], capsys)


def test_a_file_that_is_too_long_for_a_configuration(capsys) -> None:
    assert "has more than" in failed(["explain", "/dev/zero"], capsys)


@pytest.mark.parametrize("arguments", [["-o", ""], ["-o", "/dev/null", "--debug-dump", ""]])
def test_empty_names_of_directories(arguments: list[str], capsys) -> None:
    """As a variable gives that is not set; they are not the working directory."""
    assert "it is empty" in failed(["compile", "demo-gpt2", *arguments], capsys)


def test_prompts_are_checked_before_weights_are_read(compiled, library, capsys) -> None:
    for ids, says in (("96", "96 must be in 0..95"), ("1 2 96", "96"), ("1," * 64 + "1", "fit")):
        assert says in failed(["run", str(compiled[0]), "--prompt-ids", ids], capsys)


def test_prompts_that_are_no_text(compiled, library, capsys, tmp_path: Path, monkeypatch) -> None:
    for prompt, says in (("a\udcff", "UTF-8"), ("b", "cannot read")):
        tokenizer = Tokenizer(WordLevel({"a": 0}, unk_token="[UNK]"))
        monkeypatch.setattr(run, "_tokenizer", lambda *_, made=tokenizer: made)
        assert says in failed(["run", str(compiled[0]), "--prompt", prompt], capsys)


def test_a_prompt_is_neither_cut_nor_padded(tmp_path: Path) -> None:
    """As many tokenizer.json of Hugging Face's ask for, for the sake of batches."""
    tokenizer = Tokenizer(WordLevel({"a": 1}, unk_token="a"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(tmp_path / manifest.TOKENIZER))
    named = SimpleNamespace(files={manifest.TOKENIZER: None})
    assert run._encoded(run._tokenizer(tmp_path, named), "a a a a") == [1] * 4
