"""Where the native library is: at $MLC_LIBRARY_PATH, or missing."""

import os


def find_lib_path(name: str, optional: bool = False) -> list[str]:
    found = [p for p in (os.environ.get("MLC_LIBRARY_PATH"),) if p]
    if not found and not optional:
        raise RuntimeError(f"Cannot find libraries: lib{name}.so")
    return found
