"""The run log: a job's measurements, decisions and results, on disk at once and in MLflow a little later.

Training processes use only `RunLog`, which needs no MLflow. This package must be importable without torch and Horovod,
which the process that sends to MLflow does not import (see `dispatch`).
"""

from __future__ import annotations

from star_hvd.run_log.layout import default_root, enabled, new_run_name, run_directory
from star_hvd.run_log.log import RunLog
from star_hvd.run_log.windows import window_values

__all__ = ["RunLog", "default_root", "enabled", "new_run_name", "run_directory", "window_values"]
