#!/bin/sh
# One command for a machine with one GPU, at most 8 minutes: MFU, and memory and step time against their predictions.
#   bench/gpu_check.sh [--dry-run] [--cases llama7b-lora,…]
# Needs a Python with `pip install -e '.[train]'`: $PYTHON, else .venv's, else python3. With $OUT the table is also left there.
# Exit codes: 0 all cases ran, 1 one did not, 3 no CUDA device, or libraries are missing.
cd "$(dirname "$0")/.." || exit 1
if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    [ -x .venv/bin/python ] && PYTHON=.venv/bin/python
fi
[ -n "${OUT:-}" ] || exec "$PYTHON" -m bench.gpu_check "$@"
"$PYTHON" -m bench.gpu_check "$@" >"$OUT/gpu_check.md"
code=$?
cat "$OUT/gpu_check.md"
exit $code
