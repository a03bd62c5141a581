"""Parameter servers: separate processes, each with a shard of the parameters and the user's optimizer class.

How the parts are used, in order:

    key = JobKey.new()                                               # on rank 0, which sends it to all ranks
    server = ServerProcess(rank, key, host, on_event=note)           # on every owner
    endpoint = server.start(deadline_s)                              # exchanged among all ranks
    layout = Layout.build(buckets, optimizer.param_groups, base, n_servers, chunk_bytes)    # equal on every rank
    spec = OptimizerSpec.of(base, optimizer.param_groups, hyper)     # `hyper` is the worker's HyperRow
    server.open(optimizer_id, session, index, endpoints, layout, plan, spec, version)  # `index` in order of endpoints
    server.seed(optimizer_id, session, snapshot)                     # one version on every owner; event `seeded`
    client = Client(rank, optimizer_id, session, endpoints, layout, key); client.start()  # on every worker
    client.push(step=.., version=.., flats=.., weight=.., ...); reply = client.wait(deadline_s)
    server.cut(optimizer_id, plan_id)                                # shard 0; event `cut` with the final version
    client.state(deadline_s)                                         # parameters, optimizer state; also after `cut`

Pushes that arrive before the seed are queued. After a server's death (event `died`): `endpoint =
server.recover(deadline_s)`, then `client.replace(index, endpoint)` on every worker and `replace(index, endpoint)` on
the other `ServerProcess`es; nothing is lost and nothing applied twice. With `server.member(optimizer_id, rank,
"absent")` no update waits for a worker's next push. One that it has announced and not sent is waited for: if the
worker's process has ended, the other workers notice that.

Limits: servers do not clip to a norm over all parameters (`max_grad_norm`). After a server's death in an asynchronous
mode a reply can hold chunks of neighbouring versions; its version is the lowest of them.

The data channel authenticates and, by default, does not encrypt; see `auth`.
"""
