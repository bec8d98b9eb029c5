"""Tests of corpora: prompts as decoding encodes them, answers that count in the loss, joined pairs and mixtures."""

import itertools
from collections import Counter
from pathlib import Path

import gin
import numpy as np
import pytest

import speccascade_jax as sc
from speccascade_jax.data.tasks.file_task import FileTask
from speccascade_jax.data.tasks.table import get_task
from speccascade_jax.data.tasks.task import Example, FewShotTask, Record, Task
from speccascade_jax.data.vocabularies.load import load_vocabulary
from speccascade_jax.evaluation.points import Evaluation
from speccascade_jax.evaluation.session import fit_prompts
from speccascade_jax.training.finetune.corpus import (
    JoinedCorpus,
    MixedCorpus,
    SpanCorruption,
    TaskCorpus,
    examples_of,
)
from tests.support import tokenizer_files

SHIPPED = Path(sc.__file__).parent / "assets/pairs/tatoeba_en_de/vocabulary.model"
WIDTHS = (4, 8, 16)


@pytest.fixture(scope="module")
def words():
    """Returns the vocabulary of the shipped pair, of an encoder-decoder without BOS."""
    return load_vocabulary(SHIPPED)


@pytest.fixture(scope="module")
def continuing(tmp_path_factory):
    """Returns a vocabulary with BOS and one without, for decoder-only models."""
    folder = tmp_path_factory.mktemp("vocabularies")
    (folder / "qwen").mkdir()
    return [
        load_vocabulary(tokenizer_files.llama2c(folder / "tok.bin")),
        load_vocabulary(tokenizer_files.byte_level(folder / "qwen")),
    ]


def read(split):
    return [Example(n, f"Once {n} upon a time" + " there" * n, f"a time {n}" + " upon" * (n % 5)) for n in range(12)]


def task_of(**changes):
    fields = {"name": "own", "splits": ("train",), "read": read, "max_input_length": 14, "max_output_length": 8}
    return Task(**{**fields, **changes})


def rows_of(data, seed=0, number=0):
    """Returns the rows with an example of one epoch: `(encoder ids, tokens, index of the answer)`."""
    rows = []
    for batch in data.epoch(seed, number):
        built = batch.build()
        for place in np.flatnonzero(built.lengths):
            encoder = built.encoder_tokens
            source = None if encoder is None else encoder[place, : built.encoder_lengths[place]].tolist()
            rows.append((source, built.tokens[place, : built.lengths[place]].tolist(), int(built.answers[place])))
    return rows


class Encoding:
    """An encoder-decoder, of which prompts read only these attributes."""

    is_encoder_decoder, config = True, None

    def __init__(self, vocab_size):
        self.vocab_size = vocab_size


def decoded_prompts(task, vocabulary, encoder_decoder, count):
    """Returns the prompts as a session decodes them."""
    model = sc.FakeLM(vocabulary.vocab_size)
    if encoder_decoder:
        model = sc.BoundModel(params=(), model=Encoding(vocabulary.vocab_size))
    pair = sc.Pair(target=model, draft=model, vocabulary=vocabulary)
    asked = Evaluation(task=task, split="train", quality_examples=count, latency_examples=0)
    with pytest.warns(UserWarning, match="were cut"):
        return fit_prompts(pair, task, asked, task.load("train")).prompts


@pytest.mark.parametrize("few_shot", [False, True])
def test_prompts_are_those_of_decoding(words, continuing, few_shot):
    task = task_of()
    if few_shot:
        records = [Record(id=n, question=f"Once {n} upon", answer=f"time {n}", reference=str(n)) for n in range(9)]
        task = FewShotTask(name="shots", splits=("train",), records=lambda _: records, pool=lambda: records[:2],
                           shots=2, max_input_length=30, max_output_length=9)  # fmt: skip
    for vocabulary, encoder_decoder in ((words, True), *((vocabulary, False) for vocabulary in continuing)):
        count = len(task.load("train"))
        wanted = decoded_prompts(task, vocabulary, encoder_decoder, count)
        data = TaskCorpus(task=task, rows=2).tokens(vocabulary, encoder_decoder)
        rows = rows_of(data)
        prompts = [source if encoder_decoder else tokens[:answer] for source, tokens, answer in rows]
        assert sorted(prompts) == sorted(wanted) and len(rows) == count
        assert data.source.counts["prompts_cut"] > 0
        answers = [tokens[answer:] for _, tokens, answer in rows]
        assert all(ids[-1] == vocabulary.eos_id and len(ids) <= task.max_output_length for ids in answers)


