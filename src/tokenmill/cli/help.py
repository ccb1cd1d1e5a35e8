"""Order and panels of ``--help``: commands and options by use, the common ones first."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup

COMMANDS = {
    "Main commands": ("prepare", "inspect", "stats", "lint", "export"),
    "Rows, prompts and rollouts": ("rows", "prompts", "check-rollouts"),
    "Stores and cache": ("why", "verify", "attach", "push", "pull", "cache"),
    "Setup": ("doctor", "demo"),
}
# Options of commands that take a whole recipe: ten common ones, then the rest.
OPTIONS = {
    "Rows": ("tokenizer", "format", "columns"),
    "Template": ("chat_template", "chat_template_kwargs"),
    "Masking": ("train_on",),
    "Length": ("max_length", "overlong"),
    "Running": ("num_workers", "out"),
    "More: rows": ("config", "keep_columns", "max_rejected", "rejected", "processor", "media_root",
                   "media_urls"),
    "More: tokenizer and template": ("encoder", "encoder_kwargs", "as_chat", "tokenizer_backend",
                                      "trust_remote_code", "date"),
    "More: masking": ("turn_end", "thinking_opener", "expand", "trailing", "append_eos"),
    "More: running": ("name", "cache_dir", "force_recache", "disable_cache", "executor",
                      "reference", "part", "embed_media", "as_json", "help"),
}  # fmt: skip
_PANEL_OF_COMMAND = {name: panel for panel, names in COMMANDS.items() for name in names}
_PANEL_OF_OPTION = {name: panel for panel, names in OPTIONS.items() for name in names}


class _ShortFlags:
    """Shows flags without ``<bool>`` and their ``--no-`` forms, which would fill two columns."""

    def format_help(self: Any, ctx: Any, formatter: Any) -> None:
        for parameter in self.get_params(ctx):
            if getattr(parameter, "is_flag", False):
                parameter.metavar, parameter.secondary_opts = "", []
        super().format_help(ctx, formatter)  # type: ignore[misc]


class Command(_ShortFlags, TyperCommand):
    pass


class RecipeCommand(Command):
    """Shows the options of a recipe in the panels of `OPTIONS`."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        order = list(_PANEL_OF_OPTION)
        self.params.sort(key=lambda it: order.index(it.name) if it.name in order else -1)
        parameters: list[Any] = self.get_params(ctx)
        for parameter in parameters:
            # Versions of click give the flag --help different names.
            name = "help" if "--help" in parameter.opts else parameter.name
            parameter.rich_help_panel = _PANEL_OF_OPTION.get(name)
        super().format_help(ctx, formatter)


class Group(_ShortFlags, TyperGroup):
    pass


class RootGroup(Group):
    """Shows commands in the panels of `COMMANDS`."""

    def list_commands(self, ctx: Any) -> list[str]:
        order = list(_PANEL_OF_COMMAND)
        return sorted(super().list_commands(ctx), key=order.index)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        commands: Any = self.commands
        for name, command in commands.items():
            command.rich_help_panel = _PANEL_OF_COMMAND[name]
        super().format_help(ctx, formatter)
