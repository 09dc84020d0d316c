"""The model that Reknit's workers train, in PyTorch: the same shapes, the same first weights, the same tokens.

Pre-norm decoder with RMSNorm, rotary positions, grouped-query attention, SwiGLU and an untied head; no biases.
Matrices that read the same input are one (query, key and value; gate and up), as whoever wants speed writes them.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

EPSILON = 1e-5
ROTARY_BASE = 10000.0
DEVIATION = 0.02


@dataclass(frozen=True)
class Shape:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    ffn_block: int
    vocab: int
    vocab_block: int
    seq_len: int
    # Samples of a step, over all replicas.
    batch: int

    @property
    def head_dim(self):
        return self.hidden // self.heads

    @property
    def tokens(self):
        return self.batch * self.seq_len


# As `reknit bench train --shape` and `reknit bench recovery --params 10m` have them.
SHAPES = {
    "small": Shape(4, 256, 8, 8, 704, 32, 256, 16, 128, 8),
    "big": Shape(6, 512, 8, 8, 1408, 32, 256, 16, 256, 4),
    "10m": Shape(6, 384, 12, 12, 1024, 64, 256, 16, 32, 12),
}


class Block(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.shape = shape
        wide = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        self.attn_norm = nn.Parameter(torch.ones(shape.hidden))
        self.qkv = nn.Linear(shape.hidden, wide, bias=False)
        self.attn_out = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)
        self.ffn_norm = nn.Parameter(torch.ones(shape.hidden))
        self.gate_up = nn.Linear(shape.hidden, 2 * shape.ffn, bias=False)
        self.ffn_out = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, x, cosine, sine):
        shape = self.shape
        batch, length, hidden = x.shape
        normed = F.rms_norm(x, (hidden,), self.attn_norm, EPSILON)
        heads = self.qkv(normed).view(batch, length, shape.heads + 2 * shape.kv_heads, shape.head_dim)
        # Queries and keys turn together.
        turned, value = heads.split([shape.heads + shape.kv_heads, shape.kv_heads], dim=2)
        left, right = turned.chunk(2, dim=-1)
        turned = torch.cat([left * cosine - right * sine, right * cosine + left * sine], dim=-1)
        query, key = turned.split([shape.heads, shape.kv_heads], dim=2)
        mixed = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            is_causal=True,
            enable_gqa=shape.heads != shape.kv_heads,
        )
        x = x + self.attn_out(mixed.transpose(1, 2).reshape(batch, length, -1))
        gate, up = self.gate_up(F.rms_norm(x, (hidden,), self.ffn_norm, EPSILON)).chunk(2, dim=-1)
        return x + self.ffn_out(F.silu(gate) * up)


class Decoder(nn.Module):
    """Called with a row of `seq_len + 1` tokens a sample, it returns the mean cross-entropy of predicting each next one."""

    def __init__(self, shape):
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.Parameter(torch.ones(shape.hidden))
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        half = shape.head_dim // 2
        frequency = ROTARY_BASE ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = torch.outer(torch.arange(shape.seq_len, dtype=torch.float64), frequency)[:, None, :]
        self.register_buffer("cosine", angle.cos().float(), persistent=False)
        self.register_buffer("sine", angle.sin().float(), persistent=False)

    def forward(self, tokens):
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = block(x, self.cosine, self.sine)
        logits = self.head(F.rms_norm(x, (x.shape[-1],), self.norm, EPSILON))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), tokens[:, 1:].reshape(-1))


def parameters_of(shape):
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Decoder(shape).parameters())


def tokens_of(shape, step=0):
    """A step's samples: the tokens of `reknit bench train`, which are the same at every step."""
    count = shape.batch * (shape.seq_len + 1)
    index = torch.arange(count, dtype=torch.int64)
    return (index * index % 251).view(shape.batch, shape.seq_len + 1)


def adamw(model):
    """AdamW with the settings of `reknit bench train`: a constant rate; norms do not decay."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    gains = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), eps=1e-8, fused=True)


GRADIENT_NORM = 1.0


def train_step(model, optimizer, tokens):
    """One step; returns the loss as a tensor."""
    optimizer.zero_grad(set_to_none=True)
    loss = model(tokens)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM, foreach=True)
    optimizer.step()
    return loss.detach()


# The first weights, which in Reknit are a function of the seed and of each value's name (worker/model/src/init.rs).

ATTN_INPUT, ATTN_OUTPUT, FFN_INPUT, FFN_OUTPUT, EMBEDDING, HEAD = range(6)


def mix(bits):
    """The SplitMix64 finaliser, on an array of 64-bit numbers."""
    bits = bits + np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def named(name, parts):
    return mix(name ^ mix(np.asarray(parts, dtype=np.uint64)))


def unit_values(name, units, count):
    """`units x count` numbers that are normal with deviation 1: the sum of twelve uniform numbers of 16 bits each."""
    elements = named(named(name, np.arange(units))[:, None], np.arange(count)[None, :])
    total = np.zeros(elements.shape, dtype=np.uint64)
    for part in range(3):
        bits = named(elements, part)
        for shift in (0, 16, 32, 48):
            total += (bits >> np.uint64(shift)) & np.uint64(0xFFFF)
    return (total.astype(np.float64) - 12.0 * 32767.5) / 65536.0


def first_weights(model, seed):
    """Gives the model the weights that Reknit's workers begin with."""
    shape = model.shape
    hidden, dim = shape.hidden, shape.head_dim
    queries = shape.heads // shape.kv_heads
    residual = DEVIATION / math.sqrt(2.0 * shape.layers)

    def rows(matrix, layer, units, each, deviation):
        with np.errstate(over="ignore"):
            name = named(mix(np.array(seed, dtype=np.uint64)), matrix)
            if layer is not None:
                name = named(name, layer)
            values = deviation * unit_values(name, units, each * hidden)
        return torch.from_numpy(values.astype(np.float32)).view(units, each, hidden)

    def put(parameter, values):
        assert parameter.shape == values.shape, (parameter.shape, values.shape)
        parameter.copy_(values)

    with torch.no_grad():
        for layer, block in enumerate(model.blocks):
            # A unit: the query heads of one key head, that key head, its value head.
            units = rows(ATTN_INPUT, layer, shape.kv_heads, (queries + 2) * dim, DEVIATION)
            query, key, value = units.split([queries * dim, dim, dim], dim=1)
            put(block.qkv.weight, torch.cat([part.reshape(-1, hidden) for part in (query, key, value)]))
            units = rows(ATTN_OUTPUT, layer, shape.kv_heads, queries * dim, residual)
            put(block.attn_out.weight, units.reshape(-1, hidden).T)
            # A unit: a block of gate rows and the block of up rows.
            blocks = shape.ffn // shape.ffn_block
            units = rows(FFN_INPUT, layer, blocks, 2 * shape.ffn_block, DEVIATION)
            put(block.gate_up.weight, torch.cat([part.reshape(-1, hidden) for part in units.chunk(2, dim=1)]))
            units = rows(FFN_OUTPUT, layer, blocks, shape.ffn_block, residual)
            put(block.ffn_out.weight, units.reshape(-1, hidden).T)
        blocks = shape.vocab // shape.vocab_block
        put(model.embedding.weight, rows(EMBEDDING, None, blocks, shape.vocab_block, DEVIATION).reshape(-1, hidden))
        put(model.head.weight, rows(HEAD, None, blocks, shape.vocab_block, DEVIATION).reshape(-1, hidden))


def build(shape, seed=1):
    model = Decoder(shape)
    first_weights(model, seed)
    return model