def test_answers_continue_prompts_and_are_cut_before_eos(words, continuing):
    (example, *_) = task_of().load()
    for vocabulary in continuing:
        rows = rows_of(TaskCorpus(task=task_of(max_input_length=99), limit=1).tokens(vocabulary, False))
        ((_, tokens, answer),) = rows
        text = f"{example.source} {example.reference}"
        whole = [*([] if vocabulary.bos_id is None else [vocabulary.bos_id]), *vocabulary.encode(text)]
        assert tokens[: len(whole)] == whole[: len(tokens) - 1]
        long = TaskCorpus(task=task_of(max_output_length=2), limit=1).tokens(vocabulary, False)
        assert long.source.counts["answers_cut"] == 1
        assert rows_of(long)[0][1][-2:] == [tokens[answer], vocabulary.eos_id]
    ((_, tokens, answer),) = rows_of(TaskCorpus(task=task_of(), limit=1).tokens(words, True))
    assert tokens == [*words.encode(example.reference), words.eos_id] and answer == 0


@pytest.mark.parametrize(("name", "split", "inside"), [
    ("gsm8k", "train", "\n#### "), ("humaneval", "test", "    return "), ("mbpp", "train", "\n[DONE]"),
    ("webquestions", "train", " "), ("dialogsum", "train", " #Person"),
])  # fmt: skip
def test_few_shot_answers_have_the_form_of_exemplars_not_of_references(name, split, inside):
    task = get_task(name)
    try:
        answers = [task.build_answer(example) for example in task.load(split, 20)]
    except FileNotFoundError as error:
        pytest.skip(str(error))
    assert any(inside in answer for answer in answers) and "check(" not in "".join(answers)


def test_a_users_file_is_divided_into_disjoint_parts(tmp_path, words):
    path = tmp_path / "mine.csv"
    lines = [f"question {n % 150},answer {n}\n" for n in range(200)]
    path.write_text("source,reference\n" + "".join(lines))
    parts = {}
    for split in ("train", "validation"):
        corpus = TaskCorpus(task=str(path), split=split, held_out=0.1)
        parts[split] = {example.source for example in corpus.resolved.load(split)}
        assert len(rows_of(corpus.tokens(words, True))) == len(corpus.resolved.load(split))
    assert not parts["train"] & parts["validation"] and len(parts["train"] | parts["validation"]) == 150
    assert 5 < len(parts["validation"]) < 30
    whole = TaskCorpus(task=str(path), split="all")
    assert len(rows_of(whole.tokens(words, True))) == 200
    path.write_text("source,reference\n" + "".join(reversed(lines)))
    again = FileTask(path=str(path), held_out=0.1).load("validation")
    assert {example.source for example in again} == parts["validation"]


def test_tasks_without_examples_or_a_training_split_are_refused(words, tmp_path):
    with pytest.raises(ValueError, match="^task wmt22 has no training split 'train'; its splits: test: name one"):
        TaskCorpus(task="wmt22")
    with pytest.raises(ValueError, match="unknown task|no task"):
        TaskCorpus(task="wnt22")
    for changes, said in (
        ({"read": lambda _: []}, "own, split train has no examples: choose another split"),
        ({"read": lambda _: [Example(0, "Once", " ")]}, "all answers are empty"),
    ):
        with pytest.raises(ValueError, match=said):
            TaskCorpus(task=task_of(**changes)).tokens(words, True)
    for name, rows, said in (
        ("empty", [], "empty.csv has no rows: write one row for each example"),
        ("single", ["a,b\n"], "single.csv has one row only, and it is held out: .*; add rows with other prompts"),
        ("same", ["a,b\n", "a,c\n"], "same.csv has 2 rows, which have the same prompt, .* for split train; add rows"),
    ):
        path = tmp_path / f"{name}.csv"
        path.write_text("".join(["source,reference\n", *rows]))
        with pytest.raises(ValueError, match=said):
            TaskCorpus(task=str(path)).tokens(words, True)
    with pytest.raises(ValueError, match="empty.csv has no rows"):
        examples_of(FileTask(path=str(tmp_path / "empty.csv")), "validation", 3)
    path = tmp_path / "long.csv"
    path.write_text("source,reference\n" + "Once upon a time,b\n" * 3)
    task = FileTask(path=str(path), too_long="skip", max_input_length=3)
    with pytest.raises(ValueError, match=r"no examples \(3 prompts are too long\)"):
        TaskCorpus(task=task, split="all").tokens(words, True)
    with pytest.raises(ValueError, match="an example has 14 encoder tokens .* the widest bucket 8"):
        TaskCorpus(task=task_of(), widths=(8,)).tokens(words, True)


