"""Reknit beside PyTorch eager, DDP over gloo, torchrun with checkpoints, and torchft: on one machine, in one run.

    make bench-peers [ARGS="--only trainer,recovery --rounds 5 --json FILE"]

Each comparison takes turns: ours, theirs, ours, theirs. What is compared are medians. See docs/benchmarks.md.
"""

import argparse
import json
import os
import pathlib
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile

from jobs import (
    AGGRESSIVE, DEFAULT, GOLDEN, HERE, MEASURED, TUNED, Ddp, Hangs, Torchft, Torchrun, stand_in, step_ms,
    steps_of,
)  # fmt: skip
from model import SHAPES

SHAPE = "10m"
EVERY = 10
SIZES = "4KiB,1MiB,64MiB"

THEIRS_ALONE = """\
What the peers do and Reknit does not:
  PyTorch   trains any model, in any precision, on any accelerator it knows, compiled or not; Reknit trains one family of
            decoders with code written for it.
  torchft   wraps a model, an optimizer and a training loop as they are, over gloo, NCCL or XCCL, also with FSDP, and has
            LocalSGD and DiLoCo for slow networks.
  torchrun  restarts any program, and needs no second replica: one checkpoint is enough."""


def say(text):
    print(text, file=sys.stderr, flush=True)


