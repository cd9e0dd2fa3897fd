"""What MLC-LLM's ``gen_config`` asks its native library about a tokenizer, read from its file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ModelFileError

PREPENDED = {"type": "Prepend", "prepend": "\N{LOWER ONE EIGHTH BLOCK}"}
STRIPPED = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


@dataclass
class TokenizerInfo:
    """What ``mlc-chat-config.json`` says of a tokenizer, with MLC-LLM's names and defaults."""

    token_postproc_method: str = "byte_fallback"
    prepend_space_in_encode: bool = False
    strip_space_in_decode: bool = False


class Tokenizer:
    """Stands for MLC-LLM's class, of which ``gen_config`` calls nothing else."""

    @staticmethod
    def detect_tokenizer_info(folder: str) -> TokenizerInfo:
        """Return what ``tokenizer.json`` in a folder says; the defaults where there is none.

        Raises `ModelFileError` if the file is no JSON object.
        """
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            return TokenizerInfo()
        try:
            read = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as err:
            raise ModelFileError(f"{path} is no JSON: {err}") from err
        if not isinstance(read, dict):
            raise ModelFileError(f"{path} holds {type(read).__name__}, not an object")
        decoders = list(_steps(read.get("decoder"), "decoders"))
        kinds = [k for d in decoders if (k := d.get("type")) in ("ByteLevel", "ByteFallback")]
        return TokenizerInfo(
            "byte_level" if kinds[-1:] == ["ByteLevel"] else "byte_fallback",
            any(
                PREPENDED.items() <= n.items()
                for n in _steps(read.get("normalizer"), "normalizers")
            ),
            any(STRIPPED.items() <= d.items() for d in decoders),
        )


def _steps(given: Any, several: str) -> Iterator[dict[str, Any]]:
    """Yield the steps of a decoder or normalizer, which may be one, or a sequence."""
    if isinstance(given, dict):
        steps = given.get(several) if given.get("type") == "Sequence" else [given]
        yield from (step for step in steps or () if isinstance(step, dict))
