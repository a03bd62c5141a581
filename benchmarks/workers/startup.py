"""A small user script with two lines of training, for plain Horovod or star_hvd; runs under horovodrun.

It imports only what the script itself needs, since imports are part of the measured time.
"""

import json
import os
import sys
import time
from pathlib import Path


def main(folder: Path, side: str, optimizers: int, steps: int, device_s: float) -> None:
    """Train, and record in `folder` when this process had its first and its last step."""
    (folder / f"{os.getpid()}.pid").touch()
    import torch

    if side == "plain":
        import horovod.torch as hvd
    else:
        import star_hvd as hvd

    times = {"imported_unix_s": time.time()}
    torch.set_num_threads(1)
    hvd.init()
    for _ in range(optimizers):
        net = torch.nn.Linear(8, 1)
        inner = torch.optim.SGD(net.parameters(), lr=0.01)
        optimizer = hvd.DistributedOptimizer(inner, named_parameters=net.named_parameters())
        hvd.broadcast_parameters(net.state_dict(), root_rank=0)
        for _ in range(steps):
            optimizer.zero_grad()
            loss = net(torch.ones(4, 8)).square().mean()
            if device_s:
                time.sleep(device_s)
            loss.backward()
            optimizer.step()
            if "first_step_unix_s" not in times:
                times |= {"first_step_unix_s": time.time(), "first_step_cpu_s": time.process_time()}
        times["last_step_unix_s"] = time.time()
        if optimizers > 1 and side == "star":
            optimizer.close()
    report = {"rank": int(hvd.rank()), "pid": os.getpid(), **times}
    draft = folder / f".{os.getpid()}.json"
    draft.write_text(json.dumps(report), encoding="utf-8")
    draft.replace(folder / f"times{report['rank']}.json")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]))
