"""The code of a page of the documents, as one program that runs it from top to bottom.

Its lines have the numbers that they have on the page, so that an error names the line to look at.
"""

from __future__ import annotations

import contextlib
import os
import re
import runpy
import shlex
import subprocess
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).resolve().parents[2]
RUN, SHOWN = ("python", "bash"), ("text", "json", "cpp", "mermaid")
FENCE = re.compile(r"( *)```(\w*)$")
NEEDS = re.compile(r"<!-- needs: (.+) -->")
LONG = ("relax-fusion demo", "relax-fusion bench", "python -m benchmarks run", "python scripts/")
"""Commands that take minutes: they are parsed, and not run.

Neither is a compilation whose directory no other command of its page reads, nor what the README has
of the page `USAGE`, where it is run.
"""
USAGE = ROOT / "docs" / "usage.md"


@dataclass(frozen=True)
class Block:
    """A fenced block: where its code begins, and what it needs that a test does not have."""

    line: int
    language: str
    code: tuple[str, ...]
    needs: str


def blocks_of(page: Path) -> list[Block]:
    """Return the fenced blocks of a page, which may be indented as parts of a list."""
    found, lines = [], iter(enumerate(page.read_text(encoding="utf-8").splitlines(), 1))
    before = ""
    for number, line in lines:
        if opened := FENCE.match(line):
            end, code = f"{opened[1]}```", []
            for _, inner in lines:
                if inner.rstrip() == end:
                    break
                code.append(inner.removeprefix(opened[1]))
            else:
                raise ValueError(f"{page.name}:{number}: the block is not closed")
            needs = NEEDS.fullmatch(before.strip())
            found.append(Block(number + 1, opened[2], tuple(code), needs[1] if needs else ""))
        before = line
    return found


def program_of(page: Path) -> str:
    """Return the program: Python as it stands, and a call for each command of a shell."""
    text = page.read_text(encoding="utf-8")
    lines = [""] * len(text.splitlines())
    lines[0] = f"from {__name__} import shell"
    for block in blocks_of(page):
        if block.needs or block.language not in RUN:
            continue
        code = block.code if block.language == "python" else _commands(block.code, page, text)
        lines[block.line - 1 : block.line - 1 + len(code)] = code
        if block.language == "python" or any(call.startswith("shell.run") for call in code):
            lines[0] = f"from {__name__} import shell; shell.prepare()"
    return "\n".join(lines) + "\n"


def _commands(code: tuple[str, ...], page: Path, text: str) -> list[str]:
    """Return a call for each command, at its last line."""
    calls, command = [], ""
    usage = USAGE.read_text(encoding="utf-8").splitlines() if page.name == "README.md" else []
    elsewhere = {_bare(line) for line in usage if line}
    for line in code:
        command += line.removesuffix("\\")
        whole = not line.endswith("\\")
        call = "check" if _is_long(command, text) or _bare(command) in elsewhere else "run"
        calls.append(f"shell.{call}({command!r})" if whole else "")
        command = "" if whole else command
    return calls


def _bare(command: str) -> str:
    return command.partition(" #")[0].rstrip()


def _is_long(command: str, page: str) -> bool:
    if command.startswith(LONG):
        return True
    made = re.search(r"^relax-fusion compile .* -o (\S+)", command)
    reading = rf"^relax-fusion (?:run|workloads|diff)\b.* {made[1]}\b" if made else ""
    return bool(made) and "--debug-dump" not in command and not re.search(reading, page, re.M)


class shell:
    """What stands for a shell: commands of the library run in this process, on small models."""

    @staticmethod
    def prepare() -> None:
        """Make the files that pages speak of; bundled models are small, and LLVM in a hurry."""
        from tvm.target import Target, codegen

        from relax_fusion.hardware import target
        from relax_fusion.models import zoo

        from .documented_files import small, write_files

        host = {"kind": "llvm", "mcpu": codegen.llvm_get_system_cpu(), "num-cores": 2}
        target.host_target = lambda: Target({**host, "opt-level": 0})
        zoo.CONFIGS = MappingProxyType({name: small(c) for name, c in zoo.CONFIGS.items()})
        write_files(Path.cwd())

    @staticmethod
    def run(line: str) -> None:
        """Run one line."""
        words = shlex.split(line, comments=True)
        if not words:
            return
        target = contextlib.nullcontext()
        if ">" in words[:-1]:
            *words, _, name = words
            target = contextlib.redirect_stdout(open(name, "w", encoding="utf-8"))  # noqa: SIM115
        if "--seconds" in words:
            words[words.index("--seconds") + 1] = "1"
        print("$", *words, file=sys.stderr, flush=True)
        with target:
            _run(words)

    @staticmethod
    def check(line: str) -> None:
        """Let a line be parsed, and do nothing."""
        program, name, *words = shlex.split(line, comments=True)
        if program == "relax-fusion":
            from relax_fusion.cli.parser import make_parser

            make_parser().parse_args([name, *words])
        elif name == "-m":
            from benchmarks.__main__ import SUITES

            assert words[2] in SUITES[words[1]], line
        else:
            text = (ROOT / name).read_text(encoding="utf-8")
            assert all(f'"{w}"' in text for w in words if w.startswith("--")), line


def _run(words: list[str]) -> None:
    if words[0] == "relax-fusion":
        from relax_fusion.cli import main

        code = main(words[1:])
        if words[1] == "diff":  # 1: a chain was lost
            code = max(code - 1, 0)
        assert code == 0, f"{' '.join(words)}: ended with {code}"
        sys.stdout.flush()
    elif words[0] == "python":
        subprocess.run([sys.executable, *words[1:]], cwd=ROOT, check=True)
    else:
        raise ValueError(f"no program {words[0]!r} for {' '.join(words)}")


@contextlib.contextmanager
def runner(variables: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """Start a process that runs programs, each in a process of its own, as `run_program` asks.

    It has imported TVM and the library, which takes longer than most pages.
    """
    command = [sys.executable, "-W", "ignore", "-m", __name__]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=variables, stdin=pipe, stdout=pipe, text=True) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def run_program(process: subprocess.Popen[str], program: Path) -> tuple[int, str, str]:
    """Return the exit code of a program that runs in its directory, and what it prints."""
    assert process.stdin is not None and process.stdout is not None
    print(program, file=process.stdin, flush=True)
    code = int(process.stdout.readline())
    out, err = (program.with_suffix(f".{name}").read_text("utf-8") for name in ("out", "err"))
    return code, out, err


def _serve() -> None:
    import relax_fusion.pipeline  # noqa: F401  # what the programs would import

    for line in sys.stdin:
        if not (child := os.fork()):
            os._exit(_child(Path(line.strip())))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _child(program: Path) -> int:
    os.chdir(program.parent)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(program.with_suffix(f".{name}"), os.O_WRONLY | os.O_CREAT), number)
    try:
        sys.argv = [str(program)]
        runpy.run_path(str(program), run_name="__main__")
        return 0
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


if __name__ == "__main__":
    _serve()
