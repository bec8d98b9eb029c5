"""Small files of every format that the package reads, and a reader of mutated copies in a process with limited memory.

    python -m tests.support.fuzzing FOLDER CASES SEED

Prints one JSON object: the counts of refused and accepted files per format, and every failure. Reading a file fails if
it raises an error that is not one of the package's or does not name the file, if it returns changed data although the
file has a digest, or if it takes too long.
"""

import gzip
import hashlib
import importlib
import io
import json
import re
import resource
import shutil
import sys
import time
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import msgpack
import numpy as np

from speccascade_jax import checkpoints
from speccascade_jax.checkpoints.tree_writing import write_tree
from speccascade_jax.core.types import BoundModel
from speccascade_jax.data import sentence_pairs
from speccascade_jax.data.tasks.task import json_lines
from speccascade_jax.data.vocabularies import load
from speccascade_jax.models.t5 import T5
from speccascade_jax.pairs import head_files
from speccascade_jax.pairs.pair import Pair
from speccascade_jax.results.analysis import histograms
from speccascade_jax.results.store import result_store
from speccascade_jax.storage import checksums, files
from speccascade_jax.training import runs
from speccascade_jax.training.heads import shards
from tests.support import acceptance_heads, huggingface_files, tokenizer_files

SECONDS, MEMORY = 10.0, 2 << 30
WRITERS = (
    "checkpoints.llama2c_test", "checkpoints.gemma_jax_test", "checkpoints.conftest", "training.heads.train_test",
)  # fmt: skip
LLAMA2C, GEMMA, T5X, HEADS = (importlib.import_module(f"tests.{name}") for name in WRITERS)


class Format(NamedTuple):
    """A format: `make(folder)` writes files and `read(folder)` reads them; `guarded`: names of files with a digest."""

    make: Callable[[Path], Any]
    read: Callable[[Path], Any]
    guarded: str = "nothing"


def _model(path: Path) -> str:
    model, params = checkpoints.load(path)
    digest = hashlib.blake2b(repr(model).encode())
    for leaf in jax.tree.leaves(params):
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()


def _ours(folder: Path) -> None:
    arrays = T5X.random_arrays(T5X.CONFIG)
    checkpoints.save(folder / "mine", T5(T5X.CONFIG), T5X.unflatten_dict(arrays, sep="/"))


def _theirs(kind: str, shards: int, digests: bool) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        stored = huggingface_files.tensors(kind, huggingface_files.random_parameters(kind))
        huggingface_files.write(folder, huggingface_files.entries(kind), stored, shards)
        if digests:
            checkpoints.write_checksums(folder)

    return make


def _vocabulary(write: Callable[[Path], Path], digests: bool) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        write(folder)
        for file in folder.iterdir() if digests else ():
            checksums.update(file)

    return make


def _sentencepiece(folder: Path) -> Path:
    (folder / "vocabulary.model").write_bytes(load.train(tokenizer_files.texts(), 340))
    return folder / "vocabulary.model"


def _read_vocabulary(folder: Path) -> str:
    vocabulary = load.load_vocabulary(next(f for f in folder.iterdir() if f.name in NAMES))
    ids = vocabulary.encode("Once upon a time")
    return repr((vocabulary.fingerprint, vocabulary.piece_table(), ids, vocabulary.decode(ids)))


NAMES = (*load.NAMES, "tok.bin")


def _head(folder: Path) -> None:
    arrays = T5X.random_arrays(T5X.CONFIG)
    bound = BoundModel(params=T5X.unflatten_dict(arrays, sep="/"), model=T5(T5X.CONFIG))
    head_files.save(folder / "head.msgpack", acceptance_heads.head_for(Pair(bound, bound), depth=1))


MANIFEST = {name: name for name in shards.MEANING} | {"format": 1, "prompts": 7, "shard_size": 4, "pair": "p"}


