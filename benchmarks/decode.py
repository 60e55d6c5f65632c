"""Measure the engine beside transformers: prefill and decode, in one process, in turns.

    python benchmarks/decode.py [--rounds N] [--threads N] [--tokens N] [--out DIR]

Both hold the demonstration model in float32 and get the same prompts. Every round runs each case once with each of the
two, so that a busy moment of the machine hits both; medians over the rounds are compared. A case's decode time is what
``--tokens`` more tokens cost: the time for 1 + N tokens less the time for 1. Results: ``decode-DATE.json`` and ``.md``.

It also measures where ``w @ x.T`` beats ``x @ w.T`` for few rows, which decides a constant in
appliance/engine/layers.py.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from safetensors import safe_open
from torch.nn import functional

from appliance._seal import MINT
from appliance.engine.config import ModelConfig
from appliance.engine.engine import Engine
from appliance.engine.model import Decoder
from appliance.protocol import Submit, Tokens
from appliance.resident import ResidentModel
from appliance.slot_cpu import CpuSlot

ROOT: Final = Path(__file__).resolve().parent.parent
MODEL: Final = ROOT / "build" / "models" / "SmolLM2-135M-Instruct"
CONTEXT: Final = 64
PREFILL: Final = 512


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison: a batch of equal prompts."""

    name: str
    unit: str
    batch: int
    prompt: int
    decode: bool


CASES: Final = (
    Case("prefill, 512 tokens", "ms", 1, PREFILL, decode=False),
    Case("first token, 40-token prompt", "ms", 1, 40, decode=False),
    Case("decode, batch 1", "ms per step", 1, CONTEXT, decode=True),
    Case("decode, batch 4", "ms per step", 4, CONTEXT, decode=True),
    Case("decode, batch 16", "ms per step", 16, CONTEXT, decode=True),
    Case("decode, batch 4, context 1024", "ms per step", 4, 1024, decode=True),
)

# Gives the tokens of each request; arguments are the prompts and how many tokens to make.
Generate = Callable[[list[list[int]], int], list[list[int]]]


def prompts_of(case: Case, vocabulary: int) -> list[list[int]]:
    """Give prompts of fixed pseudo-random tokens."""
    return [[(at * 7919 + row * 104729 + 3) % vocabulary for at in range(case.prompt)] for row in range(case.batch)]


def own_engine() -> tuple[Generate, int]:
    """Load the model into the engine."""
    slot = CpuSlot()
    decoder = Decoder(
        ModelConfig.from_json((MODEL / "config.json").read_bytes()), empty=slot.empty, dtype=torch.float32
    )
    with safe_open(MODEL / "model.safetensors", "pt") as file:
        for name, destination in decoder.destinations().items():
            destination.copy_(file.get_tensor(name))
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
    engine = Engine(resident, kv_cache_bytes=512 << 20, max_context=2048, max_concurrent=16)

    def generate(prompts: list[list[int]], count: int) -> list[list[int]]:
        answers: dict[str, list[int]] = {str(row): [] for row in range(len(prompts))}
        for row, prompt in enumerate(prompts):
            engine.submit(Submit(str(row), prompt, count, 0.0, 1.0, 0, 0, []))
        while not engine.idle:
            for message in engine.step():
                answers[message.request] += message.tokens if isinstance(message, Tokens) else []
        return list(answers.values())

    return generate, decoder.config.vocabulary


