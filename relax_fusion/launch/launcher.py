"""From compiled kernels to a C module that TVM links into a library.

Why C over the driver API, and not TVM's serialised module of kind "cuda": that one can only be made
where libcuda is, its byte format is private to a TVM version, and it cannot encode tensor maps.  C
is compiled by `export_library` like any other source, its functions are linked straight to the host
code that calls them, and the result needs nothing but TVM's runtime and the driver.

`launcher.h` is the part that is the same for all kernels; what is generated here is a table entry,
the image, and one function per kernel that unpacks the arguments of the PrimFunc's call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from importlib.resources import files

import numpy as np
import tvm_ffi
from tvm import ir, tirx

from ..transforms.modules import KERNELS_ATTR, module_pass, with_external_module, with_functions
from ..tvm_ir import structural_map
from .body import kernel_of_attr
from .kernel import CompiledKernel, TensorMapLayout, c_type, is_tensor_map, tensor_map_rank

_BYTES_PER_LINE = 64


def launcher_module(
    kernels: Iterable[CompiledKernel],
    calls: Mapping[str, int] | None = None,
    defined: Mapping[str, int] | None = None,
) -> tvm_ffi.Module:
    """Return the C module with a function for each of `kernels` that launches it.

    A launcher that is called n times, by `calls`, has n names (`alias`).  Of these, another module
    of the library has the first m already, by `defined`; where it has any, it has the image too.

    The function has TVM's packed calling convention and is called by ``T.call_cpacked`` with the
    arguments of the kernel (a tensor map as pointer, sizes and strides), a pointer to scratch
    memory if the kernel needs any, and the three dimensions of the grid.  It is hidden in the
    library that it is linked into, so that two libraries with the same kernel don't meet.
    """
    make = tvm_ffi.get_global_func("runtime.CSourceModuleCreate")
    kernels = list(kernels)
    names = [n for k in kernels for n in _names(k.launcher, calls or {}, defined or {})]
    return make(launcher_source(kernels, calls, defined), "c", names, None)


def launcher_source(
    kernels: Iterable[CompiledKernel],
    calls: Mapping[str, int] | None = None,
    defined: Mapping[str, int] | None = None,
) -> str:
    """Return the text of `launcher_module`: C99 that is also C++11."""
    parts = [files(__package__).joinpath("launcher.h").read_text(encoding="utf-8")]
    for kernel in kernels:
        name = kernel.launcher
        is_defined = name in (defined or {})
        parts.append(f"{_signature(name)};\n" if is_defined else _kernel(kernel))
        called = _OUTCOME.format(f"{name if is_defined else _call(kernel)}({_PASSED})")
        others = [n for n in _names(name, calls or {}, defined or {}) if n != name]
        parts += [f"{_signature(n)} {{\n  return {called};\n}}\n" for n in others]
    return "\n".join([*parts, _END])


def _call(kernel: CompiledKernel) -> str:
    """Return the function that launches a kernel: 0 if it did, 1 if the grid is empty, or -1."""
    return f"rf_call_{kernel.symbol}"


def _names(launcher: str, calls: Mapping[str, int], defined: Mapping[str, int]) -> list[str]:
    """Return the names of a launcher that are to be defined."""
    return [alias(launcher, i) for i in range(defined.get(launcher, 0), calls.get(launcher, 1))]


def alias(launcher: str, call: int) -> str:
    """Return the name of a launcher for its `call`-th call."""
    return f"{launcher}_{call}" if call else launcher


def _signature(name: str) -> str:
    return (
        f'__attribute__((visibility("hidden"))) int {name}(\n'
        "    void* self, const TVMFFIAny* args, int32_t num_args, TVMFFIAny* result)"
    )


_PASSED = "self, args, num_args, result"

_OUTCOME = "{} < 0 ? -1 : 0"
"""A launcher returns this, given what the launch returned."""

_END = """#ifdef __cplusplus
}  // extern "C"
#endif
"""


def _kernel(kernel: CompiledKernel) -> str:
    """Return the image, the table entry and the function of one kernel."""
    name = kernel.symbol
    options = kernel.options
    block = ", ".join(map(str, kernel.block or (kernel.threads, 1, 1)))
    comment = kernel.to_json().replace("/", "\\u002f")  # a comment could end, or begin another
    return f"""/* {comment} */
