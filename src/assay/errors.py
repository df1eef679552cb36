"""The two errors that the command line turns into one clear line instead of a traceback."""

from __future__ import annotations


class InputError(ValueError):
    """What the user gave cannot be used; the message names the argument, what came and the remedy.

    The command line prints the message and exits with 2.
    """


class StoreError(RuntimeError):
    """The store of trials cannot be read or written (locked, read-only, corrupt, newer schema, full disk).

    The command line prints the message and exits with 2.
    """
