"""Tests of acceptance data: labels against brute force, kills and resumption, refused input."""

import dataclasses
import itertools
import json
import os
import shutil
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import speccascade_jax as sc
from speccascade_jax.core.controls import make_controls
from speccascade_jax.evaluation import session
from speccascade_jax.evaluation.points import Evaluation, ModelPair, Point, Settings
from speccascade_jax.models import fingerprints
from speccascade_jax.rules import deferral
from speccascade_jax.storage import locks
from speccascade_jax.storage.buckets import BucketPath
from speccascade_jax.training.heads import make_data, shards
from tests.support import conformance, memory, reference, text_pair
from tests.support.killing import killed_at

SOURCE = ModelPair(name="tabular")
FEW = {"quality_examples": 7, "quality_batch": 2, "latency_examples": 0, "max_new_tokens": 6}
SMALL = Evaluation(task="tiny_translation", keep_outputs=False, keep_traces=0, **FEW).resolved()


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    pair = text_pair.make(tmp_path_factory.mktemp("pair"))
    stop = pair.vocabulary.stop_ids[0]
    ending = sc.TableLM(pair.target.params.at[:, stop].add(6.0))  # with this change, outputs have different lengths
    return session.Session(SOURCE, SMALL, dataclasses.replace(pair, target=ending))


def point(rule="spec_decode", alpha=None, temperature=1.0, **more):
    settings = Settings(rule=rule, alpha=alpha, temperature=temperature)
    return Point(pair=SOURCE, evaluation=SMALL, settings=settings, **more)


