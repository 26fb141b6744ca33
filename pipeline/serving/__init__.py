"""Measure servers: any OpenAI-compatible endpoint by its URL (vLLM, TensorRT-LLM, llama.cpp's, SGLang), or one launched here.

A run: launch.py or a URL, measure.py (client.py, reply.py: one request); results.py: its report as metrics for rules.
"""
