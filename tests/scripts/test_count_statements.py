"""Statements are counted, and nothing else."""

from __future__ import annotations

import sys

import count_statements
import pytest

PYTHON = '''"""Of the module."""
x = 1  # comment
def f():
    """Of the function."""
    if x: return "text;"
    return 2
'''

C = """/* a comment;
over lines; */
#include <stdint.h>
int f(int a) {  // what it does;
  int b = a;
  if (b) {
    return g(a,
             b);
  }
  return 0;
}
"""


def test_statements_of_python_are_counted_without_docstrings() -> None:
    assert count_statements.of_python(PYTHON) == 5


def test_lines_of_c_are_counted_where_a_statement_or_a_block_is() -> None:
    assert count_statements.of_c(C) == 5


def test_every_folder_and_the_total_are_told(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["count_statements.py"])
    count_statements.main()
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    counts = {" ".join(name): int(count) for count, *name in rows}
    assert {"relax_fusion", "relax_fusion/cli", "relax_fusion_command.py"} <= counts.keys()
    assert counts.pop("in total") == sum(counts.values()) > 10000
