"""A process that generates text from weights on the disk: at the lowest priority while a run goes on.

It takes one line of JSON for each text from its standard input, and answers with one. Its input ends with the process
that has started it; then it ends at once, also in the middle of a text.
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
    """Answers requests until there are none to come."""
    if AT_USUAL_PRIORITY not in sys.argv:
        _step_back()
    requests: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests,), daemon=True).start()
    # What a library prints is no answer, be it by Python or not.
    answers, sys.stdout = os.fdopen(os.dup(1), "w", encoding="utf-8"), sys.stderr
    os.dup2(2, 1)
    import torch

    torch.set_num_threads(1)
    while True:
        _put(answers, _answer(json.loads(requests.get())))


def _step_back() -> None:
    """Take processor time only where nobody else wants it."""
    with contextlib.suppress(OSError, AttributeError):
        os.nice(19)
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def _read(requests: queue.SimpleQueue[str]) -> None:
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
        # A run removes checkpoints when it has newer ones, also one that is being read.
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
