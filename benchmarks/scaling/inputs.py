"""Every number that the predictions rest on, with where it comes from and how sure it is.

Rates are bytes per second, times seconds, costs seconds of a core per byte. docs/scaling.md shows this table; a test
holds the page against it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

GB: Final = 1e9
MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Input:
    """One number.

    Attributes:
        value: in base units.
        shown: the same for people.
        what: what it is.
        source: who says so.
        sure: ``given``, ``sheet`` (a vendor's figure), ``measured`` (by others), ``ours`` (measured here), ``assumed``.
    """

    value: float
    shown: str
    what: str
    source: str
    sure: str


_DGX = "[DGX B200 guide](https://docs.nvidia.com/dgx/dgxb200-user-guide/introduction-to-dgxb200.html)"
_INSTANT = "[InstantTensor's benchmarks](https://github.com/scitix/InstantTensor/tree/main/docs)"
_BRIDGE = "[The Serialized Bridge, arXiv 2606.23969](https://arxiv.org/abs/2606.23969)"
_PM1743 = "[as announced](https://pcjow.com/samsung-introduced-the-pcie-gen-5-ssd-with-a-speed-of-13000-mb-s/)"
_V100 = "[1.47 Tbit/s](https://paperexplained.cn/articles/paper/detail/90986910b1dcd3e4787ff167866abc063a8207ff)"
_STAGES = "stage probes of [our results](../benchmarks/results)"
_SETUP = "`python -m benchmarks.scaling.setup`"

INPUTS: Final[dict[str, Input]] = {
    "model": Input(
        700 * GB, "700 GB", "model, as it lies on the medium", "the question; DeepSeek-R1 has 688.6 GB", "given"
    ),
    "nvme5": Input(
        13 * GB,
        "13 GB/s",
        "one Gen5 x4 NVMe drive, sequential reads",
        "Samsung PM1743, " + _PM1743 + "; drives add up, which a RAID 0 does not quite do",
        "sheet",
    ),
    "usb": Input(
        1 * GB,
        "1 GB/s",
        "one USB 3.2 Gen 2 disk",
        "10 Gbit/s line, less coding and protocol; no drive measured",
        "assumed",
    ),
    "storage50": Input(50 * GB, "50 GB/s", "storage of the public plaintext figure", _INSTANT, "measured"),
    "pcie5": Input(
        55 * GB,
        "55 GB/s",
        "pinned memory to one GPU over PCIe Gen5 x16",
        "63 GB/s line rate ([MLPerf system sheet of 8 x H200](https://github.com/mlcommons/inference_results_v4.1/blob/main/"
        "closed/NVIDIA/systems/H200-SXM-141GBx8_TRT_MaxQ.json): 504 GB/s for 8); a loader got 48.5 GB/s through one "
        "(" + _INSTANT + ", tmpfs)",
        "measured",
    ),
    "bridge_hopper": Input(
        4.9 * 2**30,
        "4.9 GiB/s",
        "confidential mode, one H200 under TDX",
        "[vllm#55428](https://github.com/vllm-project/vllm/issues/55428)",
        "measured",
    ),
    "bridge_blackwell": Input(
        0.203 * 55 * GB,
        "0.203 of PCIe = 11.2 GB/s",
        "confidential mode, one B300 under TDX; no figure for a B200 was found, it is taken to be the same",
        _BRIDGE,
        "assumed",
    ),
    "toll": Input(330e-6, "330 µs", "each copy in confidential mode, B300; Hopper taken alike", _BRIDGE, "measured"),
    "memory": Input(
        0.8 * 563.2 * GB,
        "450 GB/s",
        "memory bus of both sockets: 2 x 8 channels DDR5-4400 (two modules to a channel) = 563 GB/s, 80 % of it",
        "32 modules: "
        + _DGX
        + "; [arithmetic](https://www.ai-hpc.org/en/guide/02-cluster/stream-benchmark); the 80 % are assumed",
        "assumed",
    ),
    "cores": Input(112, "112", "cores of the machine, 2 x 56", _DGX + "; the DGX H200 has as many (8480C)", "sheet"),
    "aes_zen3": Input(
        2.85 * GB,
        "2.85 GB/s",
        "AES-256-GCM, one core without AVX-512 (EPYC Milan), 2.6 to 3.1",
        "our probes on a two-core guest",
        "ours",
    ),
    "aes_icelake": Input(
        7.92 * GB,
        "7.9 GB/s",
        "AES-256-GCM, one core of a Xeon 8380 in its cache; taken for the 8480C and 8570 too (no figure found)",
        "[openssl#17239](https://github.com/openssl/openssl/pull/17239)",
        "measured",
    ),
    "aes_turin": Input(
        20.86 * GB,
        "20.9 GB/s",
        "AES-256-GCM, one core of an EPYC 9655 in its cache (encryption, unpatched)",
        "[openssl#31633](https://github.com/openssl/openssl/pull/31633)",
        "measured",
    ),
    "aes_here": Input(
        7.5 * GB,
        "7.5 GB/s",
        "AES-256-GCM, one core of this machine in its cache (a Xeon of Ice Lake; 7.5 to 8.7)",
        _STAGES,
        "ours",
    ),
    "stall": Input(
        0.04 / GB,
        "0.04 s/GB",
        "what a core waits for memory while it opens, beyond the figure in cache",
        _STAGES + ": `open_in_place` less `open_cached`; taken for every processor",
        "ours",
    ),
    "gmac_zen3": Input(
        5.6 * GB, "5.6 GB/s", "authentication alone, one core without AVX-512", "our probes on that guest", "ours"
    ),
    "gmac_avx512": Input(
        8.1 * GB,
        "8.1 GB/s",
        "authentication alone, one core of this machine; taken for Ice Lake and later",
        _STAGES,
        "ours",
    ),
    "read": Input(
        0.025 / GB,
        "0.025 s/GB",
        "core time of direct reads (virtual disk; bare metal should need less)",
        _STAGES,
        "ours",
    ),
    "wipe": Input(0.028 / GB, "0.028 s/GB", "core time of overwriting a cell", _STAGES, "ours"),
    "copy": Input(0.17 / GB, "0.17 s/GB", "core time of a copy in host memory", _STAGES, "ours"),
    "python": Input(25e-6, "25 µs", "interpreter time per segment of 1 MiB, under its lock", _STAGES, "ours"),
    "device": Input(
        0.714 * 68 * GB,
        "49 GB/s",
        "counter mode on one GPU, bitsliced: 545 Gbit/s on an A100, times 10/14 for the rounds of AES-256; "
        "our kernel has not run on a GPU",
        "FW3st/bitsliced_aes; a V100 is reported at " + _V100 + " for AES-128",
        "assumed",
    ),
    "reader": Input(
        11 * GB,
        "11 GB/s",
        "one reader thread with one read of 8 MiB under way: 0.1 ms and the drive's rate",
        "arithmetic from the drive's rate",
        "assumed",
    ),
    "tensors": Input(92_000, "92,000", "tensors of the model", "DeepSeek R1 with its block scales, about", "assumed"),
    "setup": Input(0.1, "0.1 s", "before the first segment: signatures, keys, threads", _STAGES, "ours"),
    "setup_tensor": Input(10e-6, "10 µs", "the same for each tensor: the catalog, parsed and checked", _SETUP, "ours"),
    "setup_segment": Input(
        0.3e-6, "0.3 µs", "the same for each segment of the bundle: the table of tags", _SETUP, "ours"
    ),
    "setup_own": Input(
        0.2e-6, "0.2 µs", "the same for each segment of the rank: the plan of its reads", _SETUP, "ours"
    ),
}


def value(name: str) -> float:
    """Give an input in base units."""
    return INPUTS[name].value
