"""Writes the report of ``benchmarks.sealed_load`` for people."""

from __future__ import annotations

from typing import Any

LABELS = {
    "sealed": "sealed bundle, opened and copied",
    "safetensors": "safetensors `load_file` and copy",
    "read": "plain `preadv` of the same bytes, 1 thread",
    "aes": "AES-256-GCM alone, ciphertext in memory",
}


def as_markdown(report: dict[str, Any]) -> str:
    """Write the report for people."""
    machine, settings = report["machine"], report["settings"]
    lines = [
        f"# Sealed load, {report['date']}",
        "",
        f"{machine['cpu']}, {machine['cores']} virtual cores, {machine['memory_gib']} GiB, Linux {machine['kernel']}, "
        f"AVX-512 AES: {'yes' if machine['avx512_aes'] else 'no'}; "
        f"Python {machine['python']}, torch {machine['torch']}, "
        f"cryptography {machine['cryptography']}, safetensors {machine['safetensors']}. "
        f"Load average at the end {machine['load_average']}: {machine['load_average_means']}",
        "",
        f"Ring {settings['ring_mib']} MiB, {settings['readers']} readers, {settings['openers']} openers, CPU slot, "
        f"{settings['rounds']} interleaved rounds, medians. A share is the other method's time divided by the sealed "
        "load's time in the same round: 1 is equally fast, below 1 the sealed load is slower.",
        "",
        "Written by `python -m benchmarks.sealed_load`.",
    ]
    for name, model in report["models"].items():
        lines += ["", f"## {name}, {model['bytes'] / 1e6:.0f} MB", ""]
        for state in ("warm", "cold"):
            if state in model:
                lines += _table(state, model[state])
        if beyond := model.get("host_bytes_beyond_destinations"):
            lines += [
                "Host memory beyond the destinations at the peak (own pages; with mapped files): "
                + ", ".join(
                    f"{method} {size['own'] / 1e6:.1f} MB; {size['with_mapped_files'] / 1e6:.1f} MB"
                    for method, size in beyond.items()
                )
                + f". Most plaintext in the ring at once: {model['warm']['peak_plaintext_bytes']} bytes.",
            ]
    return "\n".join(lines) + "\n"


def _table(state: str, result: dict[str, Any]) -> list[str]:
    heading = "Warm: files in the page cache" if state == "warm" else "Cold: files evicted before every run"
    if result["direct_files"]:
        heading += f"; the loader read {result['direct_files']} files past the cache"
    lines = [
        heading + ".",
        "",
        "| method | GB/s | GB per CPU-second | sealed as share of it (rounds) |",
        "|---|---|---|---|",
    ]
    for name, label in LABELS.items():
        share = result["sealed_speed_as_share_of"].get(name)
        shown = f"{share['median']:.2f} ({min(share['rounds']):.2f} to {max(share['rounds']):.2f})" if share else ""
        lines.append(f"| {label} | {result['gb_per_s'][name]:.2f} | {result['gb_per_cpu_s'][name]:.2f} | {shown} |")
    return [*lines, ""]
