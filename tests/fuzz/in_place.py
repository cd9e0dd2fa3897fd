"""Programs that overwrite tensors in place, at random, and what they compute according to numpy.

A program is a list of statements over matrices of one size.  Chains that our passes fuse are laid
out one after the other; then writes are put between their statements, to any tensor that is there,
under its own name, another one, as a part of a tuple, or as a reshape, which is a copy.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import tvm
from tvm import ir, relax

from ..support.quick import machine

N = 8
MATRIX = f'R.Tensor(({N}, {N}), "float32")'
VECTOR = f'R.Tensor(({N},), "float32")'
PARAMS = {"x": MATRIX, "w": MATRIX, "v": MATRIX, "g": VECTOR}
PACKED = "relax_fusion_tests.rewrite"

HEADER = f"""
@I.ir_module
class Module:
    @T.prim_func(private=True, s_tir=True)
    def rewrite(a: T.Buffer((T.int64({N}), T.int64({N})), "float32")):
        T.func_attr({{"tirx.noalias": True}})
        for i, j in T.grid(T.int64({N}), T.int64({N})):
            with T.sblock("rewrite"):
                vi, vj = T.axis.remap("SS", [i, j])
                a[vi, vj] = T.float32(1) - a[vi, vj] * T.float32(0.5)

    @R.function(private=True)
    def callee(a: {MATRIX}) -> {MATRIX}:
        cls = Module
        with R.dataflow():
            b = R.call_tir_inplace(cls.rewrite, (a,), inplace_indices=[0], out_ty={MATRIX})
            R.output(b)
        return b
