"""Settings for all tests."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# How long an example takes says how busy the machine is, and nothing about the code.
settings.register_profile("star", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("star")

# Every lock of the package is compared with the order of `star_hvd.locks`, here and in the jobs that tests start.
os.environ.setdefault("STAR_CHECK_LOCKS", "1")
