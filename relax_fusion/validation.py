"""Checks of data against the type hints of the record that holds it, done by pydantic.

A hint says what a field takes, limits included, and nothing is converted: ``"3"``, 3.0 and True are
no integers.  An error is one line that names the field, the value and what is allowed.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields
from functools import cache
from numbers import Integral
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import pydantic
import pydantic_core
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

MAX_INT32 = 2**31 - 1

MOST_ELEMENTS = 2**59
"""A tensor has at most this many elements: eight bytes each, in sums of two that still fit 63
bits."""

Count = Annotated[int, pydantic.Field(ge=1, le=MAX_INT32)]
"""A size, a number of things: from 1 on, and indices fit 32 bits."""

Natural = Annotated[int, pydantic.Field(ge=0, le=MAX_INT32)]
"""A number of things that may be none, or an index."""

_STRICT = ConfigDict(strict=True, arbitrary_types_allowed=True, allow_inf_nan=False)
_LONGEST = 80
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_Record = TypeVar("_Record")


def check(record: Any, error: type[Exception], where: str = "") -> None:
    """Check the fields of a dataclass; for its ``__post_init__``.

    `record` (dataclass instance): what to check; nothing in it is changed.
    `error`: what to raise.
    `where`: what the fields belong to, in front of the message.
    Raises `error` if a field has a value that its type hint does not allow.
    """
    try:
        model = _model(type(record))  # type: ignore[arg-type]  # to mypy, types have no hash
        model.model_validate(vars(record), by_name=True, by_alias=False)
    except ValidationError as err:
        raise error(_line(err, where)) from None


def read(
    cls: type[_Record],
    data: object,
    error: type[Exception],
    where: str,
    unknown: Literal["forbid", "ignore"] = "forbid",
    keys: Mapping[str, str] = MappingProxyType({}),
) -> _Record:
    """Make a dataclass of a mapping.

    A key is the alias of a field's hint, or else its name; None stands for a field's default.

    `cls`: the dataclass.
    `data` (object): what should be the mapping.
    `error`: what to raise.
    `where`: what the fields belong to, in front of the message.
    `unknown`: what to do about keys that `cls` does not have.
    `keys`: what messages call a key, where the user knows it by another name.
    Raises `error` if `data` is no mapping with text as keys, lacks a field, or has a value that its
    type hint does not allow.
    """
    if not isinstance(data, Mapping) or not all(isinstance(key, str) for key in data):
        raise error(f"{where} is {shown(data)}; must be a mapping with text as keys")
    given = {key: value for key, value in data.items() if value is not None}
    try:
        made = _model(cls)  # type: ignore[arg-type]
        model = made.model_validate(given, extra=unknown, by_name=False, by_alias=True)
    except ValidationError as err:
        raise error(_line(err, where, cls, keys)) from None
    return cls(**{name: getattr(model, name) for name in model.model_fields_set})


def read_json(
    kind: Any,
    text: str | bytes,
    error: type[Exception],
    where: str,
    unknown: Literal["forbid", "ignore"] = "forbid",
) -> Any:
    """Read JSON as a type: a dataclass, whose fields can be others, or a union of such.

    `unknown` says what to do about fields that a dataclass does not have.

    Raises `error` if `text` is no JSON, or not of that type.
    """
    try:
        return _adapter(kind).validate_json(text, strict=True, extra=unknown)
    except ValidationError as err:
        raise error(_line(err, where)) from None


def json_text(value: Any) -> str:
    """Return `value` as JSON; null stands for infinities and NaN, which JSON does not have."""
    try:
        return pydantic_core.to_json(value, indent=2, inf_nan_mode="null").decode()
    except pydantic_core.PydanticSerializationError:  # a file's name may be no Unicode
        return json.dumps(_without_infinities(value), indent=2, allow_nan=False)


def _without_infinities(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _without_infinities(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_infinities(item) for item in value]
    return value


def plain(value: Any) -> Any:
    """Return an integer of another class, such as NumPy's, as Python's own."""
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else value


def printable(text: str) -> str:
    """Return a text without what a terminal obeys: control characters are written as in JSON.

    Newlines and tabs stay; what turns the direction of writing, and half characters, do not.
    """
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def shown(value: object) -> str:
    """Return `value` as code, on one line, and not all of it if it is long."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # Python writes no integer of more than 4300 digits
        text = f"an integer of {value.bit_length()} bits" if isinstance(value, int) else "too long"
    except Exception as err:  # a value of anybody's class; telling of it must not fail
        text = f"a {type(value).__name__}, whose repr raises {type(err).__name__}"
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def reason(err: Exception) -> str:
    """Condense an error, which may carry pages, to what it says first."""
    lines = [line.strip() for line in str(err).splitlines() if line.strip()]
    return f"{type(err).__name__}: {lines[0][:300]}" if lines else type(err).__name__


@cache
def _model(cls: type) -> type[BaseModel]:
    """Return the pydantic model of a dataclass."""
    hints = get_type_hints(cls, include_extras=True)
    found: dict[str, Any] = {f.name: (hints[f.name], _default(f)) for f in fields(cls) if f.init}
    with warnings.catch_warnings():  # a field may have the name of a method that nobody calls
        warnings.filterwarnings("ignore", "Field name .* shadows an attribute", UserWarning)
        return _made(cls, found)


def _made(cls: type, found: dict[str, Any]) -> type[BaseModel]:
    return pydantic.create_model(cls.__name__, __config__=_STRICT, **found)


def _default(field: Field[Any]) -> Any:
    """Say whether a field may be left out; the dataclass itself knows by what it is replaced."""
    return ... if field.default is MISSING and field.default_factory is MISSING else None


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    """Return the reader of a type."""
    return TypeAdapter(kind)


def _line(
    err: ValidationError,
    where: str,
    cls: type | None = None,
    keys: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Return the first of what pydantic found, in one line; `cls` says which fields there are."""
    first = err.errors(include_url=False)[0]
    steps = [keys.get(str(step), step) if n == 0 else step for n, step in enumerate(first["loc"])]
    name, prefix = _path(steps), f"{where}: " if where else ""
    if first["type"] in ("missing", "missing_argument"):
        return f"{prefix}the field {name!r} is missing"
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        known = f"; there are {', '.join(f.name for f in fields(cls))}" if cls else ""
        return f"{prefix}there is no field {name!r}{known}"
    told = first["msg"].replace("Input should", "must").removeprefix("Value error, ")
    if name:
        return f"{prefix}{name} is {shown(first['input'])}; {told}"
    return f"{prefix}{told}"


def _path(steps: Sequence[int | str]) -> str:
    """Write a place in data as code would: ``plans['FuseGatedFFN'].block_m`` has two steps."""
    if not steps:
        return ""
    if steps[-1] == "[key]":
        return f"a key of {_path(steps[:-2])}"
    return str(steps[0]) + "".join(f"[{step!r}]" for step in steps[1:])
