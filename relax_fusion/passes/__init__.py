"""The fusing passes, one file per pattern."""

from .attention import FuseAttentionChain
from .gated_ffn import FuseGatedFFN
from .matmul import FuseMatmulEpilogue
from .matmul_chain import FuseMatmulChain
from .norm_matmul import FuseRMSNormMatmul

PATTERNS = {
    "FuseGatedFFN": FuseGatedFFN,
    "FuseRMSNormMatmul": FuseRMSNormMatmul,
    "FuseAttentionChain": FuseAttentionChain,
    "FuseMatmulChain": FuseMatmulChain,
    "FuseMatmulEpilogue": FuseMatmulEpilogue,
}
"""Every pass by name, in the order in which the pipeline runs them: longer chains first."""

__all__ = [
    "PATTERNS",
    "FuseAttentionChain",
    "FuseGatedFFN",
    "FuseMatmulChain",
    "FuseMatmulEpilogue",
    "FuseRMSNormMatmul",
]
