"""Measure servers: any OpenAI-compatible endpoint by its URL (vLLM, TensorRT-LLM, llama.cpp's, SGLang), or one launched here.

A run: launch.py or a URL, probe.py, measure.py (client.py, reply.py: one request). Beside it: score.py and logprobs.py
(perplexity), batch.py (many requests, each once), results.py (reports/serving/ as metrics for rules).
"""
