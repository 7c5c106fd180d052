"""`python -m elaswave_spmd generate RUN "text"`: prints the text and its continuation by the run's model."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def main(arguments: Sequence[str], program: str) -> int:
    """Print the text and its continuation. Returns the exit code.

    Raises:
        UserError: there is no such run; its model or tokenizer cannot be used; an argument out of range.
        RunError: the model's output is not finite.
    """
    options = _parse(arguments, program)
    from elaswave_spmd.weights.generate import Sampling, continued  # imports torch
    from elaswave_spmd.weights.trained import open_trained

    sampling = Sampling(options.tokens, options.temperature, options.seed)
    trained = open_trained(options.run, average=options.ema, best=options.best)
    # A text from the command line may hold bytes that are not UTF-8, which Python keeps as surrogates.
    print(continued(trained, options.text.encode("utf-8", "surrogateescape"), sampling))
    return 0


def _parse(arguments: Sequence[str], program: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        f"{program} generate", description="Prints a text with what the model of a run (gpt, llama, mlp) goes on with."
    )
    parser.add_argument("run", metavar="RUN", help="the run's directory, or that of one of its checkpoints")
    parser.add_argument("--best", action="store_true", help="of RUN, the checkpoint with the lowest validation loss")
    parser.add_argument("text", metavar="TEXT", help="the begin")
    parser.add_argument("--tokens", type=int, default=100, metavar="N", help="number of new tokens (default: 100)")
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="0: the most likely token (the default); 1: as the model has it",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the draws (default: 0)")
    parser.add_argument("--ema", action="store_true", help="the average of the weights over the steps (optim.ema)")
    return parser.parse_args(arguments)
