"""Small mistakes that can be made in a module: constants, comparisons, dropped guards and the like.

What no test can see is left alone: docstrings, messages, type hints, names for reports.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

MESSAGES = {"Decline", "Refused", "guard", "refused"}
"""Calls whose arguments only say something to a reader, a guard's condition aside."""

FOR_READERS = {"__str__", "_spelling", "_text", "_shape", "shape_text"}
"""Functions that write names and numbers for reports."""

SYMMETRIC = {"isinstance", "max", "min", "same_as", "same_shape"}
"""Calls whose operands can change places, or cannot even be tried the other way round."""

PROMISES = {"strict", "frozen", "eq", "compare", "repr"}
"""Keywords that change nothing where the code around them is right."""

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}


@dataclass(frozen=True)
class Mutant:
    """A module with one mistake.

    Parameters
    ----------
    path : str
        The module's file.
    kind : str
        Which sort of mistake.
    line, last : int
        The lines of its statement, without those of statements inside.
    function : str
        In what it is, as ``Class.method``; empty for what runs when the module is imported.
    start, end : int
        What of the source is replaced, in bytes of UTF-8.
    text : str
        By what.
    """

    path: str
    kind: str
    line: int
    last: int
    function: str
    start: int
    end: int
    text: str

    def source(self, original: str) -> str:
        """Return the module's source with the mistake."""
        data = original.encode()
        return (data[: self.start] + self.text.encode() + data[self.end :]).decode()

    def diff(self, original: str) -> tuple[str, str]:
        """Return the lines that differ, before and after, each as one line."""
        data = original.encode()
        first = data.rfind(b"\n", 0, self.start) + 1
        last = data.find(b"\n", self.end)
        before = data[first:last]
        after = data[first : self.start] + self.text.encode() + data[self.end : last]
        return " ".join(before.decode().split()), " ".join(after.decode().split())


def mutants(path: Path, name: str | None = None) -> list[Mutant]:
    """Return every mutant of a file that compiles, by line; they give its path as `name`."""
    source = path.read_text(encoding="utf-8")
    found = _Finder(name or str(path), source)
    found.visit(ast.parse(source))
    unique = dict.fromkeys(found.mutants)
    return sorted((m for m in unique if _compiles(m.source(source))), key=lambda m: m.start)


def _compiles(source: str) -> bool:
    try:
        compile(source, "mutant", "exec")
    except SyntaxError:
        return False
    return True


