"""Our divergence and speed figures against llama.cpp's own programs, on the same model files.

    python tests/bench/llamacpp.py [VARIANT] [--against OTHER] [--rounds N]     -> reports/llamacpp.json

Divergence: llama-perplexity writes OTHER's log-probabilities and compares VARIANT with them; `tools.llamacpp_compat`
does both through our engine, on the same tokens. They must agree within 1 %. llama-perplexity keeps
the base's log-probabilities in 16 bits, cut 16 nats below the likeliest, and leaves terms below exp(-16) out of the sum.
Doing the same to our logits gave its mean KLD to every digit that it prints; not doing it, 0.04 % less (Q4_0 against Q8_0,
5865 tokens). Figures without a tolerance are shown, not judged.

Speed: llama-bench and our engine in turns, in one run; each round gives a ratio. llama-bench draws its next token at random
and looks at no logits; our engine takes the likeliest, as a server would. Both get as long a context here: llama-bench makes
room for what its test needs, our engine for the model's window, and 2048 tokens of room in place of 512 cost 3.5 % of its
prefill. Our decode rate should be 0.97 of llama-bench's or more: INCONCLUSIVE where the interval of the median ratio holds that
bound.

Both variants must be built (`dvc repro`). Exit code: 0 agree, 1 do not, 3 inconclusive.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import harness
import llamacpp_tools as llama
import numpy as np
import typer

from pipeline import engines
from pipeline.core import artifacts, cli, params
from pipeline.core.errors import DataError
from pipeline.core.params import Params
from pipeline.engines import Sampling, llamacpp
from pipeline.evalset import load_texts
from pipeline.speed import hardware
from tools import llamacpp_compat

REPORT = artifacts.REPORTS / "llamacpp.json"
JUDGED, APART = ("kld_mean", "top1_agreement", "ppl_ratio"), 0.01  # how far they may be apart, relative
DECODE_BOUND = 0.97
PROMPT, OUTPUT = 256, 64
ROOM = 512  # tokens of context, in whole cells of 256


# --- divergence --------------------------------------------------------------------------------------------------


def write_text(engine: Any, into: Path, tokens: int) -> dict[str, Any]:
    """A text of about that many tokens out of the project's corpus; documents that llama.cpp's tokenizer reads otherwise
    than the base's are left out and named, since no comparison on them would be of models."""
    chosen: list[str] = []
    left_out, count = [], 0
    for document in load_texts(Path("evalsets/corpus")):
        piece = document["text"].strip() + "\n\n"
        ids = engine.tokenize("\n\n" + piece)
        if ids != engine.tokenizer("\n\n" + piece).input_ids:
            left_out.append(document["id"])
        elif count < tokens:
            chosen.append(piece)
            count += len(ids)
    artifacts.write_text(into, "".join(chosen))
    return {"documents": len(chosen), "tokenized_otherwise": left_out}


def divergence(settings: Params, home: Path, variant: str, against: str, tokens: int) -> dict[str, Any]:
    """Both programs' figures on one text; `apart` is relative to llama.cpp's."""
    files = {name: str(artifacts.model_dir(name) / "model.gguf") for name in (variant, against)}
    threads = settings.thread_count
    with tempfile.TemporaryDirectory(dir=llama.HOME) as tmp:
        text, stored = Path(tmp) / "text.txt", Path(tmp) / "base.kld"
        engine: Any = engines.load("llamacpp", artifacts.model_dir(variant), threads=threads)
        facts = write_text(engine, text, tokens)
        ids: list[int] = engine.tokenizer(llamacpp_compat.read_text(text), verbose=False).input_ids
        engine.close()
        length = str(llamacpp_compat.N_CTX)
        common = ("--kl-divergence-base", str(stored), "-c", length, "-b", length, "-t", str(threads))
        cli.say("perplexity", f"llama-perplexity on {against}, then {variant}")
        llama.run(home, "llama-perplexity", "-m", files[against], "-f", str(text), *common)
        printed = llama.parse_divergence(llama.run(home, "llama-perplexity", "-m", files[variant], "--kl-divergence", *common))
        cli.say("perplexity", "the same through our engine")
        report = llamacpp_compat.report(settings, variant, against, text)
        scored = llama.base_tokens(stored)
    if scored != ids[: llamacpp_compat.N_CTX * report["windows"]]:
        raise DataError(f"the {len(scored)} tokens that llama-perplexity read are not those that our engine scored")
    rows = []
    for name, (value, error) in printed.items():
        ours = report["figures"][name]
        apart = abs(ours["value"] - value) / abs(value) if value else float(ours["value"] != 0)
        rows.append({
            "figure": name, "unit": ours["unit"], "n": ours["n"], "ours": ours["value"], "ours_error": ours["standard_error"],
            "llamacpp": value, "llamacpp_error": error, "apart": apart, "agrees": apart <= APART if name in JUDGED else None,
        })  # fmt: skip
    return report | {"text": facts, "rows": rows}


# --- speed -------------------------------------------------------------------------------------------------------


class Rates(NamedTuple):
    """Tokens a second: of the prompt, and of what follows it."""

    prefill: float
    decode: float


