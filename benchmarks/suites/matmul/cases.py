"""The matmul chains of a layer that benchmarks measure: traffic, targets."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.suites.matmul.models import GPT2, MODELS, SIZES, Size
from benchmarks.targets import Target, floor_us
from relax_fusion.quantization import quantization
from relax_fusion.workload import Dim, GatedFFN, Norm, NormMatmul, Projection, WeightLayout

EPS = 1e-5
CASES = ("qkv", "qkv_rope", "gate_up", "ffn", "out", "down")
ROPE = ("cos", "sin")
"""Inputs in float32."""

ROWS = (1, 4, 16, 64, 256, 1024, 4096)
DTYPES = ("float16", "bfloat16")
OURS = ("ours", "unfused", "separate", "tir", "triton")
"""What our own code computes: a wrong result of these fails the run."""

SEPARABLE = ("qkv", "qkv_rope", "gate_up", "ffn")
"""Those whose weight can be several."""

CONTENDERS = (*OURS, "eager", "compile", "cublas", "tvm", "mlc")


@dataclass(frozen=True)
class Chain:
    """A chain at a size.

    ``qkv``      norm -> matmul
    ``qkv_rope`` the same, q and k turned by their positions
    ``gate_up``  norm -> matmul -> activation(first half) * second half
    ``up``       norm -> matmul -> activation, where there is no gate
    ``ffn``      x + down(gate_up(x))
    ``out``      residual + matmul, of what attention gives
    ``down``     residual + matmul, wide to hidden
    ``plain``    the matmul of qkv alone

    Matmuls have their biases in all but ``plain``.

    Parameters
    ----------
    case : str
        One of `CASES`, "up" or "plain".
    size : str
        One of `SIZES` or `MODELS`, or "gpt2".
    quantization : str
        How its weights are stored, a name of `relax_fusion.QUANTIZATIONS`; "": as they are.
    """

    case: str
    size: str
    quantization: str = ""

    @property
    def widths(self) -> Size:
        return {**MODELS, **SIZES, "gpt2": GPT2}[self.size]

    @property
    def inputs(self) -> dict[str, int]:
        """Features of the tensors that have a row for each token, by name."""
        s = self.widths
        if self.case in ("out", "down"):
            return {"x": s.wide if self.case == "down" else s.queries, "residual": s.hidden}
        return {"x": s.hidden, **dict.fromkeys(ROPE if self.case == "qkv_rope" else (), s.head)}

    @property
    def norm(self) -> Norm | None:
        """What stands in front of the matmul."""
        if self.case in ("out", "down", "plain"):
            return None
        if self.widths.biases:
            return Norm("layer", EPS, beta=True)
        return Norm("rms", EPS, unit_offset=self.widths.unit_offset)

    @property
    def biased(self) -> bool:
        """Whether a bias is added to the product."""
        s, of_qkv = self.widths, self.case in ("qkv", "qkv_rope")
        return self.case != "plain" and (s.biases or (s.qkv_bias and of_qkv))

    @property
    def weights(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the parameters, by name."""
        s, k, n = self.widths, self.inputs["x"], self.out_features
        n = 2 * s.wide if self.case in ("gate_up", "ffn") else n
        shapes: dict[str, tuple[int, ...]] = {} if self.norm is None else {"gamma": (k,)}
        shapes |= {"beta": (k,)} if self.norm is not None and self.norm.beta else {}
        shapes |= {"w": (n, k), **({"b": (n,)} if self.biased else {})}
        return shapes | ({"down": (s.hidden, s.wide)} if self.case == "ffn" else {})

    @property
    def parts(self) -> tuple[int, ...]:
        """Features of the weights that together are `w`: of q, k and v, or of gate and up."""
        s = self.widths
        if self.case in ("gate_up", "ffn"):
            return s.wide, s.wide
        narrow = (s.qkv - s.queries) // 2
        return (s.queries, narrow, narrow) if self.case in SEPARABLE else (self.out_features,)

    @property
    def out_features(self) -> int:
        """Features of the result."""
        s = self.widths
        if self.case in ("qkv", "qkv_rope", "plain"):
            return s.qkv
        return s.wide if self.case in ("gate_up", "up") else s.hidden

    def works(self, rows: Dim, dtype: str) -> tuple[NormMatmul | GatedFFN, ...]:
        """Return the workloads that the chain is: one, or for ``ffn`` two."""
        if self.case == "ffn":
            halves = (replace(self, case=half) for half in ("gate_up", "down"))
            return tuple(work for half in halves for work in half.works(rows, dtype))
        s, k, n = self.widths, self.inputs["x"], self.out_features
        packed = quantization(self.quantization).packed if self.quantization else None
        layout: WeightLayout = "kn" if packed is not None and packed.axis == -2 else s.layout
        if self.case == "gate_up":
            kind = (layout, True, True, s.activation, self.norm, dtype, dtype, self.biased)
            return (GatedFFN(rows, k, n, *kind, packed=packed),)
        last = {"up": (s.activation,), "out": ("residual",), "down": ("residual",)}
        epilogue = (*("bias",) * self.biased, *last.get(self.case, ()))
        outputs = (Projection(n, layout, epilogue, packed=packed),)
        return (NormMatmul(rows, k, outputs, self.norm, dtype, dtype),)

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
