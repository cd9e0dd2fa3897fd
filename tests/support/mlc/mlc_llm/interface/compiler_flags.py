"""The options of optimisation."""

from dataclasses import dataclass


@dataclass
class OptimizationFlags:
    flashinfer: bool = False
    cublas_gemm: bool = False
    faster_transformer: bool = False
    cutlass: bool = False
    cudagraph: bool = False

    def update(self, target, quantization) -> None:
        if target.kind.name != "cuda":
            self.flashinfer = self.cublas_gemm = self.faster_transformer = self.cutlass = False
