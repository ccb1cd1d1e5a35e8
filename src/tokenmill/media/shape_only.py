"""Run an image processor on arrays that have a shape but no pixels.

Numpy's functions and operators return shape-only arrays with the shape and dtype of the real
result. Reading a pixel raises `PixelAccess`. So the result depends on sizes alone and holds for
every image of these sizes. Code that reads the memory of an array directly would see zeros, as in a
blank image; probes and audits detect that.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np

_SMALL = 4096  # elements; a larger array of zeros is meant for pixels or a mask of them
_EMPTY = bytearray(16)  # the memory of all shape-only arrays: one number of any type


class PixelAccess(Exception):
    """A value of a shape-only array was read."""


class ShapeOnlyArray(np.ndarray):
    """An array of one repeated number that must not be read."""

    def __new__(cls, shape: tuple[int, ...], dtype: Any) -> ShapeOnlyArray:
        return np.ndarray.__new__(cls, shape, dtype, buffer=_EMPTY, strides=(0,) * len(shape))

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        out = kwargs.pop("out", None)
        if method != "__call__" or ufunc.nout != 1 or kwargs:
            raise PixelAccess(f"{ufunc.__name__}.{method}")
        shape = np.broadcast_shapes(*(np.shape(value) for value in inputs))
        if out is not None:
            if not isinstance(out[0], ShapeOnlyArray) or out[0].shape != shape:
                raise PixelAccess(f"{ufunc.__name__} into an array")
            return out[0]
        kinds = tuple(
            value.dtype if isinstance(value, np.ndarray | np.generic) else type(value)
            for value in inputs
        )
        return ShapeOnlyArray(shape, ufunc.resolve_dtypes((*kinds, None))[-1])

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func in _VIEWS:
            return super().__array_function__(func, types, args, kwargs)
        if func not in _SHAPES:
            raise PixelAccess(func.__name__)
        return _SHAPES[func](*args, **kwargs)

    def __getitem__(self, index: Any) -> Any:
        item = super().__getitem__(index)
        if not isinstance(item, ShapeOnlyArray):
            raise PixelAccess("an element")
        return item if not any(item.strides) else ShapeOnlyArray(item.shape, item.dtype)

    def __setitem__(self, index: Any, value: Any) -> None:
        target = super().__getitem__(index)
        if np.broadcast_shapes(np.shape(value), target.shape) != target.shape:
            raise PixelAccess("an assignment")

    def astype(self, dtype: Any, *args: Any, **kwargs: Any) -> Any:
        return ShapeOnlyArray(self.shape, np.dtype(dtype))

    def copy(self, *args: Any, **kwargs: Any) -> Any:
        return self

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise PixelAccess("a value")

    __bool__ = __int__ = __float__ = __index__ = __contains__ = _refuse
    item = tolist = tobytes = any = all = max = min = sum = mean = std = _refuse


def _concatenated(arrays: Any, axis: int = 0, **kwargs: Any) -> ShapeOnlyArray:
    shapes = [array.shape for array in arrays]
    axis %= len(shapes[0])
    if any(
        shape[:axis] + shape[axis + 1 :] != shapes[0][:axis] + shapes[0][axis + 1 :]
        for shape in shapes
    ):
        raise PixelAccess("arrays of different shapes")
    total = sum(shape[axis] for shape in shapes)
    kind = np.result_type(*(array.dtype for array in arrays))
    return ShapeOnlyArray((*shapes[0][:axis], total, *shapes[0][axis + 1 :]), kind)


def _stacked(arrays: Any, axis: int = 0, **kwargs: Any) -> ShapeOnlyArray:
    return _concatenated([np.expand_dims(array, axis) for array in arrays], axis)


def _padded(array: Any, width: Any, *args: Any, **kwargs: Any) -> ShapeOnlyArray:
    widths = np.broadcast_to(np.asarray(width), (array.ndim, 2)).tolist()
    pairs = zip(array.shape, widths, strict=True)
    return ShapeOnlyArray(
        tuple(side + before + after for side, (before, after) in pairs), array.dtype
    )


def _repeated(array: Any, repeats: int, axis: int) -> ShapeOnlyArray:
    shape = list(array.shape)
    shape[axis] *= repeats
    return ShapeOnlyArray(tuple(shape), array.dtype)


def _like(array: Any, dtype: Any = None, shape: Any = None, **kwargs: Any) -> ShapeOnlyArray:
    return ShapeOnlyArray(array.shape if shape is None else tuple(shape), dtype or array.dtype)


_VIEWS = frozenset(
    (
        np.transpose, np.moveaxis, np.swapaxes, np.expand_dims, np.squeeze, np.reshape,
        np.shape, np.ndim, np.size,
    )
)  # fmt: skip
_SHAPES: dict[Any, Callable[..., Any]] = {
    np.broadcast_to: lambda array, shape, **kwargs: ShapeOnlyArray(tuple(shape), array.dtype),
    np.concatenate: _concatenated,
    np.stack: _stacked,
    np.pad: _padded,
    np.repeat: _repeated,
    np.zeros_like: _like,
    np.ones_like: _like,
    np.empty_like: _like,
}


class _Numpy(ModuleType):
    """numpy with ``array``, ``asarray`` and ``zeros`` that support shape-only arrays."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def array(self, value: Any, dtype: Any = None, **kwargs: Any) -> Any:
        return _array(np.array, value, dtype, kwargs)

    def asarray(self, value: Any, dtype: Any = None, **kwargs: Any) -> Any:
        return _array(np.asarray, value, dtype, kwargs)

    def zeros(self, shape: Any, dtype: Any = float, **kwargs: Any) -> Any:
        is_large = isinstance(shape, tuple) and math.prod(shape) > _SMALL
        if is_large and WithoutPixels.thread == threading.get_ident():
            return ShapeOnlyArray(shape, dtype)
        return np.zeros(shape, dtype, **kwargs)


