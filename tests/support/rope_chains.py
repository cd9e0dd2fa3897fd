"""Rotations of heads in the spellings of exporters, for chains of tests."""

from __future__ import annotations

from collections.abc import Sequence

MATMUL, NORM_MATMUL = "FuseMatmulEpilogue", "FuseRMSNormMatmul"
H = "h = R.nn.rms_norm(x, g, axes=[-1], epsilon=1e-5)\n"
END = 9223372036854775807


def turn(source: str, cos: str, sin: str, end: str = "y", axis: int = 3, half: int = 8) -> str:
    """Return the rotation of `source` to `end`, as Hugging Face's models are exported."""
    e = end
    return (
        f"{e}a = R.multiply({source}, {cos})\n"
        f"{e}l = R.strided_slice({source}, axes=[{axis}], begin=[0], end=[{half}])\n"
        f"{e}h = R.strided_slice({source}, axes=[{axis}], begin=[{half}], end=[{END}])\n"
        f"{e}n = R.negative({e}h)\n"
        f"{e}r = R.concat(({e}n, {e}l), axis=-1)\n"
        f"{e}b = R.multiply({e}r, {sin})\n"
        f"{e} = R.add({e}a, {e}b)\n"
    )


def cut(source: str, at: int, end: int = END, axis: int = 3) -> str:
    """Return the cut of the last axis of `source` in two, named with f and k behind it."""
    return (
        f"{source}f = R.strided_slice({source}, axes=[{axis}], begin=[0], end=[{at}])\n"
        f"{source}k = R.strided_slice({source}, axes=[{axis}], begin=[{at}], end=[{end}])\n"
    )


def neighbours(
    source: str, cos: str, sin: str, end: str = "y", shape: Sequence[int] = (2, 6, 4, 16)
) -> str:
    """Return the rotation of neighbours, as GPT-J, GLM and Cohere are exported."""
    e, axis = end, len(shape) - 1
    return (
        f"{e}a = R.multiply({source}, {cos})\n"
        f"{e}l = R.strided_slice({source}, axes=[{axis}], begin=[0], end=[{END}], strides=[2])\n"
        f"{e}h = R.strided_slice({source}, axes=[{axis}], begin=[1], end=[{END}], strides=[2])\n"
        f"{e}n = R.expand_dims(R.negative({e}h), axis=[{axis + 1}])\n"
        f"{e}p = R.concat(({e}n, R.expand_dims({e}l, axis=[{axis + 1}])), axis=-1)\n"
        f"{e}r = R.reshape({e}p, R.shape({[*shape]}))\n"
        f"{e} = R.add({e}a, R.multiply({e}r, {sin}))\n"
    )


WIDE = "c = R.expand_dims(C, axis=[1]); s = R.expand_dims(S, axis=[1])\n"
