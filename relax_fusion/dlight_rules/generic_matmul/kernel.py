"""The kernel of a generic matmul: ours for its shape, read and written through views.

A kernel of `relax_fusion.compute` works on matrices.  Here it gets the operands of the generic
function as views (its own strides, and an offset for each matrix of a batch), its epilogue in the
place of the store, and an element-wise stage in front of a factor that is more than a load.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from tvm import ir, s_tir, tirx
from tvm.target import Target

from ...compute import contraction_prim_func
from ...compute.ranges import root_of, stitch, unless_empty
from ...dlight_rules import verbs
from ...errors import Decline, Reason
from ...estimator.families.cpu_tiles import PANEL_TASKS_PER_CORE, CpuPlan
from ...estimator.families.matmuls import SCALAR_FAMILIES
from ...estimator.tile_plan import PLAN_ATTR, PlanTable, TilePlan
from ...hardware import DeviceSpec
from ...hardware.target import device_of, is_cpu, is_gpu
from ...matching.expressions import different, loads_of, serial, substitute, variables_of
from ...transforms.lay_out_weights import LaidKernel
from ...tvm_ir import Analyzer, SBlock, SBlockRealize, TensorLoad, TensorRegion, structural_map
from ...workload import NormMatmul
from ..contraction_gpu import COMPUTED_LANES, schedule_gpu
from ..cpu.contraction import schedule_cpu
from ..cpu.dots import multiply_words
from ..tensor_cores.contraction import schedule_mma
from ..tensor_cores.dependent import waiting_first
from .layout import View, product, unravel
from .matmul import GenericMatmul, generic_matmul
from .plans import Planned, element_of, planned

WARP = 32
"""Threads of a warp, on every device that has tensor cores of ours."""

Index = Callable[..., tirx.Expr]


def matmul_kernel(
    func: tirx.PrimFunc, form: GenericMatmul, target: Target, allow_tf32: bool
) -> tirx.PrimFunc | Decline:
    """Return the scheduled kernel of `func`, which computes `form`, with its plans as attribute."""
    found = planned(form, device_of(target), allow_tf32)
    return found if isinstance(found, Decline) else _kernel(func, found, target)


Found = tuple[GenericMatmul, NormMatmul, list[Planned]]


def laid_kernel(func: tirx.PrimFunc, target: Target) -> LaidKernel | None:
    """Return the kernel of a matmul of a CPU whose weight is in panels already.

    None where no matmul is computed, or one whose weight the kernels do not all pack alike.
    """
    form = generic_matmul(func)
    found = None if form is None or form.batch else planned(form, device_of(target), False)
    if found is None or isinstance(found, Decline):
        return None
    form, work, plans = found
    view, others = form.w.view, [form.epilogue, form.x.value]
    alike = _of_one_width(plans, work.outputs[0].columns, device_of(target))
    if not alike or view is None:
        return None
    whole = Analyzer().can_prove_equal(
        product(view.source.ty.shape), form.size((*form.columns, form.k))
    )
    if not whole or any(load.source.same_as(view.source) for v in others for load in loads_of(v)):
        return None
    made = _kernel(func, (form, work, alike), target, laid=True)
    if isinstance(made, Decline):
        return None
    return LaidKernel(list(func.params).index(view.source), work, alike[0].plan, made)


def _of_one_width(plans: list[Planned], columns: int, dev: DeviceSpec) -> list[Planned]:
    """Return plans whose panels are as wide as the widest of them; none if they pack not alike.

    Narrower ones make more tasks of few columns, which are not needed where columns are many.
    """
    tiles = [CpuPlan.of(each.plan) for each in plans]
    width, vectors = max(t.reg_n for t in tiles), max(t.reg_n // t.lanes for t in tiles)
    many = columns // width >= PANEL_TASKS_PER_CORE * dev.sm_count
    if len({t.family for t in tiles}) > 1 or not all(t.packed for t in tiles):
        return []
    if any(t.reg_n != width for t in tiles) and not many:
        return []
    rows = max(1, (dev.vector_registers - vectors - 1) // vectors)
    made = []
    for each, tile in zip(plans, tiles, strict=True):
        height = min(tile.reg_m, rows)
        wide = replace(tile, reg_n=width, block_n=width, reg_m=height, block_m=height)
        made.append(replace(each, plan=wide))
    return made


def _kernel(
    func: tirx.PrimFunc, found: Found, target: Target, laid: bool = False
) -> tirx.PrimFunc | Decline:
    form, work, plans = found
    variants: list[tuple[int | None, tirx.PrimFunc]] = []
    for each in plans:
        variant = _variant(func, form, (work, each), target, laid)
        if isinstance(variant, Decline):
            return variant
        if variants:  # the first has the parameters of all
            own = dict(zip(variant.params, variants[0][1].params, strict=True))
            body = substitute(variant.body, own)
            variant = tirx.PrimFunc(variants[0][1].params, body, func.ret_type).with_attrs(
                dict(variant.attrs)
            )
        variants.append((each.upper, variant))
    rows = form.size(form.rows)
    whole = stitch([(upper and rows <= upper, variant) for upper, variant in variants])
    if is_gpu(target):
        whole = unless_empty(whole, form.size((*form.batch, *form.rows)))
    whole = whole.with_attrs(dict(func.attrs or {}))
    table = PlanTable(tuple((each.upper, each.plan) for each in plans))
    return whole.with_attr(PLAN_ATTR, table.to_attr())


def _on_tensor_cores(plan: TilePlan) -> bool:
    return plan.num_warps > 0 and plan.family not in SCALAR_FAMILIES


def _variant(
    func: tirx.PrimFunc,
    form: GenericMatmul,
    described: tuple[NormMatmul, Planned],
    target: Target,
    laid: bool,
) -> tirx.PrimFunc | Decline:
    """Return the kernel by one plan; `laid`: with panels in the place of the weight."""
    work, each = described
    plan = each.plan
    if plan.num_warps and not _on_tensor_cores(plan) and None in (form.x.view, form.w.view):
        plan = replace(plan, lanes=min(plan.lanes, COMPUTED_LANES))
    core = contraction_prim_func(work, plan, is_gpu(target), laid=laid)
    body = _scheduled(_adapted(core, form, each), plan, work.dtype, target).body
    x, w, out = core.params
    rows = x.ty.shape[0]
    known = {rows: form.size(form.rows)} if isinstance(rows, tirx.Var) else {}
    views = {x: form.x.view, w: None if laid else form.w.view, out: form.out}
    present = {var: view for var, view in views.items() if view is not None}
    body = through_views(body, form, (present, known), target)
    if isinstance(body, Decline):
        return body
    weight = form.w.view.source if laid and form.w.view is not None else None
    params = [w if weight is not None and p.same_as(weight) else p for p in func.params]
    return tirx.PrimFunc(params, root_of(body), func.ret_type).with_attr("s_tir", True)


def _scheduled(func: tirx.PrimFunc, plan: TilePlan, dtype: str, target: Target) -> tirx.PrimFunc:
    """Schedule an adapted matmul as the family of its plan does."""
    if not is_gpu(target):
        return multiply_words(schedule_cpu(func, plan), plan, dtype, target)
    return (
        waiting_first(schedule_mma(func, plan, target))
        if plan.family not in SCALAR_FAMILIES
        else schedule_gpu(func, plan, target)
    )


def _adapted(core: tirx.PrimFunc, form: GenericMatmul, each: Planned) -> tirx.PrimFunc:
    """Give the unscheduled matmul the epilogue and the factors of `form`."""
    x, w, out = core.params
    plan = each.plan
    stages: list[tirx.Stmt] = []
    made: list[tirx.Var] = []
    for var, factor in ((x, form.x), (w, form.w)):
        if factor.view is None:
            name = "x_read" if var is x else "w_parts0"
            stages.append(_element_wise(var, name, partial(element_of, form, factor)))
            made.append(var)
    root = core.body.block
    body = structural_map(root.body, (SBlock, lambda b: _with_epilogue(b, form, out)))
    if stages:
        body = tirx.SeqStmt([*stages, *(body.seq if isinstance(body, tirx.SeqStmt) else [body])])
    root = SBlock([], [], [], root.name_hint, body, alloc_buffers=[*root.alloc_buffers, *made])
    params = [*_operands(form), *(p for p in core.params if p not in made)]
    func = tirx.PrimFunc(params, SBlockRealize([], True, root)).with_attrs(dict(core.attrs))
    sch = s_tir.Schedule(func)
    for var in made:
        block = sch.get_sblock("x_read" if var is x else "w_parts0")
        if each.in_front:
            if var is x or not _on_tensor_cores(plan):  # whose schedule has a kernel for w
                verbs.element_wise_kernel(sch, block, plan.num_warps * WARP, plan.lanes)
        # A GPU's schedule inlines w into copies of its tiles
        elif var is x or not plan.num_warps or _on_tensor_cores(plan):
            sch.compute_inline(block)
    return sch.mod["main"]


def _operands(form: GenericMatmul) -> list[tirx.Var]:
    """Return what the epilogue and the computed factors read: sizes and positions, then tensors."""
    values = [form.epilogue, *(f.value for f in (form.x, form.w) if f.view is None)]
    tensors = {load.source for value in values for load in loads_of(value)} - {form.total}
    sizes = [d for tensor in tensors for d in tensor.ty.shape]
    found = set().union(*map(variables_of, (*values, *sizes, *form.extents.values())))
    bound = {form.k, *form.rows, *form.columns, *tensors, form.total}
    return [*_by_name(found - bound), *_by_name(tensors)]


def _by_name(variables: set[tirx.Var]) -> list[tirx.Var]:
    return sorted(variables, key=lambda var: var.name)


def _element_wise(buffer: tirx.Var, name: str, element: Index) -> tirx.Stmt:
    """Return the loop nest that fills `buffer`."""
    shape = list(buffer.ty.shape)
    loops = [tirx.Var(f"i{n}", "int64") for n in range(len(shape))]
    axes = [tirx.Var(f"v_i{n}", "int64") for n in range(len(shape))]
    zero = tirx.IntImm("int64", 0)
    value = element(*axes)
    block = SBlock(
        [
            tirx.IterVar(ir.Range.from_min_extent(zero, d), v, tirx.IterVar.DataPar)
            for v, d in zip(axes, shape, strict=True)
        ],
        _regions(value),
        [_point(buffer, axes)],
        name,
        tirx.BufferStore(buffer, value, axes),
    )
    stmt: tirx.Stmt = SBlockRealize(loops, True, block)
    for loop, size in reversed(list(zip(loops, shape, strict=True))):
        stmt = tirx.For(loop, zero, size, tirx.ForKind.SERIAL, stmt)
    return stmt


def _point(buffer: tirx.Var, indices: Sequence[tirx.Expr]) -> TensorRegion:
    return tirx.BufferRegion(buffer, [ir.Range.from_min_extent(i, 1) for i in indices])


def _regions(value: tirx.Expr) -> list[TensorRegion]:
    """Return what a value reads."""
    return different(_point(load.source, load.indices) for load in loads_of(value))


def _with_epilogue(block: SBlock, form: GenericMatmul, out: tirx.Var) -> SBlock:
    """Put the epilogue of `form` into the block that stores the result."""
    if not isinstance(block.body, tirx.BufferStore) or not block.body.buffer.same_as(out):
        return block
    i, j = block.body.indices
    total = block.body.value  # of a core without steps
    while isinstance(total, tirx.Cast):
        total = total.value
    where = {**unravel(form.extents, form.rows, i), **unravel(form.extents, form.columns, j)}
    rounded = total.astype(str(form.total.ty.dtype))
    own = (TensorLoad, lambda load: rounded if load.source.same_as(form.total) else load)
    value = structural_map(substitute(form.epilogue, where), own)
    store = tirx.BufferStore(out, value, [i, j])
    return SBlock(
        block.iter_vars, _regions(value), block.writes, block.name_hint, store, block.init
    )


GRID_Z = 65535
"""Largest extent of ``blockIdx.z`` (CUDA, ROCm and Vulkan allow no more)."""

Views = Mapping[tirx.Var, View]
Sizes = Mapping[tirx.Var, tirx.Expr]
ZERO = tirx.IntImm("int64", 0)


def through_views(
    body: tirx.Stmt, form: GenericMatmul, bound: tuple[Views, Sizes], target: Target
) -> tirx.Stmt | Decline:
    """Let a scheduled kernel of matrices read and write the parameters of the generic function.

    rewrite::

        S(x[i, k])    ->    for z: bind blockIdx.z:
                                x = decl_buffer((m, k), data=x3.data, elem_offset=z * m * k)
                                S(x[i, k])

    `body`: the scheduled body, a root block.
    `bound`: the view that each matrix is, and the value of each symbolic size.
    """
    views, sizes = bound
    if not form.batch:
        return _declared(body, views, sizes)
    count = form.size(form.batch)
    matrix = tirx.Var("v_matrix", "int64")
    axis = tirx.IterVar(ir.Range.from_min_extent(ZERO, count), matrix, tirx.IterVar.DataPar)
    where = {**sizes, **unravel(form.extents, form.batch, matrix)}
    if is_cpu(target):
        body = _declared(structural_map(body, (tirx.For, serial)), views, where)
        index = tirx.Var("matrix", "int64")
        one = SBlockRealize([index], True, SBlock([axis], [], [], "matrix", body))
        return tirx.For(index, ZERO, count, tirx.ForKind.PARALLEL, one)
    scopes = {buffer.ty.storage_scope for buffer in body.block.alloc_buffers}
    if scopes & {"", "global"} or not isinstance(body.block.body, tirx.For):
        return Decline(Reason.SCHEDULE, "a matmul of several kernels is not for a batch")
    return _grid(SBlock([axis], [], [], "matrix", _declared(body, views, where)), count)


def _grid(matrix: SBlock, count: tirx.Expr) -> tirx.Stmt:
    """Launch a kernel for each of `count` matrices, in several launches if they may be many."""
    index, axis = (tirx.Var(name, "int64") for name in ("matrix", "blockIdx.z"))
    thread = tirx.IterVar(None, axis, tirx.IterVar.ThreadIndex, "blockIdx.z")
    bind = tirx.ForKind.THREAD_BINDING
    if isinstance(count, tirx.IntImm) and int(count) <= GRID_Z:
        one = SBlockRealize([index], True, matrix)
        return tirx.For(index, ZERO, count, bind, one, thread)
    part = tirx.Var("part", "int64")
    first = part * GRID_Z
    here = tirx.min(tirx.IntImm("int64", GRID_Z), count - first)
    one = SBlockRealize([first + index], True, matrix)
    grid = tirx.For(index, ZERO, here, bind, one, thread)
    parts = (count + (GRID_Z - 1)) // GRID_Z
    return tirx.For(part, ZERO, parts, tirx.ForKind.SERIAL, grid)


def _declared(body: tirx.Stmt, views: Views, sizes: Sizes) -> tirx.Stmt:
    """Declare each view in front of `body`, and give every size its value.

    rewrite: ``S(x[i, j])`` -> ``x = decl_buffer((b * s, k), data=x3.data); S(x[i, j])``
    """
    analyzer = Analyzer()
    mapping: dict[tirx.Var, tirx.Expr] = dict(sizes)
    declared = []
    for var, view in views.items():
        rows, columns = (substitute(d, sizes) for d in var.ty.shape)
        stride = view.stride
        compact = analyzer.can_prove_equal(stride, columns) or analyzer.can_prove_equal(rows, 1)
        new = tirx.decl_buffer(
            (rows, columns),
            var.ty.dtype,
            var.name,
            strides=None if compact else (stride, tirx.IntImm("int64", 1)),
            elem_offset=analyzer.simplify(substitute(view.offset, sizes)),
            layout=None,
        )
        mapping[var] = new
        declared.append(tirx.DeclBuffer(new, data=view.source.data))
    return tirx.SeqStmt([*declared, substitute(body, mapping)])
