"""The decision side of STAR for Horovod: pure policy code without torch or horovod.

The same functions decide inside a training job, in a simulator and in a unit test.
"""

from scheduler.records import Plan, PlanError, RankStats, StepReport, Window

__all__ = ["Plan", "PlanError", "RankStats", "StepReport", "Window"]
