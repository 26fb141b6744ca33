"""llama-perplexity's protocol for any engine: one text, windows of 512 tokens, the second half of each window scored.

    python -m tools.llamacpp_compat VARIANT TEXT [--against OTHER] [--json]

llama.cpp's users publish perplexity, mean KLD and same top p measured this way. The text is tokenized once, as a whole, and cut
into windows across documents. The first half of a window is only context. If the vocabulary asks for a BOS, it replaces a
window's first token. The results compare with llama.cpp's, not with this pipeline's. tests/bench/llamacpp.py checks them.

Source: llama.cpp, tools/perplexity/perplexity.cpp, `perplexity` and `kl_divergence`. Three differences are deliberate:
llama.cpp rounds the base's log-probabilities to 16 bits, cut 16 nats below the likeliest; it leaves terms below exp(-16) out of
the sum; and it treats tokens as independent. Here nothing is rounded or cut, and intervals resample windows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from pipeline import engines
from pipeline.core import artifacts, cli, explain, params, quiet
from pipeline.core.errors import ArtifactError, DataError, InvalidVariant, ParamsError, Unsupported
from pipeline.core.params import Compare, Params
from pipeline.core.records import Json
from pipeline.divergence.distributions import TokenRows, compare_parts
from pipeline.divergence.store import Window
from pipeline.engines import ROWS, Engine
from pipeline.engines._forest import common_prefix
from pipeline.metrics.builder import Builder
from pipeline.metrics.definitions import definition
from pipeline.model import attestation
from pipeline.model.config import leading
from pipeline.stats.intervals import Estimate, quantile_interval

N_CTX = 512  # llama-perplexity's default
QUANTILES = {"kld_median": 0.5, "kld_p90": 0.9, "kld_p95": 0.95, "kld_p99": 0.99, "kld_p999": 0.999}
UNITS = {"ppl_reference": "ppl", "ppl_log_ratio": "nats"}  # of metrics that only this file has


@dataclass(frozen=True)
class Tokens:
    """A text's token ids. bos: replaces each window's first token unless None; tokenizer: where the ids came from."""

    ids: list[int]
    bos: int | None
    tokenizer: str


def read_text(path: Path) -> str:
    """The file's text as llama-perplexity reads it: UTF-8, without one final newline."""
    return explain.read_text(path, DataError, f"{path} does not exist; name a text file").removesuffix("\n")


def tokenize(loaded: dict[str, Engine], text: str) -> Tokens:
    """Tokenize with all tokenizers of these engines: transformers', and llama.cpp's for a GGUF. loaded: {variant: engine}. Raises
    `DataError` at the first token on which two differ."""
    by_source: dict[str, Tokens] = {}
    for name, engine in loaded.items():
        bos = next(iter(leading(engine.tokenizer)), None)
        by_source[f"{name}'s tokenizer.json"] = Tokens(list(engine.tokenizer(text, verbose=False).input_ids), bos, "transformers")
        if hasattr(engine, "tokenize") and hasattr(engine, "leading_token"):  # llama.cpp's, from the model file
            both = "llama.cpp and transformers"
            by_source[f"{name}'s model.gguf"] = Tokens(engine.tokenize(text), engine.leading_token(), both)
    (first, tokens), *others = by_source.items()
    for name, other in others:
        if tokens.bos != other.bos:
            raise DataError(
                f"{first} begins a text with token {tokens.bos}, {name} with {other.bos}: their windows cannot be compared"
            )
        if tokens.ids != other.ids:
            at = common_prefix(tokens.ids, other.ids)
            near = next(iter(loaded.values())).tokenizer.decode(tokens.ids[max(0, at - 4) : at + 4])
            raise DataError(
                f"token {at} of the text, in {near!r}, is {tokens.ids[at : at + 1]} by {first} and {other.ids[at : at + 1]} by "
                f"{name}: llama-perplexity would score other tokens than the base; remove this place from the text"
            )
    return max(by_source.values(), key=lambda t: len(t.tokenizer))


