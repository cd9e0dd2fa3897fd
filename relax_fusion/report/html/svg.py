"""Small pieces of pictures: escaped text, axes with logarithmic ticks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, floor, log10

from markupsafe import Markup, escape


def tag(name: str, text: object = None, **attributes: object) -> Markup:
    """Return an element; attributes and text are escaped, a `Markup` stays as it is.

    Underscores at the end of a name are dropped (``class_``), those inside are hyphens.
    """
    parts = [f"<{name}"]
    for key, value in attributes.items():
        if value is not None:
            shown = f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else value
            parts.append(f' {key.rstrip("_").replace("_", "-")}="{escape(shown)}"')
    if text is None:
        return Markup("".join(parts) + "/>")
    return Markup("".join(parts) + f">{escape(text)}</{name}>")


def titled(shape: str, title: str, **attributes: object) -> Markup:
    """Return a shape with a tooltip."""
    return tag(shape, tag("title", title), **attributes)


def picture(width: float, height: float, label: str, *parts: Markup) -> Markup:
    """Return a picture that shrinks with the page, with a label for those who cannot see it."""
    return tag(
        "svg",
        Markup("").join(parts),
        viewBox=f"0 0 {width:.0f} {height:.0f}",
        width=width,
        height=height,
        role="img",
        aria_label=label,
    )


@dataclass(frozen=True)
class Scale:
    """A logarithmic axis.

    Parameters
    ----------
    low, high : float
        Values at its ends, above 0.
    first, last : float
        Where these are.
    """

    low: float
    high: float
    first: float
    last: float

    def __call__(self, value: float) -> float:
        """Return the place of a value; outside of the axis that of its end."""
        span = log10(self.high / self.low) or 1.0
        part = log10(max(value, self.low * 1e-3) / self.low) / span
        return self.first + (self.last - self.first) * min(1.0, max(0.0, part))

    def ticks(self, most: int = 6) -> list[float]:
        """Return round values within the axis: powers of ten, with others between if few."""
        decades = range(floor(log10(self.low)), ceil(log10(self.high)) + 1)
        for steps in ((1, 1.5, 2, 3, 4, 5, 7), (1, 2, 5), (1, 3), (1,)):
            found = [s * 10.0**d for d in decades for s in steps]
            inside = [v for v in found if self.low * 0.999 <= v <= self.high * 1.001]
            if len(inside) <= most:
                return inside
        return inside[:: -(-len(inside) // most)]

    def powers_of_two(self, most: int = 8) -> list[float]:
        """Return powers of two within the axis."""
        found, value = [], 1.0
        while value <= self.high * 1.001:
            if value >= self.low * 0.999:
                found.append(value)
            value *= 2
        return found[:: max(1, -(-len(found) // most))]


def spanning(values: list[float], first: float, last: float, margin: float = 1.15) -> Scale:
    """Return an axis around values."""
    known = [v for v in values if v > 0]
    low, high = min(known, default=1.0), max(known, default=10.0)
    return Scale(low / margin, max(high, low * 1.01) * margin, first, last)


@dataclass(frozen=True)
class Axes:
    """Two axes with lines and labels.

    Parameters
    ----------
    x, y : Scale
        The axes; that of y rises from its `first` at the bottom.
    x_label, y_label : str
        What they are, with units.
    x_text, y_text : callable
        How a tick is written.
    x_ticks, y_ticks : list of float, optional
        Values with a line; round ones by default.
    """

    x: Scale
    y: Scale
    x_label: str
    y_label: str
    x_text: Callable[[float], str]
    y_text: Callable[[float], str]
    x_ticks: list[float] | None = None
    y_ticks: list[float] | None = None

    def draw(self) -> Markup:
        """Return lines, ticks and labels."""
        x, y = self.x, self.y
        parts = []
        for value in self.y_ticks if self.y_ticks is not None else y.ticks():
            at = y(value)
            parts.append(tag("path", d=f"M{x.first:.0f} {at:.1f}H{x.last:.0f}", class_="grid"))
            text = self.y_text(value)
            parts.append(tag("text", text, x=x.first - 6, y=at + 3.5, class_="tick end"))
        for value in self.x_ticks if self.x_ticks is not None else x.ticks():
            at = x(value)
            parts.append(tag("path", d=f"M{at:.1f} {y.first:.0f}V{y.last:.0f}", class_="grid"))
            parts.append(tag("text", self.x_text(value), x=at, y=y.first + 15, class_="tick mid"))
        middle = (x.first + x.last) / 2
        parts.append(tag("text", self.x_label, x=middle, y=y.first + 32, class_="label mid"))
        parts.append(tag("text", self.y_label, x=x.first - 6, y=y.last - 9, class_="label"))
        return Markup("").join(parts)
