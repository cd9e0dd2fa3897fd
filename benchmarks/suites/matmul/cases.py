"""The matmul chains of a LLaMA layer that benchmarks measure: sizes, traffic, targets."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.targets import Target, floor_us
from relax_fusion.quantization import quantization
from relax_fusion.workload import Dim, GatedFFN, Norm, NormMatmul, Projection, WeightLayout

EPS = 1e-5


@dataclass(frozen=True)
class Size:
    """Features of a model: of its residual stream, of the FFN, of q, k and v, of a head.

    With biases it has LayerNorm too, else RMSNorm.
    """

    hidden: int
    wide: int
    qkv: int
    head: int = 128
    biases: bool = False


SIZES = {
    "8b": Size(4096, 14336, 6144),
    "1b": Size(2048, 8192, 3072, 64),
    "70b": Size(8192, 28672, 10240),
}
GPT2 = Size(768, 3072, 2304, 64, biases=True)
CASES = ("qkv", "qkv_rope", "gate_up", "ffn", "out", "down")
ROPE = ("cos", "sin")
"""Inputs in float32."""

ROWS = (1, 4, 16, 64, 256, 1024, 4096)
DTYPES = ("float16", "bfloat16")
OURS = ("ours", "unfused", "separate", "tir", "mixed", "mlc")
"""What our own code computes, or compiles: a wrong result of these fails the run."""

SEPARABLE = ("qkv", "qkv_rope", "gate_up", "ffn")
"""Those whose weight can be several."""

CONTENDERS = (*OURS, "eager", "compile", "cublas", "tvm")


@dataclass(frozen=True)
class Chain:
    """A chain at a size.

    ``qkv``      norm -> matmul
    ``qkv_rope`` the same, q and k turned by their positions
    ``gate_up``  norm -> matmul -> silu(first half) * second half
    ``up``       norm -> matmul -> gelu, of GPT-2
    ``ffn``      x + down(gate_up(x))
    ``out``      residual + matmul, hidden to hidden
    ``down``     residual + matmul, wide to hidden

    Parameters
    ----------
    case : str
        One of `CASES`, or "up".
    size : str
        One of `SIZES`, or "gpt2".
    quantization : str
        How its weights are stored, a name of `relax_fusion.QUANTIZATIONS`; "": as they are.
    """

    case: str
    size: str
    quantization: str = ""

    @property
    def widths(self) -> Size:
        return GPT2 if self.size == "gpt2" else SIZES[self.size]

    @property
    def inputs(self) -> dict[str, int]:
        """Features of the tensors that have a row for each token, by name."""
        s = self.widths
        if self.case in ("out", "down"):
            return {"x": s.wide if self.case == "down" else s.hidden, "residual": s.hidden}
        return {"x": s.hidden, **dict.fromkeys(ROPE if self.case == "qkv_rope" else (), s.head)}

    @property
    def weights(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the parameters, by name."""
        s, k, n = self.widths, self.inputs["x"], self.out_features
        n = 2 * s.wide if self.case in ("gate_up", "ffn") else n
        shapes: dict[str, tuple[int, ...]] = {"gamma": (k,), "beta": (k,), "w": (n, k), "b": (n,)}
        absent = ("gamma", "beta") if "residual" in self.inputs else ()
        absent += () if s.biases else ("beta", "b")
        down = {"down": (s.hidden, s.wide)} if self.case == "ffn" else {}
        return {name: shape for name, shape in shapes.items() if name not in absent} | down

    @property
    def parts(self) -> tuple[int, ...]:
        """Features of the weights that together are `w`: of q, k and v, or of gate and up."""
        s = self.widths
        if self.case in ("gate_up", "ffn"):
            return s.wide, s.wide
        narrow = (s.qkv - s.hidden) // 2
        return (s.hidden, narrow, narrow) if self.case in SEPARABLE else (self.out_features,)

    @property
    def out_features(self) -> int:
        """Features of the result."""
        s = self.widths
        wide = {"qkv": s.qkv, "qkv_rope": s.qkv, "gate_up": s.wide, "up": s.wide}
        return wide.get(self.case, s.hidden)

    def works(self, rows: Dim, dtype: str) -> tuple[NormMatmul | GatedFFN, ...]:
        """Return the workloads that the chain is: one, or for ``ffn`` two."""
        if self.case == "ffn":
            halves = (replace(self, case=half) for half in ("gate_up", "down"))
            return tuple(work for half in halves for work in half.works(rows, dtype))
        k, n = self.inputs["x"], self.out_features
        norm = (
            Norm("layer" if self.widths.biases else "rms", EPS) if "gamma" in self.weights else None
        )
        packed = quantization(self.quantization).packed if self.quantization else None
        layout: WeightLayout = "kn" if packed is not None and packed.axis == -2 else "nk"
        if self.case == "gate_up":
            kind = (layout, True, True, "silu", norm, dtype, dtype)
            return (GatedFFN(rows, k, n, *kind, packed=packed),)
        epilogue = ("residual",) if "residual" in self.inputs else ()
        outputs = (Projection(n, layout, epilogue, packed=packed),)
        return (NormMatmul(rows, k, outputs, norm, dtype, dtype),)

    def flops(self, rows: int) -> float:
        """Operations of the matmuls."""
        return sum(work.flops() for work in self.works(rows, "float16"))

    def bytes(self, rows: int) -> float:
        """Least traffic: every input, weight and result once, in half precision."""
        moved = [work.bytes() for work in self.works(rows, "float16")]
        between = 0
        if self.case == "ffn":  # stays on the chip; its residual is x, which is read already
            between = moved[0]["out0"] + moved[1]["x"] + moved[1]["residual0_0"]
        angles = sum(4 * rows * self.inputs[name] for name in ROPE if name in self.inputs)
        return float(sum(sum(m.values()) for m in moved) - between + angles)

    def floor_us(self, rows: int, copy_tb_s: float) -> float:
        """Least time in us at the measured bandwidth (TB/s) of a copy, without launching."""
        return floor_us(self.bytes(rows), self.flops(rows), copy_tb_s)


