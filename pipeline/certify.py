"""certify: build and judge the candidates in their frozen order, up to the first that does not pass -> reports/smallest/answer.json

Fixed-sequence testing (Learn then Test, Angelopoulos et al. 2021; Pareto Testing, arXiv 2210.07913): the order was frozen on other
texts, and each candidate must pass all rules at the gate's own confidence. A false PASS is then as likely as in a single test,
however many candidates there are. Each is an ordinary variant, which the pipeline's own stages build and measure with a copy of
params.yaml."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from ruamel.yaml import YAML

from pipeline.core import artifacts, cli, params, records
from pipeline.core.errors import ArtifactError
from pipeline.core.params import Params, Variant
from pipeline.core.records import Answer, Candidates, Certified, Proposal
from pipeline.divergence.store import Checkpoints
from pipeline.gating import looks, verdicts
from pipeline.layers.choosing import digest_of, setup_of
from pipeline.reporting import smallest

MEASURE = ("quantize", "diverge", "evaluate", "benchmark", "compare")
COPY = artifacts.ARTIFACTS / "smallest.params.yaml"


def frozen(settings: Params) -> Candidates:
    """The frozen candidates. Raises `ArtifactError` if they were changed since, or chosen with another table."""
    found = records.read(artifacts.CANDIDATES, Candidates)
    changed = digest_of(found["order"], found["proposals"]) != found["digest"]
    if changed or found["sensitivity"] != artifacts.sha256_file(artifacts.SENSITIVITY):
        raise ArtifactError(f"{artifacts.CANDIDATES} was changed after it was frozen; run `make smallest`")
    if taken := set(found["order"]) & settings.variants.keys():
        raise ArtifactError(f"params.yaml has a variant {min(taken)!r} already: its files would be overwritten; rename it")
    return found


def judge(name: str, proposal: Proposal, settings: Params) -> Certified:
    """Build, measure and judge one candidate. settings: the copy, which lists it."""
    started = time.monotonic()
    env = os.environ | {"QUANTGATE_PARAMS": str(COPY)}
    for stage in MEASURE:
        code = subprocess.run([sys.executable, "-m", f"pipeline.{stage}", name], env=env).returncode
        if code:
            raise ArtifactError(f"{stage} {name} failed with exit code {code} (see above); `make smallest` continues from there")
    results = verdicts.load_results(settings)
    verdict = verdicts.of(results, settings)["variants"][name]
    manifest = records.read(artifacts.model_dir(name) / artifacts.MANIFEST, records.ModelManifest)
    artifacts.metrics(name).replace(artifacts.SMALLEST / f"{name}.json")  # the folders that other stages depend on stay as they are
    artifacts.failures(name).unlink()
    return {
        "name": name, "options": proposal["options"], "model": manifest["digest"], "weight_bytes": manifest.get("weight_bytes"),
        "bits_per_weight": manifest.get("bits_per_weight"), "predicted": proposal["predicted"],
        "measured": (proposal["engine"] or proposal["measured"])["value"] or 0.0,
        "kld": results[name]["metrics"].get("kld_mean"), "judged": verdict,
        "wall_s": round(time.monotonic() - started, 1),
    }  # fmt: skip


def copy_of(settings: Params, found: Candidates, setup: params.Smallest) -> Params:
    """Write params.yaml with the candidates among its variants; returns the same in memory."""
    by = {p["name"]: p for p in found["proposals"]}
    yaml = YAML()
    data = yaml.load(Path("params.yaml").read_text(encoding="utf-8"))
    for name in found["order"]:
        data["variants"][name] = {"quantizer": setup.quantizer, "engine": setup.engine, "options": by[name]["options"]}
    out = io.StringIO()
    yaml.dump(data, out)
    artifacts.write_text(COPY, out.getvalue())
    more = {n: Variant(quantizer=setup.quantizer, engine=setup.engine, options=by[n]["options"]) for n in found["order"]}
    return settings.model_copy(update={"variants": {**settings.variants, **more}})


def certify(settings: Params) -> Answer:
    """Judge candidates in order, and stop at the first that does not pass."""
    setup, found = setup_of(settings), frozen(settings)
    with_candidates = copy_of(settings, found, setup)
    by = {p["name"]: p for p in found["proposals"]}
    tested: list[Certified] = []
    store = records.read(artifacts.FLOOR, records.Floor)["store"]
    judged_by = [settings.gate.model_dump(), settings.compare.model_dump(), settings.amount.model_dump()]
    pieces = Checkpoints.of("certify", [found["digest"], store, judged_by, artifacts.versions()])
    for name in found["order"]:
        tested.append(pieces.json(name, partial(judge, name, by[name], with_candidates)))
        cli.say("certify", f"{name}: {tested[-1]['judged']['verdict']}: {tested[-1]['judged']['reason']}")
        if tested[-1]["judged"]["verdict"] != "PASS":
            break
    passed = [c["name"] for c in tested if c["judged"]["verdict"] == "PASS"]
    answer: Answer = {
        "candidates": found["digest"], "store": store, "tested": tested,
        "answer": passed[-1] if passed else None, "looks": looks.count(settings),
        "words": [], "wall_s": 0.0, "load": os.getloadavg()[0],
    }  # fmt: skip
    answer["words"] = words(answer, settings)
    pieces.clear()
    return answer


def words(answer: Answer, settings: Params) -> list[str]:
    """The answer beside the listed variants that pass, predicted beside measured divergence, and how worn the set is."""
    lines = []
    for c in answer["tested"]:
        kld, size = c["kld"], c["weight_bytes"]
        predicted = f"predicted {c['predicted']:.4f}, " if c["predicted"] is not None else ""
        certified = f"{kld['value']:.4f} [{kld['low']:.4f}, {kld['high']:.4f}]" if kld and kld["low"] is not None else "unknown"
        where = f"{predicted}{c['measured']:.4f} nats built and run on the texts that chose, {certified} where nothing was chosen"
        lines.append(f"{c['judged']['verdict']} {c['name']}: {(size or 0) / 1e6:.1f} MB, {where}")
    if (best := smallest.best_of(answer)) is None:
        lines.append("no candidate passes the gate: the smallest that passes is among the listed variants, or none is")
        return [*lines, looks.note(answer["looks"], settings)]
    size = best["weight_bytes"] or 0
    gate, results = records.read(artifacts.GATE, records.Verdict), verdicts.load_results(settings)
    for name, v in gate["variants"].items():
        other = results[name]["metrics"].get("weight_bytes")
        if v["verdict"] == "PASS" and other and other["value"]:
            lines.append(
                f"{100 * (1 - size / other['value']):.0f} % smaller than {name}, which passes too ({other['value'] / 1e6:.1f} MB)"
            )
    lines.append(
        f"the smallest that was certified: {best['name']}, {size / 1e6:.1f} MB, {best['bits_per_weight']:.2f} bits a weight"
    )
    return [*lines, looks.note(answer["looks"], settings)]


def main() -> None:
    """Certify the candidates in their frozen order."""
    watch = artifacts.Stopwatch("certify")
    settings = params.load()
    answer = certify(settings)
    answer["wall_s"] = watch.done()
    artifacts.write_json(artifacts.ANSWER, answer)
    table, found = records.read(artifacts.SENSITIVITY, records.Sensitivity), records.read(artifacts.CANDIDATES, Candidates)
    artifacts.write_text(smallest.PAGE, smallest.page(smallest.Found(table, found, answer)))
    for line in answer["words"]:
        cli.say("certify", line)
    cli.say("certify", f"{len(answer['tested'])} judged, {answer['wall_s']:.1f} s at load {answer['load']:.1f}")


if __name__ == "__main__":
    cli.run(main)