def told(command):
    """The last line that the command prints, as JSON. A command that fails says why on stderr, where it is left."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def median(values):
    return statistics.median(values) if values else None


def spread(values):
    values = list(values)
    if not values:
        return None
    rounded = (round(of(values), 1) for of in (min, statistics.median, max))
    return dict(zip(("min", "median", "max"), rounded))


class Bench:
    def __init__(self, args):
        self.args = args
        self.results = {}
        self.rows = []

    def reknit(self, *words):
        return told([self.args.reknit, "bench", *map(str, words), "--format", "json"])

    def peer(self, script, *words):
        return told([sys.executable, str(HERE / script), *map(str, words)])

    def row(self, what, ours, theirs, ratio, bar=""):
        self.rows.append((what, ours, theirs, ratio, bar))

    def keep(self, section, key, value):
        self.results.setdefault(section, {})[key] = value
        if self.args.json:
            pathlib.Path(self.args.json).write_text(json.dumps(self.results, indent=1) + "\n")

    # Tokens a second of one process.

    def trainer(self):
        for shape in ("small", "big"):
            for threads in (1, 2):
                ours, theirs = [], []
                for round_ in range(self.args.rounds):
                    say(f"trainer, {shape}, {threads} threads, round {round_ + 1} of {self.args.rounds}")
                    answer = self.reknit("train", "--shape", shape, "--threads", threads)
                    ours.append(answer["points"][0])
                    theirs.append(self.peer("eager.py", "--shape", shape, "--threads", threads))
                same_model(ours[0]["losses"], theirs[0]["losses"])
                rate = {
                    name: statistics.median(run["tokens_per_s"]["median"] for run in runs)
                    for name, runs in (("reknit", ours), ("pytorch", theirs))
                }
                ratio = rate["reknit"] / rate["pytorch"]
                self.keep("trainer", f"{shape}/{threads}", {**rate, "ratio": ratio, "runs": [ours, theirs]})
                self.row(
                    f"trainer, {shape}, {threads} thr., tokens/s against PyTorch eager",
                    f"{rate['reknit']:.0f}", f"{rate['pytorch']:.0f}", f"{ratio:.2f}", ">= 1.1",
                )  # fmt: skip

    # All-reduce.

    def all_reduce(self):
        ours, theirs = {}, {}
        for round_ in range(self.args.rounds):
            say(f"all-reduce, round {round_ + 1} of {self.args.rounds}")
            for points, answer in (
                # Shared memory is what ranks of one node use.
                (ours, self.reknit("plane", "--ranks", "2,4", "--sizes", SIZES, "--transport", "shm")),
                (theirs, self.peer("allreduce.py", "--ranks", "2,4", "--sizes", SIZES)),
            ):
                for point in answer["points"]:
                    if point.get("exchange", "all_reduce") == "all_reduce":
                        points.setdefault((point["ranks"], point["bytes"]), []).append(point["median_us"])
        for ranks, size in sorted(theirs):
            mine, gloo = statistics.median(ours[ranks, size]), statistics.median(theirs[ranks, size])
            self.keep("all_reduce", f"{ranks}/{size}", {"reknit_us": mine, "gloo_us": gloo, "ratio": gloo / mine})
            name = f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
            self.row(
                f"all-reduce, {ranks} ranks, {name}, us against gloo",
                f"{mine:.0f}", f"{gloo:.0f}", f"{gloo / mine:.1f}", "> 1",
            )  # fmt: skip

    # Losses and returns.

    def recovery(self):
        kills = self.args.kills
        for data, replicas in ((2, 2), (3, 3)):
            ours = self.ours(f"{data}x2", "--data", data, "--tensor", 2, "--repeats", kills)
            for timeouts in (AGGRESSIVE, TUNED, DEFAULT):
                repeats = kills if timeouts is not DEFAULT else max(2, kills // 4)
                theirs = self.torchft(replicas, timeouts, signal.SIGKILL, repeats)
                self.beside(f"kill -9, {data} replicas", "kill_to_commit_ms", ours, f"torchft {timeouts.name}", theirs)
        self.torchrun(max(2, kills // 4))

    def frozen(self):
        ours = self.ours("2x2 stopped", "--signal", "stop", "--repeats", max(2, self.args.kills // 4))
        for timeouts in (TUNED, DEFAULT):
            theirs = self.torchft(2, timeouts, signal.SIGSTOP, 2)
            self.beside("SIGSTOP, 2 replicas", "frozen_to_commit_ms", ours, f"torchft {timeouts.name}", theirs)

    def ours(self, name, *words):
        say(f"reknit, {name}")
        ours = self.reknit("recovery", "--params", SHAPE, *words)
        assert_same_shape(ours["job"])
        self.keep("recovery", f"reknit {name}", ours)
        return ours

    def beside(self, what, key, ours, peer, theirs):
        mine, other = ours[key], theirs["to_commit_ms"]
        self.row(
            f"{what}, ms to the next step, against {peer}",
            f"{mine['median']:.0f} (max {mine['max']:.0f})",
            f"{other['median']:.0f} (max {other['max']:.0f})" + ", then hangs" * theirs["hangs"] if other else "hangs",
            f"{other['median'] / mine['median']:.1f}" if other else "-",
        )
        step = ours["step_ms"]["median"]
        over, their_over = mine["median"] - step, other and other["median"] - theirs["step_ms"]
        self.row(
            "  beyond one step of its own", f"{over:.0f}", f"{their_over:.0f}" if other else "-", "",
            "median <= 100, max <= 300" if key == "kill_to_commit_ms" else "",
        )  # fmt: skip
        back, their_back = ours["rejoin_ms"], theirs["rejoin_ms"]
        if back and their_back:
            self.row(
                "  return, ms after the process is up", f"{back['median']:.0f}", f"{their_back['median']:.0f}",
                f"{their_back['median'] / back['median']:.1f}", "<= 500",
            )  # fmt: skip
            start, their_start = ours["startup_ms"], theirs["startup_ms"]
            self.row(
                "  start of the process, ms", f"{start['median']:.0f}", f"{their_start['median']:.0f}",
                f"{their_start['median'] / max(start['median'], 0.1):.0f}",
            )  # fmt: skip

    def torchft(self, replicas, timeouts, number, repeats):
        """Losses of one replica after another."""
        name = f"torchft {timeouts.name}, {replicas} replicas, {signal.Signals(number).name}"
        seen, hangs = {"to_commit": [], "startup": [], "rejoin": []}, 0
        with folder() as path, Torchft(path, replicas, timeouts, SHAPE) as job:
            for loss in range(repeats):
                say(f"{name}, loss {loss + 1} of {repeats}")
                try:
                    job.settle(replicas)
                    _, to_commit = job.hit(loss % replicas, number, loss * GOLDEN)
                    startup, rejoin = job.mend(loss % replicas)
                except Hangs as hang:
                    say(f"{name}: {hang}")
                    hangs = 1
                    break
                for key, value in (("to_commit", to_commit), ("startup", startup), ("rejoin", rejoin)):
                    seen[key].append(value)
            step = median(step_ms(job.log.read(), 0, replicas))
        result = {f"{key}_ms": spread(values) for key, values in seen.items()}
        result |= {"step_ms": step, "hangs": hangs, "losses": repeats, "each_ms": seen}
        self.keep("recovery", name, result)
        return result

    def torchrun(self, kills):
        name = f"torchrun, a checkpoint every {EVERY} steps"
        seen = []
        with folder() as path, Torchrun(path, 2, SHAPE, EVERY) as job:
            job.settle()
            for loss in range(kills):
                say(f"{name}, loss {loss + 1} of {kills}")
                seen.append(job.hit(loss % 2, loss * GOLDEN))
        columns = ("to_commit_ms", "to_new_step_ms", "startup_ms", "steps_redone")
        result = {column: spread(values) for column, values in zip(columns, zip(*seen))}
        self.keep("recovery", name, result)
        ours = self.results["recovery"]["reknit 2x2"]
        mine, other = ours["kill_to_commit_ms"], result["to_new_step_ms"]
        self.row(
            f"kill -9, ms to the next new step, against {name}", f"{mine['median']:.0f}", f"{other['median']:.0f}",
            f"{other['median'] / mine['median']:.0f}",
        )  # fmt: skip
        self.row("  steps done again", f"{ours['steps_lost_max']} at most", f"{result['steps_redone']['median']:.0f}", "")

    # What goes on when a replica's worker, or the peer's replica, is gone for good.

    def leave(self):
        ours = self.ours("2x2, one leaves", "--leave")
        with folder() as path, Torchft(path, 2, TUNED, SHAPE) as job:
            say("torchft, 2 replicas, one leaves")
            since = job.settle(2, MEASURED)
            before = rate(job.log.read(), 0, since)
            job.hit(1, signal.SIGKILL, GOLDEN)
            # The peer's replica is one process with all of its replica's work.
            with stand_in(1):
                since = job.settle(1, MEASURED)
                after = rate(job.log.read(), 0, since)
        kept = after / before * 100
        mine = ours["throughput"]["kept_percent"]
        self.keep("leave", "torchft", {"before": before, "after": after, "kept_percent": kept})
        self.row(
            "one of 2x2 gone for good, % of throughput, against torchft's replica", f"{mine:.0f}", f"{kept:.0f}",
            f"{mine / kept:.2f}", ">= 70",
        )  # fmt: skip

    # What fault tolerance costs while nothing fails.

    def overhead(self):
        ours, ddp, ft = [], [], []
        for round_ in range(self.args.rounds):
            say(f"overhead, round {round_ + 1} of {self.args.rounds}")
            ours.append(orchestration(self.args.bench_step))
            steps = 2 * MEASURED
            with folder() as path, Ddp(path, 2, SHAPE, steps) as job:
                job.finish()
                ddp.append(statistics.median(step_ms(job.log.read(), 0, 2)[SETTLED_STEPS:]))
            with folder() as path, Torchft(path, 2, DEFAULT, SHAPE) as job:
                job.settle(2, steps)
                ft.append(statistics.median(step_ms(job.log.read(), 0, 2)[SETTLED_STEPS:]))
        mine = statistics.median(ours)
        theirs = (statistics.median(ft) / statistics.median(ddp) - 1) * 100
        self.keep("overhead", "reknit", {"overhead_percent": mine, "each": ours})
        self.keep("overhead", "torchft", {"ddp_step_ms": ddp, "torchft_step_ms": ft, "overhead_percent": theirs})
        self.row(
            "orchestration, % of a step, against torchft over DDP", f"{mine:.1f}", f"{theirs:.1f}", "", "<= 1",
        )  # fmt: skip

    def table(self):
        rows = [("", "REKNIT", "PEER", "RATIO", "BAR"), *self.rows]
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        for row in rows:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())


SETTLED_STEPS = 6


def folder():
    return TemporaryPath()


class TemporaryPath(tempfile.TemporaryDirectory):
    def __enter__(self):
        return pathlib.Path(super().__enter__())


def rate(lines, rank, since):
    """Tokens a second: every participant has the share of one of two."""
    steps = steps_of(lines, rank, since)[-MEASURED:]
    share = SHAPES[SHAPE].tokens / 2
    tokens = sum(line["participants"] * share for line in steps[1:])
    return tokens / (steps[-1]["at"] - steps[0]["at"])


def orchestration(program):
    """What pace, vote, session and reports add to a step, in percent: told by the last line of the worker's own bench."""
    done = subprocess.run([program, "orchestration"], stdout=subprocess.PIPE, text=True, check=True)
    found = re.search(r"with orchestration .* ms: ([+-][0-9.]+)%", done.stdout)
    if not found:
        raise SystemExit(f"{program} does not say what orchestration costs: {done.stdout}")
    return float(found[1])


