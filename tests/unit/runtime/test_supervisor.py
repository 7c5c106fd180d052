"""What a supervisor makes of the end of a controller."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from elaswave_spmd.runtime.processes.supervisor import (
    ADOPT_S,
    VARIABLE,
    Deaths,
    Ended,
    supervised_by,
    with_adoption,
)
from tests.waiting import PATIENCE_S


@pytest.mark.parametrize("code", [0, 1, 2, 129, 130, 143])
def test_exit_codes_of_the_command_line_are_ends_that_were_told(code: int) -> None:
    assert not Ended(code).is_death


@pytest.mark.parametrize("code", [-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGTERM, 3, 134, 137, 139])
def test_signals_and_other_codes_are_deaths(code: int) -> None:
    assert Ended(code).is_death


def test_an_end_is_told_by_the_name_of_its_signal() -> None:
    assert str(Ended(-signal.SIGKILL)) == "was ended by SIGKILL"
    assert str(Ended(-200)) == "was ended by signal 200"
    assert str(Ended(134)) == "ended with exit code 134"


def test_deaths_in_a_row_without_a_step_are_too_many() -> None:
    deaths = Deaths()
    for number, steps in enumerate([5, 5, 9, 9, 9], start=1):
        deaths = deaths.one_more(steps)
        assert deaths.are_too_many == (number == 5), (number, deaths)


def test_a_run_that_goes_on_may_be_killed_for_ever() -> None:
    deaths = Deaths()
    for steps in range(1, 100):
        deaths = deaths.one_more(steps)
        assert not deaths.are_too_many


def test_a_run_that_never_gets_to_its_first_step_is_given_up() -> None:
    deaths = Deaths()
    for _ in range(Deaths.MOST):
        assert not deaths.are_too_many
        deaths = deaths.one_more(0)
    assert deaths.are_too_many


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_comes_before_the_command_can_handle_it_is_the_end(number: signal.Signals) -> None:
    """It has imported nothing yet: the signal kills it."""
    supervised = "import time; print('sleeps', flush=True); time.sleep(1000)"
    supervisor = "import sys; from elaswave_spmd.runtime.processes.supervisor import _Supervisor as S; "
    command = [sys.executable, "-c", f"{supervisor}sys.exit(S([sys.executable, '-c', {supervised!r}], []).run())"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "sleeps\n"
            process.send_signal(number)
            _, err = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    assert process.returncode == 128 + number and f"was ended by {number.name}; its run had not begun yet" in err


def test_the_variable_is_taken_out() -> None:
    environment = {VARIABLE: "7", "HOME": "/"}
    assert supervised_by(environment) == 7
    assert environment == {"HOME": "/"} and supervised_by(environment) is None


def test_workers_of_a_supervised_run_wait_unless_the_command_says_something_else() -> None:
    assert with_adoption(["mesh=dp2"]) == ["mesh=dp2", f"timeouts.adopt={ADOPT_S}"]
    assert with_adoption(["timeouts.adopt=7"]) == ["timeouts.adopt=7"]