@pytest.mark.filterwarnings("error")
def test_a_warning_counts_what_is_cut_or_left_out(words, monkeypatch):
    cut = r"^own, split train: prompts cut to .*=14 tokens: 6, answers cut to .*=6 tokens: 7 \(examples: 12\)$"
    with pytest.warns(UserWarning, match=cut):
        TaskCorpus(task=task_of(max_output_length=6)).tokens(words, True)
    with pytest.warns(UserWarning, match=r"prompts of more than .*=14 tokens left out: 6.*\(examples: 6\)$"):
        monkeypatch.setattr(Task, "too_long", "skip")
        TaskCorpus(task=task_of(max_output_length=99)).tokens(words, True)
    TaskCorpus(task=task_of(max_input_length=99, max_output_length=99)).tokens(words, True)


def test_limit_and_every_choose_examples(words):
    data = TaskCorpus(task=task_of(max_input_length=99), limit=7, every=3).tokens(words, True)
    chosen = [f"Once {n} upon a time" + " there" * n for n in (0, 3, 6)]
    assert sorted(source[:-1] for source, _, _ in rows_of(data)) == sorted(map(words.encode, chosen))


class Numbers:
    """Vocabulary of numbers, which are their own ids."""

    eos_id, bos_id, vocab_size = 1, None, 9999

    def encode(self, text):
        return [int(word) for word in text.split()]


