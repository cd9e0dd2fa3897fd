"""The command line: it shows what it is given."""

import sys

from tvm.relax.pipeline import PIPELINE_MAP


def main() -> None:
    print(sys.argv, PIPELINE_MAP["mlc_llm"].func.__module__)
