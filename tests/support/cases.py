"""Chains and what a pass makes of each, as text in ``tests/data/chains``.

A file is named after the pass, and perhaps after what its cases have in common.  A case is a Relax
function in the words of :class:`Chain`, and, behind a line of dashes, what its kernels compute and
read and what is called then, or why there are none::

    == rows_grouped_anew
    x[6,32] W[32,48] b[48] r[2,3,48]
    m = R.matmul(x, W)
    n = R.add(m, b)
    g = R.reshape(n, [2, 3, 48])
    y = R.add(r, g)
    return y
    --
    fused NormMatmul(rows=6, k=32, outputs=(Projection(n=48, layout='kn', epilogue=('bias', ...
    operands x W b r
    calls reshape kernel

The line of the inputs may end in ``| float16 | b=2 s=7``: their dtype, and sizes for the numbers.
``(slow)`` or ``(no numbers)`` behind a name says when its numbers are compared.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path

import tvm
from tvm import relax

from .chains import Chain, calls, kernel_args, module, run_pass

DIRECTORY = Path(__file__).parent.parent / "data" / "chains"
FILES = sorted(path.stem for path in DIRECTORY.glob("*.txt"))
CASE = re.compile(r"^== (\w+)(?: \((slow|no numbers)\))?\n(.*?)^--\n(.*?)(?=^== |\Z)", re.M | re.S)


@dataclass(frozen=True)
class Case:
    """A chain of a file, and what its pass makes of it.

    Parameters
    ----------
    file : str
        The file, without its ending.
    chain : Chain
        The function.
    outcome : str
        What the file says of it.
    numbers : {"", "slow", "no numbers"}
        When its numbers are compared.
    """

    file: str
    chain: Chain
    outcome: str
    numbers: str = ""

    def __str__(self) -> str:
        """Name the test."""
        return f"{self.file}-{self.chain.name}"


def cases(file: str) -> dict[str, Case]:
    """Return the cases of a file by name."""
    text = (DIRECTORY / f"{file}.txt").read_text(encoding="utf-8")
    found = {name: _case(file, name, *rest) for name, *rest in CASE.findall(text)}
    assert len(found) == text.count("== "), f"a case of {file} has no name of its own, or no end"
    return found


def _case(file: str, name: str, numbers: str, text: str, outcome: str) -> Case:
    inputs, *body, result = text.strip().split("\n")
    tensors, dtype, sizes = (part.strip() for part in f"{inputs} | |".split("|")[:3])
    given = {name: int(size) for name, size in (item.split("=") for item in sizes.split())}
    result = result.removeprefix("return ")
    chain = Chain(name, tensors, "\n".join(body), result, given, dtype or "float32")
    return Case(file, chain, outcome.strip(), numbers)


def outcome(case: Case, **options: object) -> str:
    """Apply the pass of a case, whether that pays or not, and tell what it makes of the chain."""
    name = case.file.split(".")[0]
    mod = module([case.chain])
    out, decisions = run_pass(mod, name, always_fuse=True, **options)
    fused = [decision for decision in decisions if decision.fused]
    if not fused:
        tvm.ir.assert_structural_equal(out, mod)
    lines = [f"fused {short(decision.workload)}" for decision in fused]
    lines += [d.validation for d in fused if d.validation != "checked"]
    lines += [
        f"declined {d.decline.reason.name} at {d.where}: {d.decline.detail}"
        for d in decisions
        if d.decline is not None
    ]
    if fused:
        if name == "FuseAttentionChain":  # masks that no kernel reads any more
            out = relax.transform.DeadCodeElimination()(out)
        func = out[case.chain.name]
        lines += [f"operands {' '.join(args)}" for args in kernel_args(func)]
        lines += ["calls " + " ".join(calls(func)).replace("call_tir", "kernel")]
    return "\n".join(lines or ["nothing found"])


def short(value: object) -> str:
    """Return a description without the fields that are what they are by default."""
    if isinstance(value, tuple):
        return f"({', '.join(map(short, value))}{',' * (len(value) == 1)})"
    if not is_dataclass(value):
        return repr(value)
    shown = [f"{n}={short(v)}" for n, v in _told(value)]
    return f"{type(value).__name__}({', '.join(shown)})"


def _told(value: object) -> Iterator[tuple[str, object]]:
    for each in fields(value):  # type: ignore[arg-type]
        found = getattr(value, each.name)
        if each.repr and found != each.default:
            yield each.name, found


def rewrite(case: Case, found: str) -> None:
    """Write anew what a file says of a case."""
    path = DIRECTORY / f"{case.file}.txt"
    text = path.read_text(encoding="utf-8")
    head = re.compile(rf"(^== {case.chain.name}\b.*?^--\n).*?(?=^== |\Z)", re.M | re.S)
    end = "\n" if list(cases(case.file))[-1] == case.chain.name else "\n\n"
    path.write_text(head.sub(lambda m: m[1] + found + end, text), encoding="utf-8")
