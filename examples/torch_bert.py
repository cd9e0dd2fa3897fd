"""A BERT of transformers through ``torch.compile(backend="relax_fusion")``, on the CPU.

The model has random weights, so that nothing is downloaded.

pip install -c constraints.txt '.[torch]' transformers
python torch_bert.py
"""

import logging

try:
    import torch
    from transformers import BertConfig, BertModel
except ImportError as err:
    raise SystemExit(f"this example needs PyTorch and transformers ({err})") from err

logging.basicConfig(format="%(message)s")
logging.getLogger("relax_fusion.torch").setLevel(logging.INFO)

torch.manual_seed(0)
sizes = {"hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 512}
model = BertModel(BertConfig(**sizes, num_hidden_layers=2)).eval()
fast = torch.compile(model, backend="relax_fusion")

with torch.inference_mode():
    for length in (16, 40, 33):  # the second length makes the size symbolic, the third fits it
        ids = torch.randint(0, 1000, (2, length))
        error = (fast(ids)[0] - model(ids)[0]).abs().max()
        print(f"length {length}: largest difference from PyTorch {error:.1e}")
