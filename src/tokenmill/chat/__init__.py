"""From rows to rendered text and proven spans.

`ChatSpec` says how rows are shaped and what is trained; `Renderer` turns parsed rows into texts
with the character spans that are to be trained, or rejects them with a reason; `PromptRenderer`
renders conversations that a model is to go on with. The rooms above
hand over plain values and get plain values back; nothing here reads a file or knows a token.
"""

from tokenmill.chat.prompts import PromptRenderer
from tokenmill.chat.render import Renderer, Rendering
from tokenmill.chat.spec import RENDERER_VERSION, ChatSpec

__all__ = ["RENDERER_VERSION", "ChatSpec", "PromptRenderer", "Renderer", "Rendering"]
