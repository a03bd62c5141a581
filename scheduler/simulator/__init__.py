"""An event simulator of a training job: ranks, links, servers, contention, all modes, and the live job's policies.

`job` runs a job under a policy, or many under fixed plans; `scenario` and `episodes` say what is simulated;
`whatif` replays a logged run, whose files `reports` reads. The modes are in `rounds`, `subsets` and `servers`, the
arithmetic of progress in `account` and `scheduler.cost.progress`.
"""

from scheduler.simulator.arrivals import OtherJob, contention, draw_jobs, read_arrivals
from scheduler.simulator.episodes import ContentionError, Episode, read_contention
from scheduler.simulator.job import Job, Outcome, run_plans
from scheduler.simulator.scenario import Cluster, Network, Scenario, draw_scenario

__all__ = [
    "Cluster",
    "ContentionError",
    "Episode",
    "Job",
    "Network",
    "OtherJob",
    "Outcome",
    "Scenario",
    "contention",
    "draw_jobs",
    "draw_scenario",
    "read_arrivals",
    "read_contention",
    "run_plans",
]
