"""Notes by which an agent hears that its run is at another place, and the search that follows them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elaswave_spmd.controller import agent_search as module
from elaswave_spmd.controller.address_note import AddressNote, take_note
from elaswave_spmd.controller.agent_search import Offer
from elaswave_spmd.errors import FilesError, RunError
from elaswave_spmd.runtime.processes.rendezvous import Found, NoRunYetError
from elaswave_spmd.runtime.transport.credentials import RunKeys
from tests.full_disk import room_for

A, B, C = "10.0.0.1:20001", "10.0.0.2:20002", "10.0.0.3:20003"


@pytest.fixture
def note(tmp_path: Path) -> Path:
    return tmp_path / "agent-a.moved"


def test_a_note_is_read_once_and_the_last_one_counts(note: Path) -> None:
    place = AddressNote(note, A)
    assert take_note(note) is None and place.unread_s(5.0) is None
    place.tell(B, 5.0)
    place.tell(C, 6.0)
    assert note.stat().st_mode & 0o077 == 0
    assert place.unread_s(7.5) == 1.5
    assert take_note(note) == C and take_note(note) is None
    assert place.unread_s(9.0) is None
    assert not [*note.parent.iterdir()], "nothing is left"


def test_an_agent_that_knows_the_place_is_told_nothing(note: Path) -> None:
    place = AddressNote(note, A)
    place.tell(A, 5.0)
    assert place.unread_s(100.0) is None and not note.exists()
    place.tell(B, 5.0)
    place.tell(A, 6.0)  # back, before it has read the note
    assert place.unread_s(100.0) is None and not note.exists()
    place.tell(B, 7.0)
    assert take_note(note) == B
    place.tell(A, 8.0)  # it has read the note, which nobody has noticed yet
    assert place.unread_s(9.0) == 1.0 and take_note(note) == A


def test_what_an_earlier_agent_has_not_read_is_for_nobody(note: Path) -> None:
    AddressNote(note, A).tell(B, 0.0)
    assert AddressNote(note, C).unread_s(9.0) is None and not note.exists()


def test_a_note_that_cannot_be_written_is_an_error_and_can_be_written_again(note: Path) -> None:
    place = AddressNote(note, A)
    with room_for(0), pytest.raises(FilesError):
        place.tell(B, 5.0)
    assert place.unread_s(6.0) is None
    place.tell(B, 7.0)
    assert take_note(note) == B


FOUND = Found(-7, "tcp://127.0.0.1:1", RunKeys.make(), "127.0.0.1")


class Rendezvous:
    """What an agent finds at each place. It is told another one before its nth question.

    Args:
        tells: number of the question -> the note before it.
    """

    def __init__(self, note: Path, tells: dict[int, str], found: dict[str, BaseException | Found]) -> None:
        self.asked: list[tuple[str, float]] = []
        self._note, self._tells, self._found = note, tells, found
        self.tell()

    def tell(self) -> None:
        if (said := self._tells.get(len(self.asked))) is not None:
            self._note.write_text(said)

    def find(self, host: str, port: int, secret: bytes, left_s: float) -> Found:
        self.asked.append((f"{host}:{port}", left_s))
        self.tell()
        found = self._found[f"{host}:{port}"]
        if isinstance(found, BaseException):
            raise found
        return found


def search(
    monkeypatch: pytest.MonkeyPatch, note: Path | None, rendezvous: Rendezvous, timeout_s: float = 1e6
) -> module.ControllerSearch:
    monkeypatch.setattr(module, "find_controller", rendezvous.find)
    monkeypatch.setattr(module, "LOOK_AGAIN_S", 0.0)
    return module.ControllerSearch(Offer("b", 2, A, None, 30.0), ("10.0.0.1", 20001), b"", timeout_s, note)


def test_the_search_goes_on_where_the_run_is_now(
    note: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nobody, silent = RunError("nothing listens there"), NoRunYetError("no answer")
    told = Rendezvous(note, {2: B, 4: "no place", 6: f"{C}\n"}, {A: nobody, B: silent, C: FOUND})
    made = search(monkeypatch, note, told)
    assert made.until(module.time.monotonic() + 1e6) == FOUND
    assert [place for place, _ in told.asked] == [A, A, B, B, B, B, C]
    assert max(left_s for _, left_s in told.asked) == module._NOTE_S, "a note is not waited for longer"
    assert made.offer == Offer("b", 2, C, None, 30.0)
    assert capsys.readouterr().out.splitlines() == [
        f"the run has moved: it is looked for at {B} ({note})",
        f"{note} names no place of a run: 'no place'",
        f"the run has moved: it is looked for at {C} ({note})",
    ]


def test_a_run_may_move_before_an_agent_has_found_it(note: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nobody = RunError("nothing listens there")
    assert search(monkeypatch, note, Rendezvous(note, {3: B}, {A: nobody, B: FOUND})).first() == FOUND
    never = search(monkeypatch, note, Rendezvous(note, {}, {A: nobody}), timeout_s=0.01)
    with pytest.raises(RunError, match=f"no controller at {A} within 0.01 s"):
        never.first()
    silent = Rendezvous(note, {}, {A: NoRunYetError("no answer")})
    with pytest.raises(NoRunYetError):
        search(monkeypatch, note, silent).first()
    assert len(silent.asked) == 1, "as without notes"


def test_without_such_a_file_a_search_is_one_question(note: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: Any = Rendezvous(note, {0: B}, {A: FOUND})
    assert search(monkeypatch, None, told, 300.0).first() == FOUND
    ((place, left_s),) = told.asked
    assert place == A and module._NOTE_S < left_s <= 300.0 and note.exists()
