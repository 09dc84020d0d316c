"""All-reduce of f32 sums with gloo over this machine's loopback, a process a rank.

    python allreduce.py [--ranks 2,4] [--sizes 4KiB,1MiB,64MiB] [--seconds 1]

Prints one line of JSON: `{"backend": "gloo", "points": [{"ranks", "bytes", "rounds", "best_us", "median_us"}]}`. A round
is timed on rank 0 from a barrier on; in-place, one call at a time, as gradients' buckets would be.
"""

import argparse
import json
import os
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

UNITS = {"KiB": 1 << 10, "MiB": 1 << 20}
LEAST_ROUNDS = 5


def bytes_of(text):
    for unit, factor in UNITS.items():
        if text.endswith(unit):
            return int(text.removesuffix(unit)) * factor
    return int(text)


def rank_main(rank, ranks, sizes, seconds, store, answer):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    points = []
    for size in sizes:
        values = torch.ones(size // 4)
        # Everyone does as many rounds as rank 0 finds fit into the time.
        start = time.perf_counter()
        for _ in range(3):
            dist.all_reduce(values)
        one = (time.perf_counter() - start) / 3
        rounds = torch.tensor([max(LEAST_ROUNDS, min(5000, int(seconds / one)))])
        dist.broadcast(rounds, 0)
        times = []
        for _ in range(int(rounds)):
            values.fill_(1.0)
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(values)
            times.append(time.perf_counter() - start)
            assert values[0] == ranks and values[-1] == ranks, "a wrong sum"
        points.append({
            "ranks": ranks,
            "bytes": size,
            "rounds": len(times),
            "best_us": round(min(times) * 1e6, 1),
            "median_us": round(statistics.median(times) * 1e6, 1),
        })
    if rank == 0:
        with open(answer, "w") as file:
            json.dump(points, file)
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--sizes", default="4KiB,1MiB,64MiB")
    parser.add_argument("--seconds", type=float, default=1.0, help="about how long each point is measured")
    args = parser.parse_args()
    # Between processes of one machine the loopback is what gloo has.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    sizes = [bytes_of(size) for size in args.sizes.split(",")]
    points = []
    with tempfile.TemporaryDirectory() as folder:
        for ranks in map(int, args.ranks.split(",")):
            answer = os.path.join(folder, f"answer-{ranks}")
            store = os.path.join(folder, f"store-{ranks}")
            mp.spawn(rank_main, (ranks, sizes, args.seconds, store, answer), nprocs=ranks)
            with open(answer) as file:
                points += json.load(file)
    print(json.dumps({"backend": "gloo", "points": points}))


if __name__ == "__main__":
    main()
