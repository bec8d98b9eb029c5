"""Tests of models by their names on the hub, wherever a path stands, against a server on this machine."""

import dataclasses

import pytest

import speccascade_jax as sc
from experiments import convert, describe
from speccascade_jax import checkpoints
from speccascade_jax.data.vocabularies.load import load_vocabulary
from speccascade_jax.evaluation import measuring, session
from speccascade_jax.evaluation.points import ModelPair
from speccascade_jax.models.decoder_presets import tiny
from speccascade_jax.training.finetune.corpus import TaskCorpus
from speccascade_jax.training.finetune.schedule import Schedule
from speccascade_jax.training.finetune.trainer import Trainer
from tests.support import eagle3_files, text_pair, tokenizer_files
from tests.support import huggingface_files as hf
from tests.support.hub_server import on_the_hub, serving

for library in ("huggingface_hub", "safetensors", "tokenizers"):
    pytest.importorskip(library, reason=f"needs {library}: pip install 'speccascade_jax[hub,huggingface]'")

LARGE, SMALL, WORDS = "google/gemma-3-large", "google/gemma-3-small", "google/words"
ON = text_pair.evaluation(quality_examples=1, quality_batch=1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Returns folders of two models as they lie on the hub, with one vocabulary."""
    root = tmp_path_factory.mktemp("theirs")
    by_name = {}
    for name, layers in ((LARGE, 7), (SMALL, 1)):
        folder = by_name[name] = root / name
        folder.mkdir(parents=True)
        rows = load_vocabulary(tokenizer_files.metaspace(folder)).vocab_size
        config = dataclasses.replace(tiny("gemma3_4b"), num_layers=layers, vocab_size=rows, num_embeddings=rows)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(hf.KINDS, "gemma3", config)
            hf.write(folder, hf.entries("gemma3"), hf.tensors("gemma3", hf.random_parameters("gemma3")), shards=2)
    return by_name


@pytest.fixture(scope="module")
def server(folders):
    with serving() as server:
        for name, folder in folders.items():
            server.upload(name, folder)
        server.upload(WORDS, {path.name: path.read_bytes() for path in folders[SMALL].glob("tokenizer*")})
        server.upload("google/pickles", {"config.json": (folders[SMALL] / "config.json").read_bytes()})
        yield server


@pytest.fixture
def here(server, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    server.asked.clear()
    with on_the_hub(server, tmp_path / "cache"):
        yield server


def test_a_pair_from_the_hub_is_that_of_its_files_and_its_record_names_the_commits(here, folders):
    local = ModelPair(name="mine", target=str(folders[LARGE]), draft=str(folders[SMALL]))
    named = ModelPair(name="mine", target=LARGE, draft=f"{SMALL}@main", vocabulary=WORDS)
    pair = sc.Pair.load(LARGE, f"{SMALL}@main", WORDS)
    opened = {source: session.Session(source, ON, pair) for source in (local, named)}
    assert pair.fingerprint == session.load_source(local).fingerprint
    point = text_pair.point("opt", ON, alpha=0.2)
    records = [measuring.describe(opened[s], dataclasses.replace(point, pair=s)) for s in (local, named)]
    assert "revisions" not in records[0]
    commits = {name: here.branches[name.partition("@")[0], "main"] for name in (LARGE, f"{SMALL}@main", WORDS)}
    assert records[1]["revisions"] == commits


def test_a_dry_run_accepts_and_refuses_what_a_session_does(here, folders):
    files = {path.name: path.read_bytes() for path in folders[SMALL].iterdir()}
    here.upload("google/chat", files | {"chat_template.jinja": b"{{ messages[0].content }}"})
    here.upload("google/bare", {name: content for name, content in files.items() if "token" not in name})
    source = ModelPair(name="mine", target="google/chat", draft="google/bare")
    for chat in (True, False):
        evaluation = dataclasses.replace(ON, chat=chat)
        session.rehearse(source, evaluation)
        for change, message in (
            ({"vocabulary": "google/bare"}, "google/bare on the hub has none of the files that can be read"),
            ({"vocabulary": "google/nothing"}, "knows no such model"),
            ({"target": "google/bare"}, "pair 'mine' has no vocabulary, but task tiny_translation is text"),
        ):
            with pytest.raises((FileNotFoundError, ValueError), match=message):
                session.rehearse(dataclasses.replace(source, **change), evaluation)
    assert not [path for path in here.asked if path.endswith(".safetensors")]


def test_a_description_fetches_the_configuration_only(here, capsys):
    assert describe.main([LARGE, "--batch", "1"]) == 0 and LARGE in capsys.readouterr().out
    assert {path.rpartition("/")[2] for path in here.asked if "/resolve/" in path} == {"config.json"}


def test_a_head_on_the_hub_is_described_by_its_arrays_too(here, tmp_path):
    folder = eagle3_files.write(tmp_path / "head")
    here.upload("google/head", folder)
    assert checkpoints.model_of("google/head") == checkpoints.model_of(folder)


def test_a_conversion_reads_a_name(here, folders, capsys):
    assert convert.main([SMALL, "ours"]) == 0 and "Hugging Face, gemma3_text" in capsys.readouterr().out
    assert checkpoints.load("ours")[0] == checkpoints.load(folders[SMALL])[0]
    assert convert.main(["google/nothing", "ours"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_a_run_of_training_starts_from_a_name(here):
    corpus, schedule = TaskCorpus(task="tiny_translation", split="test"), Schedule(peak=1e-3, max_steps=2)
    trainer = Trainer(init_from=SMALL, run_dir="run", corpus=corpus, schedule=schedule)
    assert trainer.configuration.num_layers == 1 and trainer.text == load_vocabulary(WORDS)
    assert trainer.start.endswith(here.branches[SMALL, "main"])


def test_weights_in_another_form_are_refused_with_the_remedy(here):
    with pytest.raises(checkpoints.CheckpointError, match="google/pickles .*no model.safetensors.*save_pretrained"):
        checkpoints.load("google/pickles")


def test_one_model_of_the_hub_is_no_pair(here):
    with pytest.raises(ValueError, match=r"no pair 'google/gemma-3-large': .* names on the hub to Pair.load\(target="):
        sc.load_pair(LARGE)