def _data(folder: Path) -> None:
    shards.begin(folder, MANIFEST)
    for number, rows in enumerate((range(4), range(4, 7))):
        shards.write_shard(folder, number, MANIFEST, HEADS.examples(prompts=7).rows(np.asarray(rows)))


def _read_data(folder: Path) -> str:
    data = shards.read(folder)
    return data.key + hashlib.blake2b(repr([x.tolist() for x in vars(data.examples).values()]).encode()).hexdigest()


STATE = {"a": np.arange(12, dtype=np.float32).reshape(3, 4), "b": np.int32(3)}


def _read_state(folder: Path) -> str:
    state = runs.load_state(folder, STATE)
    return repr(None if state is None else (state[0]["a"].tolist(), int(state[0]["b"]), state[1]))


def _claim(folder: Path) -> None:
    read = runs.STATE_FILE, runs.METRICS_FILE
    files.claim(folder / "settings.json", {"seed": 1, "grid": [1, 2]}, "name another run_dir", checked=read)


def _run(folder: Path) -> None:
    runs.save_state(folder, STATE, {"epoch": 1, "window": [{"loss": 0.5}]})
    _claim(folder)
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n{"step": 2, "loss": 0.25}\n')


def _read_run(folder: Path) -> str:
    _claim(folder)
    runs.MetricsLog(folder / "metrics.jsonl", 2, 2)
    return _read_state(folder)


def _texts(folder: Path) -> None:
    lines = "".join(f"{n} Wörter\t{n} words\n" for n in range(50)).encode()
    records = "".join(json.dumps({"id": n, "text": f"{n} words"}) + "\n" for n in range(30)).encode()
    for name, content in {"p.tsv": lines, "p.tsv.gz": lines, "r.jsonl": records, "r.jsonl.gz": records}.items():
        (folder / name).write_bytes(gzip.compress(content, mtime=0) if name.endswith(".gz") else content)


def _read_texts(folder: Path) -> str:
    pairs = [sentence_pairs.read_pairs(folder / name) for name in ("p.tsv", "p.tsv.gz")]
    return repr([*pairs, *([(r["id"], r["text"]) for r in json_lines(folder / n)] for n in ("r.jsonl", "r.jsonl.gz"))])


def _results(folder: Path) -> None:
    with result_store.ResultStore(folder / "s.jsonl") as store:
        for n in range(4):
            store.append({"key": f"k{n}", "format": result_store.FORMAT, "point": {"alpha": n / 4}, "value": [n, 1.5]})
    survey = {"task": "t", "pair": "p", "along": "x", "histogram": {"quantity": "q", "counts": [1, 2]}}
    (folder / "survey.json").write_text(json.dumps(survey))


def _read_results(folder: Path) -> str:
    with result_store.ResultStore(folder / "s.jsonl") as store:
        kept = store.records
    return repr((len(kept), histograms.read([folder / "survey.json"])))


def _t5x(folder: Path, **options: Any) -> None:
    T5X.write_t5x(folder / "checkpoint_7", T5X.random_arrays(T5X.CONFIG), **options)


def _tree(folder: Path) -> None:
    (folder / "g").mkdir()
    write_tree(folder / "g", GEMMA.arrays())


