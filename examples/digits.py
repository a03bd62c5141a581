"""Trains scikit-learn's digits on several processes: horovodrun -np 4 python examples/digits.py

Two lines had to change from a script for plain Horovod, marked (1) and (2). The calls of `record_loss`,
`record_metric`, `report` and `explain` are additions, and may be left out. To see what the two lines do, make a rank
slow: `--slow-rank 3` lets it take four times as long for a batch as the others. A fifth of a batch's time does not
depend on its size, so that a rank with smaller batches is faster.
"""

import argparse
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset, random_split

import star_hvd as hvd  # (1) was: import horovod.torch as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--device-ms", type=float, default=30.0, help="sleep per whole batch, for what a GPU would do")
parser.add_argument("--slow-rank", type=int, default=None, help="rank that sleeps four times as long")
args = parser.parse_args()

hvd.init()
if args.slow_rank is not None and not 0 <= args.slow_rank < hvd.size():
    parser.error(f"--slow-rank is {args.slow_rank}; expected a rank of this job, 0 to {hvd.size() - 1}")
torch.manual_seed(0)
torch.set_num_threads(1)

images, labels = load_digits(return_X_y=True)
samples = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
train, test = random_split(samples, [1280, len(samples) - 1280], torch.Generator().manual_seed(0))
test_x, test_y = (torch.stack(column) for column in zip(*test, strict=True))
loader = hvd.shard(train, batch_size=args.batch_size, seed=0)  # (2) was: DataLoader with DistributedSampler

model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

device_s = args.device_ms / 1000 * (4 if hvd.rank() == args.slow_rank else 1)
start_s = time.perf_counter()
for epoch in range(args.epochs):
    losses = []
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        time.sleep(device_s * (0.2 + 0.8 * len(x) / args.batch_size))
        hvd.record_loss(loss)  # for the log of the run, and for the guard of accuracy
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    mean_loss = hvd.allreduce(torch.stack(losses).mean() if losses else torch.tensor(0.0), name="loss")
    if hvd.rank() == 0:
        accuracy = (model(test_x).argmax(1) == test_y).float().mean()
        hvd.record_metric("accuracy", accuracy)  # STAR_TARGET="accuracy>=0.9" gives the run its time to accuracy
        seconds = time.perf_counter() - start_s
        print(f"epoch {epoch + 1}: loss {mean_loss:.3f}, accuracy {100 * accuracy:.1f} %, {seconds:.1f} s")

if hvd.rank() == 0:
    print(hvd.report())
    print(hvd.explain())
hvd.shutdown()
