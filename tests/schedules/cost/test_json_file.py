# SPDX-License-Identifier: Apache-2.0
"""Files of strangers: what is refused before it is parsed, and after."""

import pytest

from schedules.cost.machine import read_json
from schedules.errors import PredictionError


def test_a_file_and_its_limit(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"a": [1]}')
    assert read_json(path, 10, "file of tables") == {"a": [1]}
    with pytest.raises(PredictionError, match="a.json: larger than any file of tables"):
        read_json(path, 9, "file of tables")
    with pytest.raises(PredictionError, match="cannot read '.*b.json': No such file"):
        read_json(tmp_path / "b.json", 9, "file of tables")


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000])
def test_damaged_files(tmp_path, text):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(PredictionError, match="a.json: not JSON"):
        read_json(path, 1 << 20, "file")
