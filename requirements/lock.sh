#!/usr/bin/env bash
# Write every lock file in this directory again from pyproject.toml; called by `make lock`, or `make lock UPGRADE=--upgrade`.
#
# Pins that are already in a file are kept unless --upgrade is given. Each file is the whole list for one kind of
# machine and is installed with --require-hashes --no-deps, so pip can add nothing that is not listed.
set -euo pipefail
cd "$(dirname "$0")/.."

uv=${UV:?path of the uv program}
torch_version=2.13.0
# The CPU builds of torch carry a local version (2.13.0+cpu) and so their own files; a machine that offers one to pip may use it.
torch_cpu_hashes=(
    sha256:6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b # cp311, manylinux_2_28, x86_64
)

# torch's public Linux build names these as dependencies; a CPU build does not need them (torch-cuda.txt).
cuda_packages=(cuda-bindings cuda-toolkit nvidia-cudnn-cu13 nvidia-cusparselt-cu13 nvidia-nccl-cu13 nvidia-nvshmem-cu13)
# What torch needs in every build; these are in node.txt.
pure_packages=(filelock fsspec jinja2 markupsafe mpmath networkx setuptools sympy typing-extensions)

work=build/lock
mkdir -p "$work"
printf 'torch==%s\n' "$torch_version" > "$work/torch.in"
printf '%s\n' "${cuda_packages[@]}" > "$work/no-cuda"
# An HTTP client for a model hub has no business on the appliance; `import tokenizers` works without it.
# triton is a dependency of torch's public build too; the tests interpret a kernel with it, so dev.txt has it in every case.
printf '%s\n' "${cuda_packages[@]}" triton huggingface-hub > "$work/no-cuda-no-hub"

compile() { # out, uv's arguments...
    local out=$1
    shift
    "$uv" pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-build \
        --custom-compile-command 'make lock' ${UPGRADE:-} "$@" --output-file "requirements/$out" > "$work/log"
}

compile dev.txt pyproject.toml --extra node --extra demo --extra test --group build \
    --constraints "$work/torch.in" --excludes "$work/no-cuda" --no-emit-package torch
same_as_dev=(--constraints requirements/dev.txt --constraints "$work/torch.in")
compile owner.txt pyproject.toml "${same_as_dev[@]}"
compile node.txt pyproject.toml --extra node "${same_as_dev[@]}" --excludes "$work/no-cuda-no-hub" --no-emit-package torch
compile demo.txt pyproject.toml --extra node --extra demo "${same_as_dev[@]}" --excludes "$work/no-cuda-no-hub" --no-emit-package torch
compile bench.txt pyproject.toml --extra node --group bench "${same_as_dev[@]}" --excludes "$work/no-cuda" --no-emit-package torch
compile fuzz.txt pyproject.toml --group fuzz "${same_as_dev[@]}"
compile build.txt --group build --constraints requirements/dev.txt

printf 'pip\n' > "$work/pip.in"
compile pip.txt "$work/pip.in"

compile torch-cuda.txt "$work/torch.in" "${pure_packages[@]/#/--no-emit-package=}" --no-emit-package torch
compile torch.txt "$work/torch.in" --no-deps
# Both builds have one version number for pip, so one line names the files of both.
for hash in "${torch_cpu_hashes[@]}"; do
    grep -qF -- "$hash" requirements/torch.txt || sed -i "0,/--hash=/s/    --hash=/    --hash=$hash \\\\\n    --hash=/" requirements/torch.txt
done
