"""The data-consistency suite: docs/internals/consistency.md says what each module shows."""
