"""CUDA graphs: launches whose shapes and memory stay the same are recorded once and replayed.

TVM's pass `RewriteCUDAGraph` finds them.  It takes for granted that the parameters behind a
function's ``num_input`` (a model's weights) are the same tensors in every call, and that whatever
is called only launches kernels.  `CaptureCUDAGraphs` makes sure of both.
"""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import ir, relax, tirx

from ..matching.expressions import found_in
from ..matching.pattern import calls_in, is_call
from .modules import KERNELS_ATTR, functions_of, module_pass, with_external_module
from .whole_graph import is_run_or_capture, with_whole_tuples, without_inputs

CONFIG = "relax.backend.use_cuda_graph"
"""The option of a PassContext that switches TVM's own pass on."""

ADDRESSES = "relax_fusion_addresses"


@module_pass
class CaptureCUDAGraphs:
    """Lift launches of static shapes into functions that the VM records as CUDA graphs.

    rewrite::

        f(a, w, b); g(b, v, c)                                  # a, b, c planned; w, v weights
            ->
        key = R.call_packed("relax_fusion_addresses", w, v)
        R.call_builtin_with_ctx("vm.builtin.cuda_graph.run_or_capture",
                                (main_cuda_graph_capture, (a, w, b, v, c), 0, key))

    The VM keeps a graph for every value of the key: weights at another address are recorded anew,
    where TVM alone would read the old ones.  Other inputs of a function are never part of a graph,
    nor is a launch that depends on a symbolic dim, unless a hint names it.  A function that has
    `BOUND_ATTR`, and whose dims are all named by hints, is one graph for each value of these dims.

    declines when:
        a call that would be recorded is more than launches of kernels, such as a packed function,
        whose work on the host would be done once and not again; or memory is planned on more than
        one device, which TVM's pass does not take.  The module is left as it is.
    """

    enabled: bool = True
    """What to do where the PassContext does not say.  Where it has the option
    ``relax.backend.use_cuda_graph``, TVM's pass does as it is told there, and nothing else."""

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
        """Rewrite every function of `mod`, or none."""
        config = tvm.transform.PassContext.current().config
        if CONFIG in config:
            return relax.transform.RewriteCUDAGraph()(mod)
        storage = _calls(mod, "relax.memory.alloc_storage")
        if not self.enabled or any(int(call.args[1].value) for call in storage):
            return mod  # with storage on another device than the first
        with tvm.transform.PassContext(config={**config, CONFIG: True}):
            lifted = relax.transform.RewriteCUDAGraph()(without_inputs(mod))
        built_in = _calls(lifted, "relax.call_builtin_with_ctx")
        regions = {call.args[1].fields[0] for call in built_in if is_run_or_capture(call)}
        if not regions or not all(_only_launches(lifted, lifted[gvar]) for gvar in regions):
            return mod
        return _with_keys(with_whole_tuples(lifted))


def _calls(mod: ir.IRModule, op: str) -> list[relax.Call]:
    """Return the calls of an operator in all functions."""
    functions = functions_of(mod, relax.Function).values()
    return [call for func in functions for call in calls_in(func, op)]


_COLLECTIVES = tuple(
    f"runtime.disco.{name}"
    for name in ("allreduce", "allgather", "broadcast_from_worker0", "scatter_from_worker0")
)
"""Packed functions by which NCCL launches kernels, on the stream that is recorded.  It connects the
workers in the run in front of the recording."""

_VIEWS = ("relax.reshape", "relax.memory.alloc_tensor", "relax.memory.view")


def _only_launches(mod: ir.IRModule, region: relax.Function) -> bool:
    """Tell whether a recorded function only launches kernels, NCCL's as well, and names memory."""
    for block in region.body.blocks:
        for binding in block.bindings:
            call = binding.value
            if not isinstance(call, relax.Call) or is_call(call, *_VIEWS):
                continue
            if isinstance(call.op, relax.ExternFunc):
                if str(call.op.global_symbol) in _COLLECTIVES:
                    continue
                return False
            func = mod[call.op] if isinstance(call.op, ir.GlobalVar) else None
            if not isinstance(func, tirx.PrimFunc) or _calls_the_host(func):
                return False
    return True


def _calls_the_host(func: tirx.PrimFunc) -> bool:
    """Tell whether a PrimFunc calls packed functions, besides those that launch our kernels.

    The ones that measure candidates among these do so in the run in front of the recording.
    """
    if KERNELS_ATTR in (func.attrs or {}):
        return False
    operators = [call.op for call in found_in(func.body, ir.Call)]
    return any(isinstance(op, ir.Op) and op.name.startswith("tirx.tvm_call_") for op in operators)


def _with_keys(mod: ir.IRModule) -> ir.IRModule:
    """Give every replay that reads parameters of the function their addresses as its key."""
    mutator = _AddKeys(mod)
    for gvar, func in functions_of(mod, relax.Function).items():
        mutator.builder_.update_func(gvar, mutator.rewrite(func))
    if not mutator.keys:
        return mod
    return with_external_module(mutator.builder_.get(), addresses_module())