def same_model(ours, theirs):
    """It is the same model, with the same weights and tokens, only if the losses agree."""
    for step, loss in theirs.items():
        off = abs(ours[step] / loss - 1)
        if off > 2e-3:
            raise SystemExit(f"not the same model: loss {ours[step]} at step {step}, where PyTorch has {loss}")


def assert_same_shape(job):
    shape, model = SHAPES[SHAPE], job["model"]
    for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq_len"):
        if model[name] != getattr(shape, name):
            raise SystemExit(f"not the same model: {name} is {model[name]} and not {getattr(shape, name)}")
    if job["global_batch"] != shape.batch:
        raise SystemExit(f"not the same batch: {job['global_batch']} and not {shape.batch}")


def main():
    sections = ["trainer", "all_reduce", "overhead", "recovery", "frozen", "leave"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reknit", required=True, help="the program `reknit`, with the others of its build beside it")
    parser.add_argument("--bench-step", required=True, help="the example of that name of reknit-worker, built")
    parser.add_argument("--only", default=",".join(sections), help="of " + ",".join(sections))
    parser.add_argument("--rounds", type=int, default=3, help="of each comparison that takes turns")
    parser.add_argument("--kills", type=int, default=20, help="workers to lose in each setting")
    parser.add_argument("--json", help="a file for every figure")
    args = parser.parse_args()
    unknown = set(args.only.split(",")) - set(sections)
    # Whoever ends this ends the peers' processes too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if unknown:
        parser.error(f"--only: {', '.join(sorted(unknown))}: allowed are {', '.join(sections)}")

    import torch
    from importlib.metadata import version

    bench = Bench(args)
    versions = {"python": platform.python_version(), "torch": torch.__version__, "torchft": version("torchft")}
    bench.keep("machine", "versions", versions)
    bench.keep("machine", "cores", len(os.sched_getaffinity(0)))
    for section in sections:
        if section in args.only.split(","):
            getattr(bench, section)()
    bench.table()
    print()
    print(THEIRS_ALONE)


if __name__ == "__main__":
    main()
