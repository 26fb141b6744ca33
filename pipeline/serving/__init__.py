"""Speed against a server: any OpenAI-compatible endpoint by its address (vLLM, TensorRT-LLM, llama.cpp's, SGLang).

events.py     a stream's bytes -> its events (pure)
reply.py      what a streamed reply says, event by event (pure)
client.py     one request over HTTP -> one timings row
probe.py      what an endpoint can do, before anything is measured
load.py       closed loop at fixed concurrency, open loop with Poisson arrivals
session.py    one run from the probe to the last row, by hand or as a stage (pipeline/serve.py)
launch.py     a server of one's own: started, waited for, stopped whatever happens
able.py       whether params.yaml's servers can be: said by check
logprobs.py   log-probabilities of given tokens, in the ways that servers have
score.py      the corpus through a server: perplexity, and beside the reference's rows the change of the true token's probability
batch.py      many requests, asked once each: `python -m pipeline.serving.batch`
__main__.py   measure an endpoint: `python -m pipeline.serving URL`

What the rows mean stands in pipeline/numbers/serving_figures.py.
"""