"""

WRITES = {
    "tir": f"R.call_tir_inplace(cls.rewrite, ({{}},), inplace_indices=[0], out_ty={MATRIX})",
    "packed": f'R.call_inplace_packed("{PACKED}", {{}}, inplace_indices=[0], ty_args={MATRIX})',
    "callee": "cls.callee({})",
    "vector": f'R.call_inplace_packed("{PACKED}", {{}}, inplace_indices=[0], ty_args={VECTOR})',
}

CALLS: Mapping[str, tuple[str, Callable[..., np.ndarray]]] = {
    "add": ("R.add({}, {})", np.add),
    "multiply": ("R.multiply({}, {})", np.multiply),
    "half": ('R.multiply({}, R.const(0.5, "float32"))', lambda a: a / 2),
    "once": ('R.multiply({}, R.const(1.0, "float32"))', np.copy),
    "silu": ("R.nn.silu({})", lambda a: a / (1 + np.exp(-a))),
    "sine": ("R.sin({})", np.sin),
    "matmul": ("R.matmul({}, {})", np.matmul),
    "transpose": ("R.permute_dims({})", lambda a: a.T.copy()),
    "flat": (f"R.reshape({{}}, ({N * N},))", lambda a: a.reshape(-1).copy()),
    "square": (f"R.reshape({{}}, ({N}, {N}))", lambda a: a.reshape(N, N).copy()),
    "flip": ("R.flip({}, axis=0)", lambda a: a[::-1].copy()),
    "twice": (
        f"R.repeat(R.strided_slice({{}}, axes=[0], begin=[1], end=[{N}], strides=[2]), 2, 0)",
        lambda a: np.repeat(a[1::2], 2, 0),
    ),
    "lift": (f"R.reshape({{}}, (1, {N}, {N}))", lambda a: a.reshape(1, N, N).copy()),
    "swap": ("R.permute_dims({}, axes=[0, 2, 1])", lambda a: a.transpose(0, 2, 1).copy()),
    "norm": (
        "R.nn.rms_norm({}, {}, axes=[-1], epsilon=1e-5)",
        lambda a, g: a / np.sqrt(np.mean(a * a, axis=-1, keepdims=True) + 1e-5) * g,
    ),
    "softmax": (
        "R.nn.softmax({}, axis=-1)",
        lambda a: np.exp(a) / np.sum(np.exp(a), axis=-1, keepdims=True),
    ),
    "alias": ("{}", lambda a: a),
    "pair": ("({}, {})", lambda *a: a),
    "second": ("{}[1]", lambda pair: pair[1]),
}
"""Statements: their TVMScript, and what they do, in numpy."""

CHAINS = (
    "h=norm A g; m=matmul h B; y=add m C",
    "s=add A C; h=norm s g; m=matmul h B; y=add m s",
    "t=transpose B; m=matmul A t; n=matmul C t; y=add m n",
    "a=matmul A B; b=matmul A C; c=silu a; y=multiply c b",
    "m=matmul A B; c=half m; n=matmul c C; y=add n A",
    "t=transpose B; m=matmul A t; p=softmax m; y=matmul p C",
    "f=flat A; r=square f; m=matmul r B; e=flat m; y=square e",
    "o=once A; m=matmul o B; n=sine m; y=add n A",
    "q=lift A; k=lift B; t=swap k; s=matmul q t; p=softmax s; e=lift C; o=matmul p e; y=square o",
    "f=flip A; m=matmul f B; y=sine m",
    "f=twice A; t=transpose f; h=norm t g; m=matmul h B; y=add m f",
)
ROUTES = ("n=alias A", "p=pair v A; n=second p", "f=flat A; n=square f", "n=once A", "")


@dataclass(frozen=True)
class Statement:
    """``name = op(args)``, where `op` names one of `CALLS` or `WRITES`."""

    name: str
    op: str
    args: tuple[str, ...]

    def script(self) -> str:
        """Return the statement as TVMScript."""
        text = WRITES[self.op] if self.op in WRITES else CALLS[self.op][0]
        return f"{self.name} = {text.format(*self.args)}"


@dataclass(frozen=True)
class Program:
    """A function of `PARAMS`: its statements, and the matrices that it returns."""

    statements: tuple[Statement, ...]
    results: tuple[str, ...]
    dataflow: bool

    def script(self, name: str) -> str:
        """Return the program as a function in TVMScript."""
        lines = [s.script() for s in self.statements]
        if self.dataflow:
            lines = [f"    {line}" for line in (*lines, f"R.output({', '.join(self.results)})")]
            lines.insert(0, "with R.dataflow():")
        lines = ["cls = Module", *lines, f"return ({', '.join(self.results)})"]
        params = ", ".join(f"{p}: {ty}" for p, ty in PARAMS.items())
        return f"\n    @R.function\n    def {name}({params}):\n" + "".join(
            f"        {line}\n" for line in lines
        )

    def run(self, arrays: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Return the results; the arrays that it writes are changed."""
        values: dict[str, np.ndarray] = dict(arrays)
        for s in self.statements:
            args = [values[a] for a in s.args]
            if s.op in WRITES:
                args[0][...] = 1 - args[0] * 0.5
                values[s.name] = args[0]
            else:
                values[s.name] = CALLS[s.op][1](*args)
        return [values[r].copy() for r in self.results]


def parse(text: str, results: str, dataflow: bool = True) -> Program:
    """Read a program: ``"t=transpose w; y=matmul x t"``, and the names of its results."""
    lines = [line.replace("=", " ").split() for line in text.split(";")]
    statements = tuple(Statement(name, op, tuple(args)) for name, op, *args in lines)
    return Program(statements, tuple(results.split()), dataflow)


def module(programs: Sequence[Program]) -> ir.IRModule:
    """Return a module with the functions ``f0``, ``f1``, ..."""
    functions = (p.script(f"f{i}") for i, p in enumerate(programs))
    return tvm.script.from_source(HEADER + "".join(functions))