static const unsigned char rf_image_{name}[] __attribute__((aligned(64))) =
{_c_string(kernel.image)};
static rf_kernel rf_kernel_{name} = {{
    "{name}", "{kernel.entry}", rf_image_{name}, {kernel.capability}, {{{block}}},
    {kernel.shared_bytes}, {options.num_ctas}, {int(options.cooperative)}, {
        int(options.dependent_launch)
    }, {{NULL}}}};

static int {_call(kernel)}(
    void* self, const TVMFFIAny* args, int32_t num_args, TVMFFIAny* result) {{
  rf_kernel* kernel = &rf_kernel_{name};
{_body(kernel)}
}}

{_signature(kernel.launcher)} {{
  return {_OUTCOME.format(f"{_call(kernel)}({_PASSED})")};
}}
"""


def _body(kernel: CompiledKernel) -> str:
    """Return the statements that unpack the arguments, check them and launch."""
    unpack, params, used = _unpack(kernel)
    grid = used + bool(kernel.scratch_bytes)
    scratch = f"args[{used}].v_ptr" if kernel.scratch_bytes else "NULL"
    extras = ("&scratch", "&profile") if kernel.convention == "triton" else ()
    passed = ", ".join([*params, *extras]) or "NULL"
    lines = [
        "int32_t device;",
        "int state;",
        "int64_t grid[3];",
        *(["void *scratch, *profile = NULL;"] if extras else []),
        "(void)self;",
        "(void)result;",
        f"if (num_args != {grid + 3})",
        f'  return rf_fail(kernel->symbol, "it takes {grid + 3} arguments, grid included");',
        *(f"grid[{i}] = args[{grid + i}].v_int64;" for i in range(3)),
        "if ((state = rf_check_grid(kernel, grid)) != 0) return state;",
        "if (rf_current_device(kernel->symbol, &device)) return -1;",
        *([f"scratch = {scratch};"] if extras else []),
        "{",
        *(f"  {line}" for line in unpack),
        f"  void* params[] = {{{passed}}};",
        "  return rf_launch(kernel, device, grid, params);",
        "}",
    ]
    return "\n".join(f"  {line}" for line in lines)


def _unpack(kernel: CompiledKernel) -> tuple[list[str], list[str], int]:
    """Return declarations, the addresses to pass on, and how many arguments they take up."""
    lines: list[str] = []
    params: list[str] = []
    maps = iter(kernel.tensor_maps)
    position = 0
    for number, (kind, aligned) in enumerate(zip(kernel.params, kernel.aligned, strict=True)):
        if is_tensor_map(kind):
            rank = tensor_map_rank(kind)
            lines += _tensor_map(number, position, rank, next(maps))
            params.append(f"&m{number}")
            if kernel.convention == "triton":
                lines += [f"int32_t n{number}_{d} = (int32_t)z{number}[{d}];" for d in range(rank)]
                params += [f"&n{number}_{d}" for d in range(rank)]
                params += [f"&s{number}[{d}]" for d in range(rank)]
            position += 1 + 2 * rank
            continue
        lines += _scalar(number, position, kind, aligned)
        params.append(f"&a{number}")
        position += 1
    return lines, params, position


def _scalar(number: int, position: int, kind: str, aligned: bool) -> list[str]:
    """Return the declaration of a pointer or number, and the checks of what was promised of it."""
    c = c_type(kind)
    value = f"args[{position}]"
    if c == "void*":
        check = f"if (rf_check_address(kernel, {number}, a{number})) return -1;"
        return [f"void* a{number} = {value}.v_ptr;", *([check] if aligned else [])]
    if c in ("float", "double"):
        return [f"{c} a{number} = ({c}){value}.v_float64;"]
    checked = f"{value}.v_int64"
    lines = [f"{c} a{number} = ({c}){value}.v_int64;"]
    bits = int(kind[1:])
    signed = kind[0] == "i" and bits > 1
    least, most = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    most = min(most, 2**63 - 1)  # what a PrimFunc can pass
    if kind != "i64":
        lines.append(
            f"if (rf_check_range(kernel, {number}, {checked}, {least}LL, {most}LL)) return -1;"
        )
    if aligned:
        lines.append(f"if (rf_check_aligned(kernel, {number}, {checked})) return -1;")
    return lines


def _tensor_map(number: int, position: int, rank: int, layout: TensorMapLayout) -> list[str]:
    """Return what encodes a tensor map from a pointer, sizes and strides."""
    sizes = ", ".join(f"args[{position + 1 + d}].v_int64" for d in range(rank))
    strides = ", ".join(f"args[{position + 1 + rank + d}].v_int64" for d in range(rank))
    block = ", ".join(map(str, layout.block))
    fixed = f"{rank}, {layout.element_bytes}, {layout.element_type}, {layout.swizzle}"
    return [
        f"static const rf_tensor_map_layout l{number} = {{{fixed}, {{{block}}}}};",
        f"rf_tensor_map m{number};",
        f"int64_t z{number}[] = {{{sizes}}};",
        f"int64_t s{number}[] = {{{strides}}};",
        f"if (rf_encode(kernel, {number}, &l{number}, args[{position}].v_ptr, z{number}, "
        f"s{number}, &m{number})) return -1;",
    ]


def _c_string(data: bytes) -> str:
    """Return a C string literal of `data`.

    Compilers read a literal ten times faster than a list of numbers.  Octal escapes of three digits
    end by themselves; a hexadecimal one would swallow a following digit.
    """
    text = _ESCAPES[np.frombuffer(data, np.uint8)].tobytes().decode("ascii")
    width = _ESCAPES.itemsize * _BYTES_PER_LINE
    return "\n".join(f'"{text[i : i + width]}"' for i in range(0, len(text), width))


_ESCAPES = np.array([f"\\{byte:03o}".encode() for byte in range(256)])


LAUNCHERS_ATTR = "relax_fusion.launchers"
"""The module attribute that tells which launchers external modules define, and how many names each
has."""


@module_pass
class EmbedTritonKernels:
    """Attach a module that launches every kernel which `call_tir_extern` compiled.

    rewrite::

        PrimFuncs with relax_fusion.triton_kernels  ->  PrimFuncs without,
                                                        module attribute external_mods + launcher

    Run it behind the passes that may still remove functions.  A module without such PrimFuncs is
    left as it is; one that got more of them since an earlier run gets another launcher, with the
    kernels that the first lacks.
    """

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
        """Return the module with its kernels embedded."""
        kernels: dict[str, CompiledKernel] = {}
        defined = {str(k): int(n) for k, n in (mod.attrs or {}).get(LAUNCHERS_ATTR, {}).items()}
        calls = Counter(defined)
        updated = {}
        for gvar, func in mod.functions_items():
            if not isinstance(func, tirx.PrimFunc) or KERNELS_ATTR not in (func.attrs or {}):
                continue
            launchers = set()
            for symbol, attr in func.attrs[KERNELS_ATTR].items():
                if str(symbol) not in kernels:
                    kernels[str(symbol)] = kernel_of_attr(attr)
                launchers.add(kernels[str(symbol)].launcher)
            updated[gvar] = _own_names(func.without_attr(KERNELS_ATTR), launchers, calls)
        if not updated:
            return mod
        mod = with_functions(mod, updated).with_attr(LAUNCHERS_ATTR, dict(calls))
        mine = [kernels[symbol] for symbol in sorted(kernels)]
        return with_external_module(mod, launcher_module(mine, calls, defined))


def _own_names(func: tirx.PrimFunc, launchers: set[str], calls: Counter[str]) -> tirx.PrimFunc:
    """Return `func` with a name of its own for every call of a launcher, counted in `calls`.

    TVM declares the function that ``T.call_cpacked`` names anew at every call (0.27), so LLVM
    renames all but the first, and the library would lack them.
    """

    def rename(call: ir.Call) -> ir.Call:
        name = str(call.args[0].value) if call.op.same_as(_CPACKED) else ""
        if name not in launchers:
            return call
        calls[name] += 1
        own = alias(name, calls[name] - 1)
        return ir.Call(call.op, [ir.StringImm(own), *call.args[1:]], ret_ty=call.ty)

    return func.with_body(structural_map(func.body, (ir.Call, rename), order="post"))


_CPACKED = ir.Op.get("tirx.tvm_call_cpacked")
