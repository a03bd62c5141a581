"""Limits of MLflow's requests, for processes that do not train but should not hang either."""

from __future__ import annotations

import os

__all__ = ["limit_requests"]


def limit_requests() -> None:
    """Set MLflow's limits where the user has not: its defaults, 120 s and 7 retries, are a quarter of an hour.

    Call it before the first request.
    """
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
