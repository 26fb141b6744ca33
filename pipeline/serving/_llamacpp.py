"""llama.cpp's server on 127.0.0.1. It runs in the environment of envs/llamacpp-server.txt, which has none of our packages.

Prompts are not cached: a repeated one must cost what a new one costs.
"""

from __future__ import annotations

import argparse
import os
import threading

KV_TYPES = {"f32": 0, "f16": 1, "bf16": 30, "q8_0": 8, "q4_0": 2}  # ggml.h: enum ggml_type


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    for name in ("port", "threads", "parallel", "context", "gpu-layers"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--kv", choices=KV_TYPES, required=True)
    asked = parser.parse_args()
    import xllamacpp

    setup = xllamacpp.CommonParams()
    setup.model.path, setup.model_alias = asked.model, {"model"}
    setup.hostnames, setup.port, setup.api_keys = ["127.0.0.1"], asked.port, [os.environ.pop("QUANTGATE_SERVER_KEY")]
    setup.n_parallel, setup.n_ctx, setup.kv_unified = asked.parallel, asked.parallel * asked.context, False
    setup.cpuparams.n_threads = setup.cpuparams_batch.n_threads = asked.threads
    setup.n_gpu_layers, setup.cache_prompt, setup.cache_ram_mib = asked.gpu_layers, False, 0
    setup.cache_type_k = setup.cache_type_v = KV_TYPES[asked.kv]
    server = xllamacpp.Server(setup)
    print(f"build: {xllamacpp.BUILD_INFO} {xllamacpp.get_system_info()}", flush=True)
    print(f"listening: {server.listening_address}", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
