"""Models and drivers for the tests of the engine."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open

from appliance._seal import MINT
from appliance.engine.config import ModelConfig
from appliance.engine.engine import Engine
from appliance.engine.model import Decoder
from appliance.protocol import Rejected, Submit
from appliance.resident import ResidentModel
from appliance.slot_cpu import CpuSlot

torch.set_num_threads(1)

MODEL_DIR = Path(__file__).resolve().parents[3] / "build" / "models" / "SmolLM2-135M-Instruct"

# A tiny Llama: grouped heads whose size is not hidden / heads, an odd vocabulary, a tied head.
TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 131,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "initializer_range": 0.3,
}


def resident_of(decoder: Decoder, slot: CpuSlot) -> ResidentModel:
    """Mint the proof, as the loader does after it filled every tensor."""
    return ResidentModel(
        MINT,
        model=decoder,
        slot=slot,
        weight_bytes=slot.held_bytes,
        segments=1,
        seconds=0.0,
        ring_bytes=0,
        peak_plaintext_bytes=0,
    )


def fill(decoder: Decoder, tensors: Callable[[str], torch.Tensor], names: Iterable[str]) -> None:
    """Fill a decoder from a checkpoint, which must have exactly the tensors that it wants or skips."""
    destinations = decoder.destinations()
    left = set(names)
    for name, destination in destinations.items():
        destination.copy_(tensors(name))
        left.discard(name)
    assert all(decoder.skips(name) for name in left), left


class Oracle:
    """A model of transformers with random weights, and ours with the same."""

    def __init__(self, members: dict[str, Any], dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(20261130)
        config = transformers.AutoConfig.for_model(**copy.deepcopy(members))
        kind = getattr(transformers, members["architectures"][0])
        self.reference = kind._from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
        with torch.no_grad():
            for parameter in self.reference.parameters():
                if parameter.ndim == 1:  # norms and biases start as ones and zeros, which would hide mistakes
                    parameter.add_(torch.randn_like(parameter) * 0.2)
        self.reference.to(dtype)
        self.slot = CpuSlot()
        self.decoder = Decoder(ModelConfig.from_json(json.dumps(members).encode()), empty=self.slot.empty, dtype=dtype)
        state = self.reference.state_dict()
        fill(self.decoder, state.__getitem__, state)

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """Give the reference's logits, ``[tokens, vocabulary] float32``."""
        with torch.inference_mode():
            logits: torch.Tensor = self.reference(torch.tensor([tokens])).logits[0].float()
            return logits

    def engine(self, **settings: Any) -> Engine:
        """Give an engine over the decoder."""
        return Engine(
            resident_of(self.decoder, self.slot),
            **({"kv_cache_bytes": 1 << 20, "max_context": 256, "max_concurrent": 8} | settings),
        )


def ask(request: str, prompt: list[int], max_tokens: int, **settings: Any) -> Submit:
    """Give a request; greedy and without stop ids unless told."""
    fixed: dict[str, Any] = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "seed": 0, "stop_ids": []}
    return Submit(request=request, prompt=prompt, max_tokens=max_tokens, **(fixed | settings))


def answers(engine: Engine, submits: Iterable[Submit]) -> dict[str, tuple[list[int], str]]:
    """Run requests together to their ends: tokens and finish, or code, per request."""
    found: dict[str, tuple[list[int], str]] = {}
    for submit in submits:
        engine.submit(submit)
        found[submit.request] = ([], "")
    while not engine.idle:
        for message in engine.step():
            tokens, finish = found[message.request]
            assert finish == "", "a message after the last one"
            if isinstance(message, Rejected):
                found[message.request] = (tokens, message.code)
            else:
                found[message.request] = (tokens + message.tokens, message.finish)
    return found


class Tools:
    """The functions above for tests, which cannot import a conftest."""

    TINY = TINY
    Oracle = Oracle
    ask = staticmethod(ask)
    answers = staticmethod(answers)
    fill = staticmethod(fill)
    resident_of = staticmethod(resident_of)


@pytest.fixture(scope="session")
def tools() -> type[Tools]:
    return Tools


@pytest.fixture(scope="session")
def tiny() -> Oracle:
    """Give the tiny Llama; tests do not change its weights."""
    return Oracle(TINY)


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """Give the directory of the real model."""
    if not (MODEL_DIR / "model.safetensors").is_file():
        pytest.fail("the real model is missing; run `make model` (or python demo/fetch_model.py) first")
    return MODEL_DIR


@pytest.fixture(scope="session")
def real_decoder(model_dir: Path) -> tuple[Decoder, CpuSlot]:
    """Give the real model in float32."""
    slot = CpuSlot()
    decoder = Decoder(
        ModelConfig.from_json((model_dir / "config.json").read_bytes()), empty=slot.empty, dtype=torch.float32
    )
    with safe_open(model_dir / "model.safetensors", "pt") as file:
        fill(decoder, file.get_tensor, file.keys())
    return decoder, slot
