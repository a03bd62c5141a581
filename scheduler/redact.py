"""Removes MLflow's credentials from texts that are shown, logged or written to a run."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

__all__ = ["HIDDEN", "SECRETS", "redacted"]

SECRETS = ("MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_USERNAME")
"""Environment variables with the credentials of MLflow's client."""

HIDDEN = "***"

_IN_URI = re.compile(r"(?<=://)[^\s/@'\"]*@")
_WORD = r"[\w-]*(?:password|passwd|token|secret|api[-_]?key)"
_NAMED = re.compile(rf"(?i)({_WORD}=|--{_WORD}\s+)([^\s&;,'\"]+)")
_LEAST = 3  # Shortest secret, in characters, that is hidden: shorter ones would occur in any text.


def redacted(text: str, environ: Mapping[str, str] | None = None) -> str:
    """Hide users and passwords of URIs, values of `--token X` and the like, and MLflow's credentials in a text.

    Args:
        text: Any text.
        environ: The environment whose `SECRETS` are hidden; that of this process if None.
    """
    found = _NAMED.sub(rf"\g<1>{HIDDEN}", _IN_URI.sub(f"{HIDDEN}@", text))
    for name in SECRETS:
        secret = (os.environ if environ is None else environ).get(name, "")
        if len(secret) >= _LEAST:
            found = found.replace(secret, HIDDEN)
    return found
