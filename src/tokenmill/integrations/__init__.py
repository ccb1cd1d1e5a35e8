"""tokenmill's objects in the shapes of host frameworks, nothing else.

Each package here adapts to one host and imports it; they do not know each other (`hosts` is what
they share), and nothing below this layer knows any of them. They are reached by name: ``from
tokenmill.integrations import torch``.
"""