def _array(make: Callable[..., Any], value: Any, dtype: Any, kwargs: dict[str, Any]) -> Any:
    inner = value
    while isinstance(inner, list | tuple) and inner:
        inner = inner[0]
    if not isinstance(inner, ShapeOnlyArray):
        return make(value, dtype=dtype, **kwargs)
    return _nested(value).astype(dtype or inner.dtype)


def _nested(value: Any) -> Any:
    return value if isinstance(value, ShapeOnlyArray) else _stacked([_nested(one) for one in value])


_numpy = _Numpy("numpy")


def _resizing(resize: Callable[..., Any]) -> Callable[..., Any]:
    from transformers.image_utils import ChannelDimension, infer_channel_dimension_format

    def resized(image: Any, size: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(image, ShapeOnlyArray):
            return resize(image, size, *args, **kwargs)
        if args or not kwargs.get("return_numpy", True):
            raise PixelAccess("a Pillow image")
        input_format = kwargs.get("input_data_format") or infer_channel_dimension_format(image)
        output_format = kwargs.get("data_format") or input_format
        height, width = (int(side) for side in size)
        channels = image.shape[0 if input_format == ChannelDimension.FIRST else -1]
        if height < 1 or width < 1:
            raise PixelAccess(f"an image of {width}×{height}")  # Pillow decides about it
        first = output_format == ChannelDimension.FIRST
        shape = (channels, height, width) if first else (height, width, channels)
        return ShapeOnlyArray(shape, image.dtype)

    return resized


def _each(change: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)([_each(change, member) for member in value])
    return change(value)


@functools.cache
def _shape_only_tensor(torch: Any) -> Any:
    """Return a tensor class that corresponds to `ShapeOnlyArray`.

    Operations run on the device ``meta``, but the tensor reports the CPU. So ordinary tensors,
    computed from sizes, are still created on the CPU.
    """
    pointwise = torch.Tag.pointwise

    def one(value: Any) -> Any:
        """Return a one-element tensor, to find the dtype of a result."""
        if not isinstance(value, torch.Tensor):
            return value
        return torch.zeros((1,) * value.ndim, dtype=value.dtype)

    def to_shape_only(value: Any) -> Any:
        if isinstance(value, ShapeOnlyTensor):
            shape, strides = value.shape, value.stride()
            return torch.empty_strided(shape, strides, dtype=value.dtype, device="meta")
        if isinstance(value, torch.Tensor):
            return value.to("meta")
        return torch.device("meta") if isinstance(value, torch.device) else value

    def filled(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return ShapeOnlyTensor(value.shape, value.stride(), value.dtype)

    class ShapeOnlyTensor(torch.Tensor):  # type: ignore[misc]
        @staticmethod
        def __new__(cls: Any, shape: Any, strides: Any, dtype: Any) -> Any:
            return torch.Tensor._make_wrapper_subclass(
                cls, shape, strides=strides, dtype=dtype, device="cpu"
            )

        @classmethod
        def __torch_dispatch__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            if pointwise in func.tags and not kwargs:  # torch computes these shapes in Python
                shapes = (value.shape for value in args if isinstance(value, torch.Tensor))
                kind = func(*map(one, args)).dtype
                shape = np.broadcast_shapes(*map(tuple, shapes))
                return filled(torch.empty(shape, dtype=kind, device="meta"))
            result = func(
                *_each(to_shape_only, args),
                **{name: to_shape_only(value) for name, value in kwargs.items()},
            )
            return _each(filled, result)

    return ShapeOnlyTensor


def shape_only_images(sizes: tuple[tuple[int, int], ...]) -> list[Any]:
    """Return Pillow images with a size and no memory, for a `shape_only_of` image processor."""
    from PIL import Image

    images = [Image.Image() for _ in sizes]
    for image, size in zip(images, sizes, strict=True):
        image._mode, image._size = "RGB", size
    return images


def shape_only_of(image_processor: Any) -> Any | None:
    """Copy an image processor so that it starts with shape-only arrays; None if unsupported."""
    backend = getattr(image_processor, "backend", None)
    if backend == "pil":

        def process_image(image: Any, *args: Any, **kwargs: Any) -> Any:
            width, height = image.size
            return ShapeOnlyArray((3, height, width), np.uint8)

    elif backend == "torchvision" and "torch" in sys.modules:
        torch = sys.modules["torch"]
        tensor = _shape_only_tensor(torch)

        def process_image(image: Any, *args: Any, **kwargs: Any) -> Any:
            width, height = image.size
            return tensor((3, height, width), (height * width, width, 1), torch.uint8)

    else:
        return None
    if not getattr(image_processor, "do_convert_rgb", None):
        return None  # the number of channels depends on the image
    counterpart = copy.copy(image_processor)
    counterpart.process_image = process_image
    return counterpart


class WithoutPixels:
    """Context manager in which the copy from `shape_only_of` runs.

    It patches functions in the modules of the image processor that leave numpy (resizing uses
    Pillow) or lose the type of an array (``np.array``, ``np.zeros``), so that they support
    shape-only arrays. Other threads are not affected.
    """

    _lock = threading.RLock()
    thread = 0  # the thread that is inside

    def __init__(self, image_processor: Any) -> None:
        from transformers import feature_extraction_utils, image_transforms, image_utils

        modules = [image_transforms, image_utils, feature_extraction_utils] + [
            sys.modules[kind.__module__]
            for kind in type(image_processor).__mro__
            if kind is not object and kind.__module__ in sys.modules
        ]
        resize = image_transforms.resize
        resized = _resizing(resize)
        self._changes = [
            (vars(module), name, value, resized if value is resize else _numpy)
            for module in dict.fromkeys(modules)
            for name, value in vars(module).items()
            if value is resize or value is np
        ]

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            WithoutPixels.thread = threading.get_ident()
            try:
                for names, name, _, shape_only in self._changes:
                    names[name] = shape_only
                yield
            finally:
                WithoutPixels.thread = 0
                for names, name, own, _ in self._changes:
                    names[name] = own
