"""What bounds a phase of a request, from its needs and the machine's rates.

Decoding a token reads every weight, key and value once; prefill multiplies every weight outside the embedding with every prompt
token. Relative to the rates of the same run that gives MBU and MFU. If both together account for less than SHARE of the time,
something else takes most of it; else the larger one bounds the phase. Attention's own products are not counted."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pipeline.core.records import Json, ModelShape

SHARE = 0.5  # of the time; the rates are those of plain loops over large arrays, which real code does not reach
KV_TOLERANCE = 0.05  # between measured cache bytes and those of the config


def shape_of(config: Json) -> ModelShape:
    """Read a config.json; of a model with several kinds of input its text part."""
    text = {**config, **(config.get("text_config") or {})}
    heads, hidden = text.get("num_attention_heads"), text.get("hidden_size")
    return {
        "layers": text.get("num_hidden_layers"), "kv_heads": text.get("num_key_value_heads") or heads,
        "head_dim": text.get("head_dim") or (hidden // heads if hidden and heads else None),
        "hidden": hidden, "vocab": text.get("vocab_size"), "tied": text.get("tie_word_embeddings"),
        "experts": text.get("num_local_experts") or text.get("num_experts") or text.get("n_routed_experts"),
    }  # fmt: skip


def cache_bytes(shape: ModelShape, element_bytes: float | None) -> float | None:
    """Bytes of keys and values per token: 2 x layers x key-value heads x head dimension x bytes of a number."""
    if not (shape["layers"] and shape["kv_heads"] and shape["head_dim"] and element_bytes):
        return None
    return 2 * shape["layers"] * shape["kv_heads"] * shape["head_dim"] * element_bytes


def products(shape: ModelShape, parameters: float) -> tuple[float, float] | None:
    """(weights that multiply every token, weights of the head); None if unknown, or for a mixture of experts."""
    if not (shape["hidden"] and shape["vocab"]) or shape["tied"] is None or shape["experts"]:
        return None
    head = float(shape["hidden"] * shape["vocab"])
    body = parameters - head * (1 if shape["tied"] else 2)
    return (body, head) if body > 0 else None


@dataclass(frozen=True)
class Phase:
    """One step of a phase. bytes, operations: that it needs; bandwidth, rate: the machine's per second in the same run (None:
    unknown, `why` has the reason); rate_of: the type of the timed product; span: interval of `seconds`."""

    name: str
    step: str
    seconds: float
    bytes: float | None
    operations: float | None
    bandwidth: float | None
    rate: float | None
    rate_of: str
    why: str = "not measured"
    note: str = ""
    span: tuple[float, float] | None = None

    @property
    def mbu(self) -> float | None:
        return self.bytes / self.seconds / self.bandwidth if self.bytes and self.bandwidth else None

    @property
    def mfu(self) -> float | None:
        return self.operations / self.seconds / self.rate if self.operations and self.rate else None

    @property
    def bound(self) -> str | None:
        """`bandwidth`, `compute` or `overhead`; None if unknown, or open within the time's interval."""
        bounds = self.bounds()
        return bounds[0] if len(bounds) == 1 else None

    def bounds(self) -> list[str]:
        """What may bound it, over the interval of its time; empty if unknown."""
        bounds = {_bound(replace(self, seconds=s)) for s in (self.seconds, *(self.span or ()))}
        return [] if None in bounds else sorted(b for b in bounds if b)

    def sentence(self) -> str:
        bounds = self.bounds()
        why = "its own products are faster than the one that was timed" if (self.mfu or 0) > 1 else self.why
        text = f"{self.name} is {' or '.join(bounds)}-bound" if bounds else f"what bounds {self.name} is not known ({why})"
        if self.span and len(bounds) > 1:
            text += f" (the interval of its time, {_ms(self.span[0])} to {_ms(self.span[1])} ms, leaves that open)"
        parts = [f"{text}: it takes {_ms(self.seconds)} ms {self.step}"]
        if self.mbu is not None:
            parts.append(f"reads {_mega(self.bytes)} MB, {_percent(self.mbu)} of the {_giga(self.bandwidth)} GB/s measured")
        if self.mfu is not None:
            done = f"multiplies at {_giga(self.operations, self.seconds)} GFLOP/s"
            parts.append(f"{done}, {_percent(self.mfu)} of the {_giga(self.rate)} measured ({self.rate_of})")
        last = f", and {parts[2]}" if len(parts) == 3 else ""
        little = f"; together less than {_percent(SHARE)} of its time" if self.bound == "overhead" else ""
        return ", ".join(parts[:2]) + last + little + (f" ({self.note})" if self.note else "")


def _bound(phase: Phase) -> str | None:
    shares = {"bandwidth": phase.mbu, "compute": phase.mfu}
    known = {kind: share for kind, share in shares.items() if share is not None and share <= 1}
    if len(known) < 2:
        return next((kind for kind, share in known.items() if share >= SHARE), None)
    return max(known, key=lambda kind: known[kind]) if sum(known.values()) >= SHARE else "overhead"


def compare_phases(
    name: str, variant: Phase, reference_name: str, reference: Phase, value: float, low: float | None, high: float | None
) -> str:
    """Why a variant is faster or slower than the reference in a phase. value, low, high: the ratio of their rates."""
    same = low is None or high is None or low <= 1 <= high
    how = "not surely faster or slower" if same else "faster" if value > 1 else "slower"
    text = f"{name} is {how} than {reference_name} here: its {variant.name} rate is {value:.2f} times as high "
    text += f"({_ms(variant.seconds)} ms {variant.step} instead of {_ms(reference.seconds)})"
    if variant.name == "prefill":  # as much to multiply in both, and bytes that are read once for all of the prompt
        if not (variant.operations and reference.operations):
            return text
        rates = f"{_giga(variant.operations, variant.seconds)} GFLOP/s instead of {_giga(reference.operations, reference.seconds)}"
        return f"{text}; it has as much to multiply and does it at {rates}: unpacking and its kernels make the difference"
    if variant.bytes and reference.bytes:
        text += f"; it reads {_mega(variant.bytes)} MB a token instead of {_mega(reference.bytes)}"
        text += f", which alone would make it {reference.bytes / variant.bytes:.2f} times as fast"
    if variant.bound == "bandwidth":
        return f"{text}; memory holds it, so bytes decide"
    if variant.bound == "compute":
        return f"{text}; its products hold it, so bytes do not decide"
    if variant.bound is None:
        return text
    needed = f"reading and multiplying need {_percent((variant.mbu or 0) + (variant.mfu or 0))} of its time at most"
    if reference.mbu is not None and reference.mfu is not None:
        needed += f" ({reference_name}: {_percent(reference.mbu + reference.mfu)})"
    return f"{text}; at the rates measured {needed}: the rest is unpacking, launching and waiting"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g}" if seconds < 1 else f"{1000 * seconds:.0f}"


def _mega(value: float | None) -> str:
    return f"{(value or 0) / 1e6:.3g}"


def _giga(value: float | None, seconds: float = 1.0) -> str:
    return f"{(value or 0) / seconds / 1e9:.3g}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
