"""CUDA C++ to cubins by NVRTC, from NVIDIA's wheel: with no GPU, driver or toolkit.

NVRTC is called by ctypes: NVIDIA's own bindings are five times as large as all else that this
package needs beside TVM and Triton, and Python 3.10 has none.  Headers are those of Triton's wheel,
and of ``nvidia-cuda-cccl`` where that is installed, for kernels that use libcu++.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

from ..errors import KernelError, MissingPackageError

NEEDED = "nvidia-cuda-nvrtc 13 (pip install 'nvidia-cuda-nvrtc>=13,<14')"

OPTIONS = (
    *("-default-device", "--device-int128", "--use_fast_math", "-w"),
    "--ptxas-options=--register-usage-level=10",
    "-DINFINITY=__int_as_float(0x7f800000)",
)
"""TVM gives these options to NVRTC on load, so that kernels compute the same; there are no
warnings."""

# TVM's sources begin with these two, of which the real ones take 25 times as long as a kernel.
_OWN_HEADERS = {
    "cuda/std/cstdint": """#pragma once
namespace cuda { namespace std {
typedef signed char int8_t; typedef short int16_t; typedef int int32_t; typedef long long int64_t;
typedef unsigned char uint8_t; typedef unsigned short uint16_t;
typedef unsigned int uint32_t; typedef unsigned long long uint64_t;
} }
""",
    "cuda/std/type_traits": """#pragma once
#include <cuda/std/cstdint>
namespace cuda { namespace std {
template <bool B> struct truth { static constexpr bool value = B; };
template <class T, class U> struct is_same : truth<false> {};
template <class T> struct is_same<T, T> : truth<true> {};
template <class T, class U> inline constexpr bool is_same_v = is_same<T, U>::value;
template <class T> struct is_floating_point
    : truth<is_same_v<T, float> || is_same_v<T, double>> {};
template <class T> struct is_integral : truth<is_same_v<T, bool> || is_same_v<T, char> ||
    is_same_v<T, int8_t> || is_same_v<T, uint8_t> || is_same_v<T, int16_t> ||
    is_same_v<T, uint16_t> || is_same_v<T, int32_t> || is_same_v<T, uint32_t> ||
    is_same_v<T, long> || is_same_v<T, unsigned long> || is_same_v<T, int64_t> ||
    is_same_v<T, uint64_t>> {};
template <class T> struct is_signed : truth<(T(-1) < T(0))> {};
template <class T> struct is_unsigned : truth<!is_signed<T>::value> {};
template <bool B, class T = void> struct enable_if {};
template <class T> struct enable_if<true, T> { typedef T type; };
template <bool B, class T, class F> struct conditional { typedef T type; };
template <class T, class F> struct conditional<false, T, F> { typedef F type; };
} }
""",
}


@dataclass(frozen=True)
class Nvrtc:
    """A library of NVRTC, and where headers are."""

    library: Path
    includes: tuple[Path, ...]

    @cached_property
    def version(self) -> str:
        """The version of CUDA that it belongs to."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(
            self._lib.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "nvrtcVersion"
        )
        return f"{major.value}.{minor.value}"

    def compile(self, name: str, source: str, arch: str) -> tuple[bytes, bytes]:
        """Return the cubin of `source` for an architecture such as ``sm_90a``, and its PTX.

        Raises `KernelError` if it does not compile; the first error is told with its line.
        """
        with self._compiled(name, source, arch, OPTIONS) as program:
            return self._read(program, "CUBIN"), self._read(program, "PTX").rstrip(b"\0")

    def log(self, name: str, source: str, arch: str) -> str:
        """Return what the compiler and ``ptxas`` say of a source: warnings, registers and spills.

        Raises `KernelError` if it does not compile.
        """
        options = *(o for o in OPTIONS if o != "-w"), "--ptxas-options=-v"
        with self._compiled(name, source, arch, options) as program:
            return self._log(program)

    @contextmanager
    def _compiled(
        self, name: str, source: str, arch: str, options: Sequence[str]
    ) -> Iterator[ctypes.c_void_p]:
        own = {} if _needs_more(source) else _OWN_HEADERS
        program = ctypes.c_void_p()
        made = self._lib.nvrtcCreateProgram(
            ctypes.byref(program),
            source.encode(),
            f"{name}.cu".encode(),
            len(own),
            _strings(own.values()),
            _strings(own),
        )
        self._check(made, f"{name}: nvrtcCreateProgram")
        try:
            given = [f"--gpu-architecture={arch}", *options, *(f"-I{p}" for p in self.includes)]
            if self._lib.nvrtcCompileProgram(program, len(given), _strings(given)):
                error = _first_error(self._log(program))
                raise KernelError(f"{name} does not compile for {arch}: {error}")
            yield program
        finally:
            self._lib.nvrtcDestroyProgram(ctypes.byref(program))

    def _log(self, program: ctypes.c_void_p) -> str:
        return self._read(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")

    @cached_property
    def _lib(self) -> ctypes.CDLL:
        try:
            # Older releases look for these by name only, and find what is loaded
            for builtins in self.library.parent.glob("libnvrtc-builtins.so.*"):
                ctypes.CDLL(str(builtins))
            lib = ctypes.CDLL(str(self.library))
        except OSError as err:
            raise MissingPackageError(f"{self.library} cannot be loaded: {err}") from err
        lib.nvrtcGetErrorString.restype = ctypes.c_char_p
        return lib

    def _read(self, program: ctypes.c_void_p, what: str) -> bytes:
        """Return what NVRTC made of a program."""
        size = ctypes.c_size_t()
        self._check(getattr(self._lib, f"nvrtcGet{what}Size")(program, ctypes.byref(size)), what)
        data = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._lib, f"nvrtcGet{what}")(program, data), what)
        return data.raw

    def _check(self, code: int, what: str) -> None:
        if code:
            text = self._lib.nvrtcGetErrorString(code).decode()
            raise KernelError(f"{what} failed: {text} ({self.library})")


