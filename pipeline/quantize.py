"""quantize: run one variant's quantizer; write the model and its manifest -> artifacts/models/<variant>/"""

from __future__ import annotations

import shutil
from pathlib import Path

from pipeline import engines, quantizers
from pipeline.core import artifacts, cli, explain, isolate, params, records
from pipeline.core.errors import NoResult
from pipeline.core.params import Variant
from pipeline.core.records import BaseManifest, Build, BuildFacts, Built
from pipeline.evalset.calibration import Calibration
from pipeline.model import attestation


def quantize(variant: Variant, base: Path, out: Path, *, calibration: Calibration, seed: int) -> Build:
    """Run a variant's quantizer from `base` into `out`; return the manifest's facts."""
    quantizers.check_model(variant.quantizer, variant.options, base)  # before anything heavy is loaded
    facts = quantizers.make(variant.quantizer, variant.options, base, out, calibration=calibration, seed=seed)
    size = attestation.measure(base, out)
    attestation.check_bits(facts, size["packed_bits"])
    dtype = artifacts.read_json(out / "config.json").get("dtype")
    return {**facts, **size, "calibration": calibration.facts, "dtype": dtype}


def answer(variant: Variant, folder: Path, facts: BuildFacts, threads: int) -> None:
    """Load a built variant in its engine and probe it, so that a broken one is known now and not an hour later. Raises if other
    kernels run than were packed, or if it does not answer like the model in memory."""
    alone = {name: value for name, value in variant.engine_options.items() if name != "speculate"}  # its draft may be built later
    engine = engines.load(variant.engine, folder, threads=threads, **alone)
    attestation.check_kernels(engine.kernels(), facts)
    attestation.check_answer(engine, facts.get("probe"))


def build(
    variant: Variant, base: Path, out: Path, *, calibration: Calibration, seed: int, threads: int, name: str = "variant"
) -> Built:
    """Quantize and probe, each in its own process. A variant that cannot run here gives status, reason and an empty folder."""
    try:
        facts = isolate.isolated(quantize, variant, base, out, calibration=calibration, seed=seed, what=f"quantize {name}")
        isolate.isolated(answer, variant, out, facts, threads, what=f"probe {name}")
    except NoResult as e:
        for left in out.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        return {"status": e.status, "reason": str(e)}
    return {"status": "ok", "reason": None, **facts}


def main(variant: str) -> None:
    """Quantize the base model into VARIANT."""
    watch = artifacts.Stopwatch("quantize", variant)
    settings = params.load()
    chosen = settings.variant(variant)
    base = records.read(artifacts.BASE / artifacts.MANIFEST, BaseManifest)
    artifacts.verify_files(artifacts.BASE, base)
    asked = {
        "variant": variant, "quantizer": chosen.quantizer, "asked": chosen.options,
        "options": explain.with_defaults(quantizers.find(chosen.quantizer), chosen.options, quantizers.GIVEN),
        "engine": chosen.engine, "engine_options": chosen.engine_options, "base": base["digest"], "seed": settings.seed,
        "trust_remote_code": base["trust_remote_code"],
    }  # fmt: skip
    origin = {"dequantized_from": base["dequantized_from"]} if "dequantized_from" in base else {}
    with artifacts.atomic_dir(artifacts.model_dir(variant)) as out:
        artifacts.write_json(out / artifacts.MANIFEST, asked)  # says whether the model's own code may run
        built = build(
            chosen, artifacts.BASE, out, calibration=Calibration(), seed=settings.seed, threads=settings.thread_count, name=variant
        )
        built.pop("probe", None)  # its last digits are this processor's
        files = artifacts.files_of(out)
        identity = artifacts.digest([asked, files])
        manifest = {**asked, **origin, **built, "files": files, "digest": identity, "versions": artifacts.versions()}
        artifacts.write_json(out / artifacts.MANIFEST, manifest)
    if built["status"] == "ok":
        what = f"{built['bits_per_weight']:.2f} bits/weight, {built['weight_bytes'] / 1e6:.1f} MB"
    else:
        what = f"{built['status']}: {built['reason']}"
    cli.say("quantize", f"{variant}: {what}, {watch.done():.1f} s")
    for warning in built.get("warnings", []):
        cli.say("quantize", f"{variant}: warning: {warning}")


if __name__ == "__main__":
    cli.run(main)
    cli.leave()
