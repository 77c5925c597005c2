#!/usr/bin/env bash
# On a machine with a GPU: the bitwise tests, the kernels against the reference, and the benchmark,
# in under six minutes. Installs nothing: it needs JAX with CUDA, Optax, chex, jmp and pytest.
#
# Usage: tests/device/run.sh [DIRECTORY]    (default: device-report; gets report.json and table.txt)
#   PYTHON   the interpreter (default: python3)
#   WHEELS   a directory of pure-Python wheels for what is not installed, such as jmp
set -euo pipefail
mkdir -p "${1:-device-report}"
out=$(cd "${1:-device-report}" && pwd)
cd "$(dirname "$0")/../.."
path=$PWD
for wheel in "${WHEELS:-/nonexistent}"/*.whl; do
  [ -e "$wheel" ] && path=$path:$wheel
done
export PYTHONPATH=$path${PYTHONPATH:+:$PYTHONPATH} PYTHONDONTWRITEBYTECODE=1
exec "${PYTHON:-python3}" tests/device/report.py "$out"
