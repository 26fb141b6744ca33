"""Engine effect and precision effect, for variants that change both.

Engine effect: the engine's own 16-bit variant against the reference. Precision effect: the variant against that one. Decode rates
multiply: each is a ratio to the reference in its own run. Divergences do not add up: a variant's KLD minus that of its engine's 16
bits is a difference of two means over the same tokens, paired by document. It is not a KLD.
"""

from __future__ import annotations

from dataclasses import replace

from pipeline.core.params import Compare
from pipeline.core.records import Metric, Results
from pipeline.metrics.builder import Builder, as_metric, unknown
from pipeline.reporting.text import Row, own_16, own_ratio, show
from pipeline.stats.intervals import cluster_bootstrap

# engine: quantizer and options of its 16-bit variant, 32 if it has none; any other engine loads bfloat16 unchanged
PLAIN = {"llamacpp": ("gguf", "type: BF16"), "onnxruntime": ("onnx", "precision: fp32")}
CAPTION = (
    "Decode rates multiply, divergences do not add up: the last column is a difference of two means over the same tokens, "
    "in pairs by document, not a KLD."
)


def both(results: Results, reference: str) -> list[str]:
    """Variants that change both engine and precision."""
    return [n for n, r in results.items() if r["engine"] != results[reference]["engine"] and own_16(results, n) != n]


def rows(results: Results, reference: str, setup: Compare, seed: int) -> list[Row]:
    """One row for each variant that changes both: the engine's effect, then the precision's."""
    table: list[Row] = []
    other = unknown("speed_ratio", "not both have a rate with an interval, of the same machine", setup.confidence)
    for name in both(results, reference):
        own, none = own_16(results, name), unknown("kld_mean", lacking(results[name]["engine"]), setup.confidence)
        engine = results[own]["metrics"] if own else {"speed_ratio": none, "kld_mean": none}
        precision = own_ratio(results, name) or other if own else none
        table.append({
            "variant": name, "its engine's 16 bits": own or "–",
            "decode: engine, ×": engine.get("speed_ratio"), "decode: precision, ×": precision,
            "KLD: engine, nats": engine.get("kld_mean"), "KLD: total, nats": results[name]["metrics"].get("kld_mean"),
            "KLD beyond its engine's 16 bits, nats": beyond(results, name, own, setup, seed) if own else none,
        })  # fmt: skip
    return table


def beyond(results: Results, name: str, own: str, setup: Compare, seed: int) -> Metric:
    """A variant's mean KLD minus that of its engine's 16 bits."""
    mine, theirs = (results[n]["curves"].get("kld_by_document", {}) for n in (name, own))
    tokens = {document: rows["tokens"] for document, rows in mine.items()}
    if not mine or tokens != {document: rows["tokens"] for document, rows in theirs.items()}:
        return unknown("kld_mean", f"{name} and {own} have no KLD of the same documents; run `dvc repro`", setup.confidence)
    e = cluster_bootstrap(
        [rows["kld"] - theirs[document]["kld"] for document, rows in mine.items()], list(tokens.values()), list(mine),
        confidence=setup.confidence, resamples=setup.resamples, rng=Builder(setup, seed).rng(f"beyond/{name}"),
    )  # fmt: skip
    method = f"difference of mean KLDs to the reference, in pairs by document; {e.method}"
    return as_metric("kld_mean", replace(e, n=sum(tokens.values()), method=method), setup.confidence)


def lacking(engine: str) -> str:
    """Why an engine's effect is unknown, and what to add to params.yaml."""
    quantizer, options = PLAIN.get(engine, ("cast", "dtype: bfloat16"))
    line = f"{engine}-plain: {{quantizer: {quantizer}, engine: {engine}, options: {{{options}}}}}"
    return f"no variant of {engine} at 16 bits; add to variants in params.yaml: {line}"


def notes(results: Results, reference: str) -> list[str]:
    """Variants whose two effects cannot be separated, and why."""
    return [f"{n}: {lacking(results[n]['engine'])}" for n in both(results, reference) if own_16(results, n) is None]


def words(results: Results, name: str) -> str | None:
    """A variant's two effects in a sentence; None if it does not change both, or they cannot be separated."""
    own, precision = own_16(results, name), own_ratio(results, name)
    if own in (None, name, results[name]["reference"]) or precision is None:
        return None
    metrics, engine = results[own]["metrics"], results[name]["engine"]
    return (
        f"Of {name}'s decode rate, {engine} alone gives × {show(metrics['speed_ratio'])} ({own}), precision × {show(precision)}; "
        f"{own} alone has KLD {show(metrics.get('kld_mean'))} nats"
    )
