"""What a page says that an operator reads, writes and multiplies, counted by hand."""

from __future__ import annotations

from tvm.script import from_source

from relax_fusion.inventory.record_graph import RecordGraph
from relax_fusion.report.material import FunctionGraph, Node

MODULE = """
@I.ir_module
class Module:
    @T.prim_func(private=True, s_tir=True)
    def relu(x: T.Buffer((4, 64), "float32")):
        for i, j in T.grid(4, 64):
            with T.sblock("y"):
                vi, vj = T.axis.remap("SS", [i, j])
                x[vi, vj] = T.max(x[vi, vj], T.float32(0))

    @T.prim_func(private=True, s_tir=True)
    def append(cache: T.Buffer((32, 64), "float32"), rows: T.Buffer((4, 64), "float32")):
        for i, j in T.grid(4, 64):
            with T.sblock("y"):
                vi, vj = T.axis.remap("SS", [i, j])
                cache[vi, vj] = rows[vi, vj]

    @T.prim_func(private=True, s_tir=True)
    def fused_take_add(table: T.Buffer((512, 64), "float32"), y: T.Buffer((4, 64), "float32")):
        for i, j in T.grid(4, 64):
            with T.sblock("y"):
                vi, vj = T.axis.remap("SS", [i, j])
                y[vi, vj] = table[vi * 2, vj] + T.float32(1)

    @T.prim_func(private=True, s_tir=True)
    def append_and_sum(
        cache: T.Buffer((32, 64), "float32"),
        rows: T.Buffer((4, 64), "float32"),
        sums: T.Buffer((4,), "float32"),
    ):
        for i in range(4):
            with T.sblock("y"):
                vi = T.axis.spatial(4, i)
                cache[vi, 0] = rows[vi, 0]
                sums[vi] = cache[vi, 1] + cache[31 - vi, 1]

    @R.function
    def main(
        x: R.Tensor((4, 64), "float32"),
        w: R.Tensor((64, 64), "float32"),
        image: R.Tensor((1, 64, 8, 8), "float32"),
        window: R.Tensor((64, 64, 3, 3), "float32"),
        q: R.Tensor((1, 16, 4, 32), "float32"),
        cache: R.Tensor((32, 64), "float32"),
    ):
        cls = Module
        with R.dataflow():
            squared = R.multiply(x, x)
            whole = R.call_tir_inplace(
                cls.relu, (squared,), inplace_indices=[0], out_ty=R.Tensor((4, 64), "float32")
            )
            part = R.call_tir_inplace(
                cls.append, (cache, whole), inplace_indices=[0],
                out_ty=R.Tensor((32, 64), "float32"),
            )
            both = R.call_tir_inplace(
                cls.append_and_sum, (part, whole), inplace_indices=[-1, 0],
                out_ty=[R.Tensor((4,), "float32"), R.Tensor((32, 64), "float32")],
            )
            table = R.zeros((512, 64), "float32")
            looked = R.call_tir(cls.fused_take_add, (table,), R.Tensor((4, 64), "float32"))
            product = R.matmul(x, w)
            places = R.nn.conv2d_transpose(image, window)
            seen = R.nn.attention(q, q, q)
            letters = R.einsum((x, w), "ab,bc")
            R.output(both, product, places, seen, letters, looked)
        return both, product, places, seen, letters, looked
"""


BRANCHES = """
@I.ir_module
class Module:
    @R.function
    def main(
        c: R.Tensor((), "bool"), x: R.Tensor((4, 64), "float32"), w: R.Tensor((64, 64), "float32")
    ):
        z = R.add(x, x)
        if c:
            y = R.matmul(z, w)
        else:
            y = R.multiply(z, z)
        return y
"""


def nodes(module: str = MODULE) -> dict[str, Node]:
    graphs: list[FunctionGraph] = []
    RecordGraph(graphs)(from_source(module))
    (graph,) = graphs
    return {node.name: node for node in graph.nodes}


def test_each_operand_is_read_once() -> None:
    found = nodes()
    assert (found["squared"].read_bytes, found["squared"].written_bytes) == (1024, 1024)
    assert found["seen"].moved == 2 * 4 * 16 * 4 * 32


def test_an_update_of_the_whole_is_no_update_of_nothing() -> None:
    found = nodes()
    assert (found["whole"].read_bytes, found["whole"].written_bytes) == (1024, 1024)
    assert (found["part"].read_bytes, found["part"].written_bytes) == (1024, 1024)


def test_what_has_other_results_than_an_update_reads_all_that_it_is_given() -> None:
    both = nodes()["both"]
    assert (both.read_bytes, both.written_bytes) == (4 * 36 * 64, 4 * 4)


def test_a_kernel_with_a_lookup_reads_no_more_of_a_table_than_it_writes() -> None:
    looked = nodes()["looked"]
    assert (looked.read_bytes, looked.written_bytes) == (1024, 1024)


def test_all_that_multiplies_matrices_has_operations() -> None:
    flops = {name: node.flops for name, node in nodes().items() if node.flops}
    assert flops == {
        "product": 2.0 * 4 * 64 * 64,
        "letters": 2.0 * 4 * 64 * 64,
        "places": 2.0 * 64 * 64 * 64 * 9,
        "seen": 2.0 * 2 * 4 * 16 * 16 * 32,
    }


def test_branches_are_in_the_graph() -> None:
    """What only one of them runs is there, as it is among the launches."""
    found = nodes(BRANCHES)
    assert [node.op for node in found.values()] == ["add", "matmul", "multiply", "if"]
    _, product, square, choice = found.values()
    assert product.flops == 2.0 * 4 * 64 * 64 and product.reads == square.reads == ("z",)
    assert choice.reads == (product.name, square.name) and choice.weights == ("c",)
