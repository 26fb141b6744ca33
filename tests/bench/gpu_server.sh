#!/bin/sh
# Untried: it needs an NVIDIA GPU. Serve a model folder (engine hf) with SGLang or TensorRT-LLM, from an environment that has it:
#   QUANTGATE_API_KEY=... PYTHON=/path/to/env/bin/python sh tests/bench/gpu_server.sh sglang artifacts/models/bf16 8001
# Then name http://127.0.0.1:8001 as the variant's url. trtllm-serve checks no API key, so it must stay on 127.0.0.1.
set -eu
kind=${1:?sglang or trtllm} model=${2:?a model folder} port=${3:?a port}
nvidia-smi -L >/dev/null 2>&1 || { echo "$kind needs an NVIDIA GPU, and nvidia-smi finds none here" >&2; exit 1; }
case $kind in
sglang)
    exec "${PYTHON:?the Python that has SGLang}" -m sglang.launch_server --model-path "$model" --served-model-name model \
        --host 127.0.0.1 --port "$port" --api-key "${QUANTGATE_API_KEY:?the key to ask for}" --disable-radix-cache ;;
trtllm) exec "$(dirname "${PYTHON:?the Python that has TensorRT-LLM}")/trtllm-serve" "$model" --host 127.0.0.1 --port "$port" ;;
*) echo "unknown server '$kind'; use sglang or trtllm" >&2; exit 2 ;;
esac
