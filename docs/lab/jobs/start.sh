#!/usr/bin/env bash
# Run a file of jobs on a machine where nothing can be installed: `docs/lab/jobs/start.sh kernels 480 [ARCHIVE...]`.
# Its arguments: the file of jobs, seconds, and tar archives to unpack once into the folder W: `site` with what Python lacks
# (pip download --only-binary=:all:, unpacked).
set -euo pipefail
export W=${W:-$HOME/jobs} REPO=$PWD
mkdir -p "$W/site" "$W/results"
for archive in "${@:3}"; do tar -xf "$archive" -C "$W" --skip-old-files; done
cp docs/lab/jobs/*.toml "$W/results/"
cp -n docs/results/{shelf,mini-39m,twenty,twenty/8x384}.json "$W/results/" || true
export HERE=$W/results GPT2=${GPT2:-} TEXTS=${TEXTS:-} VALIDATION=${VALIDATION:-} TASKS=${TASKS:-}
export PYTHONPATH=$REPO:$W/site PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 PATH=$W/bin:$PATH
export TORCHINDUCTOR_CACHE_DIR=$W/cache/inductor TRITON_CACHE_DIR=$W/cache/triton XDG_CACHE_HOME=$W/cache
if [ ! -e "$W/mps" ]; then  # kernels of several processes at the same time, where the driver can
    mkdir "$W/mps"
    export CUDA_MPS_PIPE_DIRECTORY=$W/mps CUDA_MPS_LOG_DIRECTORY=$W/mps
    nvidia-cuda-mps-control -d && timeout 60 python3 -c 'import torch; torch.ones(9, device="cuda").sum().item()' && touch "$W/mps/works" || true
fi
unset CUDA_MPS_PIPE_DIRECTORY
[ ! -e "$W/mps/works" ] || export CUDA_MPS_PIPE_DIRECTORY=$W/mps
mkdir -p "$W/bin"
printf '#!/bin/sh\nexec python3 -P -m pytest "$@"\n' > "$W/bin/pytest" && chmod +x "$W/bin/pytest"
exec python3 -P tools/gpu_jobs.py "docs/lab/jobs/$1.toml" --out "$W/results" --memory "${MEMORY:-125}" --seconds "$2"
