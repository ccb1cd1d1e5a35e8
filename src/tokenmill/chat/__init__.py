"""Render rows to text and find the characters to train.

Importing this package does not import jinja2, because planning a build needs only `ChatSpec`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenmill._core.optional import lazy_exports
from tokenmill.chat.spec import GROUPED, RENDERER_VERSION, ChatSpec

if TYPE_CHECKING:
    from tokenmill.chat.render import Renderer, Rendering

__all__ = ["GROUPED", "RENDERER_VERSION", "ChatSpec", "Renderer", "Rendering"]

__getattr__ = lazy_exports(__name__, render="Renderer Rendering")
