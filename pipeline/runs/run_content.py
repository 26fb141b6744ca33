"""What is logged of a variant and of a state, as plain values: names, curves, params, datasets, words. No MLflow, no models."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pipeline.core import artifacts
from pipeline.core.errors import ArtifactError
from pipeline.core.params import Params
from pipeline.numbers.shown import UNITS, dequantized, n_of, show

SWEPT = re.compile(r"(?P<stem>[^/]+)/(?P<axis>context|batch|concurrency|closed)-(?P<at>\d+)")
AXES = {"closed": "concurrency"}  # so many requests at once, each waiting for its own answer
DIGEST = 32  # hexadecimal digits of a dataset's digest: MLflow keeps 36
DIGITS = 4  # of a figure in words: beside its bound it must not look like it
BOUNDS = (("", "value"), ("_low", "low"), ("_high", "high"))
Values = dict[str, Any]  # value, low, high, ...


def flat_metrics(metrics: dict[str, Values]) -> dict[str, float]:
    """{name: value} with `_low` and `_high` beside; unknown values are left out, since MLflow would show them as 0.

    A bound goes before the slash: kld_mean_low/news. Two names that would collide raise.
    """
    flat: dict[str, float] = {}
    for name, metric in metrics.items():
        for full, value in _bounded(name, metric):
            if full in flat:
                raise ArtifactError(f"two metrics would both be called {full!r} in MLflow")
            flat[full] = value
    return flat


def _bounded(name: str, metric: Values) -> Iterator[tuple[str, float]]:
    """(name, value) of a figure and of its bounds; nothing for those that are unknown."""
    stem, slash, part = name.partition("/")
    for suffix, key in BOUNDS:
        if metric.get(key) is not None:
            yield f"{stem}{suffix}{slash}{part}", float(metric[key])


def curves(result: Values, serving: Values | None = None) -> dict[str, list[tuple[int, float]]]:
    """{name: [(step, value), ...]} of what is measured along an axis, bounds as curves beside; the step is the axis' value.

    kld_by_position/corpus over tokens before, tpot_ms_by_context, throughput_tok_s_by_concurrency, ... A curve that has a
    metric's name raises: MLflow would make one of the two.
    """
    found: dict[str, dict[int, float]] = {}
    for name, step, metric in _points(result, serving or {}):
        for full, value in _bounded(name, metric):
            found.setdefault(full, {})[step] = value
    if both := found.keys() & flat_metrics(result["metrics"]).keys():
        raise ArtifactError(f"a metric and a curve would both be called {min(both)!r} in MLflow")
    return {name: sorted(points.items()) for name, points in sorted(found.items())}


def _points(result: Values, serving: Values) -> Iterator[tuple[str, int, Values]]:
    drawn = result.get("curves") or {}
    for kind, points in (drawn.get("kld_by_position") or {}).items():
        yield from ((f"kld_by_position/{kind}", p["from"], p) for p in points)
    for point in drawn.get("agreement_by_position") or []:
        yield from ((f"agreement_by_position/{k}", point["position"], point[k]) for k in ("free", "forced") if k in point)
    levels = {f"{name}/{level}": m for level, own in (serving.get("levels") or {}).items() for name, m in own.items()}
    for name, metric in {**levels, **result["metrics"]}.items():
        found = SWEPT.fullmatch(name)
        if found and isinstance(metric, dict):
            yield f"{found['stem']}_by_{AXES.get(found['axis'], found['axis'])}", int(found["at"]), metric


def params_of(name: str, result: Values, manifest: Values, settings: Params) -> dict[str, Any]:
    """Everything that defines a variant and what was measured of it."""
    calibration = manifest.get("calibration") or {}
    kept = {k: calibration.get(k) for k in ("source", "set", "digest", "rows_asked", "rows_used", "tokens_per_row")}
    values = {
        "variant": name, "quantizer": result["quantizer"], "engine": result["engine"], "status": result["status"],
        **{f"options.{k}": v for k, v in result["options"].items()},
        **{f"engine_options.{k}": v for k, v in (result.get("engine_options") or {}).items()},
        **{f"calibration.{k}": v for k, v in kept.items() if v is not None},
        **{k: result[k] for k in ("reason", "reference", "base", "dequantized_from", "kernels") if result.get(k)},
        "model": result["model"], "seed": settings.seed, "tier": settings.tier, "confidence": settings.compare.confidence,
        "versions": result["versions"], "machine": result["machine"], **measured_by(settings),
    }  # fmt: skip
    return {k: _text(v) for k, v in values.items()}


def measured_by(settings: Params) -> dict[str, Any]:
    """What defines the measurement: how much of everything the tier asks for, windows, batch sizes, lengths, resamples."""
    sections = {"amount": settings.amount, **{k: getattr(settings, k) for k in ("evaluate", "diverge", "benchmark", "compare")}}
    found = {f"{name}.{k}": v for name, section in sections.items() for k, v in section.model_dump(exclude_none=True).items()}
    return {k: _text(v) for k, v in found.items()}


def _text(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, (dict, list, bool)) or value is None else value


# --- datasets ----------------------------------------------------------------------------------------------------


def datasets(variant: str) -> list[dict[str, str]]:
    """{name, digest, source, context, profile} of each set a variant was asked, read or calibrated on, as recorded then."""
    answers = _recorded(artifacts.meta_of(artifacts.answers(variant))).get("sets")
    reference = _recorded(artifacts.REFERENCE / artifacts.MANIFEST).get("sets")
    calibration = _recorded(artifacts.model_dir(variant) / artifacts.MANIFEST).get("calibration") or {}
    return [
        *_sets(answers, "evaluation"),
        *_sets(reference, "divergence"),
        *_sets(calibration.get("set_files"), "calibration"),
    ]


def _recorded(path: Path) -> Values:
    return dict(artifacts.read_json(path)) if path.exists() else {}


def _sets(files: dict[str, str] | None, context: str) -> Iterator[dict[str, str]]:
    """One dataset for each name: a task is its definition and its rows together."""
    by_name: dict[str, dict[str, str]] = {}
    for file, sha256 in (files or {}).items():
        by_name.setdefault(f"{Path(file).parent.name}/{Path(file).stem}", {})[file] = sha256
    for name, own in sorted(by_name.items()):
        yield {
            "name": name, "digest": artifacts.digest(own)[:DIGEST], "source": json.dumps(sorted(own)),
            "context": context, "profile": json.dumps({"sha256": own}),
        }  # fmt: skip


# --- words -------------------------------------------------------------------------------------------------------

COLUMNS = (
    ("size MB", "weight_bytes", 1e-6), ("KLD (nats)", "kld_mean", 1.0), ("top-1 (%)", "top1_agreement", 100.0),
    ("accuracy Δ (pp)", "acc_delta/all", 1.0), ("TTFT (ms)", "ttft_ms", 1.0), ("decode tok/s", "decode_tok_s", 1.0),
)  # fmt: skip


def verdict_of(verdict: Values, name: str, reference: str) -> str:
    """A variant's verdict as a word."""
    return "REFERENCE" if name == reference else str(verdict["variants"].get(name, {}).get("verdict", "MISSING"))


