"""The command that writes a run's report: where the page cannot be written."""

from __future__ import annotations

from pathlib import Path

import pytest

from elaswave_spmd.errors import ConfigError
from elaswave_spmd.report.report_command import main


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("none/page.html", "No such file or directory"),
        ("config.yaml/page.html", "Not a directory"),
        ("a" * 300, "File name too long"),
    ],
)
def test_a_page_that_cannot_be_written_is_told_with_the_path_and_the_reason(
    tmp_path: Path, name: str, why: str
) -> None:
    (tmp_path / "config.yaml").write_text("model: m\n")
    with pytest.raises(ConfigError) as caught:
        main([str(tmp_path), "--out", str(tmp_path / name)], "elaswave-spmd")
    assert caught.value.what == f"the report cannot be written to {tmp_path / name} ({why})"
    assert caught.value.where == f"--out {tmp_path / name}" and caught.value.fix.startswith("--out FILE")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.yaml"]
