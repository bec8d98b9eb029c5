"""Reports take the place of reports, and of no other file."""

import json

import pytest

from speccascade_jax.storage.reports import check_replaceable


def test_what_is_no_report_is_refused(tmp_path):
    file = tmp_path / "out.json"
    check_replaceable(file, '"a":')
    file.write_text("\n")
    check_replaceable(file, '"a":')
    file.write_text(json.dumps({"a": 1}))
    check_replaceable(file, '"a":')
    for content in (b"\x89PNG\r\n", b'{"b": "a"}', b"import gin\n"):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"out\.json is no report of an earlier run, and is not replaced: name"):
            check_replaceable(file, '"a":')
    with pytest.raises(ValueError, match="is no file that a report could be written to"):
        check_replaceable(tmp_path)
