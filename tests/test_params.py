"""A fault in params.yaml is reported with its line, its value and the nearest right key."""

import functools
import re
from pathlib import Path
from typing import Annotated, Any

import pytest
import yaml
from conftest import ROOT
from dvc.utils.serialize import load_yaml
from pydantic import Field

from pipeline import check, evalset
from pipeline.core import params
from pipeline.core.errors import ParamsError
from pipeline.core.explain import check_options
from pipeline.evalset import tasks

GOOD = (ROOT / "params.yaml").read_text(encoding="utf-8")
READ_ONCE = {
    (module, name): functools.cache(getattr(module, name))
    for module, names in ((evalset, ("load_texts", "load_prompts")), (tasks, ("local_tasks", "load_task")))
    for name in names
}


def written(tmp_path: Path, old: str, new: str) -> Path:
    """The project's params.yaml with one change."""
    assert old in GOOD, f"params.yaml no longer holds {old!r}"
    path = tmp_path / "params.yaml"
    path.write_text(GOOD.replace(old, new, 1), encoding="utf-8")
    return path


def fault(path: Path) -> str:
    with pytest.raises(ParamsError) as caught:
        params.load(path)
    return str(caught.value)


@pytest.fixture
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkout as working directory; its sets are read once for all tests here."""
    monkeypatch.chdir(ROOT)
    for module, name in READ_ONCE:
        monkeypatch.setattr(module, name, READ_ONCE[module, name])


@pytest.mark.parametrize("old, new, expected", [
    ("seed: 2026", "sede: 2026", ["params.yaml:2:", "sede", "did you mean 'seed'"]),
    ("rounds: 5}", "rounds: 2}", ["tiers.default.benchmark.rounds = 2", "must be at least 3"]),
    ("max_rounds: 10", "max_rounds: 4", ["tiers.default.benchmark", "max_rounds = 4 is below rounds = 5"]),
    ("reference: bf16", "reference: bf61", ["reference: 'bf61' is not a variant", "did you mean 'bf16'"]),
    ("margin: 0.02 nats", "margin: 0.02", ["margin = 0.02", "bare number"]),
    ("required: [int8]  ", "required: [itn8]  ", ["gate.required", "'itn8'", "did you mean 'int8'"]),
    ("required: [int8]  ", "required: [bf16]  ", ["gate.required", "'bf16' is the reference"]),
    ("  smoke:   ", "  smo.ke:   ", ["tier name 'smo.ke'"]), ("  int8:      {", '  "int8\\n": {', ["variant name 'int8\\n'"]),
    ("tier: default", "tier: defualt", ["tier: 'defualt' is not in tiers", "did you mean 'default'"]),
    ("{facts: 24, ", "{facts: 24, facts: 50, ", ['duplicate key "facts"']),
    ("{facts: 24, ", "{facts: 0, ", ["tiers.smoke.tasks.facts = 0", "must be at least 1 or 'all'"]),
    ("source: text", "source: hub", ["calibration", "source hub needs `hub: {dataset: org/name}`"]),
    ("seed: 2026", "rounds: 1\nsede: 2026", ["sede: unknown key", "rounds: unknown key"]),  # all faults at once
])  # fmt: skip
def test_a_fault_names_line_value_and_remedy(tmp_path: Path, old: str, new: str, expected: list[str]) -> None:
    message = fault(written(tmp_path, old, new))
    assert all(part in message for part in expected), message


@pytest.mark.parametrize("content, expected", [
    (b"seed: 1\nthreads: \xe4", "params.yaml:2: is not UTF-8 (byte 17)"),
    (b"seed: 1\n\tthreads: 1", "params.yaml:2: is not valid YAML (found character"),
    (b"seed: !!python/object:os.system x", "params.yaml:1: is not valid YAML (could not determine a constructor"),
    (b"seed: 1\n---\nseed: 2", "params.yaml:2: is not valid YAML (but found another document)"),
    (b"", "params.yaml: the file: is empty"), (b"- 1", "params.yaml: the file: must be a section"),
    (None, "params.yaml cannot be read (Is a directory)"),
])  # fmt: skip
def test_a_file_that_cannot_be_read_has_a_line_only_where_one_is_to_blame(
    tmp_path: Path, content: bytes | None, expected: str
) -> None:
    path = tmp_path / "params.yaml"
    path.mkdir() if content is None else path.write_bytes(content)
    assert fault(path).removeprefix(f"{tmp_path}/").startswith(expected)


def test_a_missing_section_has_no_line_and_is_named(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    path.write_text(yaml.safe_dump({k: v for k, v in yaml.safe_load(GOOD).items() if k != "gate"}), encoding="utf-8")
    assert fault(path).endswith("params.yaml: gate: this key is required")


# Each kind of fault that pydantic finds in a section, or in an option of a backend: (what params.yaml has, the message).
KINDS = {
    "model_type": ({"calibration": 5}, "calibration = 5: must be a section"),
    "model_attributes_type": ({"model": "hub"}, "model = 'hub': must be a section"),
    "dict_type": ({"variants": ["a"]}, "variants = ['a']: must be a section"),
    "list_type": ({"gate.required": "int8"}, "gate.required = 'int8': must be a list, such as [a, b]"),
    "int_type": ({"seed": 1.0}, "seed = 1.0: must be a whole number"),
    "float_type": ({"compare.confidence": "0.9"}, "compare.confidence = '0.9': must be a number"),
    "bool_type": ({"evaluate.allow_truncated": 1}, "evaluate.allow_truncated = 1: must be true or false"),
    **{
        f"experiment {k}": ({"track.experiment": name}, "must be one line without quotes")
        for k, name in enumerate(("", "  ", ".", "..", "a\nb", 'it\'s "both"', "x" * 251))
    },
    "string_type": ({"track.experiment": 3}, "track.experiment = 3: must be text; put it in quotes"),
    "literal_error": ({"gate.inconclusive": 3}, "gate.inconclusive = 3: must be 'blocks' or 'passes'"),
    "union": ({"threads": "atuo"}, "threads = 'atuo': must be 'auto' or a whole number; did you mean 'auto'?"),
    "finite_number": ({"serving.timeout_s": float("inf")}, "serving.timeout_s = inf: must be a finite number"),
    "greater_than": ({"compare.confidence": 0.5}, "compare.confidence = 0.5: must be more than 0.5"),
    "less_than of nan": ({"compare.confidence": float("nan")}, "compare.confidence = nan: must be less than 1.0, and finite"),
    "greater_than_equal": ({"diverge.window": 7}, "diverge.window = 7: must be at least 8"),
    "less_than": ({"seed": 2**32}, "seed = 4294967296: must be less than 4294967296"),
    "too_short": ({"gate.required": []}, "gate.required = []: must be 1 or more, and there are 0"),
    "too_short mapping": ({"variants": {}}, "variants: must be 1 or more"),
    "missing": ({"tiers.smoke": {}}, "tiers.smoke.documents: this key is required"),
    "extra_forbidden": ({"evaluate.batchsize": 1}, "evaluate.batchsize: unknown key (value 1); did you mean 'batch_size'?"),
    "union_tag_invalid": ({"model.source": "hbu"}, "model: source hbu; did you mean 'hub'?"),
    "union_tag_not_found": ({"model": {"id": "a"}}, "model: source is missing; there is: package, path, hub"),
    "value_error": ({"model.package": "a>=1"}, "model.package = 'a>=1': must be a name and a version, as in name==1.2.3"),
    "none of a section": ({"variants": None}, "variants: is empty; must be a section"),
    "none where nobody is served": ({"serving.variants": None}, "serving.variants: is empty; must be a section"),
    "none of serving": ({"serving": None}, "serving: is empty; must be a section"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_no_message_repeats_the_librarys_words(tmp_path: Path, kind: str) -> None:
    changes, expected = KINDS[kind]
    data = yaml.safe_load(GOOD)
    for dotted, value in changes.items():
        *above, last = dotted.split(".")
        section = data
        for key in above:
            section = section[key]
        section[last] = value
    path = tmp_path / "params.yaml"
    path.write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
    message = fault(path)
    assert expected in message and not re.search(r"Input should|valid |Value error|pydantic|function-", message), message
    first = next(
        i for i, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1) if line.startswith(dotted.split(".")[0])
    )
    assert int(message.split("params.yaml:")[1].split(":")[0]) >= first


@pytest.mark.parametrize("hint, value, expected", [
    (tuple[int, int], [1, 2], "option x = [1, 2]: must be a list"),  # strictly: YAML has no tuples, so no option may be one
    (list[str], "a", "option x = 'a': must be a list"), (list[str], ["a", 3], "option x.1 = 3: must be text"),
    (Annotated[float, Field(gt=0, lt=1)], 5, "option x = 5: must be less than 1"),
    (Annotated[int, Field(multiple_of=32)], 5, "option x = 5: must be a multiple of 32"),
    (Annotated[list[int], Field(max_length=1)], [1, 2], "option x = [1, 2]: must be 1 or fewer"),
    (None, 5, "option x = 5: must be left empty"), (bool, 1, "option x = 1: must be true or false"),
])  # fmt: skip
def test_a_fault_of_an_option_has_the_same_words(hint: Any, value: object, expected: str) -> None:
    def method(*, x: object = None) -> None:
        """A backend's function."""

    method.__annotations__["x"] = hint
    with pytest.raises(ParamsError) as caught:
        check_options("quantizer 'q'", method, {"x": value}, given=set())
    assert expected in str(caught.value) and "Input should" not in str(caught.value)


