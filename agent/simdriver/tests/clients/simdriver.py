"""A simulated node for one client program, and the count of what the program compared."""

import json
import os
import subprocess
import sys
import tempfile

TOOL = os.environ["REKNIT_SIMDRIVER"]
_folder = tempfile.TemporaryDirectory()
# Before the client loads the library, which reads the variable when it is initialised.
FILE = os.environ["REKNIT_SIMDRIVER_STATE"] = os.path.join(_folder.name, "state.json")


def run(*arguments):
    return subprocess.run([TOOL, *map(str, arguments)], check=True, capture_output=True, text=True).stdout


def init(gpus):
    run("init", "--gpus", gpus, "--node", "outside", FILE)


def set(target, **changes):
    run("set", FILE, target, *(f"{key}={json.dumps(value)}" for key, value in changes.items()))


def event(gpu, *arguments):
    run("event", FILE, gpu, *arguments)


class Said:
    """What the tool says of a GPU. It remembers which keys were asked for."""

    def __init__(self, gpu):
        self._keys = gpu
        self._asked = {"uuid"}

    def __getattr__(self, key):
        self._asked.add(key)
        return self._keys[key]

    def never_asked(self):
        return sorted(self._keys.keys() - self._asked)


def show():
    """What the tool says: the node's keys, and the GPUs."""
    node = json.loads(run("show", FILE))
    return node, [Said(gpu) for gpu in node["gpus"]]


_compared = 0
_wrong = []


def same(what, got, want):
    """Compares what the client reads with what the file says."""
    global _compared
    _compared += 1
    if isinstance(got, bytes):
        got = got.decode()
    if got != want:
        _wrong.append(f"{what}: the client reads {got!r}, the file says {want!r}")


def fails(what, error, call, *arguments):
    """The client's call must fail in this way."""
    try:
        got = call(*arguments)
    except error:
        same(what, error.__name__, error.__name__)
    except Exception as other:  # noqa: BLE001 - whatever else it is, it is wrong
        same(what, repr(other), error.__name__)
    else:
        same(what, got, error.__name__)


def finish(at_least):
    """Ends the program: with an error if anything differed, or if too little was compared."""
    name = os.path.basename(sys.argv[0])
    for line in _wrong:
        print(f"{name}: {line}", file=sys.stderr)
    if _compared < at_least:
        print(f"{name}: compared {_compared} values, at least {at_least} are expected", file=sys.stderr)
    print(f"{name}: {_compared} values compared, {len(_wrong)} differ")
    sys.exit(bool(_wrong) or _compared < at_least)
