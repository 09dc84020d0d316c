"""Jobs of the peers on this machine: started, watched by what their trainers say, hit and mended."""

import contextlib
import json
import os
import pathlib
import signal
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

HERE = pathlib.Path(__file__).parent
# Far more than the peers' longest default timeout: what takes longer hangs.
LIMIT = 180.0
SETTLED = 6
MEASURED = 30
# Multiples of the golden ratio fill a step evenly.
GOLDEN = 0.618033988749895


class Hangs(Exception):
    pass


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Process:
    """A child of ours with its output in a file."""

    def __init__(self, command, output, **environment):
        surroundings = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", **environment}
        with open(output, "ab") as file:
            self.child = subprocess.Popen(
                command, stdout=file, stderr=file, stdin=subprocess.DEVNULL, env=surroundings, start_new_session=True
            )
        self.pid = self.child.pid

    def signal(self, number):
        self.child.send_signal(number)

    def end(self):
        """Ends it and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGCONT)
            os.killpg(self.pid, signal.SIGKILL)
        self.child.wait()


class Log:
    """What the trainers of one job have said so far, in order."""

    def __init__(self, path):
        self.path = path
        path.touch()
        self.file = open(path)
        self.part = ""
        self.lines = []

    def read(self):
        while text := self.file.readline():
            self.part += text
            if self.part.endswith("\n"):
                self.lines.append(json.loads(self.part))
                self.part = ""
        return self.lines

    def wait(self, what, found, limit=LIMIT):
        """Reads until `found`, given all lines, gives something."""
        end = time.monotonic() + limit
        while (answer := found(self.read())) is None:
            if time.monotonic() > end:
                raise Hangs(f"{what} was not seen within {limit:.0f} s")
            time.sleep(0.002)
        return answer


def first(lines, wanted):
    return next((line for line in lines if wanted(line)), None)


def steps_of(lines, rank, after=0.0):
    return [line for line in lines if line["what"] == "step" and line["rank"] == rank and line["at"] > after]


def step_ms(lines, rank, participants):
    """Wall times between consecutive steps in which so many took part."""
    steps = steps_of(lines, rank)
    pairs = [
        (before, after)
        for before, after in zip(steps, steps[1:])
        if before["pid"] == after["pid"]
        and after["step"] == before["step"] + 1
        and before["participants"] == after["participants"] == participants
    ]
    return [(after["at"] - before["at"]) * 1e3 for before, after in pairs]


@dataclass(frozen=True)
class Timeouts:
    """Of torchft, in the units of its flags."""

    name: str
    heartbeat_timeout_ms: int
    join_timeout_ms: int
    quorum_tick_ms: int
    heartbeat_ms: int
    timeout: float
    group_timeout: float


DEFAULT = Timeouts("default", 5000, 60000, 100, 100, 60.0, 60.0)
TUNED = Timeouts("tuned", 500, 1000, 100, 100, 10.0, 5.0)
AGGRESSIVE = Timeouts("aggressive", 200, 1000, 20, 50, 10.0, 5.0)


class Torchft:
    """A lighthouse and some replicas of one process each."""

    def __init__(self, folder, replicas, timeouts, shape, steps=1_000_000):
        self.folder, self.replicas, self.timeouts, self.shape, self.steps = folder, replicas, timeouts, shape, steps
        self.log = Log(folder / "steps.jsonl")
        self.processes = {}
        port = free_port()
        self.address = f"http://127.0.0.1:{port}"
        lighthouse = pathlib.Path(sys.executable).parent / "torchft_lighthouse"
        self.lighthouse = Process(
            [
                str(lighthouse), "--bind", f"127.0.0.1:{port}", "--min_replicas", "1",
                "--heartbeat_timeout_ms", str(timeouts.heartbeat_timeout_ms),
                "--join_timeout_ms", str(timeouts.join_timeout_ms),
                "--quorum_tick_ms", str(timeouts.quorum_tick_ms),
            ],
            folder / "lighthouse.log",
        )  # fmt: skip
        for replica in range(replicas):
            self.start(replica)

    def start(self, replica):
        timeouts = self.timeouts
        self.processes[replica] = Process(
            [
                sys.executable, str(HERE / "trainer.py"), "ft", "--shape", self.shape, "--events", str(self.log.path),
                "--steps", str(self.steps), "--timeout", str(timeouts.timeout),
                "--group-timeout", str(timeouts.group_timeout), "--heartbeat-ms", str(timeouts.heartbeat_ms),
            ],
            self.folder / f"replica-{replica}.log",
            REPLICA=str(replica),
            REPLICAS=str(self.replicas),
            TORCHFT_LIGHTHOUSE=self.address,
        )  # fmt: skip

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in [*self.processes.values(), self.lighthouse]:
            process.end()

    def settle(self, participants, steps=SETTLED):
        """Waits until every process of that many has done so many steps with all of them."""
        after = time.monotonic()

        def settled(lines):
            for replica, process in self.processes.items():
                if process.child.poll() is not None:
                    raise Hangs(f"the trainer of replica {replica} has ended by itself: see {self.folder}")
            done = [
                sum(1 for line in steps_of(lines, replica, after) if line["participants"] == participants)
                for replica in self.processes
            ]
            return True if min(done) >= steps else None

        self.log.wait(f"{steps} steps of {participants} replicas", settled)
        return after

    def hit(self, replica, number, moment):
        """Signals the replica so far into a step; returns when, and the milliseconds until the first step without it."""
        other = next(rank for rank in self.processes if rank != replica)
        time.sleep(statistics.median(step_ms(self.log.read(), other, self.replicas)) / 1e3 * (moment % 1.0))
        victim = self.processes.pop(replica)
        start = time.monotonic()
        victim.signal(number)

        def without(line):
            later = line["what"] == "step" and line["at"] > start
            return later and line["pid"] != victim.pid and line["participants"] == self.replicas - 1

        try:
            line = self.log.wait("a step after the loss", lambda lines: first(lines, without))
        finally:
            victim.end()
        return start, (line["at"] - start) * 1e3

    def mend(self, replica):
        """Starts the replica again; milliseconds of its start, and from then until its first step."""
        self.start(replica)
        pid = self.processes[replica].pid
        said = {}
        for what in ("started", "up", "step"):
            said[what] = self.log.wait(
                f"{what} of the new process",
                lambda lines: first(lines, lambda line: line["what"] == what and line["pid"] == pid),
            )["at"]
        return (said["up"] - said["started"]) * 1e3, (said["step"] - said["up"]) * 1e3


class Ddp:
    """DistributedDataParallel with a process a rank and nobody to mend it."""

    def __init__(self, folder, ranks, shape, steps):
        self.ranks = ranks
        self.log = Log(folder / "steps.jsonl")
        port = str(free_port())
        self.processes = [
            Process(
                [
                    sys.executable, str(HERE / "trainer.py"), "ddp", "--shape", shape, "--steps", str(steps),
                    "--events", str(self.log.path),
                ],
                folder / f"rank-{rank}.log",
                RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
            )
            for rank in range(ranks)
        ]  # fmt: skip

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.end()

    def finish(self):
        for process in self.processes:
            process.child.wait(LIMIT)


class Torchrun:
    """DistributedDataParallel under torchrun, which starts all ranks again from the newest checkpoint when one is lost."""

    def __init__(self, folder, ranks, shape, every):
        self.ranks = ranks
        self.log = Log(folder / "steps.jsonl")
        torchrun = pathlib.Path(sys.executable).parent / "torchrun"
        self.process = Process(
            [
                str(torchrun), "--standalone", "--nproc-per-node", str(ranks), "--max-restarts", "100000",
                str(HERE / "trainer.py"), "ddp", "--shape", shape, "--events", str(self.log.path),
                "--checkpoint", str(folder / "checkpoint.pt"), "--every", str(every),
            ],
            folder / "torchrun.log",
            # Its restarts otherwise use the store of the round before and can hang.
            TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
            OMP_NUM_THREADS="1",
        )  # fmt: skip
        self.every = every
        self.pids = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.end()
        # Trainers have sessions of their own.
        for pid in self.pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def settle(self, after=0.0):
        """Waits for steps beyond the first checkpoint, by all ranks; knows their processes then."""

        def settled(lines):
            if self.process.child.poll() is not None:
                raise Hangs("torchrun has ended by itself")
            steps = [steps_of(lines, rank, after) for rank in range(self.ranks)]
            if min(map(len, steps)) < self.every + SETTLED:
                return None
            return {rank: steps[rank][-1]["pid"] for rank in range(self.ranks)}

        self.pids = self.log.wait("steps of all ranks", settled)

    def hit(self, rank, moment):
        """Kills the rank so far into a stretch between checkpoints.

        Returns milliseconds until the next step, until the next new one, of the trainers' start, and steps redone.
        """
        one = statistics.median(step_ms(self.log.read(), rank, self.ranks)) / 1e3
        time.sleep(one * self.every * (moment % 1.0))
        old = set(self.pids.values())
        start = time.monotonic()
        os.kill(self.pids[rank], signal.SIGKILL)
        reached = max(line["step"] for line in steps_of(self.log.read(), rank))

        def step(least):
            def found(line):
                return line["what"] == "step" and line["pid"] not in old and line["step"] >= least

            return self.log.wait("a step after the loss", lambda lines: first(lines, found))

        again = step(0)
        fresh = step(reached + 1)
        up = [line for line in self.log.read() if line["pid"] == again["pid"]]
        startup = (first(up, lambda line: line["what"] == "up")["at"] - up[0]["at"]) * 1e3
        redone = reached - again["step"] + 1
        self.settle(again["at"])
        return (again["at"] - start) * 1e3, (fresh["at"] - start) * 1e3, startup, redone


@contextlib.contextmanager
def stand_in(count):
    """What takes the cores of processes that are gone for good: a lost GPU takes its arithmetic with it."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
