"""Differences of functions' texts: hunks, equal ones folded, long ones cut with a word about it."""

from __future__ import annotations

from relax_fusion.report.text_changes import (
    LONGEST_LINE,
    MOST_TOLD,
    Hunk,
    added,
    changes,
    shortened,
)

LAYER = (
    'm{i}: R.Tensor((1, 8), dtype="float16") = R.matmul(x{i}, w{i})',
    's{i}: R.Tensor((1, 8), dtype="float16") = R.nn.silu(m{i})',
    *(f'k{{i}}_{n}: R.Tensor((1, 8), dtype="float16") = R.add(s{{i}}, s{{i}})' for n in range(6)),
    'x{j}: R.Tensor((1, 8), dtype="float16") = R.add(x{i}, k{i}_5)',
)


def layers(lines: tuple[str, ...], count: int = 4) -> list[str]:
    weights = ", ".join(f'w{i}: R.Tensor((8, 8), dtype="float16")' for i in range(count))
    body = [line.format(i=i, j=i + 1) for i in range(count) for line in lines]
    return [f'def main(x0: R.Tensor((1, 8), dtype="float16"), {weights}):', *body]


def test_equal_texts_have_no_hunks() -> None:
    assert changes(layers(LAYER), layers(LAYER)) == ((), "")


def test_a_change_has_its_lines_and_two_around() -> None:
    before = [f"line {i}" for i in range(10)]
    after = [*before[:5], "another", *before[6:]]
    ((hunk,), left) = changes(before, after)
    around = (" line 3", " line 4", "-line 5", "+another", " line 6", " line 7")
    assert hunk == Hunk(4, 4, around) and not left


def test_layers_that_change_alike_are_told_once() -> None:
    kernel = 's{i} = R.call_tir(fused, (x{i}, w{i}), out_ty=R.Tensor((1, 8), dtype="float16"))'
    hunks, left = changes(layers(LAYER), layers((kernel, *LAYER[2:])))
    assert not left and sum(hunk.times for hunk in hunks) == 4
    assert [hunk.times for hunk in hunks] == [1, 3]  # nothing stands before the first layer
    assert "-m0: " in "".join(hunks[0].lines)


def test_other_kernels_and_numbers_are_no_equal_changes() -> None:
    before = layers(LAYER)
    for other in ("fused{i}", "fused_{i}x8"):
        kernel = f"s{{i}} = R.call_tir({other}, (x{{i}}, w{{i}}))"
        hunks, _ = changes(before, layers((kernel, *LAYER[2:])))
        assert [hunk.times for hunk in hunks] == [1] * 4
    hunks, _ = changes(before, [line.replace("(s2, s2)", "(s2, 2)") for line in before])
    assert [hunk.times for hunk in hunks] == [1]


def test_much_is_cut_and_told_how_much() -> None:
    for kind, most in MOST_TOLD.items():
        hunks, left = added([f"line {i}" for i in range(most + 5)], kind)
        assert len(hunks[0].lines) == most
        assert left == f"5 of {most + 5} lines are left out."
    texts = [f"a {i}" for i in range(501)], [f"b {i}" for i in range(501)]
    assert changes(*texts, "graph")[0]
    told = "501 lines in a row are other ones; at most 500 are compared."
    assert changes(*texts, "kernel") == ((), told)


def test_a_small_change_of_a_long_kernel_is_told() -> None:
    before = [f"{i}" for i in range(1, 3001)]
    after = [*before[:2000], "y", *before[2001:]]
    around = (" 1999", " 2000", "-2001", "+y", " 2002", " 2003")
    assert changes(before, after, "kernel") == ((Hunk(1999, 1999, around),), "")


def test_a_long_line_loses_its_middle() -> None:
    line = "a" + "x" * 1000 + "b"
    cut = shortened(line)
    assert cut[0] == "a" and cut[-1] == "b" and "… 602 characters …" in cut
    assert len(cut) < LONGEST_LINE + 30
    assert changes([line], [line + "c"])[0][0].lines[0] == shortened("-" + line)
