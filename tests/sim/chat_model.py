"""A chat model without weights: a byte-level tokenizer of a few hundred tokens, control tokens and a template."""

from __future__ import annotations

import json
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from appliance.protocol import ModelReady

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MAX_CONTEXT = 256
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('no such role') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content | trim }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@cache
def tokenizer() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=CONTROL,
        show_progress=False,
    )
    made.train_from_iterator(["hello world the quick brown fox user assistant system"] * 4, trainer)
    made.add_tokens([AddedToken("<think>", special=False)])
    return made


def ids(text: str) -> list[int]:
    found: list[int] = tokenizer().encode(text, add_special_tokens=False).ids
    return found


def end_id() -> int:
    found: int = tokenizer().token_to_id("<|im_end|>")
    return found


def ready(*, max_context: int = MAX_CONTEXT, template: str = TEMPLATE) -> ModelReady:
    config = {"bos_token": "<|endoftext|>", "eos_token": {"content": "<|im_end|>"}}
    return ModelReady(
        max_context=max_context,
        vocabulary=tokenizer().get_vocab_size(),
        eos_ids=[end_id()],
        tokenizer=tokenizer().to_str().encode(),
        tokenizer_config=json.dumps(config).encode(),
        chat_template=template.encode(),
    )
