"""Compile a small LLaMA with 4-bit weights and let it generate tokens.

The weights are random, so the tokens mean nothing.  `load_config` and `load_weights` read a model
of Hugging Face.

python quantised_llama.py
"""

import relax_fusion
from relax_fusion.models import ExportedModel, Generator, LlamaConfig, export, random_weights

CONFIG = LlamaConfig(
    vocab_size=512,
    hidden_size=256,
    intermediate_size=704,
    num_layers=1,
    num_heads=8,
    num_kv_heads=4,
    head_dim=32,
    max_position=64,
)
PROMPT = [1, 17, 400, 33]


def weight_bytes(exported: ExportedModel) -> int:
    """Return what the weights of a model occupy."""
    return sum(weight.nbytes for weight in random_weights(exported))


exported = export(CONFIG, quantization="q4f16_1")
bounds = {"seq_len": 16, "total_len": 64}  # tokens of a call, and of the sequence after it
executable = relax_fusion.build(exported.mod, "llvm", variable_bounds=bounds)
generator = Generator(executable, exported, random_weights(exported, seed=1))

tokens = generator.generate(PROMPT, max_new_tokens=8)[0].tolist()
print("tokens:", *tokens)

# All tokens but the last, read at once instead of one by one, lead to the last.
generator.reset()
again = int(generator.prefill([*PROMPT, *tokens[:-1]]).argmax())
print(f"the last of them, from all others at once: {again}")

packed, half = weight_bytes(exported), weight_bytes(export(CONFIG, dtype="float16"))
print(f"weights: {packed / 1e6:.2f} MB, in float16 {half / 1e6:.2f} MB: {packed / half:.0%}")
