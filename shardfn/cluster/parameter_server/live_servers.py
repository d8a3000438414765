"""The live servers, which the ledger names. Whoever learns of new ones starts them and ends those before them."""

from __future__ import annotations

import os
import pathlib
import shutil

from shardfn.cluster.parameter_server.coordinator import LedgerStatus
from shardfn.cluster.parameter_server.engine import Call, Engine, Setup, Target, Unreachable, ask, targets_of
from shardfn.cluster.parameter_server.ledger import Place, Update
from shardfn.errors import CheckpointFileError, fail


def enter(engine: Engine, setup: Setup, place: Place) -> None:
    """Start live servers, where they do not run yet, and retire those before them: who changed the servers may be dead.

    Raises:
      Unreachable: they are not live any more.
      CheckpointFileError: their files are damaged.
    """
    targets = targets_of(place)
    try:
        engine.start(setup, targets)
    except CheckpointFileError:
        if ask(engine, "status").place == place:
            raise
    if ask(engine, "status").place != place:  # the next ones stopped them, perhaps before they were started here
        engine.stop(targets)
        raise Unreachable("the servers changed meanwhile")
    retire(engine, setup, place)


def retire(engine: Engine, setup: Setup, place: Place) -> None:
    """Stop the servers of other epochs, which can never be live again, and delete their folders, and those that never were."""
    for name in _names(setup.folder, "epoch-"):
        epoch, _, token = name.removeprefix("epoch-").partition("-")
        if int(epoch) < place.epoch or (int(epoch) == place.epoch and token != place.token):
            servers = [int(server.removeprefix("server-")) for server in _names(setup.folder / name, "server-")]
            engine.stop([Target(int(epoch), server, token) for server in servers])
            shutil.rmtree(setup.folder / name, ignore_errors=True)


def _names(folder: pathlib.Path, start: str) -> list[str]:
    """What is in a folder whose name begins so; nothing where another client has deleted the folder meanwhile."""
    try:
        return [name for name in os.listdir(folder) if name.startswith(start)]
    except FileNotFoundError:
        return []


def advance_all(engine: Engine, setup: Setup, place: Place) -> int:
    """Bring all servers to the last update.

    Returns:
      Its number.

    Raises:
      Unreachable, CheckpointFileError: as of calls.
    """
    status: LedgerStatus = ask(engine, "status")
    targets = targets_of(place)
    versions = engine.call([Call(target, "advance", ((),)) for target in targets])
    updates = updates_after(engine, setup, min(versions))
    engine.call([Call(target, "advance", (updates,)) for target in targets])
    return status.version


def updates_after(engine: Engine, setup: Setup, version: int) -> tuple[Update, ...]:
    """The updates after the version of a server.

    Raises:
      CheckpointFileError: the coordinator has forgotten some.
    """
    updates = ask(engine, "status", version).updates
    if updates and updates[0].number > version + 1:
        fail(CheckpointFileError, f"update {version + 1} is not in the ledger", where=str(setup.folder),
             why=f"a server is at version {version}, and the ledger begins with {updates[0].number}",
             fix="restore the folder from a copy")  # fmt: skip
    return updates