def files(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def made(loaded, tmp_path_factory):
    """Returns a folder of seven examples in shards of four, the counts, and the data."""
    folder = tmp_path_factory.mktemp("made") / "data"
    counts = make_data.write(loaded, point(), 4, folder)
    return folder, counts, shards.read(folder)


LABELLED = [("spec_decode", None, 1.0), ("spec_decode", None, 0.0), ("token_v3", 0.4, 1.0), ("lossy", 0.3, 0.7),
            ("chow", 0.6, 1.0)]  # fmt: skip


@pytest.mark.parametrize(("rule", "alpha", "temperature"), LABELLED)
def test_labels_are_the_rules_ratio_at_the_drawn_token(rule, alpha, temperature):
    q_logits, p_logits = conformance.tables(6, seed=11)
    q, p = (jnp.asarray(x, jnp.float32)[None] for x in (q_logits, p_logits))
    controls = make_controls(1, alpha=alpha or 0.0, temperature=temperature)
    uniforms = jnp.asarray(np.random.default_rng(2).uniform(size=(1, 6)), jnp.float32)
    labels = jax.device_get(make_data.label(q, p, controls, uniforms, deferral.get(rule)))
    for i in range(6):
        drawn, raw = reference.scale(q_logits[i], temperature), reference.softmax(q_logits[i])
        law = reference.target_law(rule, q_logits[i], p_logits[i], alpha or 0.0, temperature)
        token = labels["proposals"][0, i]
        assert token == np.argmax(np.cumsum(drawn) > float(uniforms[0, i]) * drawn.sum())
        assert labels["kept"][0, i] == pytest.approx(min(1.0, law[token] / drawn[token]), abs=1e-4)
        assert labels["max_q"][0, i] == pytest.approx(raw.max(), abs=1e-5)
        assert labels["entropy_q"][0, i] == pytest.approx(reference.entropy(raw), abs=1e-4)
        assert labels["q_of_proposal"][0, i] == pytest.approx(drawn[token], abs=1e-5)
    if temperature == 0:
        assert set(labels["kept"].ravel().tolist()) <= {0.0, 1.0}


def test_examples_are_the_targets_outputs_labelled_at_their_own_prefixes(loaded, made):
    _, counts, data = made
    stored, stops = data.examples, loaded.pair.vocabulary.stop_ids
    assert counts == {"prompts": 7, "positions": int(stored.lengths.sum())}
    assert stored.ids.tolist() == [e.id for e in loaded.examples]
    q, p = (np.asarray(bound.params) for bound in (loaded.pair.draft, loaded.pair.target))
    assert len(set(stored.lengths.tolist())) > 1
    for row, length in enumerate(stored.lengths):
        before = [stored.prompt_tokens[row, stored.prompt_lengths[row] - 1], *stored.tokens[row, : length - 1]]
        assert length == 6 or stored.tokens[row, length - 1] in stops
        for i, previous in enumerate(before):
            token, q_law, p_law = stored.proposals[row, i], *(reference.softmax(x[previous]) for x in (q, p))
            assert stored.kept[row, i] == pytest.approx(min(1, p_law[token] / q_law[token]), rel=1e-3)
            assert stored.q_of_proposal[row, i] == pytest.approx(q_law[token], rel=1e-3)
    padding = ~stored.counted
    assert padding.any() and not any(
        x[padding].any() for x in (stored.tokens, stored.proposals, stored.kept, stored.max_q)
    )


def test_proposals_depend_only_on_seed_id_and_position():
    all_of_them = make_data.proposal_uniforms(3, np.arange(8), 6)
    np.testing.assert_array_equal(make_data.proposal_uniforms(3, np.array([5, 2]), 4), all_of_them[[5, 2], :4])
    other_seed = make_data.proposal_uniforms(4, np.arange(8), 6)
    assert len(np.unique(np.concatenate([all_of_them, other_seed]))) == 2 * 8 * 6


@pytest.mark.parametrize("last", [0, 1])
def test_a_resumed_folder_equals_an_uninterrupted_one(loaded, made, tmp_path, last):
    whole, counts, _ = made
    with killed_at(shards, "write_shard", last + 1):
        make_data.write(loaded, point(), 4, tmp_path / "data")
    with pytest.raises(ValueError, match=f"lacks {2 - last} of 2 shards"):
        shards.read(tmp_path / "data")
    before = files(tmp_path / "data")
    for _ in range(2):  # the second call finds everything done
        assert make_data.write(loaded, point(), 4, tmp_path / "data") == counts
    assert files(tmp_path / "data") == files(whole)
    assert before.items() <= files(tmp_path / "data").items()


@pytest.mark.laws
def test_a_folder_in_a_bucket_equals_a_local_one(loaded, made, bucket):
    whole, counts, _ = made
    place = BucketPath("gs://bucket/data")
    with killed_at(shards, "write_shard", 2):
        make_data.write(loaded, point(), 4, place)
    assert make_data.write(loaded, point(), 4, place) == counts
    assert {name: (place / name).read_bytes() for name in place.below()} == files(whole)
    assert shards.read(str(place)).key == shards.read(whole).key


@pytest.mark.parametrize("model", ["target", "draft"])
def test_data_from_a_failing_model_are_refused(loaded, model):
    """Covers failures of the decoding model and of the model that only scores."""
    (written, *_) = make_data.surveying.write(loaded, point(temperature=0.0))
    pair, _ = text_pair.damaged(loaded.pair, np.asarray(written.generation.tokens), model)
    broken = session.Session(SOURCE, SMALL, pair)
    with pytest.raises(FloatingPointError, match=f"the {model} model gave NaN or infinite logits"):
        make_data.examples(broken, point(temperature=0.0))


def test_a_folder_with_other_settings_is_refused(loaded, made):
    folder, *_ = made
    before = files(folder)
    with pytest.raises(ValueError, match="was started with other values of seed: name another output"):
        make_data.write(loaded, point(seed=1), 4, folder)
    with pytest.raises(ValueError, match="was started with other values of rule, alpha"):
        make_data.write(loaded, point("token_v3", 0.4), 4, folder)
    assert files(folder) == before


def test_folders_are_combined_only_if_their_labels_mean_the_same(loaded, made, tmp_path):
    folder, _, data = made
    make_data.write(loaded, point(seed=1), 4, tmp_path / "more")
    joined = shards.read([folder, tmp_path / "more"])
    assert len(joined.examples.ids) == 14 and joined.key not in {data.key, shards.read(tmp_path / "more").key}
    np.testing.assert_array_equal(joined.examples.kept[:7, : data.examples.kept.shape[1]], data.examples.kept)
    assert not np.array_equal(joined.examples.proposals[:7], joined.examples.proposals[7:])
    make_data.write(loaded, point(temperature=0.5), 4, tmp_path / "cold")
    with pytest.raises(ValueError, match="cold cannot be combined with .*: temperature is 0.5, not 1.0; train on one"):
        shards.read([folder, tmp_path / "cold"])
    with pytest.raises(ValueError, match="no folder of acceptance data is named"):
        shards.read([])


def test_foreign_and_damaged_shards_are_refused(loaded, made, tmp_path):
    folder = tmp_path / "data"
    make_data.write(loaded, point(seed=2), 7, folder)
    shard, manifest = shards.shard_path(folder, 0), folder / shards.MANIFEST
    content = shard.read_bytes()
    shard.write_bytes(shards.shard_path(made[0], 0).read_bytes())
    with pytest.raises(ValueError, match="made with settings other than its folder's manifest"):
        shards.read(folder)
    shard.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match="shard-00000.npz is damaged"):
        shards.read(folder)
    shard.write_bytes(content)
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"draft_fingerprint": "another"}))
    with pytest.raises(ValueError, match="settings other"):
        shards.read(folder)
    with pytest.raises(ValueError, match="draft_fingerprint is 'another'"):
        shards.read([made[0], folder])
    with pytest.raises(FileNotFoundError, match="holds no acceptance data"):
        shards.read(tmp_path / "nothing")


