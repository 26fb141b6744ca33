"""The registry: versions by reference, and the alias `champion` that only a fresh PASS, or a reason, moves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from track_house import VARIANTS, change, copy_tracked, sqlite_house

from pipeline import track
from pipeline.core import artifacts, params
from pipeline.core.errors import ArtifactError, ParamsError
from pipeline.tracking.registry import ALIAS, Registry

pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow's own
House = tuple[params.Params, str, MlflowClient]
NAME = "quantgate"


@pytest.fixture(scope="module")
def tracked_once(tmp_path_factory: pytest.TempPathFactory, database: Path) -> Path:
    folder = tmp_path_factory.mktemp("tracked")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        settings, uri, _ = sqlite_house(folder, database)
        track.track(settings, uri)
    return folder


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tracked_once: Path) -> House:
    """Tracked, with a gate of its own that finds the verdict fresh."""
    monkeypatch.chdir(tmp_path)
    uri = copy_tracked(tracked_once, tmp_path)
    gate_says(0)
    return params.load(), uri, MlflowClient(tracking_uri=uri)


def gate_says(
    code: int, lines: str = "FAIL          nf4 (advisory): r\nPASS          int8: all rules pass\nPASS          overall"
) -> None:
    """A `python -m pipeline.gate` in the working directory that only prints and exits."""
    Path("pipeline").mkdir(exist_ok=True)
    Path("pipeline/__init__.py").touch()
    said = f"import sys\nprint({lines!r})\nprint('gate: said', file=sys.stderr)\nsys.exit({code})\n"
    Path("pipeline/gate.py").write_text(said, encoding="utf-8")


def build(variant: str) -> Path:
    """A model as `quantize` leaves it, and results that were measured of it."""
    folder = artifacts.model_dir(variant)
    artifacts.write_text(folder / "model.safetensors", "weights")
    asked, files = {"variant": variant, "seed": 1}, artifacts.files_of(folder)
    digest = artifacts.digest([asked, files])
    artifacts.write_json(folder / artifacts.MANIFEST, asked | {"status": "ok", "files": files, "digest": digest})
    path = artifacts.metrics(variant)
    artifacts.write_json(path, artifacts.read_json(path) | {"model": digest})
    return folder


def promote(house: House, variant: str, reason: str = "", force: bool = False) -> str:
    return track.promote(house[0], house[1], variant, force=force, reason=reason)


def versions(client: MlflowClient, variant: str) -> list[Any]:
    return [v for v in client.search_model_versions(f"name = '{NAME}'") if v.tags["variant"] == variant]


def champion(client: MlflowClient) -> str:
    return str(client.get_model_version_by_alias(NAME, ALIAS).tags["variant"])


def test_every_variant_is_a_version_without_files_and_its_verdict_is_a_tag(house: House) -> None:
    settings, uri, client = house
    versions = client.search_model_versions(f"name = '{NAME}'")
    assert {v.tags["variant"]: v.tags["verdict"] for v in versions} == {"bf16": "REFERENCE", "int8": "PASS", "nf4": "FAIL"}
    assert all(v.status == "READY" and v.source.startswith("models:/") for v in versions)
    assert not [f for f in Path("mlruns").rglob("*") if f.suffix in (".safetensors", ".gguf")]
    track.track(settings, uri)
    assert len(client.search_model_versions(f"name = '{NAME}'")) == len(VARIANTS)


def test_a_changed_variant_is_a_new_version_and_the_old_one_says_so(house: House) -> None:
    change("int8", 0.77)
    track.track(house[0], house[1])
    assert sorted(v.tags["current"] for v in versions(house[2], "int8")) == ["false", "true"]


def test_a_registration_that_was_killed_half_way_is_finished(house: House) -> None:
    (version,) = versions(house[2], "nf4")
    house[2].delete_model_version(NAME, version.version)
    track.track(house[0], house[1])
    assert [v.source for v in versions(house[2], "nf4")] == [version.source], "the logged model was there already"


def test_a_variant_that_passes_becomes_champion_and_the_move_is_written_down(house: House) -> None:
    said = promote(house, "int8", reason="smaller")
    client = house[2]
    assert champion(client) == "int8" and "champion is int8" in said
    (move,) = Registry(client, NAME).moves()
    assert move["how"] == "promote" and move["reason"] == "smaller" and "@" in move["by"] and move["at"].endswith("Z")
    assert client.get_model_version_by_alias(NAME, ALIAS).tags[f"{ALIAS}.reason"] == "smaller"
    assert json.loads(client.get_registered_model(NAME).tags["quantgate.move.0001"])["variant"] == "int8", "readable by anybody"
    assert "already" in promote(house, "int8") and len(Registry(client, NAME).moves()) == 1


@pytest.mark.parametrize("variant, word", [("nf4", "FAIL"), ("nf4", "INCONCLUSIVE"), ("nf4", "UNSUPPORTED")])
def test_what_does_not_pass_needs_force_and_a_reason(house: House, variant: str, word: str) -> None:
    verdict = artifacts.read_json(artifacts.GATE)
    verdict["variants"][variant]["verdict"] = word
    artifacts.write_json(artifacts.GATE, verdict)
    gate_says(0, f"{word:<13} {variant} (advisory): r")
    with pytest.raises(ArtifactError, match=f"{variant} is not promoted: its verdict is {word}"):
        promote(house, variant)
    assert Registry(house[2], NAME).champion() is None
    promote(house, variant, reason="a trial", force=True)
    assert champion(house[2]) == variant and Registry(house[2], NAME).moves()[0]["how"] == "force"


@pytest.mark.parametrize("lines, passing", [
    ("PASS          int8: r\nFAIL          nf4 (advisory): r\nPASS          q8 (advisory): r\nPASS          overall", "int8, q8;"),
    ("FAIL          int8: r\nFAIL          overall", "none at present;"),
])  # fmt: skip
def test_the_reference_is_said_to_be_judged_by_nothing_beside_what_can_be_promoted(house: House, lines: str, passing: str) -> None:
    gate_says(0, lines)
    with pytest.raises(ArtifactError, match=f"bf16 is not promoted: it is the reference, .* with a PASS: {passing}") as caught:
        promote(house, "bf16")
    assert "mend" not in str(caught.value) and Registry(house[2], NAME).champion() is None
    promote(house, "bf16", reason="a trial", force=True)
    assert champion(house[2]) == "bf16"


@pytest.mark.parametrize("code", [2, 1 + 127, 42])
def test_a_stale_verdict_or_a_gate_that_cannot_say_promotes_nothing(house: House, code: int) -> None:
    gate_says(code)
    with pytest.raises(ArtifactError, match="int8 is not promoted: gate: said"):
        promote(house, "int8")
    assert Registry(house[2], NAME).champion() is None


@pytest.mark.parametrize("code", [1, 3])
def test_another_variant_s_fail_does_not_keep_one_that_passes_from_promotion(house: House, code: int) -> None:
    gate_says(code)
    promote(house, "int8")
    assert champion(house[2]) == "int8"


@pytest.mark.parametrize("lines, said", [
    ("INCONCLUSIVE  int8: kld_mean: judged where a merge names the commit", "INCONCLUSIVE, not PASS: kld_mean: judged"),
    ("FAIL          int8: the bounds are not those of reports/ledger.yaml", "FAIL, not PASS: the bounds are"),
    ("PASS          int88: r\nPASS          overall", "MISSING, not PASS"), ("", "MISSING, not PASS"),
])  # fmt: skip
def test_the_verdict_is_the_gate_s_as_a_merge_asks_it_and_not_that_of_the_file(house: House, lines: str, said: str) -> None:
    """A rule against a baseline, or a ledger's commit, is judged only there; gate.json says PASS."""
    gate_says(1, lines)
    with pytest.raises(ArtifactError, match=f"int8 is not promoted: its verdict is {said}"):
        promote(house, "int8")
    assert Registry(house[2], NAME).champion() is None


