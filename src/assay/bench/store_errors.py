"""What went wrong with a store, in one sentence, with what to do about it."""

from __future__ import annotations

import errno
import sqlite3

import sqlalchemy as sa

from assay.errors import StoreError

_ELSEWHERE = "or give another store by --store or ASSAY_STORE"

_SQLITE = {
    sqlite3.SQLITE_BUSY: "is locked by another program; wait until that has finished, " + _ELSEWHERE,
    sqlite3.SQLITE_LOCKED: "is locked by another program; wait until that has finished, " + _ELSEWHERE,
    sqlite3.SQLITE_READONLY: "cannot be written to: the file or its folder is read-only; change its permissions, "
    + _ELSEWHERE,
    sqlite3.SQLITE_PERM: "may not be opened; change its permissions, " + _ELSEWHERE,
    sqlite3.SQLITE_CANTOPEN: "cannot be opened: it is a folder, or the file or its folder is read-only; change its "
    "permissions, " + _ELSEWHERE,
    sqlite3.SQLITE_FULL: "could not be written: the disk is full; free some space and run again (finished trials are "
    "kept), " + _ELSEWHERE,
    sqlite3.SQLITE_IOERR: "could not be read or written: the disk is full or failing, or a quota is used up; free "
    "some space and run again (finished trials are kept), " + _ELSEWHERE,
    sqlite3.SQLITE_CORRUPT: "is damaged; move the file away (sqlite3 FILE .recover may save trials), " + _ELSEWHERE,
    sqlite3.SQLITE_NOTADB: "is a file, but not an SQLite database; move it away, " + _ELSEWHERE,
}

# The first characters of PostgreSQL's SQLSTATE that a user can do something about.
_POSTGRESQL = {
    "53100": "could not be written: the disk of the server is full; free some space there and run again (finished "
    "trials are kept), " + _ELSEWHERE,
    "25006": "cannot be written to: the database is read-only; connect to its primary server, " + _ELSEWHERE,
    "42501": "may not be used by this user; ask for the right to create and write tables, " + _ELSEWHERE,
    "55P03": "is locked by another program; wait until that has finished, " + _ELSEWHERE,
    "28": "refused the login; check user and password in the URL (or PGPASSWORD, ~/.pgpass), " + _ELSEWHERE,
    "3D": "names a database that is not there; make it (createdb NAME), " + _ELSEWHERE,
}

_OS = {
    errno.ENOSPC: _SQLITE[sqlite3.SQLITE_FULL],
    errno.EDQUOT: _SQLITE[sqlite3.SQLITE_FULL],
    errno.EROFS: _SQLITE[sqlite3.SQLITE_READONLY],
    errno.EACCES: _SQLITE[sqlite3.SQLITE_READONLY],
    errno.EPERM: _SQLITE[sqlite3.SQLITE_READONLY],
    errno.ENOTDIR: "cannot be made: a part of its path is a file and not a folder; correct the path, " + _ELSEWHERE,
    errno.EEXIST: "cannot be made: a part of its path is a file and not a folder; correct the path, " + _ELSEWHERE,
}


def explain(error: BaseException, where: str) -> StoreError:
    """The error of a driver, SQLAlchemy or the system as a :class:`StoreError` that says what to do.

    ``where`` is the address of the store, without a password.
    """
    cause: BaseException = error.orig if isinstance(error, sa.exc.DBAPIError) and error.orig is not None else error
    said = str(cause).strip().splitlines()[0] if str(cause).strip() else type(cause).__name__
    told = _told(cause)
    if told is None and isinstance(cause, ModuleNotFoundError):
        told = "needs a driver that is not installed: pip install 'assay[postgresql]'"
    if told is None and isinstance(error, sa.exc.OperationalError) and not isinstance(cause, sqlite3.Error):
        told = (
            "cannot be reached; check that the server runs and that host and port in the URL are right, " + _ELSEWHERE
        )
    if told is None:
        told = "cannot be used, " + _ELSEWHERE.removeprefix("or ")
    return StoreError(f"the store {where} {told}. ({said})")


def _told(cause: BaseException) -> str | None:
    if isinstance(cause, sqlite3.Error):
        code = getattr(cause, "sqlite_errorcode", None)
        return None if code is None else _SQLITE.get(code & 0xFF)
    if isinstance(cause, OSError) and cause.errno in _OS:
        return _OS[cause.errno]
    state = getattr(cause, "sqlstate", None)
    if not state:
        # While connecting, psycopg raises before it knows the state; the server's words are all that there is.
        words = str(cause)
        state = "28" if "password" in words or "authentication" in words else ""
        state = "3D" if 'database "' in words and "does not exist" in words else state
    return next((text for start, text in _POSTGRESQL.items() if state and state.startswith(start)), None)
