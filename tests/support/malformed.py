"""Values that nobody expects, a small configuration, and what an error looks like."""

from __future__ import annotations

from typing import Any

from relax_fusion.cli import main, manifest


class Stranger:
    """Of no use as an option; its repr is the same in every process, for the names of tests."""

    def __repr__(self) -> str:
        return "Stranger()"


STRANGER = Stranger()
HUGE, LONG = 10**20, 10**5000
CYCLE: dict[str, Any] = {}
CYCLE["itself"] = CYCLE


class Rude:
    """A value that cannot even be shown."""

    def __repr__(self) -> str:
        raise ZeroDivisionError


def assert_one_line(err: BaseException) -> None:
    """Check that an error says something, on one line that can be read."""
    assert str(err) and "\n" not in str(err) and len(str(err)) < 600


CONFIG = {
    "model_type": "gpt2",
    "vocab_size": 96,
    "n_embd": 32,
    "n_layer": 1,
    "n_head": 2,
    "n_positions": 64,
}


def reached() -> None:
    """Stand for what comes after all checks."""
    raise manifest.CliError("everything is right")


def failed(arguments: list[str], capsys) -> str:
    """Run the command line; return its one line, which calls nothing unexpected."""
    assert main([*arguments, "-q"]) in (1, 2)
    lines = capsys.readouterr().err.splitlines()
    errors = [line for line in lines if line.startswith("relax-fusion: error: ")]
    assert len(errors) == 1 and lines[-1:] == errors
    assert "--traceback shows where" not in errors[0] and len(errors[0]) < 700, errors[0]
    return errors[0]
