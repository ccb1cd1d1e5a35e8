"""One question of the doctor's and its answer.

The modules of this package make these values, `examine` lists them, ``tokenmill doctor`` prints
them. A `Check` has a name, a status, what was seen (*detail*) and what to do about it (*remedy*).
There are four statuses: ``ok``; ``note``, something is off that not everybody needs; ``warning``,
it works but not as well as it could; ``fail``, a preparation would not work. Only ``fail`` makes
the exit code 1. The four functions of those names make checks, so that a check reads as what it
says.
"""

from __future__ import annotations

from dataclasses import dataclass

STATUSES = ("ok", "note", "warning", "fail")
NOTHING = "nothing to do"


@dataclass(frozen=True, slots=True)
class Check:
    """One answer.

    Attributes:
        name: What was looked at.
        status: One of `STATUSES`.
        detail: What was seen.
        remedy: What to do.
    """

    name: str
    status: str
    detail: str
    remedy: str = NOTHING

    def document(self) -> dict[str, str]:
        """As ``tokenmill doctor --json`` prints it."""
        return {
            "name": self.name,
            "status": self.status,
            "detail": self.detail,
            "do": self.remedy,
        }


def ok(name: str, detail: str, remedy: str = NOTHING) -> Check:
    """All is well."""
    return Check(name, "ok", detail, remedy)


def note(name: str, detail: str, remedy: str = NOTHING) -> Check:
    """Off, and not everybody needs it."""
    return Check(name, "note", detail, remedy)


def warning(name: str, detail: str, remedy: str) -> Check:
    """It works, but not as well as it could."""
    return Check(name, "warning", detail, remedy)


def fail(name: str, detail: str, remedy: str) -> Check:
    """A preparation would not work."""
    return Check(name, "fail", detail, remedy)
