"""Durable state of parameter servers and of saved tables: a folder with an SQLite database, and files for large arrays.

| module | holds |
|---|---|
| `database` | `Database`: transactions with group commit, rows with checksums, what is refused |
| `arrays` | `Arrays`: arrays in rows, or in files that rows name |
| `sqlite_log` | which damage of SQLite's log SQLite does not tell |
| `store_errors` | what is told of files |
"""

from shardfn.durable.arrays import ARRAY_COLUMNS, Arrays
from shardfn.durable.database import Database, new_database
from shardfn.durable.store_errors import DatabaseClosed, FolderInUse

__all__ = ["ARRAY_COLUMNS", "Arrays", "Database", "DatabaseClosed", "FolderInUse", "new_database"]
