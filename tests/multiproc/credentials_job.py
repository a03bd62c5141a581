"""A rank that looks for MLflow's password: in its own environment, and where everybody on the host can read it."""

from __future__ import annotations

import os

import psutil

import star_hvd as hvd
from tests.support.launch import write_result


def main() -> None:
    hvd.init()
    secret, shown = os.environ.get("MLFLOW_TRACKING_PASSWORD", ""), 0
    for process in psutil.process_iter(["cmdline"]):
        shown += bool(secret) and any(secret in part for part in process.info["cmdline"] or [])
    hvd.barrier()
    write_result({"secret": secret, "shown": shown})
    hvd.shutdown()


if __name__ == "__main__":
    main()