FORMATS: dict[str, Format] = {
    "ours": Format(_ours, lambda f: _model(f / "mine"), r"config\.json|d/|manifest|_METADATA"),
    "hugging face": Format(_theirs("llama2", 1, True), _model, r"config\.json|model\.safetensors"),
    "hugging face, shards": Format(_theirs("qwen2.5", 2, False), _model),
    "llama2.c": Format(lambda f: LLAMA2C.write(f / "model.bin"), _model),
    "t5x": Format(_t5x, lambda f: _model(f / "checkpoint_7")),
    "t5x, one file": Format(
        lambda f: _t5x(f, inline=tuple(T5X.random_arrays(T5X.CONFIG))), lambda f: _model(f / "checkpoint_7")
    ),
    "gemma": Format(_tree, lambda f: _model(f / "g")),
    "sentencepiece": Format(_vocabulary(_sentencepiece, True), _read_vocabulary, r"vocabulary\.model"),
    "sentencepiece, no digest": Format(_vocabulary(_sentencepiece, False), _read_vocabulary),
    "tokenizer.json": Format(_vocabulary(tokenizer_files.byte_level, False), _read_vocabulary),
    "tokenizer.json, digests": Format(_vocabulary(tokenizer_files.metaspace, True), _read_vocabulary, r"tokenizer"),
    "tokenizer of llama2.c": Format(
        _vocabulary(lambda f: tokenizer_files.llama2c(f / "tok.bin"), False), _read_vocabulary
    ),
    "head": Format(_head, lambda f: head_files.load(f / "head.msgpack").fingerprint, r"head\.msgpack"),
    "data": Format(_data, _read_data, r"manifest\.json"),
    "run": Format(_run, _read_run, r"state\.msgpack"),
    "texts": Format(_texts, _read_texts),
    "results": Format(_results, _read_results),
}


# --- damaged copies of files: changed bits, bytes and slices of any file; changed values and types in known formats

ODD = (
    -1, 0, 1, 2, 3.5, 20_000_000, 10**9, 2**31, 2**40, 2**63, 10**30, -(2**40), 1e308, float("nan"), True, None, "",
    "x", "../../x", [], {}, [[]], [1e9], {"x": 1}, "9" * 40,
)  # fmt: skip


def mutated(path: Path, draws: np.random.Generator) -> bytes:
    """Returns the file's content with one change."""
    content, inside = path.read_bytes(), _inside(path)
    if inside is not None and draws.random() < 0.5:
        return inside(content, draws)
    return _damaged_bytes(content, draws)


def _inside(path: Path) -> Callable[[bytes, np.random.Generator], bytes] | None:
    kinds = {
        ".json": _json, ".jsonl": _damaged_line, ".gz": _gzipped, ".npz": _zipped, ".safetensors": _header,
        ".msgpack": _packed, ".zarray": _json,
    }  # fmt: skip
    named = {"_METADATA": _json, "checkpoint": _packed, ".zarray": _json}
    return named.get(path.name, kinds.get(path.suffix))


