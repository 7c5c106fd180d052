"""The text of `--help`: examples, choices, and one line for each setting, made from the declarations."""

from __future__ import annotations

from collections.abc import Iterator

from elaswave_spmd.conf import checks
from elaswave_spmd.conf.compose import CHOICES, choices_of
from elaswave_spmd.conf.schema import GROUPS, Settings
from elaswave_spmd.conf.section import Declaration, Section, declarations

EXAMPLES = """\
Examples:
  python train.py                                    one worker, a small GPT, the source text of Python's library
  python train.py mesh=dp2_pp2                       4 workers: 2 stages of 2
  python train.py mesh=dp4 sharding=zero3            4 workers, parameters, gradients and optimizer state sharded
  python train.py 'mesh.stages=[3,2]'                5 workers: ragged stages of 3 and 2
  python train.py data=text 'data.path="corpus/*.txt"' model=llama_tiny train.steps=200
  python train.py mesh=dp4 'chaos.events=[{step: 12, kind: kill, rank: 3, point: backward}]'
  python train.py mesh=dp2_pp2 chaos=random chaos.seed=7 chaos.rate=0.1
  python train.py --supervise mesh=dp2_pp2           a controller that dies is started again, and adopts its workers
  python train.py model.target=my_file.MyModel model.layers=6 +model.args.window=8
"""
_NAME_WIDTH = 42


def help_text() -> str:
    """The text of `train --help`."""
    return "\n".join([EXAMPLES, *_choices(), "", *_settings(), "", _FOOTER])


_FOOTER = """\
--cfg job prints all settings of a command line without running it. --supervise starts the run's controller again if it
dies; the next one adopts the workers that live."""


def _choices() -> Iterator[str]:
    yield "Choices (group=choice; mesh= takes any name of that form, such as dp3 or dp3_pp2):"
    for group in CHOICES:
        yield f"  {group}: {', '.join(choices_of(group))}"


def _settings() -> Iterator[str]:
    yield "Settings (name=default, and what it means):"
    yield from (_line(declared) for declared in declarations(Settings))
    for name, section in GROUPS.items():
        yield ""
        yield f"{name}: {_first_sentence(section)}"
        for declared in declarations(section):
            yield _line(declared)
            if declared.items is not None:
                yield from _items(declared.items)


def _first_sentence(section: type[Section]) -> str:
    return " ".join((section.__doc__ or "").split("\n\n")[0].split()).partition(". ")[0].rstrip(".")


def _items(section: type[Section]) -> Iterator[str]:
    """The fields of the items of a list, indented below it."""
    for declared in declarations(section):
        yield f"      {declared.field + ':':{_NAME_WIDTH - 4}} {_meaning(declared)}"


def _line(declared: Declaration) -> str:
    return f"  {checks.override(declared.name, declared.default):{_NAME_WIDTH}} {_meaning(declared)}"


def _meaning(declared: Declaration) -> str:
    choices = declared.limits.choices
    return declared.limits.meaning + (f" ({', '.join(choices)})" if choices else "")
