"""The peers: other engines that `benchmark.py` times, each in a process of its own.

`launch` is the benchmark's side. `worker` and one file a peer are the process's side: they run in the peer's
own environment, so they import nothing of ours but each other, and nothing of others but the peer.
"""
