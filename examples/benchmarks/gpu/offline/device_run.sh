#!/usr/bin/env bash
# Measures what `make pack-gpu` has packed, on a machine with a GPU, Python and PyTorch, without TVM and network:
#     bash device_run.sh [SECONDS] [STAGE...]        (500 seconds by default; the last lines are a table)
# PYTHON is the interpreter (python3 by default), OUT the folder of the results (results, beside this file).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
seconds=${1:-500}; shift || true
python=${PYTHON:-python3} out=${OUT:-$here/results}
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
"$python" - "$here" "$work" <<'P'
import lzma, pathlib, sys, tarfile
here, work = map(pathlib.Path, sys.argv[1:])
made, there = (here / "python-version").read_text().strip(), "%d.%d" % sys.version_info[:2]
if made != there:
    sys.exit(f"device_run.sh: packed for Python {made}, and this is {there}: set PYTHON, or pack with --python {there}")
for name in ("runtime", "cases"):
    with lzma.open(here / f"{name}.tar.xz") as file, tarfile.open(fileobj=file, mode="r|") as archive:
        archive.extractall(work / name, filter="data")
P
export PYTHONPATH=$work/runtime PYTHONUNBUFFERED=1 TORCHINDUCTOR_CACHE_DIR=$work/inductor
# The driver is the machine's; of the CUDA runtime its own comes first, too.
export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$work/runtime/cuda
"$python" -m examples.benchmarks.gpu.offline.device_run "$work/cases" "$out" "$seconds" "$@"
