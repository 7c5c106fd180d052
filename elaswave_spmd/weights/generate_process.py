"""A process that generates text from weights on disk, at the lowest priority, so that it does not slow the run down.

It reads requests from its standard input, one line of JSON each, and answers each with one line of JSON on its standard
output. Its input ends when the process that has started it ends; then this process exits at once, even in the middle of
a text.

    request: {"path": file or checkpoint, "prompt": text, "tokens": N, "temperature": T, "seed": N}
    answer: {"text": prompt with its continuation, "seconds": S}, or {"gone": path does not exist, "error": reason}
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, TextIO

AT_USUAL_PRIORITY = "--usual-priority"


def main() -> None:
    """Answer requests, one after another. Never returns: `_read` ends the process."""
    if AT_USUAL_PRIORITY not in sys.argv:
        _step_back()
    requests: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests,), daemon=True).start()
    # Whatever a library prints, from Python or from C, goes to standard error, so that it is not taken for an answer.
    answers, sys.stdout = os.fdopen(os.dup(1), "w", encoding="utf-8"), sys.stderr
    os.dup2(2, 1)
    import torch

    torch.set_num_threads(1)
    while True:
        _put(answers, _answer(json.loads(requests.get())))


def _step_back() -> None:
    """Take processor time only when no other process wants it."""
    with contextlib.suppress(OSError, AttributeError):
        os.nice(19)
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def _read(requests: queue.SimpleQueue[str]) -> None:
    """Queue the requests, on a thread of its own, and end the process when standard input ends."""
    for line in sys.stdin:
        requests.put(line)
    os._exit(0)


def _put(answers: TextIO, answer: Mapping[str, object]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def _answer(request: Mapping[str, Any]) -> Mapping[str, object]:
    begin = time.monotonic()
    try:
        text = _generate(request)
    except Exception as error:
        # A run removes old checkpoints when it has newer ones, even one that is being read here.
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return {"gone": not os.path.exists(request["path"]), "error": reason}
    return {"text": text, "seconds": round(time.monotonic() - begin, 3)}


def _generate(request: Mapping[str, Any]) -> str:
    from elaswave_spmd.weights.generate import Sampling, continued
    from elaswave_spmd.weights.trained import open_trained

    sampling = Sampling(request["tokens"], request["temperature"], request["seed"])
    return continued(open_trained(request["path"]), request["prompt"].encode(), sampling)


if __name__ == "__main__":
    main()
