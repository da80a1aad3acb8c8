"""The interpreter's types, remembered: most of an interpreted operation's time goes into describing its result's shape all over again.

Triton makes a new block type (name, sizes, checks) for nearly every tensor that an operation returns, and a new tuple of constants from it.
Equal types are described once here and their attributes shared. Nothing else changes: what Triton refuses, it refuses as before.
"""

from __future__ import annotations

from typing import Any

import triton.language.core as core
from triton.runtime import interpreter as triton_interpreter

_block_types: dict[tuple[Any, ...], dict[str, Any]] = {}
_shapes: dict[tuple[Any, ...], tuple[Any, Any]] = {}
_numpy_dtypes: dict[str, Any] = {}
_make_block_type = core.block_type.__init__
_numpy_dtype = triton_interpreter._get_np_dtype


def block_type_init(self: Any, element_ty: Any, shape: Any) -> None:
    """triton.language.core.block_type.__init__, with the attributes of an equal block type where there was one before."""
    key = (element_ty.name, getattr(element_ty, "address_space", None), *[size.value if isinstance(size, core.constexpr) else size for size in shape])
    known = _block_types.get(key)
    if known is None:
        _make_block_type(self, element_ty, shape)
        _block_types[key] = dict(self.__dict__)
    else:
        self.__dict__.update(known)


def tensor_init(self: Any, handle: Any, type: Any) -> None:
    """triton.language.core.tensor.__init__, with the shape and size of an equally large tensor where there was one before."""
    self.handle = handle
    self.type = type
    self.dtype = type.scalar
    key = tuple(type.shape) if type.is_block() else ()
    known = _shapes.get(key)
    if known is None:
        numel = 1
        for size in key:
            numel *= size
        known = _shapes[key] = (core.tuple([core.constexpr(size) for size in key]), core.constexpr(numel))
    self.shape, self.numel = known


def numpy_dtype(triton_type: Any) -> Any:
    """triton.runtime.interpreter._get_np_dtype, which makes a table of all types at each call."""
    known = _numpy_dtypes.get(triton_type.name)
    if known is None:
        known = _numpy_dtypes[triton_type.name] = _numpy_dtype(triton_type)
    return known