def comparison(results: dict[str, Values], verdict: Values, reference: str) -> Values:
    """The trade-off as {columns, data}: one row a variant, figures as text with their intervals."""
    data = [
        [name, verdict_of(verdict, name, reference), *(show(r["metrics"].get(m), DIGITS, scale) for _, m, scale in COLUMNS)]
        for name, r in results.items()
    ]
    return {"columns": ["variant", "verdict", *(head for head, _, _ in COLUMNS)], "data": data}


def markdown(table: Values) -> str:
    """A comparison as a table of Markdown."""
    rows: Iterable[list[str]] = [table["columns"], ["---"] * len(table["columns"]), *table["data"]]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def state_note(results: dict[str, Values], verdict: Values, settings: Params) -> str:
    """What a person reads on top of a state's run."""
    table = markdown(comparison(results, verdict, settings.reference))
    told = [f"{n_of(results, m)} {what}" for m, what in (
        ("kld_mean", "tokens"), ("acc/all", "items"), ("decode_tok_s", "rounds"))]  # fmt: skip
    against = f"`{settings.reference}`{dequantized(results[settings.reference])}"
    return (
        f"**{verdict['verdict']}**: every precision of one model against {against}; child runs are the variants.\n\n"
        f"{table}\n\nBrackets are {100 * settings.compare.confidence:.3g} % intervals over {', '.join(told)} (tier "
        f"{settings.tier}). Artifacts: report/report.html, figures/, comparison.json."
    )


def variant_note(name: str, verdict: Values, reference: str) -> str:
    """Why a variant has its verdict, one line a rule."""
    if name == reference:
        return "REFERENCE: every other variant is compared with it."
    judged = verdict["variants"].get(name, {})
    lines = [f"{judged.get('verdict', 'MISSING')}: {judged.get('reason', 'no verdict')}"]
    lines += [
        f"- {r['metric']} {_figure(r)}, n = {r['n']}: {r['verdict']}{'' if r['required'] else ', advisory'}, {r['bound']}"
        for r in judged.get("rules", [])
    ]
    return "\n".join(lines)


def _figure(rule: Values) -> str:
    scale, unit = UNITS.get(rule["unit"], (1.0, f" {rule['unit']}"))
    return f"{show(rule, DIGITS, scale)}{unit}"