def reference_engine() -> Generate:
    """Load the model into transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()

    def generate(prompts: list[list[int]], count: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        whole = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=count,
            max_new_tokens=count,
            pad_token_id=0,
        )
        return [row[ids.shape[1] :] for row in whole.tolist()]

    return generate


def timed(generate: Generate, case: Case, prompts: list[list[int]], tokens: int) -> tuple[float, float]:
    """Give wall and CPU milliseconds of a case: of its first token, or of one decode step."""
    marks = [(time.perf_counter(), time.process_time())]
    generate(prompts, 1)
    marks.append((time.perf_counter(), time.process_time()))
    if not case.decode:
        return (marks[1][0] - marks[0][0]) * 1e3, (marks[1][1] - marks[0][1]) * 1e3
    generate(prompts, 1 + tokens)
    marks.append((time.perf_counter(), time.process_time()))
    wall, cpu = ((c - b) - (b - a) for a, b, c in zip(*marks, strict=True))
    return wall * 1e3 / tokens, cpu * 1e3 / tokens


def compare(rounds: int, tokens: int) -> tuple[list[dict[str, Any]], int]:
    """Run all cases in turns; gives a row per case, and how many of the cases answered differently."""
    own, vocabulary = own_engine()
    engines = {"lethe": own, "transformers": reference_engine()}
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    differing = 0
    for case in CASES:
        prompts = prompts_of(case, vocabulary)
        first = [generate(prompts, 4) for generate in engines.values()]  # warms up as well
        differing += first[0] != first[1]
    for number in range(rounds):
        for case in CASES:
            prompts = prompts_of(case, vocabulary)
            # Who goes first changes from round to round.
            for name in sorted(engines, reverse=bool(number % 2)):
                found.setdefault((case.name, name), []).append(timed(engines[name], case, prompts, tokens))
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
    rows = []
    for case in CASES:
        row: dict[str, Any] = {"case": case.name, "unit": case.unit}
        for name in engines:
            wall, cpu = zip(*found[case.name, name], strict=True)
            row[name] = {"wall": statistics.median(wall), "cpu": statistics.median(cpu), "all_wall": list(wall)}
        row["ratio_wall"] = row["transformers"]["wall"] / row["lethe"]["wall"]
        row["ratio_cpu"] = row["transformers"]["cpu"] / row["lethe"]["cpu"]
        rows.append(row)
    return rows, differing


def crossing() -> list[dict[str, float]]:
    """Measure both orders of a product with few rows, over weights too many for the caches; milliseconds."""
    weights = [torch.randn(3072, 576) for _ in range(30)]
    rows = []
    with torch.inference_mode():
        for count in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40, 48, 64, 96):
            x = torch.randn(count, 576)
            times = {"rows": float(count)}
            for name, product in (("plain", functional.linear), ("swapped", lambda x, w: torch.mm(w, x.t()))):
                trials = []
                for _ in range(4):
                    start = time.perf_counter()
                    for weight in weights:
                        product(x, weight)
                    trials.append((time.perf_counter() - start) * 1e3)
                times[name] = min(trials[1:])
            rows.append(times)
    return rows


def machine() -> dict[str, Any]:
    """Describe the machine without naming it."""
    cpu = [line.split(":", 1) for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if ":" in line]
    models = [value.strip() for key, value in cpu if key.strip() == "model name"]
    memory = Path("/proc/meminfo").read_text(encoding="utf-8").split()[1]
    return {
        "processor": models[0] if models else platform.machine(),
        "processors": len(models),
        "vector": torch.backends.cpu.get_cpu_capability(),
        "memory_gib": round(int(memory) / (1 << 20)),
        "load_average": [round(value, 2) for value in load_average()],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def load_average() -> tuple[float, ...]:
    """Give the load of the machine over 1, 5 and 15 minutes."""
    return tuple(float(part) for part in Path("/proc/loadavg").read_text(encoding="ascii").split()[:3])


def report(result: dict[str, Any]) -> str:
    """Give the result as Markdown."""
    about = result["machine"]
    lines = [
        f"# Decode and prefill, {result['date']}",
        "",
        f"SmolLM2-135M-Instruct, float32, {result['threads']} thread(s), {result['rounds']} rounds in turns, medians. "
        f"{about['processor']}, {about['processors']} processors, {about['vector']}, {about['memory_gib']} GiB; "
        f"load average {about['load_average'][0]} before and {result['load_after'][0]} after. "
        f"Python {about['python']}, torch {about['torch']}, transformers {about['transformers']}. "
        f"Cases with differing tokens: {result['differing']}.",
        "",
        "| case | unit | lethe wall | transformers wall | ratio | lethe CPU | transformers CPU | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in result["cases"]:
        own, other = row["lethe"], row["transformers"]
        lines.append(
            f"| {row['case']} | {row['unit']} | {own['wall']:.1f} | {other['wall']:.1f} | {row['ratio_wall']:.2f} | "
            f"{own['cpu']:.1f} | {other['cpu']:.1f} | {row['ratio_cpu']:.2f} |"
        )
    lines += [
        "",
        "A ratio above 1 means that this engine is faster. The load average says how busy other programs kept the "
        "machine.",
        "",
        "## Products with few rows",
        "",
        "Thirty weights of 3072 by 576, milliseconds for all, best of three.",
        "",
        "| rows | x @ w.T | w @ x.T |",
        "|---|---|---|",
    ]
    lines += [f"| {row['rows']:.0f} | {row['plain']:.1f} | {row['swapped']:.1f} |" for row in result["crossing"]]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run and write the results."""
    parser = argparse.ArgumentParser(description="measure the engine beside transformers")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", metavar="DIR")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    about = machine()
    cases, differing = compare(options.rounds, options.tokens)
    result = {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "threads": options.threads,
        "rounds": options.rounds,
        "machine": about,
        "cases": cases,
        "differing": differing,
        "crossing": crossing(),
        "load_after": list(load_average()),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    stem = options.out / f"decode-{result['date']}"
    stem.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    stem.with_suffix(".md").write_text(report(result), encoding="utf-8")
    print(report(result))


if __name__ == "__main__":
    main()
