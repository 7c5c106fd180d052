"""Time until a group can sum again after it lost or gained a member: edited in place, against rebuilt gloo groups.

    python -m benchmarks.communicator [--quick] [--repeats N] [--sizes 4,8,16] [--json PATH]

n real processes, in two stages; each is in two groups, that of all and that of its stage, as a worker of this project
is. One process is killed and reaped; then all others are sent the new mesh, each sums 1 KiB over both groups, and the
time is from the moment before the first is sent the mesh until the last has both sums. No group is in use at the moment
of the kill, so that nobody hangs in a collective, and the time until the loss is noticed is not part of it (`recovery`
measures that). Then a process that is running already, with everything imported, joins in the same way.

- in place: the product's own links and mailbox. The link of the lost member is dropped, or the new member's opened; all
  others stay. A sum works as the product's reduction of one page does: a message to the primary, which adds in the
  order of the canonical tree, and one back.
- partial rebuild: only groups of the lost member are destroyed and created again, as ProcessGroupGloo under a new
  prefix of a store that stays. In its fastest form: connections are opened when first used (`lazy_init`), and old
  groups are destroyed later, outside of the measured time.
- full rebuild: destroy_process_group, init_process_group and new_group, over the same store.
- c10d's reconfigure, from torch 2.14 on: each process has made its end of both groups alone; they are given the handles
  of all members of a group that changes. It is experimental; which handles are valid next is told with the sums.

Each way has its own n processes, alive all the time; in each repeat all ways are measured, in another order. The ratio
is the median over repeats of a rebuild's time over the time in place, with a 95 % interval. "Usable" is when the last
process could have begun to sum: in place, the edit is a tuple and a dropped socket, and its time in each process is in
the footnote. "An order that changes nothing", answered by
all, shows the share of sending orders in each time.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from benchmarks.communicator_members import FULL, HAS_RECONFIGURE, IN_PLACE, METHODS, RECONFIGURE
from benchmarks.harness import Result, estimate, parser, say
from benchmarks.members import Members
from benchmarks.processes import new_directory, stop_on_signals

_PRELOAD = ("numpy", "torch", "torch._dynamo", "torch.distributed", "zmq", "benchmarks.communicator_members")
_SETTLE_S = 0.1  # after a kill: closed links are noticed, and nothing is under way when the clock starts
GONE, COME = "one gone", "one joins"


@dataclass
class Team:
    """The processes of one way, divided into two stages."""

    members: Members
    spec: dict[str, Any]
    stages: list[list[int]] = field(default_factory=list)
    addresses: dict[int, str] = field(default_factory=dict)
    number: int = 0

    def start(self, size: int) -> None:
        """Starts all processes and makes the first mesh. Then one kill and one join warm up; they are not counted."""
        self._add(size)
        keys = sorted(self.addresses)
        self.stages = [keys[: size // 2], keys[size // 2 :]]
        self.change()
        self.lose(keys[-1])
        self.gain()

    def _add(self, count: int) -> list[int]:
        hellos = self.members.start(self.spec, count)
        self.addresses |= {key: answer["address"] for key, answer in hellos.items()}
        return list(hellos)

    @property
    def keys(self) -> list[int]:
        return [key for stage in self.stages for key in stage]

    def lose(self, key: int) -> dict[str, float]:
        """Kills one process; the others continue without it. Returns what `change` returns."""
        self.members.kill(key)
        del self.addresses[key]
        for stage in self.stages:
            if key in stage:
                stage.remove(key)
        time.sleep(_SETTLE_S)
        return self.change()

    def gain(self) -> dict[str, float]:
        """Adds one process to the smaller stage. Returns what `change` returns."""
        [key] = self._add(1)
        min(self.stages, key=len).append(key)
        time.sleep(_SETTLE_S)
        return self.change()

    def change(self) -> dict[str, float]:
        """Sends all processes the mesh; they sum. Returns ms until usable and done, and microseconds of one edit."""
        self.number += 1
        mesh = {"number": self.number, "stages": self.stages, "addresses": self.addresses}
        began = time.monotonic()
        answers = self.members.all(self.keys, "change", **mesh)
        for stage in self.stages:
            for key in stage:
                wanted = [float(sum(k + 1 for k in group)) for group in (self.keys, stage)]
                if answers[key]["sums"] != wanted:
                    raise RuntimeError(f"{self.spec['method']}: {key} has {answers[key]['sums']}, not {wanted}")
            self.addresses |= {key: answers[key]["address"] for key in stage}
        self.members.all(self.keys, "tidy")
        return {
            "usable": 1e3 * (max(answer["usable"] for answer in answers.values()) - began),
            "done": 1e3 * (max(answer["done"] for answer in answers.values()) - began),
            "own_us": 1e6 * statistics.median(answer["usable"] - answer["began"] for answer in answers.values()),
        }

    def order_nothing(self) -> float:
        """The time until all have answered an order that changes nothing, in ms."""
        began = time.monotonic()
        answers = self.members.all(self.keys, "nothing")
        return 1e3 * (max(answer["done"] for answer in answers.values()) - began)


def measure(size: int, repeats: int, seed: int) -> dict[str, Any]:
    """Measures all ways, interleaved. Returns the results of `Team.change` by event and way, and "ordering"."""
    draw = random.Random(seed)
    found: dict[str, Any] = {GONE: {m: [] for m in METHODS}, COME: {m: [] for m in METHODS}, "ordering": []}
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    with (
        new_directory("communicator-") as directory,
        Members("benchmarks.communicator_members:member", _PRELOAD, directory) as members,
    ):
        base = {"directory": str(directory), "port": store.port}
        teams = {m: Team(members, base | {"method": m, "team": f"{size}-{i}"}) for i, m in enumerate(METHODS)}
        for team in teams.values():
            team.start(size)
        for repeat in range(repeats):
            order = draw.sample(METHODS, len(METHODS))
            place = draw.randrange(size)
            for method in order:
                team = teams[method]
                found[GONE][method].append(team.lose(team.keys[place]))
                found[COME][method].append(team.gain())
            found["ordering"].append(teams[IN_PLACE].order_nothing())
            times = ", ".join(f"{m} {found[GONE][m][-1]['done']:.1f}" for m in METHODS)
            say(f"n={size} {repeat + 1}/{repeats}: {times} ms")
    return found


def rows(size: int, found: dict[str, Any]) -> list[list[str]]:
    """The lines of the table. Also writes the ratios into `found`."""
    lines = []
    for event, change in ((GONE, f"{size} to {size - 1}"), (COME, f"{size - 1} to {size}")):
        ours = [one["done"] for one in found[event][IN_PLACE]]
        for method in METHODS:
            done = [one["done"] for one in found[event][method]]
            ratio = estimate([[b / a for a, b in zip(ours, done, strict=True)]])
            found.setdefault("ratios", {}).setdefault(event, {})[method] = ratio
            lines.append(
                [
                    change,
                    method,
                    f"{statistics.median(done):.1f}",
                    f"{min(done):.1f} - {max(done):.1f}",
                    f"{statistics.median(one['usable'] for one in found[event][method]):.1f}",
                    str(ratio) if method != IN_PLACE else "1",
                ]
            )
    if not HAS_RECONFIGURE:
        lines.append([f"{size}", RECONFIGURE, "not run: needs torch 2.14", "", "", ""])
    ordering = found["ordering"]
    spread = f"{min(ordering):.1f} - {max(ordering):.1f}"
    lines.append([f"{size}", "an order that changes nothing", f"{statistics.median(ordering):.1f}", spread, "", ""])
    return lines


def footnote(found: dict[int, dict[str, Any]]) -> list[list[str]]:
    """The time of the edit itself in one process, in microseconds, as a sentence."""
    return [
        [str(size), *(f"{statistics.median(one['own_us'] for one in found[size][GONE][m]):,.0f}" for m in columns)]
        for size, columns in ((size, (IN_PLACE, FULL)) for size in found)
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    options = parser(__doc__)
    options.add_argument("--repeats", type=int, help="of each way and size (10; with --quick 3)")
    options.add_argument("--sizes", default="", help="numbers of processes (4,8,16; with --quick 4,8)")
    options.add_argument("--seed", type=int, default=1)
    args = options.parse_args(arguments)
    stop_on_signals()
    sizes = [int(word) for word in (args.sizes or ("4,8" if args.quick else "4,8,16")).split(",")]
    repeats = args.repeats or (3 if args.quick else 10)
    result = Result("communicator", {"sizes": sizes, "repeats": repeats, "seed": args.seed, "bytes": 1024})
    found = {size: measure(size, repeats, args.seed) for size in sizes}
    columns = ["processes", "how", "first sums done, median", "min - max", "usable", "theirs / ours [95 %]"]
    lines = [line for size in sizes for line in rows(size, found[size])]
    result.table("Until the first small all-reduces of the new groups are done on all, ms", columns, lines)
    result.table(
        "Footnote: until one process that has the order can use the groups without the lost one, microseconds",
        ["processes", IN_PLACE, FULL],
        footnote(found),
    )
    result.data = {str(size): values for size, values in found.items()}
    result.finish(args.json)


if __name__ == "__main__":
    sys.exit(main())
