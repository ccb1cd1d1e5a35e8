"""The one definition of a prompt's text: from a shaped row to what is served and measured.

`PromptMaker` joins the spec's `Convention` with the renderer. `text` makes one prompt, when it is
served; `texts` makes many, when they are measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tokenmill.chat import ChatSpec, Renderer
from tokenmill.chat.render import Asked
from tokenmill.errors import RowError
from tokenmill.prompts.shaping import Messages, Shaped
from tokenmill.prompts.spec import Convention, PromptSpec


class PromptMaker:
    """Makes prompts' texts."""

    def __init__(
        self,
        spec: PromptSpec,
        template: str | Mapping[str, str] | None,
        special_tokens: Mapping[str, str] | None,
    ) -> None:
        self.spec = spec
        self._convention = Convention.load(spec.convention)(spec)
        # What is served as it is meets no template, not even one that does not compile.
        used = template if spec.apply_chat_template else None
        shape = ChatSpec(template_kwargs=spec.template_kwargs, date=spec.date)
        self._renderer = Renderer(shape, used, special_tokens)

    def text(self, shaped: Shaped) -> str | Messages:
        """What is served as the prompt of a row.

        Raises:
            RowError: The template refuses the row.
        """
        if not self.spec.apply_chat_template:
            return shaped.prompt
        asked = self._convention.conversation(shaped)
        try:
            return self._renderer.prompt(*asked)
        except RowError as error:
            return self._renderer.prompt(*self._convention.retry(asked, error))

    def texts(self, rows: Sequence[Shaped]) -> list[str | Messages | RowError]:
        """`text` for many rows; a refused one is the error in its place."""
        if not self.spec.apply_chat_template:
            return [shaped.prompt for shaped in rows]
        conversations: list[Asked] = []
        errors: dict[int, RowError] = {}
        for number, shaped in enumerate(rows):
            try:
                conversations.append(Asked(*self._convention.conversation(shaped)))
            except RowError as error:
                errors[number] = error
        rendered = iter(zip(conversations, self._renderer.prompts(conversations), strict=True))
        made: list[str | Messages | RowError] = []
        for number in range(len(rows)):
            if number in errors:
                made.append(errors[number])
                continue
            asked, text = next(rendered)
            if isinstance(text, RowError):
                try:
                    text = self._renderer.prompt(*self._convention.retry(asked, text))
                except RowError as error:
                    text = error
            made.append(text)
        return made
