"""Texts without the credentials of MLflow: what is shown, logged or written to a run goes through here."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

__all__ = ["HIDDEN", "SECRETS", "redacted"]

SECRETS = ("MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_USERNAME")
"""Environment variables by which MLflow's client is let in."""

HIDDEN = "***"

_IN_URI = re.compile(r"(?<=://)[^\s/@'\"]*@")
_WORD = r"[\w-]*(?:password|passwd|token|secret|api[-_]?key)"
_NAMED = re.compile(rf"(?i)({_WORD}=|--{_WORD}\s+)([^\s&;,'\"]+)")
_LEAST = 3  # Letters of a secret: what is shorter is in every text.


def redacted(text: str, environ: Mapping[str, str] | None = None) -> str:
    """A text in which the user and password of URIs, values of `--token X` and the like, and MLflow's own are hidden.

    Args:
        text: Any text.
        environ: The environment whose `SECRETS` must not show; that of this process where None.
    """
    found = _NAMED.sub(rf"\g<1>{HIDDEN}", _IN_URI.sub(f"{HIDDEN}@", text))
    for name in SECRETS:
        secret = (os.environ if environ is None else environ).get(name, "")
        if len(secret) >= _LEAST:
            found = found.replace(secret, HIDDEN)
    return found