@pytest.mark.parametrize("value", ["1e-4", "010", "0o17", "1_000", "12:30", "2026-12-01", ".inf", "on", "no", "~", "'1e-4'"])
def test_yaml_values_are_read_as_dvc_reads_them(tmp_path: Path, value: str) -> None:
    path = written(tmp_path, "{dtype: bfloat16}", f"{{dtype: {value}}}")
    read = params.load(path).variants["bf16"].options["dtype"]
    by_dvc = load_yaml(str(path))["variants"]["bf16"]["options"]["dtype"]
    assert (read, type(read)) == (by_dvc, type(by_dvc))


Q4 = "engine: llamacpp, options: {type: Q4_0}"


@pytest.mark.parametrize("old, new, expected", [
    ("", "", []),  # as shipped
    ("hf, options: {bits: 4, group_size", "hf, options: {bits: 4, group_sise", ["unknown option 'group_sise'", "'group_size'"]),
    ("bits: 4,", "bits: 5,", ["variants.int4-rtn", "bits = 5"]),
    ("group_size: 64", "group_size: '64'", ["group_size = '64'", "must be -1, 16"]),
    ("metric: acc_delta/all", "metric: acc_delta/fatcs", ["'acc_delta/fatcs'", "did you mean 'acc_delta/facts'"]),
    ("metric: acc_delta/all", "metric: acc_delta/prose_ppl", ["has no right and wrong; use byte_ppl_ratio/prose_ppl"]),
    ("metric: acc_delta/all", "metric: score_delta/instruct", ["has no choices; use acc_delta/instruct"]),
    ("metric: acc_delta/all", "metric: acc_delta", ["'acc_delta' is not measured in tier 'default'", "'acc_delta/all'"]),
    ("metric: kld_mean", "metric: kld_maen", ["'kld_maen' is not known", "did you mean 'kld_mean'"]),
    ("metric: speed_ratio", "metric: tpot_ms/context-1025", ["is not measured", "did you mean 'tpot_ms/context-1024'"]),
    ("set: evalsets/calibration/own.jsonl", "set: evalsets/corpus/news.jsonl", ["overlaps what is measured", "'news-01'"]),
    ("set: evalsets/calibration/own.jsonl", "set: evalsets/calibration/onw.jsonl", ["calibration.set", "cannot be read"]),
    ("{dtype: bfloat16}", "{}", ["variants.bf16", "option 'dtype' is required"]),
    ("{dtype: bfloat16}", "{dtype: bfloat16}, engine_options: {kv: int8}", ["'bf16' quantizes its key-value cache", "remove kv"]),
    ("metric: acc_delta/all", "metric: acc_depth/retrieval:long-0.2", ["long-0.2' is not measured in tier 'default'"]),
    ("engine: llamacpp", "engine: hf", ["variants.gguf-bf16", "does not read what quantizer 'gguf'", "llamacpp"]),
    ("engine: hf, options: {scheme", "engine: llamacpp, options: {scheme", ["variants.int8", "use engine: hf"]),
    ("{dtype: bfloat16}", "{dtype: bfloat16}, engine_options: {speculate: {draft: ngram, tokens: 4}}", ["'bf16' speculates"]),
    (Q4, f"{Q4}, engine_options: {{speculate: {{draft: gguf-q8_0, tokens: 4}}}}", []),
    (Q4, f"{Q4}, engine_options: {{speculate: {{draft: gguf-q8, tokens: 4}}}}", ["'gguf-q8' is not", "did you mean 'gguf-q8_0'"]),
    (Q4, f"{Q4}, engine_options: {{speculate: {{draft: int8, tokens: 4}}}}", ["draft 'int8' runs in engine 'hf'"]),
    (Q4, f"{Q4}, engine_options: {{speculate: {{draft: ngram, tokens: 17}}}}", ["speculate.tokens = 17: must be at most 16"]),
    (Q4, f"{Q4}, engine_options: {{speculate: {{draft: ngram}}}}", ["speculate.tokens: this key is required"]),
    ("margin: 0.02 nats", "margin: -0.02 nats", ["must be a finite number that is not negative"]),
])  # fmt: skip
@pytest.mark.usefixtures("at_root")
def test_faults_that_need_other_modules_are_found_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, expected: list[str]
) -> None:
    monkeypatch.setattr(check, "_lm_eval_tasks", lambda: {"hellaswag"})  # the real index takes ten seconds
    faults = "\n".join(check.faults(params.load(written(tmp_path, old, new))))
    assert all(part in faults for part in expected) and bool(expected) == bool(faults), faults


@pytest.mark.usefixtures("at_root")
def test_a_rule_may_name_a_depth_that_the_tier_asks_for(tmp_path: Path) -> None:
    path = written(tmp_path, "metric: acc_delta/all, margin", "metric: acc_depth_delta/retrieval:long-0.9, margin")
    path.write_text(path.read_text(encoding="utf-8").replace("retrieval: 24", "retrieval: all"), encoding="utf-8")
    assert not check.faults(params.load(path))
