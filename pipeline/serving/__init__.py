"""Measure servers: any OpenAI-compatible endpoint by its URL (vLLM, TensorRT-LLM, llama.cpp's, SGLang), or one launched here.

events.py     bytes of a stream -> its events (pure)
reply.py      events -> what a streamed reply says (pure)
client.py     one request over HTTP -> one row
probe.py      what an endpoint can do, before anything is measured
load.py       closed loop at fixed concurrency, open loop with Poisson arrivals
measure.py    one run, from the launch or URL to the metrics; also for the stage (pipeline/serve.py)
launch.py     start a server, wait for it, stop it whatever happens
logprobs.py   log-probabilities of given tokens, in the ways that servers have
score.py      perplexity of the corpus through a server
results.py    reports/serving/<variant>.json as metrics for rules
batch.py      many requests, each asked once: `python -m pipeline.serving.batch`
__main__.py   measure an endpoint: `python -m pipeline.serving URL`

pipeline/metrics/serving.py computes metrics from rows.
"""
