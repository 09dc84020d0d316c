"""Tokens a second of PyTorch eager: forward, backward, clip and fused AdamW in one process.

    python eager.py --shape small --threads 1 [--seconds 5]

Prints one line of JSON: `{"shape", "threads", "params", "step_ms": {"best", "median"}, "tokens_per_s": {"best",
"median"}, "losses": {step: loss}, "rss_mb": {"imported", "trained"}}`. Losses of the first steps are told, so that they
can be compared with those of `reknit bench train`: it is the same model only if they agree.
"""

import argparse
import json
import statistics
import time

import torch

from model import SHAPES, adamw, build, parameters_of, tokens_of, train_step

TOLD_STEPS = (1, 2, 3, 5, 10)


def resident_mb():
    """Resident memory of this process. That of Python and its libraries alone is told apart."""
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("VmRSS:"))
    return round(int(line.split()[1]) / 1024, 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=5.0)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    shape = SHAPES[args.shape]
    imported = resident_mb()
    model, tokens = build(shape), tokens_of(shape)
    optimizer = adamw(model)
    losses, times = {}, []
    begin = time.perf_counter()
    while len(times) < max(TOLD_STEPS) or time.perf_counter() - begin < args.seconds:
        start = time.perf_counter()
        loss = train_step(model, optimizer, tokens)
        times.append(time.perf_counter() - start)
        if len(times) in TOLD_STEPS:
            losses[len(times)] = round(loss.item(), 6)
    # The first steps make the buffers.
    warm = times[2:]
    best, median = min(warm), statistics.median(warm)
    print(json.dumps({
        "shape": args.shape,
        "threads": args.threads,
        "params": parameters_of(shape),
        "steps": len(times),
        "step_ms": {"best": round(best * 1e3, 3), "median": round(median * 1e3, 3)},
        "tokens_per_s": {"best": round(shape.tokens / best, 1), "median": round(shape.tokens / median, 1)},
        "losses": losses,
        "rss_mb": {"imported": imported, "trained": resident_mb()},
    }))


if __name__ == "__main__":
    main()
