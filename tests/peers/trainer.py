"""One process of a data-parallel job in PyTorch. bench.py starts it, torchrun does, or a person.

    trainer.py ddp  --shape 10m            DistributedDataParallel over gloo; RANK, WORLD_SIZE, MASTER_ADDR and
                                           MASTER_PORT say who it is. With --checkpoint it begins from the newest one
                                           and writes another every --every steps.
    trainer.py ft   --shape 10m            a replica of torchft, as its documentation has it: manager, gloo, state
                                           fetched over HTTP. REPLICA, REPLICAS and TORCHFT_LIGHTHOUSE say who it is.

It says what happens as lines of JSON in the file --events, each with the time on the machine's monotonic clock:
{"what": "started" | "up" | "step", "at", "pid", "rank", "step", "participants"}. "up" is said when Python, PyTorch, model
and optimizer are there; "step" when the optimizer has applied it.
"""

import time

STARTED = time.monotonic()

import argparse
import json
import os
import pathlib
from datetime import timedelta

import torch
import torch.distributed as dist

from model import GRADIENT_NORM, SHAPES, Decoder, adamw, tokens_of


class Log:
    """Whole lines, so that several processes can write to one file."""

    def __init__(self, path, rank):
        self.file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self.rank = rank

    def say(self, what, at=None, **more):
        line = {"what": what, "at": at or time.monotonic(), "pid": os.getpid(), "rank": self.rank, **more}
        os.write(self.file, (json.dumps(line) + "\n").encode())


def build(shape):
    """PyTorch's own first weights, which are made sooner: what is measured does not depend on them."""
    torch.manual_seed(1)
    return Decoder(shape)


def apply(model, optimizer):
    torch.nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM, foreach=True)
    optimizer.step()


def ddp(args, shape):
    """The global batch is divided among the ranks."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    log = Log(args.events, rank)
    log.say("started", STARTED)
    model, tokens = build(shape), tokens_of(shape).tensor_split(world)[rank]
    optimizer = adamw(model)
    step = 0
    saved = pathlib.Path(args.checkpoint) if args.checkpoint else None
    if saved and saved.exists():
        state = torch.load(saved, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    log.say("up")
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    parallel = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    while step < args.steps:
        optimizer.zero_grad(set_to_none=False)
        parallel(tokens).backward()
        apply(model, optimizer)
        step += 1
        log.say("step", step=step, participants=world)
        if saved and step % args.every == 0 and rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, saved.with_suffix(".new"))
            saved.with_suffix(".new").rename(saved)
    dist.destroy_process_group()


def ft(args, shape):
    """Each replica always computes the same share: while one is away, the global batch is smaller."""
    from torchft import DistributedDataParallel, Manager, ProcessGroupGloo

    class Parallel(DistributedDataParallel):
        @staticmethod
        def _comm_hook(manager, bucket):
            """As torchft 0.2.0 has it, but for an assertion: when gloo tells of a lost peer, it ends the survivors."""
            values = bucket.buffer()
            # A failure is noted by the manager, which then does not let the step be committed.
            manager.allreduce(values).wait()
            done = torch.futures.Future()
            done.set_result(values)
            return done

    replica, replicas = int(os.environ["REPLICA"]), int(os.environ["REPLICAS"])
    log = Log(args.events, replica)
    log.say("started", STARTED)
    model, tokens = build(shape), tokens_of(shape).tensor_split(replicas)[replica]
    optimizer = adamw(model)

    def load(state):
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    def save():
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    log.say("up")
    timeout = timedelta(seconds=args.timeout)
    # A replica of one process: its store is its own.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=args.group_timeout)),
        load_state_dict=load,
        state_dict=save,
        min_replica_size=1,
        timeout=timeout,
        quorum_timeout=timeout,
        connect_timeout=timeout,
        heartbeat_interval=timedelta(milliseconds=args.heartbeat_ms),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        hostname="127.0.0.1",
        replica_id=f"replica_{replica}",
    )
    parallel = Parallel(manager, model)
    while manager.current_step() < args.steps:
        manager.start_quorum()
        optimizer.zero_grad(set_to_none=False)
        parallel(tokens).backward()
        if manager.should_commit():
            apply(model, optimizer)
            log.say("step", step=manager.current_step(), participants=manager.num_participants())
    manager.shutdown(wait=False)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=["ddp", "ft"])
    parser.add_argument("--shape", choices=SHAPES, default="10m")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--events", default="/dev/stdout")
    parser.add_argument("--checkpoint", help="ddp: the file that is written and read")
    parser.add_argument("--every", type=int, default=10, help="ddp: steps between checkpoints")
    parser.add_argument("--timeout", type=float, default=60.0, help="ft: the manager's, in seconds")
    parser.add_argument("--group-timeout", type=float, default=60.0, help="ft: of collectives, in seconds")
    parser.add_argument("--heartbeat-ms", type=int, default=100, help="ft: between two heartbeats")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    {"ddp": ddp, "ft": ft}[args.mode](args, SHAPES[args.shape])


if __name__ == "__main__":
    main()