def test_what_passes_against_a_baseline_is_promoted_though_the_file_could_not_judge_it(house: House) -> None:
    verdict = artifacts.read_json(artifacts.GATE)
    verdict["variants"]["int8"]["verdict"] = "INCONCLUSIVE"
    artifacts.write_json(artifacts.GATE, verdict)
    promote(house, "int8")
    assert champion(house[2]) == "int8" and Registry(house[2], NAME).moves()[0]["reason"] == "verdict PASS"


# --- its files ---------------------------------------------------------------------------------------------------


def tracked(house: House) -> House:
    track.track(house[0], house[1])
    return house


def reseal(folder: Path) -> None:
    """A manifest that lists what is there now, under the digest of before."""
    manifest = artifacts.read_manifest(folder)
    artifacts.write_json(folder / artifacts.MANIFEST, manifest | {"files": artifacts.files_of(folder)})


DAMAGES: list[tuple[str, Any, str]] = [
    ("changed", lambda f: artifacts.write_text(f / "model.safetensors", "others"), "model.safetensors was changed"),
    ("gone", lambda f: (f / "model.safetensors").unlink(), "model.safetensors is missing"),
    ("added", lambda f: artifacts.write_text(f / "more", "x"), "more was added"),
    ("listed anew", lambda f: (artifacts.write_text(f / "more", "x"), reseal(f)), "its manifest was edited by hand"),
    ("another", lambda f: artifacts.write_json(f / "manifest.json", artifacts.read_manifest(f) | {"digest": "d"}), "another build"),
    ("no manifest's", lambda f: artifacts.write_json(f / "manifest.json", {}), "its manifest is damaged"),
]


