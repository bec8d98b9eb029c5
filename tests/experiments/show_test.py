"""Tests of the command show: the printed text of every token, with and without colours."""

import io
import re

import pytest
from absl import flags
from absl.testing import flagsaver
from rich.console import Console

import speccascade_jax as sc
from tests.support import conformance


@pytest.fixture(scope="module")
def show(script):
    return script("show")


def written():
    """Returns three rounds: two drafts and a replacement; a draft and a bonus; the end of the sequence."""
    rows = [
        ("Das", "draft", 0, 0), (" Wetter", "draft", 0, 1), (" war", "replaced", 0, 2),
        (" kalt", "draft", 1, 0), (".", "bonus", 1, 1), ("", "target", 2, 0),
    ]  # fmt: skip
    return [sc.StreamedToken(7, text, source, r, slot, index) for index, (text, source, r, slot) in enumerate(rows)]


def page(show, **console):
    out = io.StringIO()
    return show.Page(Console(file=out, width=200, highlight=False, **console)), out


@pytest.mark.parametrize("console", [{}, {"force_terminal": True, "no_color": True}])
def test_marks_show_the_source_of_every_token_without_colours(show, console):
    shown, out = page(show, **console)
    for token in written():
        shown.token(token)
    assert out.getvalue() == "Das Wetter [war]| kalt(.)|"
    assert shown.legend().plain == "draft   [replaced]   (bonus)   <target>   | next round   ■ end"


def test_each_source_has_its_own_colour_and_rounds_end_visibly(show):
    shown, out = page(show, force_terminal=True, color_system="standard")
    styles = {}
    for token in written():
        before = len(out.getvalue())
        shown.token(token)
        codes = re.findall(r"\x1b\[([\d;]+)m([^\x1b|]+)", out.getvalue()[before:])
        styles.update((token.source, code) for code, _ in codes)
    assert len(set(styles.values())) == len(styles) == 3
    assert re.sub(r"\x1b\[[\d;]*m", "", out.getvalue()) == "Das Wetter war| kalt.|"


def test_the_summary_counts_tokens_rounds_and_time(show):
    lines = show.summary(written(), [11.0, 11.0, 11.0, 12.0, 12.0, 13.5], begin=10.25)
    assert lines == [
        "6 tokens in 3 rounds: 2.00 tokens per round",
        "3 draft, 1 replaced, 1 bonus, 1 target; acceptance rate 75%",
        "first token after 0.75 s, then 1 tokens/s",
    ]
    assert show.summary([], [], 0.0) == ["no token was written"]
    assert show.summary(written()[:3], [2.0] * 3, 0.0)[2] == "first token after 2.00 s"


def test_ways_to_draft_and_to_verify_are_those_of_decode(show):
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    assert (show._settings()["verify"], show._settings()["tree"]) == ("token", None)
    with flagsaver.flagsaver(verify="block", tree=["3", "2"]):
        assert (show._settings()["verify"], show._settings()["tree"]) == ("block", (3, 2))
    with (
        flagsaver.flagsaver(tree=["3", "x"]),
        pytest.raises(ValueError, match="--tree=3,x is not a list of whole numbers"),
    ):
        show._settings()


def test_an_interrupt_ends_the_output_and_keeps_the_shown_text(show):
    def interrupted():
        yield from written()[:4]
        raise KeyboardInterrupt

    shown, _ = page(show)
    tokens, times = show.show(interrupted(), shown)
    assert tokens == written()[:4] and len(times) == 4


def test_the_picture_holds_every_token_in_its_colour(show, tmp_path):
    show.draw(written() * 12, "Wie ist", str(tmp_path / "page.svg"), "a title")
    picture = (tmp_path / "page.svg").read_text()
    plain = re.sub(r"<[^>]+>", "", picture).replace("&#160;", " ")
    assert plain.count("kalt") == 12 and "Wie ist" in plain and "a title" in plain
    # the page is narrower: the line is wrapped, not cut
    assert len(set(re.findall(r' y="([\d.]+)"', picture))) > 6
    assert len(set(re.findall(r"fill: (#\w+)", picture))) >= 4


class Letters:
    """A vocabulary of one-letter words."""

    vocab_size, bos_id, eos_id, stop_ids = 9, None, 4, (4,)

    def encode(self, text):
        return ["abcdefghi".index(letter) for letter in text]

    def decode(self, ids, after=()):
        return " ".join("abcdefghi"[i] for i in ids)


@pytest.mark.parametrize("method", ["spec_decode", "autoregressive_draft"])
def test_the_printed_text_equals_the_output_of_decode(show, capsys, monkeypatch, method):
    models = (sc.TableLM(table) for table in conformance.tables(9, seed=0))
    pair = sc.Pair(*models, vocabulary=Letters())
    monkeypatch.setattr(sc, "load_pair", lambda name: pair)
    changes = {"prompt": "cd", "method": method, "block_size": 3, "max_new_tokens": 14, "temperature": 1.0, "seed": 5}
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    with flagsaver.flagsaver(**changes):
        show.main(["show"])
    output = capsys.readouterr().out.splitlines()
    arguments = {name: changes[name] for name in ("method", "block_size", "max_new_tokens", "temperature", "seed")}
    expected = sc.decode(pair, ["cd"], **arguments)
    assert output[0] == "prompt: cd" and output[1].startswith("draft   [replaced]")
    assert re.sub(r"[\[\]()<>|■]", "", output[2]) == expected.texts[0]
    assert output[3].startswith(f"{expected.lengths[0]} tokens in {expected.stats['rounds']} rounds")
    rate = expected.stats["acceptance_rate"]
    assert (f"acceptance rate {rate:.0%}" in output[4]) if rate else ("acceptance" not in output[4])
