"""What a ``config.json`` says of a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from ..errors import ConfigError
from ..validation import Count, Natural, check
from .rope import Positive

MAX_WIDTH = 2**24
Width = Annotated[Count, Field(le=MAX_WIDTH)]
"""A number of features or heads: with more, a weight's elements could not be counted."""


@dataclass(frozen=True)
class Experts:
    """The experts of a layer, in the place of its feed-forward network."""

    count: Count
    chosen: Count
    """How many there are, and how many each token goes to."""
    features: Width
    """What the feed-forward network of one is wide."""
    renormalised: bool = True
    """Whether the shares of a token's experts are divided by their sum."""
    dense_layers: tuple[Natural, ...] = ()
    """Layers that have none."""
    names: Literal["qwen", "mixtral", "gpt_oss"] = "qwen"
    """Whose names their weights have in a checkpoint."""
    limit: Positive | None = None
    """Gates are at most that, what they multiply lies between it and its negative and is added 1,
    and their activation is ``gate * sigmoid(sharpness * gate)``."""
    sharpness: Positive = 1.702
    biases: bool = False
    """Whether the router and the experts add some."""
    shared: Natural = 0
    """So many times as wide as an expert is a network that all tokens go to, with a sigmoid of its
    own as share: experts behind the others, of which each is a part."""

    def at(self, layer: int) -> Experts | None:
        """Return the experts of a layer, if it has some."""
        return None if layer in self.dense_layers else self

    def __post_init__(self) -> None:
        check(self, ConfigError, "experts")
        if self.chosen > self.count:
            raise ConfigError(
                f"num_experts_per_tok is {self.chosen}; must be at most the {self.count} experts"
            )
