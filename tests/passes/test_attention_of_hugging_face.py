"""FuseAttentionChain on models of transformers, as PyTorch's exporter hands them over.

The graphs are those of `torch.export` and Relax's importer: eager attention, PyTorch's own
decomposition of `scaled_dot_product_attention`, and that operator kept whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
import transformers
import tvm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention
from tvm import relax
from tvm.relax.frontend.torch import from_exported_program

from relax_fusion import Attention, DynamicDim, Report

from ..support import models
from ..support.accuracy import assert_accurate
from ..support.attention_chains import fused, thirds, turns
from ..support.quick import machine, quick_host, quickly
from ..support.slow import quick_if

BATCH, LENGTH = 2, 6
NOT_LEFT = {"nn.softmax", "nn.attention", "repeat", "tile", "cumsum", "less_equal", "index_tensor"}
BASE = Attention(
    batch=BATCH,
    q_len=LENGTH,
    kv_len=LENGTH,
    q_heads=2,
    kv_heads=2,
    head_dim=16,
    v_dim=16,
    scale=0.25,
    causal="none",
    bias_dims=None,
    dtype="float32",
    out_dtype="float32",
)
CAUSAL = replace(BASE, causal="top_left")
GROUPED = replace(CAUSAL, q_heads=4, q_layout="bnsh", kv_layout="bnsh")
PADDED = {"mask_dims": (True, False, False, True)}
POSITIONS = {"scale": 1.0, "bias_dims": (False, True, True, True)}
DECODER = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
ENCODER = {k: v for k, v in DECODER.items() if "key_value" not in k and k != "head_dim"}
ENCODER["num_attention_heads"] = 2


class Hidden(torch.nn.Module):
    """A model as a function of token ids and, where it takes one, of a mask of padding."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        cache = {} if isinstance(self.model, transformers.BertModel) else {"use_cache": False}
        return self.model(ids, attention_mask=mask, **cache).last_hidden_state


class Translator(Hidden):
    """An encoder and a decoder, of ids, a mask of padding and the ids of the other language."""

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        inputs = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": other}
        return self.model(**inputs, use_cache=False).last_hidden_state


