"""Tokens from a LLaMA of transformers with a static cache, compiled by relax_fusion.

The prompt and the token are a graph each; the cache is written in place.

pip install -c constraints.txt '.[torch]' transformers
python torch_generate.py
"""

import logging

try:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
except ImportError as err:
    raise SystemExit(f"this example needs PyTorch and transformers ({err})") from err

logging.basicConfig(format="%(message)s")
logging.getLogger("relax_fusion.torch").setLevel(logging.INFO)

torch.manual_seed(0)
heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
sizes = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 500}
model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, num_hidden_layers=2)).eval()
prompt = torch.randint(3, 500, (1, 6))
# `disable_compile`: generate would compile with its own choice of a backend
choices = {"max_new_tokens": 12, "do_sample": False, "disable_compile": True}

with torch.inference_mode():
    expected = model.generate(prompt, cache_implementation="static", **choices)
    model.forward = torch.compile(model.forward, backend="relax_fusion")
    found = model.generate(prompt, cache_implementation="static", **choices)
print(found[0, 6:].tolist())
print("the same tokens as PyTorch:", torch.equal(found, expected))
