"""tokenmill's objects in the shapes of host frameworks, nothing else.

Each module here adapts to one host and imports it; they do not know each other, and nothing below
this layer knows any of them. They are reached by name: ``from tokenmill.integrations import
torch``.
"""
