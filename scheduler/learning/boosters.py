"""Prediction with a LightGBM model by LightGBM's C library, without its Python package.

Importing the package also imports pandas, scikit-learn and SciPy: 2.7 CPU seconds and 110 MB in the process of rank 0,
which trains (measured with LightGBM 4.6). The library is loaded in 6 ms, a model of 200 trees in 10 ms.
"""

from __future__ import annotations

import ctypes
import importlib.util
import weakref
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Booster", "BoosterError", "LightGBMMissing", "find_library", "load_booster"]

Array = npt.NDArray[np.float64]

_FLOAT64, _ROW_MAJOR, _NORMAL, _ALL = 1, 1, 0, -1  # C_API_DTYPE_FLOAT64, is_row_major, C_API_PREDICT_NORMAL
_NAMES = ("lib_lightgbm.so", "lib_lightgbm.dylib", "lib_lightgbm.dll")


class BoosterError(RuntimeError):
    """LightGBM, or the validation before it, rejects a model or its input."""


class LightGBMMissing(BoosterError):
    """LightGBM is not installed or cannot be loaded."""


def load_booster(text: str) -> Any:
    """Load a model from LightGBM's text: a `Booster`, or LightGBM's own if its C library is not found.

    Raises:
        LightGBMMissing: It is not installed or cannot be loaded.
        BoosterError: The text is not a model.
    """
    library = find_library()
    if library is not None:
        return Booster(text, library)
    try:
        import lightgbm
    except (ImportError, OSError) as error:  # OSError: libgomp is missing.
        raise LightGBMMissing(f"LightGBM cannot be loaded: {error}") from None
    try:
        return lightgbm.Booster(model_str=text)
    except Exception as error:
        # LightGBM raises its own error, and arbitrary others on damaged input.
        raise BoosterError(str(error)) from None


class Booster:
    """One model, with the two methods of `lightgbm.Booster` that are needed here. Thread-safe.

    Args:
        text: The model, as LightGBM writes it.
        library: LightGBM's C library.

    Raises:
        BoosterError: The text is not a model.
    """

    def __init__(self, text: str, library: ctypes.CDLL) -> None:
        self._library = library
        handle, iterations = ctypes.c_void_p(), ctypes.c_int(0)
        data = ctypes.c_char_p(text.encode())
        self._call(library.LGBM_BoosterLoadModelFromString(data, ctypes.byref(iterations), ctypes.byref(handle)))
        self._handle = handle
        weakref.finalize(self, library.LGBM_BoosterFree, handle)
        count = ctypes.c_int(0)
        self._call(library.LGBM_BoosterGetNumClasses(handle, ctypes.byref(count)))
        if count.value != 1:
            raise BoosterError(f"the model has {count.value} outputs per row; expected 1")
        self._call(library.LGBM_BoosterGetNumFeature(handle, ctypes.byref(count)))
        self._features = count.value

    def num_feature(self) -> int:
        """Number of feature columns."""
        return self._features

    def predict(self, features: Array, *, num_threads: int = 1, validate_features: bool = False) -> Array:
        """Predict one number per row.

        Args:
            features: Rows, shape (n, `num_feature()`).
            num_threads: Threads to use.
            validate_features: Ignored, for compatibility with LightGBM: there are no names to compare.

        Raises:
            BoosterError: The rows have another number of columns.
        """
        rows = np.ascontiguousarray(features, dtype=np.float64)
        if rows.ndim != 2 or rows.shape[1] != self._features:
            raise BoosterError(f"rows have shape {rows.shape}; expected (n, {self._features})")
        found, length = np.empty(len(rows), dtype=np.float64), ctypes.c_int64(0)
        if not len(rows):
            return found
        self._call(
            self._library.LGBM_BoosterPredictForMat(
                self._handle,
                rows.ctypes.data_as(ctypes.c_void_p),
                ctypes.c_int(_FLOAT64),
                ctypes.c_int32(rows.shape[0]),
                ctypes.c_int32(rows.shape[1]),
                ctypes.c_int(_ROW_MAJOR),
                ctypes.c_int(_NORMAL),
                ctypes.c_int(0),
                ctypes.c_int(_ALL),
                ctypes.c_char_p(f"num_threads={int(num_threads)}".encode()),
                ctypes.byref(length),
                found.ctypes.data_as(ctypes.POINTER(ctypes.c_double)),
            )
        )
        if length.value != len(found):
            raise BoosterError(f"LightGBM gave {length.value} predictions; expected one for each of {len(found)} rows")
        return found

    def _call(self, status: int) -> None:
        if status != 0:
            raise BoosterError(str(self._library.LGBM_GetLastError().decode("utf-8", errors="replace")))


@lru_cache(maxsize=1)
def find_library() -> ctypes.CDLL | None:
    """Load LightGBM's C library; None if it is not in its package's folder.

    Raises:
        LightGBMMissing: It is not installed, or its library cannot be loaded.
    """
    package = importlib.util.find_spec("lightgbm")
    if package is None:
        raise LightGBMMissing("LightGBM is missing; install it for learned decisions: pip install lightgbm")
    for folder in map(Path, package.submodule_search_locations or []):
        for path in (folder / part / name for part in ("lib", "bin", ".") for name in _NAMES):
            if path.is_file():
                try:
                    library = ctypes.CDLL(str(path))
                except OSError as error:  # libgomp is missing.
                    raise LightGBMMissing(f"LightGBM cannot be loaded: {error}") from None
                library.LGBM_GetLastError.restype = ctypes.c_char_p
                return library
    return None
