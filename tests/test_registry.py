"""The registry: versions by reference, and the alias `champion` that only a fresh PASS, or a reason, moves."""

import json
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from track_house import VARIANTS, House, change, copy_tracked, judged, rejudge

from pipeline import track
from pipeline.core.errors import ArtifactError, ParamsError
from pipeline.gating import verdicts
from pipeline.tracking.registry import ALIAS
from tools import track as moves
from tools.track import Champions

pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow's own
NAME = "quantgate"


def say(patch: pytest.MonkeyPatch, words: dict[str, str]) -> None:
    """Let the gate give these verdicts to a merge."""
    verdict: Any = {"variants": {name: judged(word) for name, word in words.items()}}
    patch.setattr(verdicts, "for_merge", lambda settings: verdicts.Merge(verdict))


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tracked: Path) -> House:
    """Tracked, with a gate that finds the results fresh."""
    say(monkeypatch, {"int8": "PASS", "nf4": "FAIL"})
    return copy_tracked(tracked, tmp_path)


def promote(house: House, variant: str, reason: str = "", force: bool = False) -> str:
    return moves.promote(house[0], house[1], variant, force=force, reason=reason)


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


def test_a_version_has_its_present_verdict_as_an_alias(house: House) -> None:
    settings, uri, client = house
    assert set(client.get_registered_model(NAME).aliases) == {"bf16-reference", "int8-pass", "nf4-fail"}
    rejudge("int8", "FAIL", verdict="FAIL")
    track.track(settings, uri)
    assert set(client.get_registered_model(NAME).aliases) == {"bf16-reference", "int8-fail", "nf4-fail"}


def versions_of(client: MlflowClient, variant: str) -> list[Any]:
    return [v for v in client.search_model_versions(f"name = '{NAME}'") if v.tags["variant"] == variant]


def test_a_changed_variant_is_a_new_version_and_a_registration_that_was_killed_half_way_is_taken_up(house: House) -> None:
    settings, uri, client = house
    change("int8", 0.77)
    (nf4,) = versions_of(client, "nf4")
    client.delete_model_version(NAME, nf4.version)
    track.track(settings, uri)
    assert sorted(v.tags["current"] for v in versions_of(client, "int8")) == ["false", "true"]
    assert [v.source for v in versions_of(client, "nf4")] == [nf4.source]  # the logged model was there already


def test_a_variant_that_passes_becomes_champion_and_the_move_is_written_down_without_a_password(house: House) -> None:
    said, client = promote(house, "int8", reason="smaller at https://me:hunter2pass@host/x"), house[2]
    assert champion(client) == "int8" and "champion is int8" in said
    (move,) = Champions(client, NAME).moves()
    reason = "smaller at https://(hidden)@host/x"
    assert move["how"] == "promote" and move["reason"] == reason and "@" in move["by"] and move["at"].endswith("Z")
    tags = client.get_registered_model(NAME).tags
    assert json.loads(tags["quantgate.move.0001"])["variant"] == "int8" and "hunter2" not in str(tags)
    assert "already" in promote(house, "int8") and len(Champions(client, NAME).moves()) == 1


def test_what_does_not_pass_needs_force_and_a_reason(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    for word in ("UNSUPPORTED", "INCONCLUSIVE", "FAIL"):
        say(monkeypatch, {"nf4": word})
        with pytest.raises(ArtifactError, match=f"nf4 is not promoted: its verdict is {word}, not PASS: r; mend it, or"):
            promote(house, "nf4")
    assert Champions(house[2], NAME).champion() is None
    promote(house, "nf4", reason="a trial", force=True)
    assert champion(house[2]) == "nf4" and Champions(house[2], NAME).moves()[0]["how"] == "force"


def test_the_reference_is_judged_by_nothing_and_so_not_promoted(house: House) -> None:
    with pytest.raises(ArtifactError, match="bf16 is not promoted: it is the reference, .* with a PASS: int8;"):
        promote(house, "bf16")
    assert Champions(house[2], NAME).champion() is None


def test_where_the_gate_cannot_judge_nothing_is_promoted(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the real one: this folder is no project of DVC's
    monkeypatch.chdir(house[1].removeprefix("sqlite:///").removesuffix("/mlflow.db"))
    with pytest.raises(ArtifactError, match="int8 is not promoted: DVC cannot compare the results"):
        promote(house, "int8")
    assert Champions(house[2], NAME).champion() is None


def test_the_verdict_is_the_gate_s_as_a_merge_asks_it_and_not_that_of_the_file(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rule against a baseline is judged only there; gate.json says PASS, or could not judge it."""
    say(monkeypatch, {"int8": "INCONCLUSIVE"})  # PASS in gate.json
    with pytest.raises(ArtifactError, match="int8 is not promoted: its verdict is INCONCLUSIVE, not PASS: r"):
        promote(house, "int8")
    rejudge("int8", verdict="INCONCLUSIVE")
    say(monkeypatch, {"int8": "PASS"})
    promote(house, "int8")
    assert champion(house[2]) == "int8" and Champions(house[2], NAME).moves()[0]["reason"] == "verdict PASS"


def test_an_unknown_variant_and_results_that_are_not_in_mlflow_yet_are_not_promoted(house: House) -> None:
    with pytest.raises(ParamsError, match="int88"):
        promote(house, "int88")
    change("int8", 0.011)
    with pytest.raises(ArtifactError, match="not in MLflow; run `quantgate track` first"):
        promote(house, "int8")


def test_rollback_goes_back_one_champion_at_a_time(house: House) -> None:
    settings, uri, client = house
    with pytest.raises(ArtifactError, match="there is no champion yet"):
        moves.rollback(settings, uri, "")
    promote(house, "bf16", "first", force=True)
    promote(house, "int8")
    promote(house, "nf4", "third", force=True)
    assert "by rollback" in moves.rollback(settings, uri, "slow") and champion(client) == "int8"
    moves.rollback(settings, uri, "")
    assert champion(client) == "bf16"
    with pytest.raises(ArtifactError, match="nothing to roll back to"):
        moves.rollback(settings, uri, "")
    assert [m["how"] for m in Champions(client, NAME).moves()] == ["force", "promote", "force", "rollback", "rollback"]


def test_a_move_by_hand_is_written_down_and_can_be_undone(house: House) -> None:
    settings, uri, client = house
    promote(house, "int8")
    client.set_registered_model_alias(NAME, ALIAS, versions_of(client, "nf4")[0].version)
    moves.rollback(settings, uri, "who did that?")
    assert champion(client) == "int8" and [m["how"] for m in Champions(client, NAME).moves()] == ["promote", "by hand", "rollback"]


def test_a_move_killed_before_it_was_written_down_is_written_down_by_the_next(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = house[2]
    promote(house, "bf16", "first", force=True)

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(MlflowClient, "set_registered_model_tag", killed)
        with pytest.raises(KeyboardInterrupt):
            promote(house, "int8")
    assert "already" in promote(house, "int8") and champion(client) == "int8"
    assert [m["how"] for m in Champions(client, NAME).moves()] == ["force", "by hand"]
