"""A model directory of the Llama family with random weights: small enough to load in a second, real in every format."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def write(
    directory: Path,
    *,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    seed: int = 0,
    canary: str = "",
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """Write config, tokenizer, chat template and weights; the same arguments give the same bytes.

    Args:
        directory: made here.
        hidden: width; the MLP is twice as wide.
        layers, heads, kv_heads: shape of the decoder.
        seed: of the random weights.
        canary: text to hide in ``generation_config.json``, so that it ends up in the sealed catalog.
        dtype: of the weights in the file.
    """
    directory.mkdir(parents=True)
    tokenizer = byte_tokenizer()
    tokenizer.save(str(directory / "tokenizer.json"))
    vocabulary = tokenizer.get_vocab_size()
    texts = {
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": hidden,
            "intermediate_size": 2 * hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": hidden // heads,
            "vocab_size": vocabulary,
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "torch_dtype": str(dtype).removeprefix("torch."),
        },
        "generation_config.json": {"eos_token_id": 2} | ({"canary": canary} if canary else {}),
        "tokenizer_config.json": {
            "chat_template": CHAT_TEMPLATE,
            "bos_token": SPECIAL[1],
            "eos_token": SPECIAL[2],
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    }
    for name, members in texts.items():
        (directory / name).write_text(json.dumps(members))
    save_file(weights(hidden, layers, heads, kv_heads, vocabulary, seed, dtype), directory / "model.safetensors")
    return directory


def weights(
    hidden: int, layers: int, heads: int, kv_heads: int, vocabulary: int, seed: int, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Give random weights under the names of the Llama family."""
    random = torch.Generator().manual_seed(seed)
    kv_width = hidden // heads * kv_heads

    def matrix(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=random) / shape[-1] ** 0.5).to(dtype)

    tensors = {
        "model.embed_tokens.weight": matrix(vocabulary, hidden),
        "model.norm.weight": torch.ones(hidden, dtype=dtype),
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        tensors |= {
            f"{prefix}.self_attn.q_proj.weight": matrix(hidden, hidden),
            f"{prefix}.self_attn.k_proj.weight": matrix(kv_width, hidden),
            f"{prefix}.self_attn.v_proj.weight": matrix(kv_width, hidden),
            f"{prefix}.self_attn.o_proj.weight": matrix(hidden, hidden),
            f"{prefix}.mlp.gate_proj.weight": matrix(2 * hidden, hidden),
            f"{prefix}.mlp.up_proj.weight": matrix(2 * hidden, hidden),
            f"{prefix}.mlp.down_proj.weight": matrix(hidden, 2 * hidden),
            f"{prefix}.input_layernorm.weight": 1 + 0.1 * matrix(hidden, 1).flatten(),
            f"{prefix}.post_attention_layernorm.weight": 1 + 0.1 * matrix(hidden, 1).flatten(),
        }
    return tensors


def byte_tokenizer() -> Tokenizer:
    """Give a tokenizer with one token per byte and the usual control tokens: every text has an encoding."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer
