"""A synthetic model in the shape of Llama 8B, with as many layers as its size allows; random bytes in bfloat16."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

_SHARD = 2 << 30
_CHUNK = 16 << 20
_ITEM = 2


@dataclass(frozen=True, slots=True)
class Model:
    """What was written.

    Attributes:
        nbytes: of all tensors.
        shapes: of each tensor; all are bfloat16.
        files: safetensors files.
    """

    nbytes: int
    shapes: dict[str, tuple[int, ...]]
    files: int


def shapes(nbytes: int) -> dict[str, tuple[int, ...]]:
    """Give names and shapes of a model of about that many bytes.

    The hidden size is that of Llama 8B, 4096, where one layer and the embeddings fit, and a smaller power of two else;
    the other sizes keep its proportions (MLP 3.5 times as wide, a quarter of the heads for keys and values).
    """
    hidden = 4096
    # 8 times hidden words in the vocabulary, twice; 13 squares of the hidden size to a layer.
    while hidden > 64 and (32 + 26) * hidden**2 > nbytes:
        hidden //= 2
    layers = max(1, round((nbytes - 32 * hidden**2) / (26 * hidden**2)))
    wide, narrow = hidden * 7 // 2, hidden // 4
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (8 * hidden, hidden)}
    for number in range(layers):
        at = f"model.layers.{number}."
        found |= {
            at + "input_layernorm.weight": (hidden,),
            at + "self_attn.q_proj.weight": (hidden, hidden),
            at + "self_attn.k_proj.weight": (narrow, hidden),
            at + "self_attn.v_proj.weight": (narrow, hidden),
            at + "self_attn.o_proj.weight": (hidden, hidden),
            at + "post_attention_layernorm.weight": (hidden,),
            at + "mlp.gate_proj.weight": (wide, hidden),
            at + "mlp.up_proj.weight": (wide, hidden),
            at + "mlp.down_proj.weight": (hidden, wide),
        }
    return found | {"model.norm.weight": (hidden,), "lm_head.weight": (8 * hidden, hidden)}


def size(plan: dict[str, tuple[int, ...]]) -> int:
    """Give the bytes of all tensors."""
    return sum(math.prod(shape) * _ITEM for shape in plan.values())


def write(
    directory: Path,
    plan: dict[str, tuple[int, ...]],
    *,
    progress: Callable[[int, int], None] = lambda *_: None,
    seen: Callable[[str, bytes], object] = lambda *_: None,
) -> Model:
    """Write the model's directory: config, a tokenizer's place holder, shards of at most 2 GiB and their index.

    Args:
        directory: made here.
        plan: names and shapes.
        progress: told (bytes written, bytes in all).
        seen: shown every tensor's name and its bytes, piece by piece, as they are written.

    Raises:
        OSError: the disk is full or fails.
    """
    directory.mkdir(parents=True)
    (directory / "config.json").write_text('{"model_type": "llama", "rms_norm_eps": 1e-5}', encoding="utf-8")
    (directory / "tokenizer.json").write_text("{}", encoding="utf-8")
    shards = list(_shards(plan))
    total = size(plan)
    index: dict[str, str] = {}
    done = 0
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        with (directory / file).open("wb") as stream:
            stream.write(_header({name: plan[name] for name in names}))
            for name in names:
                index[name] = file
                for chunk in _random(math.prod(plan[name]) * _ITEM):
                    seen(name, chunk)
                    stream.write(chunk)
                    done += len(chunk)
                    progress(done, total)
    members = {"metadata": {"total_size": total}, "weight_map": index}
    (directory / "model.safetensors.index.json").write_text(json.dumps(members), encoding="utf-8")
    return Model(total, plan, len(shards))


def _random(nbytes: int) -> Iterator[bytes]:
    for start in range(0, nbytes, _CHUNK):
        yield os.urandom(min(_CHUNK, nbytes - start))


def _shards(plan: dict[str, tuple[int, ...]]) -> Iterator[list[str]]:
    names: list[str] = []
    held = 0
    for name, shape in plan.items():
        nbytes = math.prod(shape) * _ITEM
        if names and held + nbytes > _SHARD:
            yield names
            names, held = [], 0
        names.append(name)
        held += nbytes
    yield names


def _header(part: dict[str, tuple[int, ...]]) -> bytes:
    members = {}
    position = 0
    for name, shape in part.items():
        nbytes = math.prod(shape) * _ITEM
        members[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [position, position + nbytes]}
        position += nbytes
    text = json.dumps(members).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
