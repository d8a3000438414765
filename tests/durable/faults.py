"""An SQLite connection that fails, or that is looked at, at a statement."""

import sqlite3

from shardfn.durable import database


class Watched(sqlite3.Connection):
    """Calls `before` with each statement; it may raise what SQLite would."""

    before = staticmethod(lambda db, sql: None)

    def execute(self, sql, *args):
        Watched.before(self, sql)
        return super().execute(sql, *args)


def error(message, code=sqlite3.SQLITE_FULL):
    found = sqlite3.OperationalError(message)
    found.sqlite_errorcode = code
    return found


def watch(monkeypatch, before):
    """Watch the statements of connections that are made from now on."""
    whole = sqlite3.connect

    def connect(database, **options):
        return whole(database, factory=Watched, **options)

    monkeypatch.setattr(database.sqlite3, "connect", connect)
    monkeypatch.setattr(Watched, "before", staticmethod(before))


def path_of(db):
    """The file of a connection."""
    return next(file for _, name, file in sqlite3.Connection.execute(db, "PRAGMA database_list") if name == "main")
