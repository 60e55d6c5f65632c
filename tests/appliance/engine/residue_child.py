"""A process that serves a random model and is searched by test_engine_buffers.py; it obeys one word a line."""

from __future__ import annotations

import json
import sys

import torch

from appliance._seal import MINT
from appliance.engine.config import ModelConfig
from appliance.engine.engine import Engine
from appliance.engine.model import Decoder
from appliance.protocol import Submit
from appliance.resident import ResidentModel
from appliance.slot_cpu import CpuSlot

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 1,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


def decoder_with_random_weights() -> tuple[Decoder, CpuSlot]:
    """Build the model; the test builds the same one to know what to look for."""
    slot = CpuSlot()
    decoder = Decoder(ModelConfig.from_json(json.dumps(CONFIG).encode()), empty=slot.empty, dtype=torch.float32)
    generator = torch.Generator().manual_seed(11)
    for view in decoder.destinations().values():
        view.normal_(0, 0.05, generator=generator)
    return decoder, slot


def serve(engine: Engine) -> None:
    """Run products of many widths."""
    for rows in (1, 2, 3, 5, 9, 16, 33, 40, 48, 77, 100, 200, 300, 400, 512):
        engine.submit(Submit("a", [7 * at % 2048 for at in range(rows)], 2, 0.0, 1.0, 0, 0, []))
        while not engine.idle:
            engine.step()
    for name in range(9):
        engine.submit(Submit(str(name), [name, 5], 3, 1.0, 1.0, 0, 0, []))
    while not engine.idle:
        engine.step()


def main() -> None:
    """Obey."""
    torch.set_num_threads(int(sys.argv[1]))
    decoder, slot = decoder_with_random_weights()
    resident = ResidentModel(
        MINT,
        model=decoder,
        slot=slot,
        weight_bytes=slot.held_bytes,
        segments=1,
        seconds=0.0,
        ring_bytes=0,
        peak_plaintext_bytes=0,
    )
    engine = Engine(resident, kv_cache_bytes=8 << 20, max_context=1024, max_concurrent=16)
    for line in sys.stdin:
        match line.strip():
            case "serve":
                serve(engine)
            case "zeroize":
                slot.zeroize()
            case "wipe caches":
                engine.wipe_caches()
        print("done", flush=True)


if __name__ == "__main__":
    main()
