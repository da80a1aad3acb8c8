"""The one family of errors that is meant for people.

Every message is one sentence that says what is wrong, where, and how to mend it. Screens show it in an error box, command lines print it and
exit non-zero; anything that is not a `PagewalkError` is a bug in Pagewalk.
"""

from __future__ import annotations


class PagewalkError(Exception):
    """Base class. `str(error)` is one sentence, safe to show to a person as it is."""


class InvalidInput(PagewalkError):
    """What somebody typed or brought along cannot be used (a scenario, a request, a name, a size). Exit code 2."""


class EngineError(PagewalkError):
    """The engine refused an operation while it ran. The trace up to that point stays usable. Exit code 3."""
