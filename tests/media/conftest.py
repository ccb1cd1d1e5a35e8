"""Processors that the tests of this package share: making one takes seconds."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from tests.media import processors
from tokenmill.media import Processor


@functools.cache
def raw(name: str, directory: Path = processors.EXAMPLE) -> Any:
    return processors.make(name, directory)


@functools.cache
def known(name: str) -> Processor:
    return Processor(raw(name), processors.OPTIONS.get(name))
