"""The few functions of torchvision that Llama 4's image processor calls, for machines without it.

Pixtral's processor only imports the library. The pixels are close to those of the real functions,
not equal. The tests need only correct shapes and reproducible pixels.
"""

from __future__ import annotations

import enum
import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any


class InterpolationMode(enum.Enum):
    NEAREST = "nearest"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    LANCZOS = "lanczos"


def resize(image: Any, size: Any, interpolation: Any = None, antialias: bool = True) -> Any:
    import torch

    batch = image if image.ndim == 4 else image[None]
    made = torch.nn.functional.interpolate(
        batch.float(), size=tuple(int(side) for side in size), mode="bilinear", antialias=True
    )
    made = made.round().clamp(0, 255).to(image.dtype)
    return made if image.ndim == 4 else made[0]


def pad(image: Any, padding: Any, fill: Any = 0, padding_mode: str = "constant") -> Any:
    import torch

    left, top, right, bottom = padding
    value = float(fill[0] if isinstance(fill, list | tuple) else fill)
    return torch.nn.functional.pad(image, (left, right, top, bottom), value=value)


def normalize(image: Any, mean: Any, std: Any, inplace: bool = False) -> Any:
    import torch

    mean = torch.as_tensor(mean, dtype=image.dtype, device=image.device).view(-1, 1, 1)
    std = torch.as_tensor(std, dtype=image.dtype, device=image.device).view(-1, 1, 1)
    return (image - mean) / std


def grayscale_to_rgb(image: Any) -> Any:
    return image if image.shape[-3] != 1 else image.expand(*image.shape[:-3], 3, -1, -1)


def install() -> None:
    """Let transformers import torchvision; do nothing if the real one is installed."""
    if "torchvision" in sys.modules or importlib.util.find_spec("torchvision") is not None:
        return
    from transformers import image_processing_backends
    from transformers.image_utils import PILImageResampling

    functional = sys.modules[__name__]
    names = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")
    for name in names:
        module = ModuleType(name)
        module.__path__ = []
        module.__spec__ = SimpleNamespace(name=name)  # type: ignore[assignment]
        sys.modules[name] = module
    sys.modules["torchvision.transforms.v2"].functional = functional  # type: ignore[attr-defined]
    sys.modules["torchvision.transforms.v2.functional"] = functional
    image_processing_backends.tvF = functional
    image_processing_backends.pil_torch_interpolation_mapping = {
        PILImageResampling.BILINEAR: InterpolationMode.BILINEAR,
        PILImageResampling.BICUBIC: InterpolationMode.BICUBIC,
        PILImageResampling.LANCZOS: InterpolationMode.LANCZOS,
        PILImageResampling.NEAREST: InterpolationMode.NEAREST,
    }
