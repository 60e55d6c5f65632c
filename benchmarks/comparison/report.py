"""The report for people: the table of the terminal, and a page of Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_STATES = {
    "warm": "Warm: the files are in the page cache",
    "cold": "Cold: the files were evicted, and looked for in the cache, before each run",
}

_METHOD = [
    "All weights end in tensors that were allocated and touched before the clock started, as device memory would be.",
    "A loader that makes tensors of its own pays one copy into them; one marked *own* does not: its tensors count as",
    "the destination, and it pays for their fresh pages instead. *own MB* is the peak of anonymous and shared memory",
    "beyond the weights, *mapped MB* that of mapped files, which is page cache. The last column is our speed divided",
    "by the loader's in the same round (median, least, most): above 1 we are faster. What each loader brought was",
    "compared, byte by byte and after the clock, with what was written.",
]


def table(results: Mapping[str, Any], *, markdown: bool) -> list[str]:
    """Give one state's results as the lines of a table."""
    heading = ["loader", "GB/s", "best", "GB/CPU-s", "user s", "sys s", "own MB", "mapped MB", "ours is ... times it"]
    rows = [_row(result) for result in results.values() if "gb_s" in result]
    if markdown:
        lines = [heading, ["---"] + ["--:"] * (len(heading) - 1), *rows]
        return ["| " + " | ".join(cells) + " |" for cells in lines]
    widths = [max(len(row[column]) for row in [heading, *rows]) for column in range(len(heading))]
    return [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()
        for cells in [heading, *rows]
    ]


def _row(result: Mapping[str, Any]) -> list[str]:
    share = result["ours_as_share"]
    times = f"{share['median']:.2f} ({share['min']:.2f} to {share['max']:.2f})" if share else ""
    return [
        result["label"] + (", *own*" if result["own"] else ""),
        f"{result['gb_s']['median']:.2f}",
        f"{result['gb_s']['best']:.2f}",
        f"{result['gb_per_cpu_s']:.2f}",
        f"{result['user_s']:.2f}",
        f"{result['sys_s']:.2f}",
        f"{result['memory']['anonymous_bytes'] / 1e6:.0f}",
        f"{result['memory']['mapped_bytes'] / 1e6:.0f}",
        times,
    ]


def missing(report: Mapping[str, Any]) -> dict[str, str]:
    """Give the contenders that did not run, and why."""
    return {
        name: result["unavailable"]
        for state in _STATES
        for name, result in report.get(state, {}).items()
        if "unavailable" in result
    }


def as_markdown(report: Mapping[str, Any], *, plot: str) -> str:
    """Write the page.

    Args:
        report: the whole result.
        plot: file name of the picture beside the page; empty without one.
    """
    lines = [f"# Sealed load, {report['date']}", "", *_setting(report), "", *_METHOD, ""]
    for state, heading in _STATES.items():
        if report.get(state):
            lines += [f"## {heading}", "", *table(report[state], markdown=True), ""]
    lines += _aims(report) + _probes(report["probes"])
    if absent := missing(report):
        lines += ["## Did not run", "", *(f"- {name}: {reason}" for name, reason in absent.items()), ""]
    lines += _versions(report)
    if plot:
        lines += [f"![GB/s of each loader, warm and cold]({plot})", ""]
    lines += ["Written by `make bench`, or `python -m benchmarks.sealed_load`.", ""]
    return "\n".join(lines)


def _setting(report: Mapping[str, Any]) -> list[str]:
    machine, settings, model = report["machine"], report["settings"], report["model"]
    before, after = machine["load_average"]
    avx512 = "yes" if machine["avx512_aes"] else "no"
    return [
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_bytes'] / (1 << 30):.0f} GiB, "
        f"Linux {machine['kernel']}, {machine['file_system']}, AES with AVX-512: {avx512}; "
        f"Python {machine['python']}, torch {machine['torch']}, cryptography {machine['cryptography']}. "
        f"Load average before {before:.1f}, after {after:.1f}"
        + (": other work ran; trust ratios and CPU-seconds, not GB/s." if before > machine["cores"] / 2 else "."),
        "",
        f"{model['bytes'] / 1e9:.2f} GB of random bfloat16 in the shapes of Llama 8B, {model['tensors']} tensors, "
        f"{model['files']} files. {settings['rounds']} interleaved rounds, each run in a fresh process; medians. "
        f"Ours: ring {settings['ring_bytes'] / (1 << 20):.0f} MiB, {settings['readers']} readers, "
        f"{settings['openers']} openers, CPU slot, opened on the host, from opening the bundle's directory to the "
        f"last byte. {settings['openers']} threads for everybody who lets that be said.",
    ]


def _aims(report: Mapping[str, Any]) -> list[str]:
    if not report["aims"]:
        return []
    rows = [
        f"| {aim['aim']} | {aim['wanted']:,} | {aim['measured']:,} | {'yes' if aim['met'] else '**no**'} |"
        for aim in report["aims"]
    ]
    return ["## Aims", "", "| aim | wanted | measured | met |", "|---|--:|--:|---|", *rows, ""]


def _probes(probes: Mapping[str, Any]) -> list[str]:
    reads = [
        f"| {entry['block_bytes'] >> 20} MiB | {entry['threads']} | {entry['gb_s']:.2f} |"
        for entry in probes["raw_read_gb_s"]
    ]
    ciphers = ", ".join(f"{threads}: {rate:.2f}" for threads, rate in probes["aes_gcm_gb_s"].items())
    copies = ", ".join(f"{entry['copy_bytes'] >> 20} MiB: {entry['gb_s']:.2f}" for entry in probes["copy_gb_s"])
    return [
        "## Probes",
        "",
        "Raw read past the cache:",
        "",
        "| read | at once | GB/s |",
        "|--:|--:|--:|",
        *reads,
        "",
        f"AES-256-GCM, memory to memory, GB/s by threads: {ciphers}. One copy to the slot, GB/s by size: {copies}.",
        "",
    ]


def _versions(report: Mapping[str, Any]) -> list[str]:
    found = {
        name: result["version"]
        for state in _STATES
        for name, result in report.get(state, {}).items()
        if result.get("version")
    }
    return ["Versions: " + ", ".join(f"{name} {version}" for name, version in found.items()) + ".", ""] if found else []
