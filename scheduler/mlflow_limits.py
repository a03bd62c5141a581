"""Limits of MLflow's requests, for processes that do not train but should not hang either, and what they may raise."""

from __future__ import annotations

import os

__all__ = ["limit_requests", "request_errors"]


def limit_requests() -> None:
    """Set MLflow's limits where the user has not: its defaults, 120 s and 7 retries, are a quarter of an hour.

    Call it before the first request.
    """
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")


def request_errors() -> tuple[type[Exception], ...]:
    """Exceptions of MLflow's client: its own and SQLAlchemy's, which it passes on where a file is no database.

    Imports MLflow.
    """
    from mlflow.exceptions import MlflowException

    try:
        from sqlalchemy.exc import SQLAlchemyError
    except ImportError:  # The client without stores of its own, which asks servers only.
        return (MlflowException,)
    return (MlflowException, SQLAlchemyError)