def llama_bench(home: Path, file: Path, threads: int) -> Rates:
    """One repetition each: a prompt in an empty cache; tokens one by one behind a prompt of the same length."""
    common = ("-m", str(file), "-t", str(threads), "-r", "1", "-o", "json")
    prompt = json.loads(llama.run(home, "llama-bench", *common, "-p", str(PROMPT), "-n", "0"))
    decode = json.loads(llama.run(home, "llama-bench", *common, "-p", "0", "-n", str(OUTPUT), "-d", str(PROMPT)))
    return Rates(prompt[0]["avg_ts"], decode[0]["avg_ts"])


def our_engine(engine: Any, prompt: list[int]) -> Rates:
    """One greedy request, timed as `benchmark` times it, behind one that is not: llama-bench warms up for each test, too."""
    list(engine.stream(prompt[::-1], 2, Sampling(stop=False)))
    submitted = time.monotonic()
    times = [at for _, at in engine.stream(prompt, OUTPUT + 1, Sampling(stop=False))]
    return Rates(PROMPT / (times[0] - submitted), OUTPUT / (times[-1] - times[0]))


def speed(settings: Params, home: Path, variant: str, rounds: int) -> dict[str, Any]:
    """Rounds in turn, each with a prompt of its own, and the median of their ratios."""
    folder, threads = artifacts.model_dir(variant), settings.thread_count
    llamacpp.LONGEST = ROOM
    engine: Any = engines.load("llamacpp", folder, threads=threads)
    prompts = np.random.default_rng(settings.seed).integers(0, engine.vocab_size, (rounds + 1, PROMPT)).tolist()
    work = {
        "ours": lambda k: our_engine(engine, prompts[k]), "llamacpp": lambda _: llama_bench(home, folder / "model.gguf", threads)
    }  # fmt: skip
    rates = harness.in_turns(work, rounds)
    engine.close()
    report = {}
    for phase in Rates._fields:
        each = {who: [getattr(r, phase) for r in found] for who, found in rates.items()}
        ratios = [a / b for a, b in zip(each["ours"], each["llamacpp"])]
        ratio, low, high = harness.median(ratios)
        medians = {f"{who}_tok_s": float(np.median(rate)) for who, rate in each.items()}
        report[phase] = {"ratio": ratio, "low": low, "high": high, "n": rounds, **medians, "ratios": ratios}
    return report


def judge(decode: dict[str, Any]) -> str:
    """PASS: the whole interval at or above the bound; FAIL: wholly below; else INCONCLUSIVE."""
    if decode["low"] is None or decode["high"] is None:
        return "INCONCLUSIVE"
    return "PASS" if decode["low"] >= DECODE_BOUND else "FAIL" if decode["high"] < DECODE_BOUND else "INCONCLUSIVE"


# --- the command -------------------------------------------------------------------------------------------------


def show(report: dict[str, Any], variant: str, against: str) -> None:
    print(harness.head("figure", f"{variant} against {against}: ours", "llama-perplexity", "apart", "agrees"))
    for r in report["divergence"]["rows"]:
        both = [f"{r[who]:.6g} ± {r[f'{who}_error'] or float('nan'):.2g} {r['unit']}" for who in ("ours", "llamacpp")]
        print(harness.row(r["figure"], *both, f"{100 * r['apart']:.3f} %", "" if r["agrees"] is None else r["agrees"]))
    for phase, s in report["speed"].items():
        rates = f"ours {s['ours_tok_s']:.1f} tok/s, llama-bench {s['llamacpp_tok_s']:.1f}"
        print(f"{phase}: {rates}; ratio {s['ratio']:.3f} [{s['low']}, {s['high']}], median of {s['n']} rounds")


def main(
    variant: Annotated[str, typer.Argument()] = "gguf-q4_0",
    against: str = "gguf-q8_0",
    tokens: Annotated[int, typer.Option(help="Tokens of text, about; a window of 512 takes 25 MB of disk meanwhile.")] = 12000,
    rounds: Annotated[int, typer.Option(help="Rounds of speed; fewer than 6 give no interval.")] = 41,
) -> None:
    """Hold our divergence and speed figures against llama.cpp's own programs."""
    settings = params.load()
    home = llama.build(settings.thread_count)
    report = {
        "divergence": divergence(settings, home, variant, against, tokens), "speed": speed(settings, home, variant, rounds),
        "machine": hardware.describe(settings.thread_count),
    }  # fmt: skip
    artifacts.write_json(REPORT, report)
    show(report, variant, against)
    apart = [r["figure"] for r in report["divergence"]["rows"] if r["agrees"] is False]
    verdict = judge(report["speed"]["decode"])
    agreement = f"out of tolerance: {', '.join(apart)}" if apart else "agrees"
    cli.say("llamacpp", f"divergence {agreement}; decode rate at least {DECODE_BOUND} of llama-bench's: {verdict}")
    sys.exit(1 if apart or verdict == "FAIL" else 3 if verdict != "PASS" else 0)


if __name__ == "__main__":
    cli.run(main)
