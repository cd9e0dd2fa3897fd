"""A decoder without its attention: weights, and float64 results."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

GROUP, ZERO, FIELDS = 32, 8, 8
"""Elements of a scale; the field that means 0; fields of a word."""

EPS = 1e-5


@dataclass(frozen=True)
class Widths:
    """Of a decoder; `qkv` are the features of queries, keys and values together."""

    hidden: int = 2048
    qkv: int = 2560
    ffn: int = 5632
    vocabulary: int = 32000

    @property
    def of_layer(self) -> dict[str, tuple[int, int]]:
        """Return the rows and columns of each weight of a layer."""
        hidden = self.hidden
        return {
            "qkv": (self.qkv, hidden),
            "out": (hidden, hidden),
            "gate_up": (2 * self.ffn, hidden),
            "down": (hidden, self.ffn),
        }


@dataclass(frozen=True)
class Quantised:
    """A weight ``[n, k]`` of 4 bits: words, the lowest field first, and scales."""

    words: np.ndarray
    scales: np.ndarray

    @property
    def bytes(self) -> int:
        """Bytes of words and scales."""
        return int(self.words.nbytes + self.scales.nbytes)

    def decoded(self) -> np.ndarray:
        """Return the weight in float32."""
        n, words = self.words.shape
        shifts = np.arange(FIELDS, dtype="uint32") * 4
        fields = (self.words[..., None] >> shifts & 15).reshape(n, words * FIELDS)
        return (fields.astype("float32") - ZERO) * self.scales.repeat(GROUP, axis=1)


class Model:
    """Random weights of some layers and of what projects to the vocabulary."""

    def __init__(self, widths: Widths, layers: int) -> None:
        rng = np.random.default_rng(0)

        def drawn(n: int, k: int) -> Quantised:
            words = rng.integers(0, 2**32, (n, k // FIELDS), "uint32")
            scales = rng.uniform(0.5, 1.5, (n, k // GROUP)) / (4.6 * k**0.5)
            return Quantised(words, scales.astype("float32"))

        self.widths = widths
        self.layers = [
            {name: drawn(*shape) for name, shape in widths.of_layer.items()} for _ in range(layers)
        ]
        self.head = drawn(widths.vocabulary, widths.hidden)

    @property
    def weights(self) -> list[Quantised]:
        """All weights, in the order in which they are used."""
        return [*(w for layer in self.layers for w in layer.values()), self.head]

    def exact(self, x: np.ndarray) -> np.ndarray:
        """Return the results in float64."""
        hidden = self.widths.hidden

        def normed(x: np.ndarray) -> np.ndarray:
            return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS)

        def times(x: np.ndarray, w: Quantised) -> np.ndarray:
            return x @ w.decoded().astype("float64").T

        x = x.astype("float64")
        for layer in self.layers:
            x = x + times(times(normed(x), layer["qkv"])[:, :hidden], layer["out"])
            gate, up = np.split(times(normed(x), layer["gate_up"]), 2, axis=-1)
            x = x + times(gate / (1 + np.exp(-gate)) * up, layer["down"])
        return times(normed(x), self.head)
