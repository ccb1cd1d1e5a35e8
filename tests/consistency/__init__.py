"""The data-consistency suite: docs/resume.md says what each module shows."""
