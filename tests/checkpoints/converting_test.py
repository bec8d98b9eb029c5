"""Tests of conversions: written files, dry runs, checksums, and errors as a user sees them."""

import dataclasses

import jax
import pytest

from experiments.convert import main
from speccascade_jax.checkpoints import converting, load, save
from speccascade_jax.checkpoints.array_plan import Piece
from speccascade_jax.checkpoints.reading import find

pytest.importorskip("safetensors", reason="writing test files needs safetensors")


from tests.support import checkpoint_arrays, damage, memory
from tests.support import huggingface_files as hf


@pytest.fixture
def theirs(tmp_path):
    arrays = hf.tensors("gemma2", hf.random_parameters("gemma2"))
    return hf.write(tmp_path / "theirs", hf.entries("gemma2"), arrays, shards=2)


def same(path, other) -> bool:
    (model, params), (again, restored) = load(path, dtype=None), load(other, dtype=None)
    stored_dtypes, restored_dtypes = ([leaf.dtype for leaf in jax.tree.leaves(tree)] for tree in (params, restored))
    return (
        model == again
        and checkpoint_arrays.same(params, checkpoint_arrays.flat(restored))
        and stored_dtypes == restored_dtypes
    )


def test_a_converted_checkpoint_is_bit_equal(theirs, tmp_path, capsys):
    assert main([str(theirs), str(tmp_path / "ours")]) == 0
    assert same(theirs, tmp_path / "ours")
    output = capsys.readouterr()
    assert "Hugging Face, gemma2: 46 parameters" in output.out and f"written: {tmp_path / 'ours'} in 0:0" in output.out
    assert "writing" in output.err


def test_stored_dtypes_are_kept_if_supported(tmp_path):
    for stored, expected in {"bfloat16": "bfloat16", "float16": "float32"}.items():
        arrays = {n: a.astype(stored) for n, a in hf.tensors("llama2", hf.random_parameters("llama2")).items()}
        path = hf.write(tmp_path / stored, hf.entries("llama2"), arrays)
        main([str(path), str(tmp_path / f"{stored}-ours")])
        assert find(tmp_path / f"{stored}-ours").dtypes == {expected}
    main([str(path), str(tmp_path / "small"), "--dtype", "bfloat16"])
    assert find(tmp_path / "small").dtypes == {"bfloat16"}
    assert load(tmp_path / "small")[0].config.dtype == "float32"


def test_a_conversion_holds_about_two_arrays(tmp_path, wide):
    save(tmp_path / "from", *wide)
    largest, total = (4 * value for value in (512 * 64, sum(leaf.size for leaf in jax.tree.leaves(wide[1]))))
    stored = find(tmp_path / "from")
    most = memory.peak(lambda: converting.convert(stored, tmp_path / "to", "bfloat16", overwrite=True))
    assert most < 3 * largest < total, (most, largest, total)
    assert find(tmp_path / "to").dtypes == {"bfloat16"}


