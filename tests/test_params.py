"""A fault in params.yaml is found with its line, its value and the nearest right key."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline import check
from pipeline.core import params
from pipeline.core.errors import ParamsError

ROOT = Path(__file__).resolve().parent.parent
GOOD = (ROOT / "params.yaml").read_text(encoding="utf-8")


def fault(tmp_path: Path, old: str, new: str) -> str:
    assert old in GOOD, f"params.yaml no longer holds {old!r}"
    path = tmp_path / "params.yaml"
    path.write_text(GOOD.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(ParamsError) as caught:
        params.load(path)
    return str(caught.value)


def test_the_shipped_params_are_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert check.faults(params.load()) == []


@pytest.mark.parametrize(
    "old, new, expected",
    [
        ("seed: 2026", "sede: 2026", ["params.yaml:2:", "sede", "did you mean 'seed'"]),
        ("quantizer: torchao", "quantiser: torchao", ["variants.int8.quantiser", "did you mean 'quantizer'"]),
        ("rounds: 5}", "rounds: 2}", ["tiers.default.benchmark.rounds = 2", "greater than or equal to 3"]),
        ("max_rounds: 10", "max_rounds: 4", ["tiers.default.benchmark", "max_rounds = 4 is below rounds = 5"]),
        ("rounds: 5}", "rounds: five}", ["benchmark.rounds = 'five'", "integer"]),
        ("source: package ", "source: pakage ", ["pakage", "did you mean 'package'"]),
        ("batch_size: 16", "batch_size: '16'", ["evaluate.batch_size = '16'", "integer"]),
        ("temperature: 1.0", "temperature: 1e-4", ["temperature = '1e-4'", "YAML reads 1e-4 as text, write 1.0e-4"]),
        ("temperature: 1.0", "temperature: 0.0", ["temperature = 0.0", "greater than 0"]),
        ("reference: bf16", "reference: bf61", ["'bf61' is not a variant", "did you mean 'bf16'"]),
        ("margin: 0.02 nats", "margin: 0.02", ["margin = 0.02", "bare number"]),
        ("margin: 0.02 nats", "marign: 0.02 nats", ["marign", "did you mean 'margin'"]),
        ("required: [int8]  ", "required: [itn8]  ", ["gate.required", "'itn8'", "did you mean 'int8'"]),
        ("required: [int8]  ", "required: [bf16]  ", ["gate.required", "'bf16' is the reference"]),
        ("required: [int8]  ", "required: []  ", ["gate.required = []"]),
        ("  smoke:   ", "  smo.ke:   ", ["tier name 'smo.ke'"]),
        ("tier: default", "tier: defualt", ["tier 'defualt' is not in tiers", "did you mean 'default'"]),
        ("{facts: 48, ", "{facts: 48, facts: 50, ", ["'facts' is given twice"]),
        ("{facts: 48, ", "{facts: 0, ", ["tiers.smoke.tasks.facts = 0", "a count of at least 1, or all"]),
        ("{facts: 48, ", "{facts: every, ", ["tiers.smoke.tasks.facts = 'every'", "a count of at least 1, or all"]),
        ("{facts: 48, ", "{facts: true, ", ["tiers.smoke.tasks.facts = True", "a count of at least 1, or all"]),
        ("source: text", "source: hub", ["calibration", "source hub needs `hub: {dataset: org/name}`"]),
        ("source: text", "source: slef", ["calibration.source = 'slef'", "did you mean 'self'"]),
        ("seed: 2026", "seed: -2026", ["seed = -", "greater than or equal to 0"]),
        ("  int8:      {", "  int8.0:      {", ["variant name 'int8.0'"]),
        ("inconclusive: blocks", "inconclusive: block", ["inconclusive = 'block'", "did you mean 'blocks'"]),
        ("calibration:  ", "calibratoin:  ", ["calibratoin", "did you mean 'calibration'"]),
        ("confidence: 0.95", "confidence: .nan", ["compare.confidence = nan"]),
    ],
)
def test_a_fault_names_line_value_and_remedy(tmp_path: Path, old: str, new: str, expected: list[str]) -> None:
    message = fault(tmp_path, old, new)
    assert all(part in message for part in expected), message


def test_all_faults_are_listed_at_once(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    path.write_text(GOOD.replace("seed: 2026", "sede: 2026").replace("rounds: 5}", "rounds: 1}"), encoding="utf-8")
    with pytest.raises(ParamsError) as caught:
        params.load(path)
    assert "sede" in str(caught.value) and "rounds" in str(caught.value)


def test_params_that_are_not_utf_8_are_named(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    path.write_bytes(b"seed: 1 # \xe4")
    with pytest.raises(ParamsError, match="is not UTF-8"):
        params.load(path)


def test_a_key_given_twice_is_an_error(tmp_path: Path) -> None:
    assert "given twice (first on line 2)" in fault(tmp_path, "threads: auto", "seed: 1")


def test_the_line_is_that_of_the_key(tmp_path: Path) -> None:
    message = fault(tmp_path, "output_tokens: 32", "output_tokens: 0")
    line = next(i for i, text in enumerate(GOOD.split("\n"), 1) if "output_tokens: 32" in text)
    assert f"params.yaml:{line}: tiers.default.benchmark.output_tokens = 0" in message


@pytest.mark.parametrize(
    "old, new, expected",
    [
        (
            "{quantizer: gptq,    engine: hf, options: {bits: 4, group_size: 64",
            "{quantizer: gptq,    engine: hf, options: {bits: 4, group_sise: 64",
            ["variants.int4-gptq", "unknown option 'group_sise'", "'group_size'"],
        ),
        ("bits: 4,", "bits: 5,", ["variants.int4-rtn", "bits = 5"]),
        ("group_size: 64", "group_size: '64'", ["group_size = '64'", "should be -1, 16"]),
        ("group_size: 64", "group_size: 0", ["group_size = 0", "should be -1, 16"]),
        ("metric: acc_delta/all", "metric: acc_delta/fatcs", ["'acc_delta/fatcs'", "did you mean 'facts'"]),
        ("metric: acc_delta/all", "metric: acc_delta/prose_ppl", ["has no right and wrong; use byte_ppl_ratio/prose_ppl"]),
        ("metric: acc_delta/all", "metric: acc_delta", ["'acc_delta'", "give one of the tier's tasks"]),
        ("metric: kld_mean", "metric: kld_mean/nwes", ["'kld_mean/nwes'", "did you mean 'news'"]),
        ("metric: speed_ratio", "metric: speed_ratio/x", ["speed_ratio has no parts"]),
        ("metric: speed_ratio", "metric: tpot_ms/context-1025", ["no such part", "did you mean 'context-1024'"]),
        ("set: evalsets/calibration/own.jsonl", "set: evalsets/corpus/news.jsonl", ["overlaps what is measured", "'news-01'"]),
        ("{dtype: bfloat16}", "{dtype: float61}", ["variants.bf16", "dtype = 'float61'"]),
        ("{dtype: bfloat16}", "{}", ["variants.bf16", "option 'dtype' is needed"]),
        ("quantizer: gptq", "quantizer: gtpq", ["quantizer 'gtpq'", "did you mean 'gptq'"]),
        ("engine: hf, options: {scheme", "engine: fh, options: {scheme", ["engine 'fh'"]),
        (
            "engine: llamacpp",
            "engine: hf",
            ["variants.gguf-q8_0", "does not read what quantizer 'gguf'", "llamacpp"],
        ),
        ("engine: hf, options: {scheme", "engine: llamacpp, options: {scheme", ["variants.int8", "use engine: hf"]),
        ("{facts: 48, ", "{fatcs: 48, ", ["tiers.smoke.tasks", "'fatcs'", "did you mean 'facts'"]),
        ("grammar: 48, ", "grammar: all, ", ["tiers.default.tasks.grammar = 240", "is less than tiers.smoke's 'all'"]),
        ("metric: kld_mean", "metric: kld_maen", ["'kld_maen' is not known", "did you mean 'kld_mean'"]),
        ("margin: 7 pp", "margin: 7 %", ["top1_agreement", "a number and a unit (pp)"]),
        ("margin: 0.02 nats", "margin: -0.02 nats", ["must be a finite number that is not negative"]),
        ("set: evalsets/calibration/own.jsonl", "set: evalsets/calibration/onw.jsonl", ["calibration.set", "is not here"]),
    ],
)
def test_what_needs_other_modules_is_checked_before_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, expected: list[str]
) -> None:
    monkeypatch.chdir(ROOT)
    path = tmp_path / "params.yaml"
    path.write_text(GOOD.replace(old, new, 1), encoding="utf-8")
    found = "\n".join(check.faults(params.load(path)))
    assert all(part in found for part in expected), found
    assert bool(expected) == bool(found)