class Begun(Numbers):
    """`Numbers` with a beginning of sequence."""

    bos_id = 2


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Returns a file of 200 pairs; pair `i` has 1 to 8 source tokens 10 + i and as many target tokens 1010 + i."""
    file = tmp_path_factory.mktemp("pairs") / "pairs.tsv"
    lengths = np.random.default_rng(0).integers(1, 9, size=(200, 2)).tolist()
    rows = enumerate(lengths)
    file.write_text("".join(f"{f'{10 + i} ' * a}\t{f'{1010 + i} ' * b}\n" for i, (a, b) in rows))
    return str(file)


def joined(path, **changes):
    return JoinedCorpus(**{"path": path, "widths": WIDTHS, "tokens_per_batch": 64, **changes})


@pytest.mark.parametrize("max_joined", [1, 4])
@pytest.mark.parametrize("encoder_decoder", [True, False])
def test_joined_pairs_occur_once_an_epoch_in_step_on_both_sides(path, max_joined, encoder_decoder):
    vocabulary = Numbers() if encoder_decoder else Begun()
    widths = WIDTHS if encoder_decoder else (8, 32)
    data = joined(path, max_joined=max_joined, widths=widths).tokens(vocabulary, encoder_decoder)
    orders = []
    for number in (0, 1):
        numbers, sizes = list[int](), set[int]()
        for source, tokens, answer in rows_of(data, 3, number):
            assert tokens[-1] == 1
            if encoder_decoder:
                assert source[-1] == 1 and answer == 0
                source = source[:-1]
            else:
                assert tokens[0] == 2
                source = tokens[1:answer]
            ids = list(dict.fromkeys(source))
            assert [token + 1000 for token in ids] == list(dict.fromkeys(tokens[answer:-1]))
            numbers += ids
            sizes.add(len(ids))
        assert Counter(numbers) == Counter(range(10, 210)) and max(sizes) == max_joined
        orders.append(numbers)
    assert orders[0] != orders[1]


def test_both_sides_of_a_decoders_pair_share_one_width(path):
    source = joined(path, widths=(12,)).source(Begun(), False)
    sums = [
        len(side[0].split()) + len(side[1].split())
        for side in (line.split("\t") for line in Path(path).read_text().splitlines())
    ]
    assert source.size == sum(total <= 10 for total in sums) < 200
    assert max(len(tokens) for _, tokens, _ in rows_of(joined(path, widths=(12,)).tokens(Begun(), False))) == 12


def test_joined_corpora_read_some_of_the_lines_and_cut_sources(tmp_path):
    lines = "".join(f"{i} {' '.join(['5'] * (i % 7))}\t{i + 100}\n" for i in range(10, 40))
    path = tmp_path / "a.tsv"
    path.write_text(lines, encoding="utf-8")

    def sources(**changes):
        source = joined(str(path), widths=(5,), limit=20, **changes).source(Numbers(), True)
        return [source.sources[index].tolist() for index in range(source.size)]

    cut = sources(every=3, cut=2)
    assert [ids[0] for ids in cut] == list(range(10, 30, 3))
    assert [len(ids) for ids in cut] == [1 if i % 7 == 0 else 2 for i in range(10, 30, 3)]
    assert [ids[0] for ids in sources()] == [i for i in range(10, 30) if i % 7 < 4]  # longer pairs are left out
    assert sources(columns=(1, 0), cut=2)[0] == [110]
    with pytest.raises(ValueError, match="no pair of .* fits into 1 tokens: check the file, or raise widths"):
        joined(str(path), widths=(1,)).source(Numbers(), True)


def test_a_mixture_holds_all_parts_and_never_joins_two(path):
    mixed = MixedCorpus(parts=(joined(path), joined(path, columns=(1, 0))), widths=WIDTHS, rows=4)
    data = mixed.tokens(Numbers(), True)
    rows = [source[:-1] for source, _, _ in rows_of(data)]
    assert Counter(itertools.chain(*map(dict.fromkeys, rows))) == Counter([*range(10, 210), *range(1010, 1210)])
    assert all(min(ids) >= 1000 or max(ids) < 1000 for ids in rows)
    first = [ids[0] >= 1000 for ids in rows[:100]]
    assert 20 < sum(first) < 80, "batches hold the examples of all parts"
    # the two parts read the same file, but join its pairs differently
    groups = [frozenset(token % 1000 for token in ids) for ids in rows if len(set(ids)) > 1]
    assert len(set(groups)) > 0.9 * len(groups)


def test_rates_use_every_example_before_one_is_used_again(path, words):
    parts = tuple(TaskCorpus(task=task_of(read=lambda _, n=n: read("")[:n])) for n in (4, 11))
    data = MixedCorpus(parts=parts, rates=(1, 2), rows=3).tokens(words, True)
    counts = list[int]()
    short = {tuple(source) for source, _, _ in rows_of(parts[0].tokens(words, True))}
    used = list[tuple[int, ...]]()
    for number in range(12):
        rows = [tuple(source) for source, _, _ in rows_of(data, 0, number)]
        counts.append(len(rows))
        used += rows
    assert 14 <= min(counts) <= max(counts) <= 16 and abs(sum(counts) - 12 * 15) <= 2
    # part 0 gives 5 of 15 examples an epoch: 60 of 4 texts, part 1 gives 10 of 15: 120 of 11 texts, among them these 4
    times = Counter(used)
    assert {times[ids] for ids in times.keys() - short} <= {10, 11}
    assert {times[ids] for ids in short} <= {25, 26, 27}


def test_mixtures_take_every_kind_of_corpus_and_gin_binds_them(path, tmp_path, words):
    (tmp_path / "text.txt").write_text("Once upon a time there was a king.\n" * 40)
    config = f"""
    from __gin__ import dynamic_registration
    from speccascade_jax.training.finetune import corpus
    corpus.MixedCorpus:
        parts = (@corpus.TaskCorpus(), @corpus.JoinedCorpus(), @corpus.SpanCorruption())
        rates = (1.0, 1.0, 2.0)
        rows = 4
    corpus.TaskCorpus.task = 'tiny_translation'
    corpus.TaskCorpus.split = 'test'
    corpus.JoinedCorpus.max_joined = 1
    corpus.JoinedCorpus.path = {str(tmp_path / "pairs.tsv")!r}
    corpus.SpanCorruption.text = {str(tmp_path / "text.txt")!r}
    corpus.SpanCorruption.length = 64
    """
    (tmp_path / "pairs.tsv").write_text("Once upon\ta time\n" * 9)
    with gin.unlock_config():
        gin.parse_config(config)
    mixed = gin.get_configurable(MixedCorpus)()
    gin.clear_config()
    assert [type(part) for part in mixed.parts] == [TaskCorpus, JoinedCorpus, SpanCorruption]
    data = mixed.tokens(words.with_sentinels(words.vocab_size + 100), True)
    rows = rows_of(data)
    assert abs(len(rows) - data.source.size) <= 2
    corrupted = sum(any(token >= words.vocab_size for token in source) for source, *_ in rows)
    assert abs(corrupted - len(rows) / 2) <= 2, "the rates are 1 : 1 : 2"
    assert data.source.counts["examples"] == data.source.size


@pytest.mark.parametrize(("make", "said"), [
    (lambda: joined("a", widths=()), "give the widths of a JoinedCorpus"),
    (lambda: joined("a", max_joined=0), "max_joined=0"),
    (lambda: joined("a", every=0), "every=0"),
    (lambda: joined("a", cut=-1), "cut=-1"),
    (lambda: TaskCorpus(task="tatoeba", every=0), "every=0"),
    (lambda: MixedCorpus(parts=()), "needs parts"),
    (lambda: MixedCorpus(parts=(joined("a"),), rates=(1, 2)), r"rates=\(1, 2\) for 1 parts"),
    (lambda: MixedCorpus(parts=(joined("a"),), rates=(0,)), "must be positive numbers"),
])  # fmt: skip
def test_bad_corpora_are_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()


def test_a_part_that_is_wider_than_the_mixture_is_refused(path):
    with pytest.raises(ValueError, match="an example has 16 encoder tokens .* the widest bucket 8"):
        MixedCorpus(parts=(joined(path),), widths=(4, 8)).tokens(Numbers(), True)