def test_no_flipped_byte_of_a_shard_is_read_as_data(made, tmp_path):
    """Flips every seventh byte; some bytes do not affect the data, such as a date in the archive's directory."""
    folder, _, _ = made
    manifest, path = json.loads((folder / shards.MANIFEST).read_text()), tmp_path / "shard-00000.npz"
    content = shards.shard_path(folder, 0).read_bytes()
    whole, refused = shards.read_shard(shards.shard_path(folder, 0), manifest), 0
    for position, mask in itertools.product(range(0, len(content), 7), (1, 0xFF)):
        path.write_bytes(content[:position] + bytes([content[position] ^ mask]) + content[position + 1 :])
        try:
            read = shards.read_shard(path, manifest)
        except ValueError as error:
            assert "shard-00000.npz is damaged" in str(error) and "remove it and make it again" in str(error)
            refused += 1
        else:
            for field in dataclasses.fields(whole):
                np.testing.assert_array_equal(getattr(read, field.name), getattr(whole, field.name))
    assert refused > len(content) / 7  # at least half of the flips are refused


def test_a_folder_is_refused_if_the_rule_of_that_name_changed(loaded, made, monkeypatch):
    folder, *_ = made
    changed = dataclasses.replace(deferral.RULES["spec_decode"], kept=lambda pair, alpha: 0.5 * pair.q_tilde)
    monkeypatch.setitem(deferral.RULES, "spec_decode", changed)
    again = session.Session(loaded.source, loaded.evaluation, loaded.pair)
    with pytest.raises(ValueError, match="was started with other values of code: name another output"):
        make_data.write(again, point(), 4, folder)


def test_the_manifest_identifies_models_and_settings(loaded, made):
    manifest = json.loads((made[0] / shards.MANIFEST).read_text())
    assert manifest["draft_fingerprint"] == fingerprints.of_model(loaded.pair.draft)
    assert manifest["pair_fingerprint"] == loaded.pair.fingerprint
    expected = {"rule": "spec_decode", "alpha": None, "temperature": 1.0, "seed": 0, "prompts": 7, "batch": 2}
    assert {name: manifest[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rule": "chw"}, "unknown rule 'chw'"),
        ({"rule": "token_v3"}, "rule 'token_v3' needs alpha, for example 0.9"),
        ({"alpha": 0.5}, "has no alpha"),
        ({"rule": "lossy_greedy", "alpha": 0.1}, "defined at temperature 0 only"),
        ({"shard_size": 0}, "shard_size=0 is not a whole number >= 1"),
    ],
)
def test_invalid_settings_are_refused_before_loading(changes, message, tmp_path):
    arguments = {"pair": SOURCE, "evaluation": SMALL, "settings": Settings(temperature=1.0), "output": str(tmp_path)}
    with pytest.raises(ValueError, match=message):
        make_data.make(**(arguments | changes))
    assert not list(tmp_path.iterdir())


def copied(made, folder):
    shutil.copytree(made[0], folder)
    return folder


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"prompts": 10**9}, r"lacks 249999998 of 250000000 shards \(shard-00002.npz\): finish it"),
        ({"prompts": "many"}, r"manifest.json is damaged \(prompts is 'many'\)"),
        ({"shard_size": 0}, r"manifest.json: shard_size=0 is not a whole number >= 1"),
        ({"shard_size": 4.0}, r"manifest.json is damaged \(shard_size is 4.0\)"),
        ({"prompts": 8}, "made with settings other"),
        *((text, "manifest.json is damaged .*: make the folder again") for text in ("{", "[1]", "")),
    ],
)
def test_implausible_manifests_are_refused(made, tmp_path, changes, said):
    manifest = copied(made, tmp_path / "data") / shards.MANIFEST
    whole = json.loads(manifest.read_text())
    manifest.write_text(changes if isinstance(changes, str) else json.dumps(whole | changes))
    check_refused(tmp_path / "data", said)


def check_refused(folder, said):
    """Checks that reading the folder is refused, and takes little memory."""

    def refused():
        with pytest.raises(ValueError, match=said):
            shards.read(folder)

    assert memory.peak(refused) < 5_000_000


def repacked(path, change):
    """Rewrites a shard with changed members and valid checksums."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in change(members).items():
            archive.writestr(name, content)


def long_header(members):
    name = "kept.npy"
    start = members[name].index(b"(4, ")
    return members | {
        name: members[name][:start] + b"(4000000000, " + members[name][start + 4 :].replace(b" " * 9, b"", 1)
    }


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (long_header, "an array of shape .*4000000000"),
        (lambda members: members | {"more.npy": b"\0" * 300_000_000}, "bytes unpack to more than"),
        (lambda members: members | {"kept.npy": members["ids.npy"]}, "kept has shape"),
    ],
)
def test_shards_with_implausible_sizes_are_refused(made, tmp_path, change, said):
    folder = copied(made, tmp_path / "data")
    repacked(shards.shard_path(folder, 0), change)
    check_refused(folder, rf"shard-00000.npz is damaged \(.*{said}")


def test_a_second_writer_of_a_folder_is_refused(loaded, made, tmp_path):
    folder = copied(made, tmp_path / "data")
    said = rf"data is being written by process {os.getpid()} .*: wait for it, end it, or name another output"
    with locks.held(folder / "lock", folder), pytest.raises(locks.LockedError, match=said):
        make_data.write(loaded, point(), 4, folder)
    assert make_data.write(loaded, point(), 4, folder) == made[1]
    assert files(folder) == files(made[0])
