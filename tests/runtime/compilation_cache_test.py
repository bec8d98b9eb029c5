"""Tests of the folder of compiled programs: the settings that choose it, and damaged entries."""

import os

import jax
import pytest

import speccascade_jax as sc
from speccascade_jax.methods.build import assemble
from speccascade_jax.runtime import compilation_cache, progress
from tests.support import new_process

DIRECTORY, SECONDS = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"


@pytest.fixture(autouse=True)
def as_after_an_import(monkeypatch, tmp_path):
    """Sets JAX's settings as an import leaves them, and a home for the test; restores them afterwards."""
    names = (DIRECTORY, SECONDS, "jax_enable_compilation_cache")
    before = {name: jax.config.values[name] for name in names}
    for name, value in zip(names, (None, 1.0, True), strict=True):
        jax.config.update(name, value)
    monkeypatch.delenv(compilation_cache.VARIABLE)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def switched_on():
    """Returns the directory and the seconds that JAX was left with, as `(folder or None, seconds)`."""
    compilation_cache.switch_on()
    return jax.config.values[DIRECTORY], jax.config.values[SECONDS]


def test_decoding_caches_programs_in_the_users_cache_folder_by_default(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    model = sc.TableLM([[0.0, 1.0], [2.0, 0.0]])
    assert jax.config.values[DIRECTORY] is None
    assemble(sc.Pair(target=model, draft=model))
    folder = tmp_path / "xdg/speccascade_jax/xla"
    assert (jax.config.values[DIRECTORY], jax.config.values[SECONDS]) == (str(folder), 0.0)
    assert folder.stat().st_mode & 0o077 == 0  # other users have no permissions


@pytest.mark.parametrize(("variable", "value", "expected"), [
    ("XDG_CACHE_HOME", "relative/is/not/valid", "home/.cache/speccascade_jax/xla"),
    (compilation_cache.VARIABLE, "{0}/named", "named"),
    (compilation_cache.VARIABLE, "~/named", "home/named"),
    (compilation_cache.VARIABLE, "off", None), (compilation_cache.VARIABLE, "", None),
])  # fmt: skip
def test_environment_variables_choose_another_folder_or_none(monkeypatch, tmp_path, variable, value, expected):
    monkeypatch.setenv(variable, value.format(tmp_path))
    assert switched_on() == ((str(tmp_path / expected), 0.0) if expected else (None, 1.0))


def test_the_users_own_jax_settings_are_kept(monkeypatch, tmp_path):
    monkeypatch.setenv(compilation_cache.VARIABLE, str(tmp_path / "ours"))
    jax.config.update("jax_enable_compilation_cache", False)
    assert switched_on() == (None, 1.0)
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update(SECONDS, 7.0)
    assert switched_on() == (str(tmp_path / "ours"), 7.0)
    jax.config.update(SECONDS, 1.0)
    jax.config.update(DIRECTORY, str(tmp_path / "theirs"))
    assert switched_on() == (str(tmp_path / "theirs"), 1.0)
    assert not (tmp_path / "theirs").exists()


@pytest.mark.parametrize(("name", "mode", "owner", "said"), [
    ("a_file/below", 0o700, 0, r".*a_file/below.*\), so .* variable SPECCASCADE_COMPILATION_CACHE to a folder, or"),
    ("locked", 0o700, 0, r".*locked is not writable\), so .* variable SPECCASCADE_COMPILATION_CACHE to a folder, or"),
    ("named", 0o777, 0, r"other users can write to .*named and so run any program as you: chmod go-w"),
    ("named", 0o770, 0, r"other users can write to .*named"),
    ("named", 0o700, 1, r".*named belongs to another user, who could"),
])  # fmt: skip
def test_unwritable_folders_and_folders_that_others_can_write_are_not_used(
    tmp_path, monkeypatch, name, mode, owner, said
):
    """The folder's content is executed. A folder that others may only read does no harm."""
    (tmp_path / "a_file").write_text("")
    for folder in (tmp_path / "locked", tmp_path / "named"):
        folder.mkdir()
        folder.chmod(mode)
    monkeypatch.setenv(compilation_cache.VARIABLE, str(tmp_path / name))
    # replaced, because root may write everywhere
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path / "locked")
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + owner)
    with pytest.warns(UserWarning, match=f"not cached \\({said}") as caught:
        assert switched_on() == (None, 1.0)
    assert len(caught) == 1 and "\n" not in str(caught[0].message)


