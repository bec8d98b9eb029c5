"""Tests of names on the hub, against a server on this machine: resolved, cached, pinned, and refused with a remedy."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from speccascade_jax import checkpoints
from speccascade_jax.data.vocabularies.load import load_vocabulary
from speccascade_jax.storage import hub
from tests.support.hub_server import on_the_hub

pytest.importorskip("huggingface_hub", reason="needs pip install 'speccascade_jax[hub]'")

MODEL = {"config.json": b"{}", "model.safetensors": b"weights", "tokenizer.json": b"[]"}
OTHER = {
    "pytorch_model.bin": b"pickle",
    "chat_template.json": b"{}",
    "original/model.safetensors": b"again",
    "model.fp16.safetensors": b"again",
}


def test_only_the_files_that_are_read_are_fetched(empty_hub):
    commit = empty_hub.upload("google/tiny", MODEL | OTHER)
    folder = hub.located("google/tiny")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == MODEL
    assert folder.name == commit and hub.commits(["google/tiny", "./x", None]) == {"google/tiny": commit}


def test_weights_are_not_fetched_for_a_vocabulary(empty_hub):
    empty_hub.upload("google/tiny", MODEL)
    assert [path.name for path in hub.located("google/tiny", hub.VOCABULARY).iterdir()] == ["tokenizer.json"]


def test_a_process_reads_one_commit_of_a_name(empty_hub):
    first = empty_hub.upload("google/tiny", MODEL)
    hub.located("google/tiny", hub.CONFIGURATION)
    later = empty_hub.upload("google/tiny", MODEL | {"config.json": b"{ }"})
    assert hub.located("google/tiny").name == first != later
    hub._COMMITS.clear()  # as in another process
    assert hub.located("google/tiny").name == later


def test_two_spellings_of_a_name_are_one_commit(empty_hub):
    """A target `g/two` and a draft `g/two@main` are one model, also if the branch moves between their reads."""
    first = empty_hub.upload("g/two", MODEL)
    hub.located("g/two")
    empty_hub.upload("g/two", MODEL | {"config.json": b"{ }"})
    assert hub.located("g/two@main").name == hub.located("hf:g/two").name == first
    names = ["g/two", "g/two@main", "hf:g/two"]
    assert hub.commits(names) == dict.fromkeys(names, first)


def test_revisions_are_pins(empty_hub):
    first = empty_hub.upload("google/tiny", MODEL)
    branch = empty_hub.upload("google/tiny", MODEL | {"config.json": b"{ }"}, branch="bf16")
    assert [hub.located(f"google/tiny@{name}").name for name in ("main", "bf16", first)] == [first, branch, first]
    assert hub.commits(["google/tiny@bf16"]) == {"google/tiny@bf16": branch}
    with pytest.raises(FileNotFoundError, match="google/tiny has no revision 'fp8' on the hub: give a branch, a tag"):
        hub.located("google/tiny@fp8")


@pytest.mark.parametrize("offline", [True, False])
def test_the_cache_replaces_the_server(empty_hub, offline, tmp_path, monkeypatch):
    commit = empty_hub.upload("google/tiny", MODEL)
    hub.located("google/tiny")
    reason = "HF_HUB_OFFLINE is set" if offline else "gives no answer"
    from huggingface_hub import constants

    with on_the_hub(empty_hub, tmp_path / "cache", offline):
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
        empty_hub.asked.clear()
        assert hub.located("google/tiny").name == commit and not empty_hub.asked
        with pytest.raises(
            FileNotFoundError,
            match=f"g/x does not exist here, nor in the hub's cache, and .*{reason}.*: run  hf download g/x ",
        ):
            hub.located("g/x")


def test_files_that_the_cache_lacks_are_not_read_offline(empty_hub, tmp_path):
    """A description has fetched the configuration only; versions of the library before 1.22 gave its folder."""
    empty_hub.upload("google/tiny", MODEL)
    hub.located("google/tiny", hub.CONFIGURATION)
    with (
        on_the_hub(empty_hub, tmp_path / "cache", offline=True),
        pytest.raises(hub.UnreachableError, match="hf download"),
    ):
        hub.located("google/tiny")


def test_a_gated_repository_says_how_to_get_access(empty_hub, monkeypatch):
    empty_hub.upload("google/tiny", MODEL)
    empty_hub.gated.add("google/tiny")
    with pytest.raises(
        PermissionError, match=f"gated: accept .* at {empty_hub.url}/google/tiny, then run hf auth login"
    ):
        hub.located("google/tiny")
    monkeypatch.setenv("HF_TOKEN", "hf_a_token")
    assert (hub.located("google/tiny") / "model.safetensors").read_bytes() == b"weights"


def test_what_is_nowhere_is_called_so(empty_hub):
    empty_hub.upload("google/pickles", OTHER)
    with pytest.raises(
        FileNotFoundError, match="models/tiny does not exist here, and .* knows no such model: correct the"
    ):
        hub.located("models/tiny")
    with pytest.raises(FileNotFoundError, match="google/pickles on the hub has none of the files that can be read"):
        hub.located("google/pickles")
    with pytest.raises(ValueError, match="'hf:tiny' is no name on the hub: write hf:owner/name"):
        hub.located("hf:tiny")


def test_local_paths_win(empty_hub, tmp_path):
    empty_hub.upload("models/tiny", MODEL)
    Path("models/mine").mkdir(parents=True)
    for path in ("models/mine", "models/tiny", "./a/b", "a/model.bin", "a/b/c", "/a/b", "tiny"):
        assert hub.located(path) == Path(path) and not empty_hub.asked
    assert "models/ is a folder here, so the hub was not asked (to read from the hub, give hf:models/tiny)" in hub.hint(
        "models/tiny"
    )
    assert not hub.hint("models/mine") and not hub.hint("./a/b")
    assert hub.located("hf:models/tiny").is_relative_to(tmp_path / "cache")


def test_a_path_object_is_local_because_pathlib_drops_the_dot(empty_hub):
    empty_hub.upload("google/tiny", MODEL)
    assert hub.located(Path("./google/tiny")) == Path("google/tiny") and not empty_hub.asked
    assert hub.located(Path("hf:google/tiny")).is_dir()
    for path in (Path("google/tiny"), "google/tiny/"):
        for read in (checkpoints.model_of, load_vocabulary):
            with pytest.raises(
                FileNotFoundError, match="to read the model from the hub, give the text hf:google/tiny; "
            ):
                read(path)


def test_addresses_and_impossible_revisions_are_refused(empty_hub):
    for path, name in (
        ("https://huggingface.co/google/tiny", "hf:google/tiny"),
        ("huggingface.co/datasets/me/mine/tree/v2/", "hf:me/mine@v2"),
    ):
        with pytest.raises(ValueError, match=f"{path} is the address of a page: give the name on the hub, {name}$"):
            hub.located(path)
    for revision in ("..", "../../x", "a/.b", "v1..v2"):
        with pytest.raises(ValueError, match=f"'{revision}' is no revision: give a branch, a tag or a commit"):
            hub.located(f"google/tiny@{revision}")
    assert not empty_hub.asked


def test_a_name_that_was_read_stays_one(empty_hub):
    """A folder of the owner's name that is made after reading leaves the name in records; the model's own path wins."""
    commit = empty_hub.upload("google/tiny", MODEL)
    folder = hub.located("google/tiny")
    Path("google").mkdir()
    assert hub.located("google/tiny") == folder and hub.commits(["google/tiny"]) == {"google/tiny": commit}
    assert hub.located("google/other") == Path("google/other")
    Path("google/tiny").mkdir()
    assert hub.located("google/tiny") == Path("google/tiny")


def test_the_variables_of_the_library_hold(empty_hub, tmp_path):
    """Two processes fetch the same files at the same time, and a later one reads them offline."""
    commit = empty_hub.upload("google/tiny", MODEL)
    code = "from speccascade_jax.storage import hub; print(hub.located('google/tiny').name)"
    env = os.environ | {"HF_ENDPOINT": empty_hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    env |= {"PYTHONPATH": str(Path(hub.__file__).parents[2])}

    def start(**more):
        return subprocess.Popen([sys.executable, "-c", code], env=env | more, stdout=subprocess.PIPE, text=True)

    both = [start(), start()]
    assert [process.communicate()[0].strip() for process in both] == [commit, commit]
    assert empty_hub.asked.count(f"GET /google/tiny/resolve/{commit}/model.safetensors") == 1
    assert start(HF_HUB_OFFLINE="1", HF_ENDPOINT="http://127.0.0.1:9").communicate()[0].strip() == commit
