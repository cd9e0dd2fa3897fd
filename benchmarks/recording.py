"""What every benchmark writes beside its numbers, and the writing itself."""

from __future__ import annotations

import datetime
import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
PACKAGES = (
    *("relax-fusion", "apache-tvm", "triton", "numpy"),
    *("torch", "transformers", "onnxruntime", "openvino"),
)


def facts() -> dict[str, Any]:
    """Date, processor, cores and versions; nothing that names the machine."""
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": _cpu(),
        "cores": _cores(),
        "load_average_1min": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "versions": {name: v for name in PACKAGES if (v := _version(name))},
    }


def write(name: str, record: dict[str, Any], markdown: str, directory: Path) -> list[Path]:
    """Write ``DATE-name.json`` and ``.md``; the Markdown begins with the facts of the record."""
    stem = f"{record['date']}-{name}"
    machine = f"{record['cpu']}, {record['cores']} cores, load {record['load_average_1min']}"
    installed = ", ".join(f"{k} {v}" for k, v in record["versions"].items())
    head = f"# {name}, {record['date']}\n\n{machine}; Python {record['python']}, {installed}.\n\n"
    files = [directory / f"{stem}.json", directory / f"{stem}.md"]
    write_results(files[0], record, head + markdown + "\n")
    return files


def results(path: Path, *parts: str) -> dict[str, Any]:
    """Return the results in a file, which has one of `parts`.

    Raises
    ------
    SystemExit
        If there are none.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        raise SystemExit(f"error: {path} holds no results: {err}") from err
    if not isinstance(found, dict) or not found.keys() & parts:
        raise SystemExit(f"error: {path} holds no results: {' or '.join(parts)} is missing")
    return found


def write_results(path: Path, data: dict[str, Any], text: str) -> None:
    """Write results and tables for people; whoever is interrupted leaves the former ones."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for place, content in ((path, compact_json(data) + "\n"), (path.with_suffix(".md"), text)):
        new = place.with_name(place.name + ".new")
        new.write_text(content, encoding="utf-8")
        new.replace(place)


def compact_json(value: Any, indent: str = "") -> str:
    """Return `value` as indented JSON in which what holds only scalars is on one line."""
    items = list(value.values() if isinstance(value, dict) else value) if _nests(value) else []
    if not any(_nests(item) for item in items):
        return json.dumps(value)
    inner = indent + "  "
    lines = [compact_json(item, inner) for item in items]
    if isinstance(value, dict):
        lines = [f"{json.dumps(str(k))}: {line}" for k, line in zip(value, lines, strict=True)]
    brackets = "{}" if isinstance(value, dict) else "[]"
    body = f",\n{inner}".join(lines)
    return f"{brackets[0]}\n{inner}{body}\n{indent}{brackets[1]}"


def _nests(value: Any) -> bool:
    return isinstance(value, dict | list | tuple)


def markdown_table(rows: list[tuple[str, ...]]) -> str:
    """Return rows, the first being the head, as a Markdown table."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