DECODE = """
import json, resource, sys, warnings
import jax
import speccascade_jax as sc
before = jax.config.values["jax_compilation_cache_dir"]
if len(sys.argv) > 1:
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)  # a write beyond fails, as on a full disk
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    model = sc.TableLM([[0.0, 1.0], [2.0, 0.0]])
    tokens = sc.decode(sc.Pair(target=model, draft=model), [1], max_new_tokens=3, method="autoregressive").tokens
print(json.dumps([before, [str(w.message) for w in caught], tokens.tolist()]))
"""


def decode(folder, *limit):
    """Returns a new process's settings before its first decode, its warnings and its tokens."""
    return new_process.answer(DECODE, *limit, **{compilation_cache.VARIABLE: str(folder)})


@pytest.mark.laws
def test_decoding_works_on_a_full_disk_and_after_it(tmp_path):
    before, warned, tokens = decode(tmp_path, 100)
    assert before is None  # importing the package does not change JAX's settings
    assert tokens == [[0, 1, 0]]
    assert any("Error writing persistent compilation cache entry for 'jit__joined'" in text for text in warned)
    assert not list(tmp_path.iterdir())  # no part of a damaged entry is left
    _, warned, tokens = decode(tmp_path)
    assert (warned, tokens) == ([], [[0, 1, 0]])


@pytest.mark.laws
def test_the_time_of_compilations_is_noted():
    compilation_cache._tell_compiling()
    before = len(progress._PREPARED)
    jax.jit(lambda x: x + before)(1.0)
    assert len(progress._PREPARED) > before


def test_damaged_entries_are_compiled_again_and_never_read(tmp_path):
    """Damages a compressed program by a flipped bit, cut, emptied or rubbish: no warning, no crash, compiled again."""
    decode(tmp_path)
    entries = sorted(tmp_path.glob("jit_*-checked"))
    whole = {path: path.read_bytes() for path in entries}
    flipped = bytearray(whole[entries[0]])
    flipped[len(flipped) // 2] ^= 4
    for damage in (bytes(flipped), whole[entries[0]][:-7], b"", b"rubbish" * 99):
        for path in entries:
            path.write_bytes(damage if path == entries[0] else damage[::-1] + whole[path][5:])
        _, warned, tokens = decode(tmp_path)
        assert (warned, tokens) == ([], [[0, 1, 0]])
        assert sorted(tmp_path.iterdir()) == entries
        cache = compilation_cache._Checked(tmp_path)
        assert all(cache.get(path.name.removesuffix("-checked")) for path in entries)


def test_an_entry_with_any_bit_flipped_is_removed(tmp_path):
    cache, file = compilation_cache._Checked(tmp_path / "new"), tmp_path / "new/key-checked"
    assert cache.get("key") is None
    cache.put("key", b"a program")
    whole = file.read_bytes()
    assert cache.get("key") == b"a program" and file.stat().st_mode & 0o077 == 0
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        assert cache.get("key") is None and not file.exists()
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        assert cache.get("key") is None and not file.exists()
    cache.put("key", b"a program")
    cache.put("key", b"another")
    assert cache.get("key") == b"another" and [path.name for path in file.parent.iterdir()] == ["key-checked"]


def test_folders_that_the_user_chose_are_read_by_jax_itself(tmp_path):
    (tmp_path / "theirs").mkdir()
    compilation_cache._check_what_is_read(tmp_path / "ours")
    ours, theirs = (compilation_cache.jaxs_own.get_file_cache(str(tmp_path / name))[0] for name in ("ours", "theirs"))
    assert isinstance(ours, compilation_cache._Checked) and not isinstance(theirs, compilation_cache._Checked)


@pytest.mark.laws
def test_a_bucket_keeps_programs_for_the_next_machine(bucket):
    place = "gs://bucket/cache"
    assert decode(place)[1:] == [[], [[0, 1, 0]]]
    entries = dict(bucket.objects)
    assert entries and all(name.startswith("bucket/cache/jit_") for name in entries)
    assert decode(place)[1:] == [[], [[0, 1, 0]]]
    assert bucket.objects == entries  # nothing was compiled again, so nothing was written
    bucket.fault = lambda method, name: "403"
    _, warned, tokens = decode(place)
    assert tokens == [[0, 1, 0]]
    assert sum("compiled programs are not cached from here on (gs://bucket/cache/" in text for text in warned) == 1
