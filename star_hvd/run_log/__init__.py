"""The log of a job: what was measured, decided and reached, on disk at once and in MLflow a little later.

Training processes use `RunLog` alone, which needs no MLflow. This package must stay importable without torch and
Horovod: the process that sends to MLflow does so (see `log`).
"""

from __future__ import annotations

from star_hvd.run_log.layout import default_root, enabled, new_run_name, run_directory
from star_hvd.run_log.log import RunLog
from star_hvd.run_log.windows import window_values

__all__ = ["RunLog", "default_root", "enabled", "new_run_name", "run_directory", "window_values"]
