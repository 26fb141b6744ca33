"""`quantgate track`: log the results to MLflow, or move the alias `champion` in its registry: --promote VARIANT, --rollback.

Every move is recorded as a tag of the registered model; --rollback reads these tags as a stack. A move by hand, or one of a process
that was killed before it could record it, is recorded by the next command.
"""

from __future__ import annotations

import json
import platform
import time
from typing import Annotated, TypedDict

import typer

from pipeline import track
from pipeline.core import cli, params, secrets
from pipeline.core.errors import ArtifactError, ParamsError, QuantgateError
from pipeline.core.params import Params
from pipeline.gating import verdicts
from pipeline.tracking import runs
from pipeline.tracking.connection import Tracker, user
from pipeline.tracking.registry import ALIAS, Registry

MOVE = "quantgate.move."
MOVING_FAILED = "once MLflow is back, look there who is champion, and repeat the command if it was not moved"


class Move(TypedDict):
    """A move of the alias. before: the version that had it; how: promote, force, rollback, by hand."""

    number: str
    version: str
    variant: str
    before: str | None
    how: str
    at: str
    by: str
    reason: str


class Champions(Registry):
    """A registry with the moves of its alias."""

    def version_of(self, run_id: str) -> str | None:
        return next((str(v.version) for v in self.versions() if v.run_id == run_id), None)

    def champion(self) -> str | None:
        """The version that has the alias, or None."""
        model = self.model()
        return str(model.aliases[ALIAS]) if model is not None and ALIAS in model.aliases else None

    def moves(self) -> list[Move]:
        """Recorded moves, oldest first."""
        model = self.model()
        tags = model.tags if model is not None else {}
        return [json.loads(tags[k]) for k in sorted(tags) if k.startswith(MOVE)]

    def promote(self, version: str, *, reason: str, forced: bool) -> Move | None:
        """Move the alias to a version; None if it has it already."""
        self._settle()
        return None if self.champion() == version else self._move(version, "force" if forced else "promote", reason)

    def rollback(self, reason: str) -> Move:
        """Move the alias back to the previous champion. Raises `ArtifactError` if there was none."""
        self._settle()
        champions = succession(self.moves())
        if len(champions) < 2:
            now = f"version {champions[-1]} is the first champion" if champions else "there is no champion yet"
            raise ArtifactError(f"nothing to roll back to: {now} of {self.name!r}")
        return self._move(champions[-2], "rollback", reason)

    def _settle(self) -> None:
        """Record a move that has no record."""
        moves, now = self.moves(), self.champion()
        before = moves[-1]["version"] if moves else None
        if now and now != before:
            self._record(now, before, "by hand", "found so; not moved by quantgate")

    def _move(self, version: str, how: str, reason: str) -> Move:
        before = self.champion()
        self.client.set_registered_model_alias(self.name, ALIAS, version)
        return self._record(version, before, how, reason)

    def _record(self, version: str, before: str | None, how: str, reason: str) -> Move:
        move: Move = {
            "number": f"{len(self.moves()) + 1:04d}", "version": version,
            "variant": self.client.get_model_version(self.name, version).tags.get("variant", "?"), "before": before, "how": how,
            "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "by": f"{user()}@{platform.node()}",
            "reason": secrets.hide(reason),
        }  # fmt: skip
        self.client.set_registered_model_tag(self.name, MOVE + move["number"], json.dumps(move))
        return move


def succession(moves: list[Move]) -> list[str]:
    """Champions that a rollback can return to, then the present one; a rollback removes the one it undid."""
    champions: list[str] = []
    for move in moves:
        champions = champions[:-1] if move["how"] == "rollback" else [*champions, move["version"]]
    return champions


def promote(settings: Params, uri: str, variant: str, *, force: bool, reason: str) -> str:
    """Make a variant the champion; returns a sentence on it. Without `force`, raises `ArtifactError` unless its verdict is PASS and
    not stale."""
    settings.variant(variant)
    state = runs.load_state(settings)
    if not force:
        _check_promotable(variant, settings)
    tracker = Tracker(uri, settings.track.experiment)
    registry = Champions(tracker.client, settings.track.experiment)
    run = tracker.find(state.variant_key(variant))
    version = registry.version_of(run.info.run_id) if run else None
    if version is None:
        raise ArtifactError(f"{variant}'s current results are not in MLflow; run `quantgate track` first")
    move = registry.promote(version, reason=reason or "verdict PASS", forced=force)
    return _sentence(move) if move else f"{variant} (version {version}) is already the champion; nothing changed"


def _check_promotable(variant: str, settings: Params) -> None:
    """Raise unless the variant passes as a merge would be judged."""
    force, refused = "or use --force --reason TEXT", f"{variant} is not promoted"
    try:
        judged = verdicts.for_merge(settings).verdict["variants"]
    except QuantgateError as e:
        raise ArtifactError(f"{refused}: {e}; {force}") from None
    if variant == settings.reference:
        passing = ", ".join(name for name, v in judged.items() if v["verdict"] == "PASS") or "none at present"
        why = f"it is the reference, which is not judged; variants with a PASS: {passing}"
        raise ArtifactError(f"{refused}: {why}; {force}")
    if (word := judged[variant]["verdict"]) != "PASS":
        raise ArtifactError(f"{refused}: its verdict is {word}, not PASS: {judged[variant]['reason']}; mend it, {force}")


def rollback(settings: Params, uri: str, reason: str) -> str:
    """Make the previous champion champion again; returns a sentence on it."""
    registry = Champions(Tracker(uri, settings.track.experiment).client, settings.track.experiment)
    return _sentence(registry.rollback(reason or "rollback"))


def _sentence(move: Move) -> str:
    before = f"before: version {move['before']}" if move["before"] else "the first champion"
    return f"champion is {move['variant']} (version {move['version']}), by {move['how']}; {before}; reason: {move['reason']}"


def main(
    to_promote: Annotated[str, typer.Option("--promote", metavar="VARIANT", help="Make it champion; its verdict must PASS.")] = "",
    back: Annotated[bool, typer.Option("--rollback", help="Make the previous champion champion again.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Promote whatever the verdict; needs --reason.")] = False,
    reason: Annotated[str, typer.Option("--reason", help="Kept with the move.")] = "",
) -> None:
    """Log the results to MLflow; move the champion."""
    if to_promote and back:
        raise ParamsError("--promote and --rollback exclude each other; give one")
    if force and not (to_promote and reason.strip()):
        raise ParamsError("--force goes with --promote VARIANT and --reason TEXT, which is kept with the move")
    if reason and not (to_promote or back):
        raise ParamsError("--reason goes with --promote VARIANT or --rollback")
    if not (to_promote or back):
        track.main()
        return
    settings, why = params.load(), reason.strip()
    uri = track.address(settings)

    def move() -> str:
        return promote(settings, uri, to_promote, force=force, reason=why) if to_promote else rollback(settings, uri, why)

    with track.alone():
        cli.say("track", track.reported(uri, MOVING_FAILED, move))