_COMPILE = {
    "qkv": (1.25, 1.3, 1.1, 1.03),
    "gate_up": (1.05, 1.1, 1.1, 1.0),
    "ffn": (1.06, 1.12, 1.1, 1.0),
}
_TVM = (1.1, 3.0, 15.0, 20.0)
_COLUMNS = {1: 0, 4: 1, 16: 1, 64: 1, 256: 2, 1024: 3, 4096: 3}
_COPY_PART = 0.9
_MLC = {1: 1.2, 4: 2.0, 8: 2.0, 16: 2.0}
_TIR_FEW, _TIR_MANY, _TIR_TVM = 0.95, 0.6, 10.0


def quantized_targets(rows: int) -> list[Target]:
    """Return what quantised weights are to reach at `rows` rows, on an H200."""
    return [Target("mlc", _MLC[rows])] if rows in _MLC else []


def targets(case: str, rows: int) -> list[Target]:
    """Return what `case` is to reach at `rows` rows, on an H200.

    Against our own unfused way it may never be slower, whatever the rows.  What TIR is to reach is
    a part of what Triton does.
    """
    found = [Target("unfused", 1.0)] if case in _COMPILE else []
    if rows <= 16:
        found.append(Target("ours", _TIR_FEW, "tir"))
    elif rows >= 256:
        found += [Target("ours", _TIR_MANY, "tir"), Target("tvm", _TIR_TVM, "tir")]
    column = _COLUMNS.get(rows)
    if column is None:
        return found
    if case in _COMPILE:
        found.append(Target("compile", _COMPILE[case][column]))
    found.append(Target("tvm", _TVM[column]))
    if rows == 1:
        found.append(Target("copy", _COPY_PART))
    return found
