"""Reads an exported checkpoint with Python's safetensors and computes the model's loss from it with numpy alone, by the
conventions of Hugging Face's Llama models. Arguments: the exported file, and reference.json of `sample_checkpoint`."""

import json
import sys

import numpy as np
from safetensors import safe_open

exported, reference = sys.argv[1], json.load(open(sys.argv[2]))
with safe_open(exported, framework="np") as file:
    weights = {name: file.get_tensor(name).astype(np.float64) for name in file.keys()}
    assert file.metadata() == {"format": "pt"}, file.metadata()

layers, heads, kv_heads = reference["layers"], reference["heads"], reference["kv_heads"]
expected = 3 + 9 * layers
assert len(weights) == expected, f"{len(weights)} tensors instead of {expected}: {sorted(weights)}"


def linear(x, name):
    return x @ weights[name + ".weight"].T


def norm(x, name):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weights[name + ".weight"]


def rotate(x):
    """[..., positions, dim]: the first half of a head is paired with the second."""
    half = x.shape[-1] // 2
    angles = np.arange(x.shape[-2])[:, None] / 10000.0 ** (np.arange(half) / half)
    cos, sin = np.cos(angles), np.sin(angles)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def split(x, count):
    return x.reshape(*x.shape[:-1], count, -1).swapaxes(-2, -3)


tokens = np.array(reference["tokens"]).reshape(-1, reference["seq_len"] + 1)
inputs, targets = tokens[:, :-1], tokens[:, 1:]
x = weights["model.embed_tokens.weight"][inputs]
mask = np.triu(np.full((reference["seq_len"],) * 2, -np.inf), 1)
for layer in range(layers):
    at = f"model.layers.{layer}"
    h = norm(x, f"{at}.input_layernorm")
    q = rotate(split(linear(h, f"{at}.self_attn.q_proj"), heads))
    k = rotate(split(linear(h, f"{at}.self_attn.k_proj"), kv_heads)).repeat(heads // kv_heads, 1)
    v = split(linear(h, f"{at}.self_attn.v_proj"), kv_heads).repeat(heads // kv_heads, 1)
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]) + mask
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = (scores / scores.sum(-1, keepdims=True)) @ v
    mixed = mixed.swapaxes(-2, -3).reshape(*x.shape[:-1], -1)
    x = x + linear(mixed, f"{at}.self_attn.o_proj")
    h = norm(x, f"{at}.post_attention_layernorm")
    gate = linear(h, f"{at}.mlp.gate_proj")
    x = x + linear(gate / (1 + np.exp(-gate)) * linear(h, f"{at}.mlp.up_proj"), f"{at}.mlp.down_proj")
logits = linear(norm(x, "model.norm"), "lm_head")
logits = logits - logits.max(-1, keepdims=True)
picked = np.take_along_axis(logits, targets[..., None], -1)[..., 0]
loss = (np.log(np.exp(logits).sum(-1)) - picked).mean()
apart = abs(loss - reference["loss"]) / reference["loss"]
print(f"read_export: {len(weights)} tensors; loss {loss:.7f} by numpy, {reference['loss']:.7f} by Reknit")
sys.exit(f"read_export: the losses are {apart:.1e} apart" if apart > 1e-5 else 0)