def windows(token_ids: Sequence[int], *, n_ctx: int = N_CTX, bos: int | None = None) -> list[Window]:
    """Cut all whole windows of n_ctx tokens; the rest at the end is dropped. Each window scores its tokens n_ctx/2 + 1 .. n_ctx - 1
    by the logits at n_ctx/2 .. n_ctx - 2. bos: replaces each window's first token. Raises `DataError` for fewer than two."""
    if len(token_ids) < 2 * n_ctx:
        raise DataError(f"the text has {len(token_ids)} tokens; windows of {n_ctx} need at least {2 * n_ctx}: use a longer text")
    pieces = [tuple(token_ids[at : at + n_ctx]) for at in range(0, len(token_ids) - n_ctx + 1, n_ctx)]
    begun = pieces if bos is None else [(bos, *piece[1:]) for piece in pieces]
    return [Window("text", f"text#{k}", "text", ids, n_ctx // 2 + 1) for k, ids in enumerate(begun)]


@dataclass(frozen=True)
class Scores:
    """Rows of all scored tokens, and the window number [n] of each."""

    rows: TokenRows
    window: NDArray[np.int64]


def score(variant: Engine, base: Engine, asked: Sequence[Window], *, threads: int) -> Scores:
    """Score every window with both engines, with only a few windows' logits in memory at a time."""
    if variant.vocab_size != base.vocab_size:
        raise ArtifactError(
            f"vocabularies of {variant.vocab_size} and {base.vocab_size} entries: their distributions cannot be compared"
        )
    longest = min(variant.max_length, base.max_length)
    if len(asked[0].token_ids) > longest:
        raise DataError(f"windows of {len(asked[0].token_ids)} tokens are longer than the model's {longest}")
    parts: list[TokenRows] = []
    numbers: list[int] = []
    with ThreadPoolExecutor(threads) as pool, cli.progress(sum(w.scored for w in asked), "compare", "token") as bar:
        for (k, at, ref), (also_k, also, var) in zip(_blocks(base, asked), _blocks(variant, asked), strict=True):
            if (k, at, len(ref)) != (also_k, also, len(var)):
                raise ArtifactError(f"{asked[k].window}: the engines disagree about positions ({at}, {also})")
            true_ids = np.asarray(asked[k].token_ids[at + 1 : at + 1 + len(ref)])
            parts.append(compare_parts(pool, ref, var, true_ids))
            numbers += [k] * len(ref)
            bar.update(len(ref))
    rows = TokenRows(**{name: np.concatenate([getattr(p, name) for p in parts]) for name in vars(parts[0])})
    return Scores(rows, np.asarray(numbers))


def _blocks(engine: Engine, asked: Sequence[Window]) -> Iterator[tuple[int, int, NDArray[np.float32]]]:
    """Yield (window's number, first position, logits); all windows together for an engine that computes them side by side."""
    size = len(asked) if getattr(engine, "any_lengths", False) else 1
    for first in range(0, len(asked), size):
        part = asked[first : first + size]
        for k, at, block in engine.logit_blocks([w.token_ids for w in part], [w.first - 1 for w in part], ROWS):
            yield first + k, at, block


class _Summary:
    """Metrics by name: value, interval from resampled windows, and the standard error that llama.cpp prints."""

    def __init__(self, scores: Scores, setup: Compare, seed: int) -> None:
        self.windows, self.n, self.builder = scores.window, len(scores.window), Builder(setup, seed)
        self.figures: dict[str, Json] = {}

    def mean(self, name: str, values: Any, transform: str = "mean") -> None:
        """transform: one of `stats.TRANSFORMS`, applied to the standard error to first order."""
        x = np.asarray(values, float)
        e = self.builder.resampled(name, x, np.ones(self.n), self.windows, transform)
        error = float(x.std() / np.sqrt(self.n - 1))
        assert e.value is not None
        slope = {"mean": 1.0, "exp": e.value, "sqrt": 0.5 / e.value if e.value else 0.0}[transform]
        self.add(name, e, error * slope)

    def quantile(self, name: str, values: NDArray[np.float64], q: float) -> None:
        """The value is interpolated between ranks, as in llama.cpp; the interval is not."""
        e = quantile_interval(values, self.windows, q, confidence=self.builder.confidence)
        self.add(name, replace(e, value=float(np.quantile(values, q))))

    def add(self, name: str, e: Estimate, error: float | None = None) -> None:
        unit = known.unit if (known := definition(name)) else UNITS[name]
        self.figures[name] = asdict(e) | {"unit": unit, "standard_error": error, "confidence": self.builder.confidence}


def summarize(scores: Scores, setup: Compare, seed: int) -> dict[str, Json]:
    """{metric: value, low, high, standard_error, n, unit, method, warnings}, named as in `metrics.DEFINITIONS`.
    `ppl_reference` is the other model's perplexity, `ppl_log_ratio` is ln(ppl / ppl_reference). Raises `InvalidVariant` if a token
    has no finite divergence: an average would hide it."""
    r = scores.rows
    if bad := int((~np.isfinite(r.kld)).sum()):
        raise InvalidVariant(f"{bad} of {len(r.kld)} tokens have no finite divergence: NaN logits, or a token ruled out")
    b = _Summary(scores, setup, seed)
    b.mean("ppl", -r.logp, "exp")
    b.mean("ppl_reference", -r.logp_ref, "exp")
    b.mean("ppl_log_ratio", r.logp_ref - r.logp)
    b.mean("ppl_ratio", r.logp_ref - r.logp, "exp")
    b.mean("kld_mean", r.kld)
    for name, q in QUANTILES.items():
        b.quantile(name, r.kld, q)
    b.add("kld_max", Estimate(float(r.kld.max()), None, None, b.n, "maximum", ("a maximum has no interval",)))
    change = np.exp(r.logp) - np.exp(r.logp_ref)
    b.mean("delta_p_mean", change)
    b.mean("delta_p_rms", change**2, "sqrt")
    b.mean("top1_agreement", r.top1 == r.top1_ref)
    return b.figures


def _load(settings: Params, variant: str) -> tuple[Engine, str]:
    """Return (engine, the model's digest), verified as in `diverge`."""
    chosen, folder = settings.variant(variant), artifacts.model_dir(variant)
    manifest = artifacts.read_manifest(folder)
    if manifest["status"] != "ok":
        raise Unsupported(f"variant {variant!r} is {manifest['status']}: {manifest['reason']}")
    artifacts.verify_files(folder, manifest)
    engine = engines.load(chosen.engine, folder, threads=settings.thread_count, **chosen.engine_options)
    attestation.check_kernels(engine.kernels(), manifest)
    return engine, str(manifest["digest"])


def report(settings: Params, variant: str, against: str, text: Path) -> Json:
    """The metrics, and what they were measured on."""
    if variant == against:
        raise ParamsError(f"cannot compare {variant!r} with itself; name another variant with --against")
    content = read_text(text)
    loaded = {name: _load(settings, name) for name in dict.fromkeys((variant, against))}
    tokens = tokenize({name: engine for name, (engine, _) in loaded.items()}, content)
    asked = windows(tokens.ids, bos=tokens.bos)
    scores = score(loaded[variant][0], loaded[against][0], asked, threads=settings.thread_count)
    return {
        "variant": variant, "against": against, "models": {name: digest for name, (_, digest) in loaded.items()},
        "text": str(text), "text_sha256": artifacts.sha256_file(text), "text_tokens": len(tokens.ids),
        "tokenizer": tokens.tokenizer, "bos": tokens.bos, "n_ctx": N_CTX, "windows": len(asked), "tokens": len(scores.window),
        "tokens_dropped": len(tokens.ids) - N_CTX * len(asked), "seed": settings.seed, "versions": artifacts.versions(),
        "figures": summarize(scores, settings.compare, settings.seed),
    }  # fmt: skip


def main(
    variant: str,
    text: Annotated[Path, typer.Argument(help="a UTF-8 text file")],
    against: Annotated[str | None, typer.Option(help="the variant to compare with (default: the reference)")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Print what llama-perplexity reports for VARIANT compared with another; writes nothing."""
    quiet.before_sharing_cores()
    settings = params.load()
    result = report(settings, variant, against or settings.reference, text)
    if as_json:
        print(json.dumps(artifacts.jsonable(result), indent=2, ensure_ascii=False, allow_nan=False))
    else:
        show(result)


def show(result: Json) -> None:
    level = 100 * result["figures"]["kld_mean"]["confidence"]
    columns = ("metric", "value", "±", f"{level:g} % interval", "unit", "n")
    rows = []
    for name, f in result["figures"].items():
        error = "" if f["standard_error"] is None else f"{f['standard_error']:.3g}"
        interval = "" if f["low"] is None else f"[{f['low']:.5g}, {f['high']:.5g}]"
        rows.append(dict(zip(columns, (name, f"{f['value']:.6g}", error, interval, f["unit"], str(f["n"])))))
    title = f"{result['variant']} against {result['against']}, as llama-perplexity measures"
    cli.table(columns, rows, title=title, left=("metric", "unit"))
    print(
        f"{result['tokens']} tokens in {result['windows']} windows of {result['n_ctx']} ({result['tokens_dropped']} tokens at the "
        f"end dropped); tokenized by {result['tokenizer']}; BOS {result['bos']}.\n"
        "± is the standard error as llama.cpp prints it, for independent tokens; intervals resample whole windows."
    )
    for note in sorted({w for f in result["figures"].values() for w in f["warnings"]}):
        print(f"note: {note}")


if __name__ == "__main__":
    cli.run(main)