@relax.expr_functor.mutator
class _AddKeys(relax.PyExprMutator):
    """Adds the keys of one function after the other, and counts them."""

    def __init__(self, mod: ir.IRModule):
        super().__init__(mod)
        self.given: set[relax.Expr] = set()
        self.keys = 0

    def rewrite(self, func: relax.Function) -> relax.Function:
        """Return `func` with its keys."""
        self.given = set(func.params)
        return self.visit_expr(func)

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        value = binding.value
        source = value.tuple_value if isinstance(value, relax.TupleGetItem) else value
        if is_call(value, "relax.reshape"):
            source = value.args[0]
        if source in self.given:
            self.given.add(binding.var)
        super().visit_var_binding_(binding)

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        if not is_run_or_capture(call):
            return super().visit_call_(call)
        gvar, args, index, *dims = call.args[1].fields
        weights = [a for a in args.fields if a in self.given and _has_addresses(a.ty)]
        if not weights:
            return super().visit_call_(call)
        self.keys += 1
        key = self.builder_.emit(
            relax.Call(
                relax.ExternFunc(ADDRESSES),
                [self.visit_expr(a) for a in (*weights, *dims)],
                ty_args=[relax.ShapeType()],
            )
        )
        fields = [gvar, self.visit_expr(args), index, key]
        return relax.Call(call.op, [call.args[0], relax.Tuple(fields)], call.attrs, call.ty_args)


def _has_addresses(ty: ir.Type) -> bool:
    """Tell whether a value is a tensor, or a tuple of such."""
    if isinstance(ty, ir.TupleType):
        return all(map(_has_addresses, ty.fields))
    return isinstance(ty, relax.TensorType)


def addresses_module() -> tvm_ffi.Module:
    """Return the C function `ADDRESSES` as a module that is linked into the library."""
    make = tvm_ffi.get_global_func("runtime.CSourceModuleCreate")
    return make(_SOURCE, "c", [ADDRESSES], None)


_SOURCE = f"""/* {ADDRESSES}(tensor, shape, or array of such, ...): addresses and dims. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <tvm/ffi/c_api.h>

#ifdef __cplusplus
extern "C" {{
#endif

static int rf_addresses_fail(const char* message) {{
  TVMFFIErrorSetRaisedFromCStr("RuntimeError", message);
  return -1;
}}

/* Appends what `args` have to `values`, or counts it if that is NULL; -1 for anything else. */
static int64_t rf_addresses_of(const TVMFFIAny* args, int64_t size, TVMFFIAny* values) {{
  int64_t n = 0, i, j;
  for (i = 0; i < size; ++i) {{
    char* cell = (char*)args[i].v_obj + sizeof(TVMFFIObject);
    if (args[i].type_index == kTVMFFIShape) {{
      TVMFFIShapeCell* shape = (TVMFFIShapeCell*)cell;
      for (j = 0; j < (int64_t)shape->size; ++j, ++n) {{
        if (values) values[n].v_int64 = shape->data[j];
      }}
    }} else if (args[i].type_index == kTVMFFITensor) {{
      DLTensor* tensor = (DLTensor*)cell;
      if (values) values[n].v_int64 = (int64_t)(uintptr_t)tensor->data + tensor->byte_offset;
      ++n;
    }} else if (args[i].type_index == kTVMFFIArray) {{
      TVMFFISeqCell* array = (TVMFFISeqCell*)cell;
      j = rf_addresses_of((TVMFFIAny*)array->data, array->size, values ? values + n : NULL);
      if (j < 0) return -1;
      n += j;
    }} else {{
      return -1;
    }}
  }}
  return n;
}}

__attribute__((visibility("default"))) int __tvm_ffi_{ADDRESSES}(
    void* self, const TVMFFIAny* args, int32_t num_args, TVMFFIAny* result) {{
  static const char name[] = "ffi.Shape";
  TVMFFIByteArray bytes;
  TVMFFIObjectHandle make = NULL;
  TVMFFIAny* values;
  int64_t n = rf_addresses_of(args, num_args, NULL), i;
  int code;
  if (n < 0) return rf_addresses_fail("{ADDRESSES} takes tensors, shapes, and arrays of them");
  values = (TVMFFIAny*)calloc(n ? n : 1, sizeof(TVMFFIAny));
  if (values == NULL) return rf_addresses_fail("{ADDRESSES}: out of memory");
  for (i = 0; i < n; ++i) values[i].type_index = kTVMFFIInt;
  rf_addresses_of(args, num_args, values);
  bytes.data = name;
  bytes.size = sizeof(name) - 1;
  code = TVMFFIFunctionGetGlobal(&bytes, &make);
  if (code == 0 && make == NULL) code = rf_addresses_fail("TVM has no function ffi.Shape");
  if (code == 0) {{
    code = TVMFFIFunctionCall(make, values, (int32_t)n, result);
    TVMFFIObjectDecRef(make);
  }}
  free(values);
  return code;
}}

#ifdef __cplusplus
}}  // extern "C"
#endif
"""