def wrong(built: relax.VMExecutable, programs: Sequence[Program]) -> list[str]:
    """Run a module's functions; return those that compute or overwrite something else."""
    tvm.register_global_func(PACKED, _rewrite, override=True)
    vm = machine(built)
    found = []
    for i, program in enumerate(programs):
        rng = np.random.default_rng(i)
        arrays = {n: rng.standard_normal(N if n == "g" else (N, N)) / 2 for n in PARAMS}
        tensors = [tvm.runtime.tensor(a.astype("float32")) for a in arrays.values()]
        results = vm[f"f{i}"](*tensors)
        got = [results] if len(program.results) == 1 else list(results)
        want = [*program.run(arrays), *arrays.values()]
        for name, g, w in zip((*program.results, *PARAMS), [*got, *tensors], want, strict=True):
            error = np.abs(g.numpy() - w).max()
            if not error <= 1e-4 * max(1.0, np.abs(w).max()):
                found.append(f"{name} is wrong by {error:.2g}:{program.script(f'f{i}')}")
    return found


def _rewrite(tensor: tvm.runtime.Tensor) -> tvm.runtime.Tensor:
    tensor.copyfrom((1 - tensor.numpy() * 0.5).astype("float32"))
    return tensor


class Draft:
    """Draws one program."""

    def __init__(self, rng: random.Random):
        self.rng = rng
        self.statements: list[Statement] = []
        self.matrices = ["x", "w", "v"]

    def draw(self) -> Program:
        """Return a program of one to three chains and one to three writes."""
        for _ in range(self.rng.randint(1, 3)):
            self.lay_out(self.rng.choice(CHAINS), len(self.statements))
        for _ in range(self.rng.randint(1, 3)):
            self.write(self.rng.randint(0, len(self.statements)))
        made = [s.name for s in self.statements if s.name in self.matrices]
        results = {made[-1], *self.rng.sample(made, min(len(made), self.rng.randint(0, 2)))}
        in_order = tuple(m for m in made if m in results)
        return Program(tuple(self.statements), in_order, self.rng.random() < 0.7)

    def lay_out(self, text: str, place: int) -> str:
        """Insert statements, capital letters standing for tensors that are there already."""
        there = self.there(place)
        names: dict[str, str] = {"g": "g", "v": "v"}
        names |= {letter: self.rng.choice(there) for letter in "ABC"}
        name = names["A"]
        for at, line in enumerate(filter(None, map(str.strip, text.split(";")))):
            target, op, *args = line.replace("=", " ").split()
            name = f"{target}{len(self.statements)}"
            statement = Statement(name, op, tuple(names[a] for a in args))
            self.statements.insert(place + at, statement)
            names[target] = name
            if op in ("second", "square") or self.makes_matrix(statement):
                self.matrices.append(name)
        return name

    def makes_matrix(self, statement: Statement) -> bool:
        """Tell whether a statement makes a matrix of matrices and vectors."""
        shapes = ("flat", "lift", "pair")
        return statement.op not in shapes and {*statement.args} <= {"g", *self.matrices}

    def write(self, place: int) -> None:
        """Insert a write, and perhaps let a later statement read its result."""
        if self.rng.random() < 0.1:
            name = f"u{len(self.statements)}"
            self.statements.insert(place, Statement(name, "vector", ("g",)))
            return
        before = len(self.statements)
        name = self.lay_out(self.rng.choice(ROUTES), place)
        place += len(self.statements) - before
        result = f"u{len(self.statements)}"
        kind = self.rng.choice(("tir", "packed", "callee"))
        statement = Statement(result, kind, (name,))
        self.statements.insert(place, statement)
        self.matrices.append(result)
        later = range(place + 1, len(self.statements))
        if later and self.rng.random() < 0.6:
            self.replace_an_argument(self.rng.choice(later), result)

    def replace_an_argument(self, place: int, new: str) -> None:
        """Let a statement read another matrix in place of one of its own."""
        old = self.statements[place]
        matrices = [i for i, a in enumerate(old.args) if a in self.matrices]
        if matrices:
            args = list(old.args)
            args[self.rng.choice(matrices)] = new
            self.statements[place] = Statement(old.name, old.op, tuple(args))

    def there(self, place: int) -> list[str]:
        """Return the matrices that exist at a place."""
        made = [s.name for s in self.statements[:place] if s.name in self.matrices]
        return ["x", "w", "v", *made]
