"""Which keys a query sees, where that depends on positions only: causal masks and windows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tvm import tirx

from ...tvm_ir import Analyzer, ConstIntBound, detect_linear_equation
from ...workload import Causal
from ..element_values import integer
from ..pattern import PrimExpr
from ..shapes import is_one, same_shape

_ANALYZER = Analyzer()


@dataclass(frozen=True)
class Band:
    """Query i sees key j where ``above < j - i <= upto``; None where there is no bound."""

    above: PrimExpr | None = None
    upto: PrimExpr | None = None

    @property
    def is_open(self) -> bool:
        """Whether every query sees every key."""
        return self.above is None and self.upto is None

    def __str__(self) -> str:
        """Render for refusals."""
        low = "" if self.above is None else f"{self.above} < "
        high = "" if self.upto is None else f" <= {self.upto}"
        return f"keys {low}j - i{high}"


@dataclass(frozen=True)
class Sight:
    """What a workload says of a band."""

    causal: Causal = "none"
    window: int | None = None

    def __str__(self) -> str:
        """Render for refusals."""
        return self.causal if self.window is None else f"{self.causal}, window {self.window}"


def band_of(condition: PrimExpr, row: tirx.Var | None, column: tirx.Var | None) -> Band | None:
    """Read a condition on a row and a column as a band, if it is one.

    `row`, `column`: positions of query and key; None where there is only one of them, at 0.
    """
    band: Band | None = Band()
    for part in _conjuncts(condition):
        other = _bounded(part, row, column)
        band = joined(band, other) if band is not None and other is not None else None
    return band


def _conjuncts(condition: PrimExpr) -> Iterator[PrimExpr]:
    if isinstance(condition, tirx.And):
        yield from _conjuncts(condition.a)
        yield from _conjuncts(condition.b)
    else:
        yield condition


def _bounded(part: PrimExpr, row: tirx.Var | None, column: tirx.Var | None) -> Band | None:
    """Read one comparison."""
    if isinstance(part, tirx.IntImm):
        return Band() if int(part) else None
    if isinstance(part, tirx.Not):
        turned = {tirx.LT: tirx.GE, tirx.LE: tirx.GT, tirx.GT: tirx.LE, tirx.GE: tirx.LT}
        inner = part.a
        kind = turned.get(type(inner))
        return _bounded(kind(inner.a, inner.b), row, column) if kind else None
    if isinstance(part, tirx.GT | tirx.GE):
        kind = tirx.LT if isinstance(part, tirx.GT) else tirx.LE
        return _bounded(kind(part.b, part.a), row, column)
    if not isinstance(part, tirx.LT | tirx.LE):
        return None
    if column is None:
        return None
    position = tirx.Var("row", "int64") if row is None else row
    factors = detect_linear_equation(part.a - part.b, [position, column])
    if len(factors) != 3:
        return None
    by_row, by_column, rest = factors
    strict = isinstance(part, tirx.LT)
    if row is None and same_shape((by_row,), (0,)):
        by_row = -by_column
    if same_shape((by_row, by_column), (-1, 1)):  # j - i + rest <= 0
        return Band(upto=_ANALYZER.simplify(-rest - integer(1) if strict else -rest))
    if same_shape((by_row, by_column), (1, -1)):  # i - j + rest <= 0
        return Band(above=_ANALYZER.simplify(rest if strict else rest - integer(1)))
    return None


def joined(a: Band, b: Band) -> Band | None:
    """Return what both bands let see; None if it is not known which bound is the tighter."""
    above, upto = a.above, a.upto
    for mine, theirs, low in ((a.above, b.above, True), (a.upto, b.upto, False)):
        if mine is None or theirs is None:
            chosen = mine if theirs is None else theirs
        elif _ANALYZER.can_prove(mine <= theirs):
            chosen = theirs if low else mine
        elif _ANALYZER.can_prove(mine >= theirs):
            chosen = mine if low else theirs
        else:
            return None
        above, upto = (chosen, upto) if low else (above, chosen)
    return Band(above, upto)


def sight_of(band: Band, q_len: PrimExpr | int, kv_len: PrimExpr | int) -> Sight | None:
    """Describe a band as a causal mask and a window; None if it is another one."""
    corner = kv_len - q_len
    causal: Causal = "none"
    offset: PrimExpr | int = 0
    ends = band.upto is not None and not _ANALYZER.can_prove(band.upto >= kv_len - 1)
    if not ends and band.above is not None and is_one(q_len):
        causal, offset = "bottom_right", corner  # the one query is the last, which sees all keys
    elif ends:
        if same_shape((band.upto,), (0,)):
            causal = "top_left"
        elif same_shape((band.upto,), (corner,)):
            causal, offset = "bottom_right", corner
        else:
            return None
    if band.above is None or _ANALYZER.can_prove(band.above < 1 - q_len):
        return Sight(causal)
    window = _ANALYZER.simplify(offset - band.above)
    if not isinstance(window, tirx.IntImm) or int(window) < 1:
        return None
    return Sight(causal, int(window))


def rows_see(sight: Sight, q_len: PrimExpr | int, kv_len: PrimExpr | int) -> bool:
    """Tell whether every query sees a key, if there are keys."""
    if sight == Sight():
        return True
    analyzer, zero = Analyzer(), integer(0)
    for size in tirx.analysis.undefined_vars(zero + q_len + kv_len):
        analyzer.update(size, ConstIntBound(int(size.same_as(kv_len)), 1 << 44))
    offset = zero + kv_len - q_len if sight.causal == "bottom_right" else zero
    past = zero if sight.window is None else q_len + offset - integer(sight.window)
    return bool(analyzer.can_prove(tirx.And(offset >= 0, past < kv_len)))
