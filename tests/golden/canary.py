"""Train a small model with torch and transformers alone, and print a digest of its weights.

Nothing of bigtrain is imported: another digest means that this machine, or these libraries, compute
something else, whatever bigtrain does.
"""

from __future__ import annotations

import hashlib

import torch
import transformers


def main() -> None:
    checksum = hashlib.sha256()
    for dtype in (torch.float32, torch.bfloat16):
        for name, tensor in train(dtype):
            checksum.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            checksum.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    # Kernels for shapes that are not tried here change between versions.
    libraries = f"torch {torch.__version__.split('+')[0]}, transformers {transformers.__version__}"
    print(f"{libraries}: {checksum.hexdigest()}")


def train(dtype: torch.dtype) -> list[tuple[str, torch.Tensor]]:
    config = transformers.LlamaConfig(
        vocab_size=4096,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=3,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for _ in range(3):
        ids = torch.randint(0, 4096, (2, 64))
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return list(model.state_dict().items())


if __name__ == "__main__":
    main()
