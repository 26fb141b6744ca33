#!/bin/sh
# Real vLLM on a CPU: its engine on a variant (test_vllm.py holds the rest), then the variant behind its server, probed and measured.
#
#     sh tests/bench/vllm.sh [MODEL_DIR]      -> artifacts/serving/vllm.figures.json
#
# MODEL_DIR: a transformers folder (artifacts/models/bf16). The environment is built on first use: 3.3 GB in artifacts/envs.
set -eu
model=${1:-artifacts/models/bf16}
VLLM_PYTHON=$(python -m pipeline.core.venvs vllm | sed -n '$s/^env *//p')
export VLLM_PYTHON VLLM_CPU_KVCACHE_SPACE=2
python tests/bench/vllm_engine.py "$model"
exec python -m tools.serve_url --launch vllm --model-dir "$model" --tokenizer "$model" --name vllm \
    --concurrency 1,2,4 --requests 8 --rounds 5 --prompt-tokens 128 --output-tokens 16 --objective ttft_ms=2000,tpot_ms=200