class _Finder(ast.NodeVisitor):
    """Walks over what computes; what is only read by people is not entered."""

    def __init__(self, path: str, source: str) -> None:
        self.path = path
        starts = [0]
        for line in source.encode().splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        self.starts = starts
        self.operators = _operators(source)
        self.scope: list[str] = []
        self.runs_later = False
        self.statement = (1, 1)
        self.mutants: list[Mutant] = []

    def add(self, kind: str, node: ast.AST, text: str | ast.AST) -> None:
        """Note that `node` may become `text`."""
        text = text if isinstance(text, str) else _nested(text)
        place = [
            self.starts[getattr(node, f"{end}lineno") - 1] + getattr(node, f"{end}col_offset")
            for end in ("", "end_")
        ]
        scope = ".".join(self.scope) if self.runs_later else ""
        self.mutants.append(Mutant(self.path, kind, *self.statement, scope, *place, text))

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.stmt):
            inside = getattr(node, "body", None)
            self.statement = (node.lineno, inside[0].lineno - 1 if inside else node.end_lineno)
        for make in MAKERS.get(type(node), ()):
            for kind, place, text in make(node):
                self.add(kind, place, text)
        method: Callable[[ast.AST], None] = getattr(
            self, f"visit_{type(node).__name__}", self.generic_visit
        )
        method(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.name in FOR_READERS:
            return
        self.scope.append(node.name)
        for default in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
            self.visit(default)
        later, self.runs_later = self.runs_later, True
        self._body(node.body)
        self.runs_later = later
        self.scope.pop()

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.scope.append(node.name)
        self._body(node.body)
        self.scope.pop()

    def visit_Module(self, node: ast.Module) -> None:
        self._body(node.body)

    def _body(self, body: list[ast.stmt]) -> None:
        for statement in body:
            if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
                self.visit(statement)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        names = {t.id for t in node.targets if isinstance(t, ast.Name)}
        if not names & {"__all__", "detail", "spelling", "NAMES", "Axis", "Steps"}:
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = _called(node)
        if name == "guard":
            self.visit(node.args[0])
        elif name in MESSAGES:
            self.visit(node.func)
        elif name == "isinstance":
            self.visit(node.args[0])
        else:
            self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        for side in (node.left, *node.comparators):
            self._unordered(side)

    def visit_For(self, node: ast.For) -> None:
        self._unordered(node.iter)
        self._body([*node.body, *node.orelse])

    def _unordered(self, node: ast.expr) -> None:
        """Walk over what is searched, or gone through, in whatever order."""
        for part in node.elts if isinstance(node, ast.Tuple) else [node]:
            self.visit(part)

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg not in PROMISES:
            self.visit(node.value)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and node.value in self.operators:
            others = self.operators
            other = others[(others.index(node.value) + 1) % len(others)]
            self.add("operator", node, repr(other))

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Leave text alone."""

    def visit_Assert(self, node: ast.Assert) -> None:
        """Leave it alone: what it says is true."""

    def visit_Raise(self, node: ast.Raise) -> None:
        """Leave messages alone."""

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        """Leave it alone: nothing runs without it."""

    visit_ImportFrom = visit_Import


def _operators(source: str) -> list[str]:
    """Return the names of operators that a module mentions, and one that it does not."""
    values = [n.value for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Constant)]
    named = (v for v in values if isinstance(v, str) and v.startswith("relax.") and " " not in v)
    return [*dict.fromkeys(named), "relax.nn.dropout"]


def _called(node: ast.expr) -> str:
    if not isinstance(node, ast.Call):
        return ""
    return getattr(node.func, "attr", None) or getattr(node.func, "id", "")


def _nested(node: ast.AST) -> str:
    """Write an expression so that it stands inside any other; a statement as it is."""
    text = ast.unparse(node)
    simple = ast.Name | ast.Constant | ast.Tuple | ast.Call | ast.stmt
    return text if isinstance(node, simple) else f"({text})"


Made = Iterator[tuple[str, ast.AST, str | ast.AST]]


def _constants(node: ast.Constant) -> Made:
    value = node.value
    if isinstance(value, bool):
        yield "boolean", node, str(not value)
    elif isinstance(value, int):
        yield "number", node, str(value + 1)
        yield "number", node, f"({value - 1})"
    elif isinstance(value, float):
        yield "number", node, repr(value * 2 or 1.0)


def _texts(node: ast.Compare | ast.Dict) -> Made:
    """Text that is compared, or looked up, is no longer what it was."""
    if isinstance(node, ast.Dict):
        inside = [n for n in (*node.keys, *node.values) if n is not None]
    else:
        inside = [n for side in (node.left, *node.comparators) for n in ast.walk(side)]
    for part in inside:
        text = part.value if isinstance(part, ast.Constant) else None
        if isinstance(text, str) and not text.startswith("relax."):
            yield "text", part, repr(text + "?")


def _comparisons(node: ast.Compare) -> Made:
    for i, op in enumerate(node.ops):
        ops = [*node.ops[:i], _COMPARISONS[type(op)](), *node.ops[i + 1 :]]
        yield "comparison", node, ast.Compare(node.left, ops, node.comparators)


def _booleans(node: ast.BoolOp) -> Made:
    other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    yield "and/or", node, ast.BoolOp(other, node.values)
    for i in range(len(node.values)):
        rest = [*node.values[:i], *node.values[i + 1 :]]
        yield "operand", node, rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)


def _arithmetic(node: ast.BinOp) -> Made:
    if type(node.op) in _ARITHMETIC:
        yield "arithmetic", node, ast.BinOp(node.left, _ARITHMETIC[type(node.op)](), node.right)
    if isinstance(node.op, ast.Sub | ast.Div | ast.FloorDiv | ast.Mod):
        yield "swapped", node, ast.BinOp(node.right, node.op, node.left)


def _updates(node: ast.AugAssign) -> Made:
    if type(node.op) in _ARITHMETIC:
        yield (
            "arithmetic",
            node,
            ast.AugAssign(node.target, _ARITHMETIC[type(node.op)](), node.value),
        )


def _negations(node: ast.UnaryOp) -> Made:
    if isinstance(node.op, ast.Not | ast.USub) and not isinstance(node.operand, ast.Constant):
        yield "not", node, node.operand


def _calls(node: ast.Call) -> Made:
    """Neighbours among the operands of a call change places, where both may be right."""
    if _called(node) in MESSAGES | SYMMETRIC:
        return
    for i, (a, b) in enumerate(zip(node.args, node.args[1:], strict=False)):
        if _is_operand(a) and _is_operand(b):
            args = [*node.args[:i], b, a, *node.args[i + 2 :]]
            yield "swapped", node, ast.Call(node.func, args, node.keywords)


def _is_operand(node: ast.expr) -> bool:
    context = isinstance(node, ast.Name) and node.id in ("view", "bounds")
    return not (context or isinstance(node, ast.Starred | ast.Constant | ast.JoinedStr))


def _tuples(node: ast.Tuple) -> Made:
    pairs = len(node.elts) == 2 and not any(isinstance(e, ast.Starred) for e in node.elts)
    if pairs and isinstance(node.ctx, ast.Load):
        yield "swapped", node, f"({ast.unparse(node.elts[1])}, {ast.unparse(node.elts[0])})"


def _slices(node: ast.Slice) -> Made:
    for end in ("lower", "upper"):
        at = getattr(node, end)
        if at is not None and not isinstance(at, ast.Constant):
            yield "slice", at, f"{ast.unparse(at)} + 1"
    if node.step is not None:
        yield "slice", node, ast.Slice(node.lower, node.upper, None)


def _branches(node: ast.If | ast.While | ast.IfExp) -> Made:
    for value in ("True", "False"):
        if not (isinstance(node, ast.While) and value == "True"):
            yield "condition", node.test, value


def _filters(node: ast.comprehension) -> Made:
    for condition in node.ifs:
        yield "condition", condition, "True"


def _statements(node: ast.Expr) -> Made:
    if _called(node.value) in ("guard", "check_inner", "check_operands", "check_dtype"):
        yield "guard", node, "pass"


def _returns(node: ast.Return) -> Made:
    if node.value is not None and not isinstance(node.value, ast.Constant):
        yield "return", node.value, "None"


MAKERS: dict[type[ast.AST], tuple[Callable, ...]] = {
    ast.Constant: (_constants,),
    ast.Compare: (_comparisons, _texts),
    ast.Dict: (_texts,),
    ast.BoolOp: (_booleans,),
    ast.BinOp: (_arithmetic,),
    ast.AugAssign: (_updates,),
    ast.UnaryOp: (_negations,),
    ast.Call: (_calls,),
    ast.Tuple: (_tuples,),
    ast.Slice: (_slices,),
    ast.If: (_branches,),
    ast.While: (_branches,),
    ast.IfExp: (_branches,),
    ast.comprehension: (_filters,),
    ast.Expr: (_statements,),
    ast.Return: (_returns,),
}
"""What makes mutants of each kind of syntax: a kind, the place, and what stands there then."""


def sample(found: Sequence[Mutant], count: int, seed: int) -> list[Mutant]:
    """Choose `count` mutants at random, of every kind equally many as long as there are."""
    rng = random.Random(seed)
    piles: dict[str, list[Mutant]] = {}
    for mutant in rng.sample(found, len(found)):
        piles.setdefault(mutant.kind, []).append(mutant)
    chosen: list[Mutant] = []
    while piles and len(chosen) < count:
        for kind in sorted(piles):
            chosen.append(piles[kind].pop())
            if not piles[kind]:
                del piles[kind]
    return chosen[:count]