def test_t5x_and_native_checkpoints_are_converted_too(t5x, arrays, model, params, tmp_path):
    assert main([str(t5x(arrays)), str(tmp_path / "a")]) == 0
    assert main([str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    save(tmp_path / "c", model, params)
    assert same(tmp_path / "a", tmp_path / "c") and same(tmp_path / "b", tmp_path / "c")


def test_dry_run_lists_the_mapping_and_writes_nothing(theirs, tmp_path, capsys):
    assert main([str(theirs), str(tmp_path / "ours"), "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert "format: Hugging Face, gemma2" in output
    line = next(row for row in output.splitlines() if "decoder/layers_1/self_attention/query/kernel" in row)
    for part in ("32 × 32", "model.layers.1.self_attn.q_proj.weight transposed", "model-0000"):
        assert part in line
    assert sum("│" in row for row in output.splitlines()) == len(find(theirs).plan)
    assert [entry.name for entry in tmp_path.iterdir()] == ["theirs"]


def test_rows_describe_how_a_tensor_is_transformed(theirs):
    stored = find(theirs)
    source = next(iter(stored.tensors))
    plan = {"a/b": (Piece(source, (), (2, 3), order=(1, 0, 2), take=(1, 4)), Piece(source, (), (2, 5)))}
    row = next(converting.rows(dataclasses.replace(stored, plan=plan)))
    assert row == ("a/b", (2, 8), f"{source}[:, 4] axes 1, 0, 2, {source}", stored.tensors[source].file.name)


def test_only_checksums_are_written_next_to_the_source(theirs, tmp_path, capsys):
    before = {entry.name for entry in theirs.iterdir()}
    for _ in range(2):  # The second call replaces the first call's file.
        assert main([str(theirs), "--checksums"]) == 0
    assert {entry.name for entry in theirs.iterdir()} == before | {"checksums.json"}
    assert f"written: {theirs / 'checksums.json'}" in capsys.readouterr().out
    damage.flip(theirs / "model-00002-of-00002.safetensors", -1)
    assert main([str(theirs), str(tmp_path / "ours")]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"error: {theirs} is damaged: 1 array can't be read (model.")
    assert "model-00002-of-00002.safetensors: its bytes do not match checksums.json" in said
    assert not (tmp_path / "ours").exists()


def test_a_converted_configuration_keeps_its_dtype_and_loads_in_the_requested_one(tmp_path, model, params):
    half = dataclasses.replace(model, config=dataclasses.replace(model.config, dtype="bfloat16"))
    save(tmp_path / "half", half, params, "bfloat16")
    assert main([str(tmp_path / "half"), str(tmp_path / "again")]) == 0
    assert same(tmp_path / "half", tmp_path / "again") and load(tmp_path / "again", dtype=None)[0] == half
    assert load(tmp_path / "again")[0] == model


@pytest.mark.parametrize(("more", "said"), [
    (["ours"], "--checksums writes into SOURCE and nothing else: leave out DESTINATION"),
    (["--overwrite"], "leave out --overwrite"),
    (["ours", "--dtype", "bfloat16"], "leave out DESTINATION, --dtype"),
    (["--dry-run"], "argument --dry-run: not allowed with argument --checksums"),
])  # fmt: skip
def test_checksums_refuse_options_that_they_would_ignore(theirs, tmp_path, capsys, monkeypatch, more, said):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        main([str(theirs), "--checksums", *more])
    assert said in capsys.readouterr().err
    assert [entry.name for entry in tmp_path.iterdir()] == ["theirs"]
    assert not (theirs / "checksums.json").exists()


def test_a_source_that_needs_no_checksums_is_refused_without_a_progress_bar(tmp_path, model, params, capsys):
    save(tmp_path / "ours", model, params)
    assert main([str(tmp_path / "ours"), "--checksums"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ")
    assert "ours is not a Hugging Face directory: checksums.json is only for these" in lines[0]


def test_existing_destinations_are_replaced_only_if_allowed(theirs, tmp_path, capsys):
    main([str(theirs), str(tmp_path / "ours")])
    assert main([str(theirs), str(tmp_path / "ours")]) == 1
    assert "ours exists: choose another path, or add --overwrite to replace it" in capsys.readouterr().err
    assert main([str(theirs), str(tmp_path / "ours"), "--overwrite", "--dtype", "bfloat16"]) == 0
    assert find(tmp_path / "ours").dtypes == {"bfloat16"}
    (tmp_path / "ours" / "thesis.txt").write_text("years")
    assert main([str(theirs), str(tmp_path / "ours"), "--overwrite"]) == 1
    assert "ours holds more than a checkpoint written by save (thesis.txt)" in capsys.readouterr().err
    assert (tmp_path / "ours" / "thesis.txt").read_text() == "years"
    assert main([str(theirs), str(theirs), "--overwrite"]) == 1
    assert "theirs exists and is not a checkpoint written by save" in capsys.readouterr().err
    assert (theirs / "model.safetensors.index.json").is_file()
    with pytest.raises(ValueError, match="dtype is 'float16': choose one of float32, bfloat16"):
        converting.convert(find(theirs), tmp_path / "half", "float16")


def test_a_destination_inside_the_source_is_refused(theirs, tmp_path, capsys):
    (tmp_path / "link").symlink_to(theirs, target_is_directory=True)
    before = sorted(theirs.rglob("*"))
    for inner in (theirs / "ours", theirs / "a/b", tmp_path / "link/ours"):
        assert main([str(theirs), str(inner), "--overwrite"]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line == f"error: {inner} is inside the source {theirs}: choose a destination outside it"
    with pytest.raises(ValueError, match="is inside the source"):
        converting.convert(find(theirs), theirs / "ours", "float32")
    assert sorted(theirs.rglob("*")) == before


def test_the_command_line_reports_errors(tmp_path, capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert "python -m experiments.convert SOURCE DESTINATION --dtype bfloat16" in capsys.readouterr().out
    assert main([str(tmp_path / "nowhere"), "--dry-run"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "nowhere does not exist: give a directory written by save, a Hugging Face directory" in line
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path)])
    assert "give DESTINATION, or --dry-run or --checksums" in capsys.readouterr().err
