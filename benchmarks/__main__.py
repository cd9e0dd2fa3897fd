"""Benchmarks of relax_fusion.

    python -m benchmarks run matmul [options]      # --help tells each one's options
    python -m benchmarks judge attention [options]
    python -m benchmarks plot FILE.json            # draws a record again, without a GPU

A run writes JSON and Markdown after every case, and can be completed with --resume.
"""

from __future__ import annotations

import re
import sys
from argparse import REMAINDER, ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from importlib import import_module

from benchmarks.runner import main as run
from benchmarks.suite import Suite

SUITES = {
    "run": {
        "matmul": ("matmul.suite:Matmul", "chains of LLaMA against torch, cuBLAS and TVM (GPU)"),
        "widths": ("widths.suite:Widths", "chains of seventeen models, heat maps (GPU)"),
        "attention": ("attention.suite:Attention", "against SDPA and FlexAttention (GPU)"),
        "chains": ("chains.suite:Chains", "matmuls in one kernel, apart, and torch (GPU)"),
        "experts": ("experts:Experts", "layers of experts against torch and SGLang (GPU)"),
        "encoders": (
            "encoders:Encoders",
            "BERT, GPT-2, ViT, Whisper whole, against torch.compile (GPU)",
        ),
        "decode": ("decode.suite:Decode", "a token: CUDA graphs, torch.compile, the floor (GPU)"),
        "prefill": (
            "decode.prefill:Prefill",
            "a prompt: the VM, a CUDA graph, torch.compile, the floor (GPU)",
        ),
        "parallel": (
            "decode.parallel:Parallel",
            "a token and a prompt on several GPUs: one of them, torch.distributed, the floor (GPU)",
        ),
        "compiled": ("compiled:Compiled", "models by torch.compile's backends (GPU)"),
        "groups": ("groups:Groups", "chains that FuseOps makes slower, by our fusion plans"),
        "plans": ("plans:Plans", "forty models on this CPU by our plans, FuseOps, TVM alone"),
        "layer": ("layer:Layer", "chains of a layer and their predictions against TVM (GPU)"),
        "launch": ("launch:Launch", "launching a Triton kernel against one of TVM's (GPU)"),
        "cpu_chains": ("chains.cpu:CpuChains", "chains on this CPU: one kernel, and apart"),
        "cpu": ("cpu:Cpu", "chains on this CPU against TVM, MLC-LLM's pipeline and torch"),
        "cpu_q4": ("cpu_q4.suite:CpuQ4", "a token by 4-bit weights on this CPU against its peers"),
        "cpu_int8": ("cpu_int8:CpuInt8", "layers of int8 weights on this CPU against its peers"),
        "imported": ("imported:Imported", "models of PyTorch on this CPU against their peers"),
        "compile": ("compile:Compile", "LLaMA-3.1-8B for an H200: seconds and memory"),
    },
    "judge": {
        "matmul": (
            "judge.matmul:JudgeMatmul",
            "is the plan chosen for a matmul the fastest? (GPU)",
        ),
        "attention": ("judge.attention:JudgeAttention", "the same for attention (GPU)"),
        "chains": ("judge.chains:JudgeChains", "the same for chains, random ones too (GPU)"),
        "experts": ("judge.experts:JudgeExperts", "the same for matmuls by experts (GPU)"),
        "choices": ("judge.choices:JudgeChoices", "what ranges lose by price, and choosing's time"),
        "families": ("judge.families:JudgeFamilies", "what is lost without each family? (GPU)"),
        "feasibility": ("judge.feasibility:JudgeFeasibility", "do generated kernels fit a block?"),
        "models": ("judge.models:JudgeModels", "predicted times of whole models against kept ones"),
        "learned": ("judge.learned:JudgeLearned", "would trees that learn from times beat prices?"),
        "cpu": ("judge.cpu:JudgeCpu", "the same as matmul on this CPU"),
    },
}
ALIASES = {"estimator": "matmul", "gpu": "layer", "chain": "chains", "regions": "chains"}
"""How suites, and their files, were called before."""


def suite_of(verb: str, name: str) -> type[Suite]:
    """Import a suite."""
    where, _, cls = SUITES[verb][ALIASES.get(name, name)][0].partition(":")
    package = "benchmarks." if verb == "judge" else "benchmarks.suites."
    found: type[Suite] = getattr(import_module(package + where), cls)
    return found


def plotted(file: str) -> type[Suite]:
    """Return the suite whose record a file is named after.

    Raises
    ------
    SystemExit
        If there is none.
    """
    found = re.search(r"bench_([a-z]+)[\w-]*\.json$", file)
    name = found[1] if found else ""
    if name not in SUITES["run"]:
        raise SystemExit(
            f"error: {file!r} is no DATE-bench_NAME.json of {', '.join(SUITES['run'])}"
        )
    return suite_of("run", name)


def main(argv: Sequence[str] | None = None) -> int:
    """Do what a command line says; return the exit status."""
    lists = [
        f"{verb}:\n" + "\n".join(f"  {name:<10} {what}" for name, (_, what) in suites.items())
        for verb, suites in SUITES.items()
    ]
    parser = ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        epilog="\n".join(lists),
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("verb", choices=(*SUITES, "plot"))
    parser.add_argument("name", help="what to run or judge (see below), or the file to plot")
    parser.add_argument("options", nargs=REMAINDER, help="those of the benchmark; try --help")
    args = parser.parse_args(argv)
    if args.verb == "plot":
        return run(plotted(args.name), ["--plot", args.name, *args.options])
    known = SUITES[args.verb]
    if ALIASES.get(args.name, args.name) not in known:
        parser.error(f"{args.verb} {args.name}: choose from {', '.join(known)}")
    return run(suite_of(args.verb, args.name), args.options)


if __name__ == "__main__":
    sys.exit(main())
