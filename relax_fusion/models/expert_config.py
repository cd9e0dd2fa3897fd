"""What a ``config.json`` says of a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field, InstanceOf

from ..errors import ConfigError
from ..validation import Count, Natural, check
from .rope import Positive

MAX_WIDTH = 2**24
Width = Annotated[Count, Field(le=MAX_WIDTH)]
"""A number of features or heads: with more, a weight's elements could not be counted."""


@dataclass(frozen=True)
class Choice:
    """How the experts of a token are chosen, and what their shares are."""

    sigmoid: bool = False
    """Whether scores are sigmoids, with a bias where experts are chosen; a softmax otherwise."""
    groups: Width = 1
    chosen_groups: Width = 1
    """How many groups of experts there are, and of how many a token has its experts."""
    factor: Positive = 1.0
    """What shares are multiplied by."""

    def __post_init__(self) -> None:
        check(self, ConfigError, "experts")
        if self.chosen_groups > self.groups:
            raise ConfigError(
                f"topk_group is {self.chosen_groups}; must be at most the {self.groups} groups"
            )


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
    names: Literal["qwen", "mixtral", "gpt_oss", "deepseek"] = "qwen"
    """Whose names their weights have in a checkpoint."""
    limit: Positive | None = None
    """Gates are at most that, what they multiply lies between it and its negative and is added 1,
    and their activation is ``gate * sigmoid(sharpness * gate)``."""
    sharpness: Positive = 1.702
    biases: bool = False
    """Whether the router and the experts add some."""
    shared: Natural = 0
    """So many times as wide as an expert is a network that all tokens go to, with a sigmoid of its
    own as share, DeepSeek's with 1: experts behind the others, of which each is a part."""
    choice: InstanceOf[Choice] = field(default_factory=Choice)

    def at(self, layer: int) -> Experts | None:
        """Return the experts of a layer, if it has some."""
        return None if layer in self.dense_layers else self

    def __post_init__(self) -> None:
        check(self, ConfigError, "experts")
        if self.chosen > self.count:
            raise ConfigError(
                f"num_experts_per_tok is {self.chosen}; must be at most the {self.count} experts"
            )
        if self.count % self.choice.groups or self._among < self.chosen:
            raise ConfigError(
                f"n_group is {self.choice.groups}; must divide the {self.count} experts, and "
                f"{self.choice.chosen_groups} groups must have {self.chosen}"
            )

    @property
    def _among(self) -> int:
        return self.count // self.choice.groups * self.choice.chosen_groups

    @property
    def has_shared_gate(self) -> bool:
        """Whether the network of all tokens has a share of its own."""
        return self.shared > 0 and self.names != "deepseek"
