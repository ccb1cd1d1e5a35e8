"""minijinja."""

from __future__ import annotations

from typing import Any


class FastTemplate:
    @classmethod
    def of(cls, reference: Any, date: str | None) -> FastTemplate | None:
        return None

    def render(self, messages: list[dict[str, Any]]) -> str | None:
        return None


def audited(position: int, text: str) -> bool:
    return False