@pytest.mark.parametrize("damage, said", [d[1:] for d in DAMAGES], ids=[d[0] for d in DAMAGES])
def test_a_model_that_is_not_what_was_measured_needs_force_and_the_move_says_so(house: House, damage: Any, said: str) -> None:
    folder = build("int8")
    tracked(house)
    damage(folder)
    with pytest.raises(ArtifactError, match=f"int8 is not promoted: .*{said}.*--force --reason TEXT") as caught:
        promote(house, "int8")
    assert Registry(house[2], NAME).champion() is None and "\n" not in str(caught.value)
    assert said in promote(house, "int8", reason="I know", force=True)
    assert said in Registry(house[2], NAME).moves()[0]["files"]


def test_a_model_that_is_what_was_measured_is_promoted_and_one_that_is_not_here_is_said_to_be_unchecked(house: House) -> None:
    build("int8")
    tracked(house)
    assert "as measured" in promote(house, "int8") and Registry(house[2], NAME).moves()[0]["files"] == "as measured"
    gate_says(0, "PASS          nf4 (advisory): all rules pass")
    assert "not here, and so not compared with what was measured" in promote(house, "nf4")
    assert "not here" in house[2].get_model_version_by_alias(NAME, ALIAS).tags[f"{ALIAS}.files"]


def test_results_that_are_not_in_mlflow_yet_are_not_promoted(house: House) -> None:
    change("int8", 0.011)
    with pytest.raises(ArtifactError, match="not in MLflow; run `python -m pipeline.track` first"):
        promote(house, "int8")
    with pytest.raises(ParamsError, match="variant 'int88' .*did you mean 'int8'"):
        promote(house, "int88")


def test_a_reason_is_kept_without_a_password(house: House) -> None:
    promote(house, "int8", reason="as seen at https://me:hunter2pass@host/x")
    kept = str([house[2].get_registered_model(NAME).tags, house[2].get_model_version_by_alias(NAME, ALIAS).tags])
    assert "hunter2" not in kept and "as seen at https://(hidden)@host/x" in kept


def test_rollback_goes_back_one_champion_at_a_time(house: House) -> None:
    settings, uri, client = house
    with pytest.raises(ArtifactError, match="there is no champion yet"):
        track.rollback(settings, uri, "")
    promote(house, "bf16", "first", force=True)
    promote(house, "int8")
    promote(house, "nf4", "third", force=True)
    assert "by rollback" in track.rollback(settings, uri, "slow") and champion(client) == "int8"
    track.rollback(settings, uri, "")
    assert champion(client) == "bf16"
    with pytest.raises(ArtifactError, match="nothing to roll back to"):
        track.rollback(settings, uri, "")
    assert [m["how"] for m in Registry(client, NAME).moves()] == ["force", "promote", "force", "rollback", "rollback"]


def test_a_move_by_hand_is_written_down_and_can_be_undone(house: House) -> None:
    settings, uri, client = house
    promote(house, "int8")
    client.set_registered_model_alias(NAME, ALIAS, versions(client, "nf4")[0].version)
    track.rollback(settings, uri, "who did that?")
    assert champion(client) == "int8" and [m["how"] for m in Registry(client, NAME).moves()] == ["promote", "by hand", "rollback"]


def test_a_move_killed_after_it_was_written_down_is_made_by_the_next(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    client = house[2]
    promote(house, "bf16", "first", force=True)

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(MlflowClient, "set_registered_model_alias", killed)
        with pytest.raises(KeyboardInterrupt):
            promote(house, "int8")
    assert champion(client) == "bf16"
    assert "already" in promote(house, "int8") and champion(client) == "int8"