@lru_cache
def find_nvrtc() -> Nvrtc | None:
    """Return the NVRTC of the wheel ``nvidia-cuda-nvrtc``; None if that is not installed."""
    cuda = [root / "cu13" for root in package_roots("nvidia")]
    libraries = [path for root in cuda for path in root.glob("lib/libnvrtc.so.*")]
    includes = [root / "backends" / "nvidia" / "include" for root in package_roots("triton")]
    includes += [root / name for root in cuda for name in ("include", "include/cccl")]
    return Nvrtc(libraries[0], tuple(filter(Path.is_dir, includes))) if libraries else None


def require_nvrtc() -> Nvrtc:
    """Return the NVRTC that is installed; raise `MissingPackageError` if there is none."""
    found = find_nvrtc()
    if found is None:
        raise MissingPackageError(f"kernels in CUDA C++ need {NEEDED}")
    return found


def package_roots(package: str) -> list[Path]:
    """Return the directories of a package, which is not imported."""
    spec = importlib.util.find_spec(package)
    return [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []


def _needs_more(source: str) -> bool:
    """Tell whether a source includes headers of libcu++ beside the two that are written here."""
    return bool(set(re.findall(r"#\s*include\s*<(cuda/[^>]*)>", source)) - set(_OWN_HEADERS))


def _first_error(log: str) -> str:
    """Return the first error of a log in one line, which names the line of the source."""
    found = re.search(r"^.*\(\d+\): (?:catastrophic )?error: .*$", log, re.MULTILINE)
    lines = log[found.start() :].splitlines()[:2] if found else [log[:400]]
    return " | ".join(" ".join(line.split()) for line in lines)


def _strings(texts: Iterable[str]) -> ctypes.Array[ctypes.c_char_p]:
    encoded = [text.encode() for text in texts]
    return (ctypes.c_char_p * len(encoded))(*encoded)
