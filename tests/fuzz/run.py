"""Coverage-guided fuzzing of one parser: ``python -m tests.fuzz.run TARGET --seconds N``.

Needs atheris (``pip install --require-hashes -r requirements/fuzz.txt``). Begins with the seeds of
``tests/fuzz/corpus/TARGET``; what it finds on the way is kept in ``build/fuzz/TARGET`` for the next run. A breach, an
error that is not ours, an input that takes ten seconds or two gigabytes ends the run with a status other than 0 and the
input in ``build/fuzz/TARGET-*``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["attestation", "provisioning", "json"]):
    from tests.fuzz.invariants import TARGETS

ROOT = Path(__file__).parents[2]
CORPUS = ROOT / "tests" / "fuzz" / "corpus"
FOUND = ROOT / "build" / "fuzz"


def _dictionary(target: str) -> Path:
    """Write the words of a target in libFuzzer's form."""
    path = FOUND / f"{target}.dict"
    words = ("".join(f"\\x{byte:02x}" for byte in word) for word in TARGETS[target].words)
    path.write_text("".join(f'"{word}"\n' for word in words))
    return path


def main() -> None:
    """Fuzz until the time is over or something is found."""
    parser = argparse.ArgumentParser(description="Fuzz one parser.")
    parser.add_argument("target", choices=sorted(TARGETS))
    parser.add_argument("--seconds", type=int, default=60)
    options = parser.parse_args()
    target = TARGETS[options.target]
    found = FOUND / options.target
    found.mkdir(parents=True, exist_ok=True)

    def check(data: bytes) -> None:
        target.check(data)

    atheris.Setup(
        [
            sys.argv[0],
            f"-max_total_time={options.seconds}",
            f"-max_len={target.most}",
            "-timeout=10",
            "-rss_limit_mb=2048",
            f"-dict={_dictionary(options.target)}",
            f"-artifact_prefix={FOUND}/{options.target}-",
            str(found),
            str(CORPUS / options.target),
        ],
        check,
    )
    atheris.Fuzz()


if __name__ == "__main__":
    main()
