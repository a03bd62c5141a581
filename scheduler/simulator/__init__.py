"""An event simulator of training jobs: ranks, links, servers, contention, all modes, and the policies of live jobs.

`job` runs one job under a policy, or many under fixed plans; `scenario` and `episodes` describe the input; `whatif`
replays a logged run that `reports` reads. Modes: `rounds`, `subsets`, `servers`, `stream`. Progress: `account`.
"""

from scheduler.simulator.episodes import ContentionError, Episode
from scheduler.simulator.job import Job, Outcome, run_plans
from scheduler.simulator.scenario import Cluster, Network, Scenario, draw_scenario

__all__ = [
    "Cluster",
    "ContentionError",
    "Episode",
    "Job",
    "Network",
    "Outcome",
    "Scenario",
    "draw_scenario",
    "run_plans",
]
