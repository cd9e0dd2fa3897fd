"""The ``config.json`` of a Hugging Face directory, as it is."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..validation import shown

_LONGEST = 2**24
"""A ``config.json`` has at most this many bytes: a longer file is one of weights, say."""


def read_config(path: str | Path) -> dict[str, Any]:
    """Read the content of a ``config.json``: once, for it may be a pipe.

    `path`: as for `load_config`.
    Raises `ConfigError` if the file is missing or is not a JSON object, or `path` is no path.
    """
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(f"path is {shown(path)}, must be a directory or a file")
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    try:
        with file.open("rb") as stream:
            text = stream.read(_LONGEST + 1)
        if len(text) > _LONGEST:
            raise ValueError(f"it has more than {_LONGEST} bytes")
        data = json.loads(text.decode())
    except FileNotFoundError as err:
        raise ConfigError(f"{file} does not exist; give a Hugging Face model directory") from err
    except (OSError, ValueError, RecursionError) as err:
        raise ConfigError(f"{file} cannot be read as JSON: {err}") from err
    if not isinstance(data, dict):
        raise ConfigError(f"{file} holds a JSON {type(data).__name__}, not an object")
    return data