def _damaged_bytes(content: bytes, draws: np.random.Generator) -> bytes:
    position, size = (int(draws.integers(len(content) + 1)) for _ in range(2))
    changed, size = bytearray(content), size % 64 + 1
    match draws.integers(7):
        case 0 | 1:
            for bit in draws.integers(8 * len(content), size=draws.integers(1, 4)) if content else ():
                changed[bit // 8] ^= 1 << (bit % 8)
        case 2:
            del changed[position:]
        case 3:
            changed[position:position] = draws.bytes(size)
        case 4:
            del changed[position : position + size]
        case 5:
            changed[position:position] = changed[position : position + size]
        case _:
            position -= position % 4
            number = int(draws.choice([2**31 - 1, 10**9, 20_000_000, -1, 0, 2**16]))
            changed[position : position + 4] = number.to_bytes(4, "little", signed=True)
    return bytes(changed)


def _json(content: bytes, draws: np.random.Generator) -> bytes:
    return json.dumps(_value(json.loads(content), draws)).encode()


def _damaged_line(content: bytes, draws: np.random.Generator) -> bytes:
    lines = content.splitlines()
    line_index = int(draws.integers(len(lines)))
    lines[line_index] = _json(lines[line_index], draws)
    return b"\n".join(lines)


def _value(tree: Any, draws: np.random.Generator) -> Any:
    """Returns the tree with one node replaced, or left out."""
    inner = tree if isinstance(tree, list) else list(tree) if isinstance(tree, dict) else []
    if not inner or draws.random() < 0.1:
        return ODD[draws.integers(len(ODD))]
    child = int(draws.integers(len(inner)))
    key = child if isinstance(tree, list) else inner[child]
    if draws.random() < 0.1:
        return (
            [*tree[:child], *tree[child + 1 :]]
            if isinstance(tree, list)
            else {k: v for k, v in tree.items() if k != key}
        )
    tree = tree.copy()
    tree[key] = _value(tree[key], draws)
    return tree


def _gzipped(content: bytes, draws: np.random.Generator) -> bytes:
    text = gzip.decompress(content)
    return gzip.compress(_damaged_line(text, draws) if text.startswith(b"{") else _damaged_bytes(text, draws), mtime=0)


def _zipped(content: bytes, draws: np.random.Generator) -> bytes:
    """Returns an archive whose checksums are correct, but one member has a damaged header or damaged bytes."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as archive, zipfile.ZipFile(out, "w") as damaged:
        names = archive.namelist()
        chosen = names[draws.integers(len(names))]
        for name in names:
            member = archive.read(name)
            if name == chosen:
                huge = member.replace(b"(7,", b"(9999999999,", 1)
                lies = huge != member and draws.random() < 0.5
                member = huge if lies else _damaged_bytes(member[:128], draws) + member[128:]
            damaged.writestr(name, member)
    return out.getvalue()


def _header(content: bytes, draws: np.random.Generator) -> bytes:
    length = int.from_bytes(content[:8], "little")
    header = _json(content[8 : 8 + length], draws)
    return len(header).to_bytes(8, "little") + header + content[8 + length :]


def _packed(content: bytes, draws: np.random.Generator) -> bytes:
    try:
        tree = msgpack.unpackb(content, raw=False, strict_map_key=False)
        return msgpack.packb(_value(tree, draws), use_bin_type=True)
    except (msgpack.ExtraData, OverflowError):  # a digest after the content; a number that msgpack cannot hold
        return _damaged_bytes(content, draws)


def fuzz(folder: Path, cases: int, seed: int) -> dict[str, Any]:
    """Reads `cases` mutated copies, the formats in turn."""
    whole = {}
    for name, file_format in FORMATS.items():
        (folder / name).mkdir(parents=True)
        file_format.make(folder / name)
        whole[name] = file_format.read(folder / name)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, -1))
    began, said, failures = time.process_time(), Counter[str](), list[str]()
    names = list(FORMATS)
    for case in range(cases):
        name = names[case % len(names)]
        (folder / "last").write_text(f"{case} {name}")  # if the process crashes, this file shows the case
        began_case = time.monotonic()
        outcome, problem = _one(folder, name, whole[name], np.random.default_rng((seed, case)))
        took = time.monotonic() - began_case
        said[f"{name}: {outcome}"] += 1
        if problem or took > SECONDS:
            failures.append(f"case {case}, {name}: {problem or f'took {took:.0f} s'}")
    # not getrusage's, which begins with the memory of the parent process
    status = Path("/proc/self/status").read_text()
    peak = int(status.partition("VmHWM:")[2].split()[0]) << 10
    return {"failures": failures, "said": said, "seconds": time.process_time() - began, "peak": peak}


def _one(folder: Path, name: str, whole: Any, draws: np.random.Generator) -> tuple[str, str | None]:
    """Reads one mutated file; returns the outcome ("refused", "the same", "another") and the problem, if any."""
    scratch = folder / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(folder / name, scratch)
    every = sorted(file for file in scratch.rglob("*") if file.is_file())
    file = every[draws.integers(len(every))]
    content = mutated(file, draws)
    same = content == file.read_bytes()
    file.write_bytes(content)
    shown = f"{file.relative_to(scratch)}"
    try:
        content_read = FORMATS[name].read(scratch)
    except (ValueError, OSError) as error:
        named = any(part in str(error) for part in (file.name, str(scratch)))
        return "refused", None if named else f"the error does not name {shown}: {type(error).__name__}: {error}"
    except BaseException as error:
        return "broke", f"{shown}: {type(error).__name__}: {error}"
    if content_read == whole:
        return "the same", None
    guarded = re.search(FORMATS[name].guarded, shown) and not same
    return "another", f"{shown} changed silently" if guarded else None


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(fuzz(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