class Pixels(Hidden):
    """A model of images."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.model(image).last_hidden_state


def ids(length: int = LENGTH) -> torch.Tensor:
    return torch.arange(BATCH * length).reshape(BATCH, length) % 64


def padding() -> torch.Tensor:
    return torch.tensor([[1] * LENGTH, [1] * (LENGTH - 2) + [0] * 2])


def gpt2(kind: str) -> transformers.PreTrainedModel:
    small = {"vocab_size": 64, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 32}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(**small, **ends, attn_implementation=kind)
    return transformers.GPT2Model(config)


def decoder(kind: str, family: str = "Llama", **more) -> transformers.PreTrainedModel:
    config = getattr(transformers, f"{family}Config")(**DECODER | more, attn_implementation=kind)
    return getattr(transformers, f"{family}Model")(config)


def bert(kind: str) -> transformers.PreTrainedModel:
    return transformers.BertModel(transformers.BertConfig(**ENCODER, attn_implementation=kind))


def vit(kind: str) -> transformers.PreTrainedModel:
    small = {k: v for k, v in ENCODER.items() if k.endswith("size") or k.startswith("num")}
    image = {"image_size": 8, "patch_size": 4, "attn_implementation": kind}
    return transformers.ViTModel(transformers.ViTConfig(**small | image))


def t5(kind: str) -> transformers.PreTrainedModel:
    small = {"d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    config = transformers.T5Config(
        **small, vocab_size=64, relative_attention_num_buckets=8, attn_implementation=kind
    )
    return transformers.T5Model(config)


def alibi(family: str) -> transformers.PreTrainedModel:
    small = {
        "Bloom": {"hidden_size": 32, "n_layer": 1, "n_head": 2},
        "Mpt": {"d_model": 32, "n_layers": 1, "n_heads": 2, "max_seq_len": 32},
    }[family]
    config = getattr(transformers, f"{family}Config")(vocab_size=64, **small)
    return getattr(transformers, f"{family}Model")(config)


def imported(module: torch.nn.Module, args: Sequence[torch.Tensor], **options) -> tvm.IRModule:
    """Export and import a module, decomposed as by default."""
    whole = {"run_ep_decomposition": not options.pop("whole", False)}
    exported = torch.export.export(module.eval(), tuple(args), strict=False, **options)
    return from_exported_program(exported, **whole)


def assert_recognised(mod: tvm.IRModule, works: Sequence[Attention]) -> None:
    """Check the workloads of all attentions, and that nothing of them is left."""
    out, decisions = fused(mod)
    found = [replace(d.workload, scale=round(d.workload.scale, 6)) for d in decisions]
    assert found == list(works)
    bindings = [b.value for block in out["main"].body.blocks for b in block.bindings]
    ops = [v.op.name.removeprefix("relax.") for v in bindings if isinstance(v, relax.Call)]
    assert ops.count("call_tir") == len(works)
    assert NOT_LEFT.isdisjoint(ops)
    products = [v for v in bindings if isinstance(v, relax.Call) and v.op.name == "relax.matmul"]
    assert all(len(p.args[0].ty.shape.values) < 4 for p in products)


CASES: dict[str, tuple[Callable[[], torch.nn.Module], list[torch.Tensor], list[Attention]]] = {
    "gpt2_eager": (lambda: Hidden(gpt2("eager")), [ids()], [replace(CAUSAL, **thirds(2))]),
    "gpt2_eager_padded": (
        lambda: Hidden(gpt2("eager")),
        [ids(), padding()],
        [replace(CAUSAL, **PADDED, **thirds(2))],
    ),
    "llama_eager": (lambda: Hidden(decoder("eager")), [ids()], [GROUPED]),
    "llama_sdpa": (lambda: Hidden(decoder("sdpa")), [ids()], [GROUPED]),
    "llama_sdpa_padded": (
        lambda: Hidden(decoder("sdpa")),
        [ids(), padding()],
        [replace(GROUPED, **PADDED)],
    ),
    "mistral_sdpa": (
        lambda: Hidden(decoder("sdpa", "Mistral", sliding_window=4)),
        [ids()],
        [replace(GROUPED, window=4)],
    ),
    "gemma2_eager": (
        lambda: Hidden(decoder("eager", "Gemma2", sliding_window=4, num_hidden_layers=2)),
        [ids()],
        [
            replace(GROUPED, scale=0.0625, softcap=50.0, window=4),
            replace(GROUPED, scale=0.0625, softcap=50.0),
        ],
    ),
    "bert_eager": (lambda: Hidden(bert("eager")), [ids(), padding()], [replace(BASE, **PADDED)]),
    "bert_sdpa": (lambda: Hidden(bert("sdpa")), [ids(), padding()], [replace(BASE, **PADDED)]),
    "vit_eager": (
        lambda: Pixels(vit("eager")),
        [torch.ones(BATCH, 3, 8, 8)],
        [replace(BASE, q_len=5, kv_len=5)],
    ),
    "vit_sdpa": (
        lambda: Pixels(vit("sdpa")),
        [torch.ones(BATCH, 3, 8, 8)],
        [replace(BASE, q_len=5, kv_len=5)],
    ),
    **{
        f"t5_{kind}": (
            lambda kind=kind: Translator(t5(kind)),
            [ids(), padding(), ids(5)],
            [
                replace(BASE, **PADDED, **POSITIONS),
                replace(CAUSAL, q_len=5, kv_len=5, **POSITIONS),
                replace(BASE, q_len=5, scale=1.0, **PADDED),
            ],
        )
        for kind in ("eager", "sdpa")
    },
    "bloom": (
        lambda: Hidden(alibi("Bloom")),
        [ids()],
        [replace(CAUSAL, alibi="float32", **turns(2))],
    ),
    "mpt": (
        lambda: Hidden(alibi("Mpt")),
        [ids()],
        [replace(CAUSAL, bias_dims=(False, True, False, True), **thirds(2))],
    ),
}


COMPILED = ("llama_sdpa_padded", "bloom")
QUICK = ("gpt2_eager", "gemma2_eager", "vit_eager", "t5_sdpa")  # LLaMA is exported below, too


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", quick_if(QUICK.__contains__, CASES))
def test_models(name: str) -> None:
    make, args, works = CASES[name]
    module = make().eval()
    models.randomize(module.model)
    mod = imported(module, args)
    assert_recognised(mod, works)
    if name in COMPILED:
        assert_same_numbers(mod, module, args)


def assert_same_numbers(mod: tvm.IRModule, module: Hidden, args: Sequence[torch.Tensor]) -> None:
    """Compile a whole model, masks included, and compare it with PyTorch."""
    report = Report()
    pipeline = relax.get_pipeline("relax_fusion", target=quick_host(), report=report)
    built = quickly(mod, pipeline)
    assert [d.fused for d in report.decisions if d.pattern == "FuseAttentionChain"] == [True]
    inputs = (tvm.runtime.tensor(a.numpy()) for a in args)
    got = machine(built)["main"](*inputs)[0].numpy()
    with torch.no_grad():
        both = models.to_float64(module.model), models.nudge(module.model, "float32")
        exact, moved = (Hidden(made)(*args).numpy() for made in both)
    assert_accurate(got, exact, moved, "float32", models.longest_sum(module.model.config))


class GPTOSSLayer(torch.nn.Module):
    """The attention of gpt-oss, whose sinks are one more score for each head."""

    def __init__(self) -> None:
        super().__init__()
        small = DECODER | {"num_local_experts": 2, "sliding_window": 4}
        rope = {"rope_type": "default", "rope_theta": 1e4}
        config = transformers.GptOssConfig(
            **small, rope_parameters=rope, attn_implementation="eager"
        )
        self.attention = GptOssAttention(config, layer_idx=0)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        lowest = torch.finfo(x.dtype).min
        hidden = torch.full((LENGTH, LENGTH), lowest)
        mask = torch.triu(hidden, 1) + torch.tril(hidden, -4)
        return self.attention(x, (cos, sin), mask[None, None])[0]


class Operator(torch.nn.Module):
    """PyTorch's operator between the transposes of a layer."""

    def __init__(self, *, is_causal: bool) -> None:
        super().__init__()
        self.is_causal = is_causal

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        call = torch.nn.functional.scaled_dot_product_attention
        return call(q, k, v, bias, is_causal=self.is_causal).transpose(1, 2)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_sinks_of_gpt_oss() -> None:
    x, angles = torch.ones(BATCH, LENGTH, 32), torch.ones(BATCH, LENGTH, 8)
    mod = imported(GPTOSSLayer(), (x, angles, angles))
    assert_recognised(mod, [replace(GROUPED, window=4, sinks="float32")])


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("bias", [(), (1, 2, 6, 6), (BATCH, 1, 6, 6)], ids=str)
@pytest.mark.parametrize("whole", [True, False])
def test_operator(bias: tuple[int, ...], whole: bool) -> None:
    x = torch.ones(BATCH, LENGTH, 2, 16)
    args = [x, x, x, *([torch.ones(bias)] if bias else [])]
    work = CAUSAL if not bias else replace(BASE, bias_dims=tuple(d > 1 for d in bias))
    assert_recognised(imported(Operator(is_causal=not bias), args, whole=whole), [work])


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_dynamic_batch_and_length() -> None:
    dims = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length")}
    mod = imported(Hidden(decoder("sdpa")), [ids()], dynamic_shapes=(dims,))
    _, (decision,) = fused(mod)
    work = decision.workload
    assert isinstance(work.batch, DynamicDim) and isinstance(work.q_len, DynamicDim)
    assert work.batch != work.q_len
    changes = {"batch": work.batch, "q_len": work.q_len, "kv_len": work.q_len}
    assert replace(work, scale=0.25) == replace(GROUPED, **changes)
