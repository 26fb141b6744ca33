"""Measure servers: any OpenAI-compatible one by its URL (vLLM, TensorRT-LLM, llama.cpp's, SGLang), or one launched here.

launch.py starts it, measure.py sends the load (client.py and reply.py: one request), results.py turns its report into metrics.
"""
