"""Digests (hashes) of the code of a method, and of a user's task and metrics, for the provenance of records.

The digest of a method covers its rule, stop policy and drafter. It is a hash of the programs that JAX lowers, so
another constant, operation or closed-over value gives another digest. Comments, the location of a file and the process
do not affect it. It does not cover models, the package's tasks and the engine's loop; for these, a record names the
revision (`environment.package`). Nothing is compiled.
"""

import ast
import functools
import hashlib
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import fields
from types import FunctionType, MethodType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from speccascade_jax.core.controls import make_controls
from speccascade_jax.core.names import without_addresses
from speccascade_jax.core.protocols import DraftStep
from speccascade_jax.core.types import Array, BoundModel, Controls, LawPair, LogPair, Params
from speccascade_jax.data.tasks.file_task import FileTask, is_file
from speccascade_jax.data.tasks.seqio_task import SeqioTask
from speccascade_jax.data.tasks.table import TASKS, get_task
from speccascade_jax.data.tasks.task import Task
from speccascade_jax.drafters.model import BranchingDrafter, ModelDrafter, NoDrafter, PlannedDrafter
from speccascade_jax.drafters.nested import NestedDrafter
from speccascade_jax.engine.engine import Engine
from speccascade_jax.methods.generations import SCORES, OracleStopping, SequenceCascade
from speccascade_jax.methods.method import Decoder, run
from speccascade_jax.metrics.quality import METRICS, get_metric
from speccascade_jax.models import fingerprints, teacher_forcing
from speccascade_jax.pairs.prompts import make_prompt
from speccascade_jax.rules.verification import TokenWise
from speccascade_jax.runtime.mesh import fewest_rows
from speccascade_jax.stopping.block_planner import Costs
from speccascade_jax.stopping.policies import AcceptanceHead, Oracle
from speccascade_jax.storage.files import point_key

_TOLD = ("title", "detail", "symbol")
"""Fields of a `Method` that are only shown to readers, and are therefore not part of the digest."""


def digest(decoder: Decoder, controls: Callable[[], Controls]) -> str:
    """Returns a digest of a method's code (32 hex digits), which does not cover settings, models and the engine's loop.

    Args:
        decoder: the decoder whose method and programs determine the digest.
        controls: returns controls for the smallest number of rows that the pair's mesh takes
            (`runtime.mesh.fewest_rows`).
    """
    method = decoder.method
    row = {field.name: getattr(method, field.name) for field in fields(method) if field.name not in _TOLD}
    plain = {name: value for name, value in row.items() if isinstance(value, str | bool | int | float)}
    kind = "" if type(method).__module__.startswith("speccascade_jax.") else _source(type(method))
    return point_key(row=plain, kind=kind, parts=list(_program(decoder, controls)))


def task_digest(asked: str | Task) -> str:
    """Returns a digest of the code of a user's task and metrics that scores depend on; "" if there is no such code.

    It is empty for the package's tasks, and for files and registered tasks, because their settings are part of a
    record's key. It does not cover the functions that read examples, because the examples themselves are part of the
    key.
    """
    task, parts = get_task(asked), list[str]()
    if not _is_known(asked):
        values = {field.name: getattr(task, field.name) for field in fields(task) if field.name not in _READERS}
        plain = {name: value for name, value in values.items() if isinstance(value, _PLAIN)}
        parts += [without_addresses(repr(plain))]
        parts += [text for value in values.values() if callable(value) for text in _user_code(value)]
        parts += [text for kind in type(task).__mro__ if not _in_package(kind) for text in _user_code(kind)]
    for metric in (get_metric(name) for name in task.metrics if name not in METRICS):
        parts += [f"{metric.signature()} {metric.several}"]
        parts += [text for part in (metric.statistics, metric.from_sums) for text in _user_code(part)]
    return point_key(task=parts) if parts else ""


_PLAIN = str | int | float | tuple | None
_READERS = ("read", "records", "pool")


def _is_known(asked: str | Task) -> bool:
    if isinstance(asked, str):
        return asked.partition(":")[0] in TASKS or is_file(asked)
    return type(asked) in (FileTask, SeqioTask) or asked in TASKS.values()


def _in_package(part: Any) -> bool:
    return part is object or part.__module__.startswith("speccascade_jax.")


def _user_code(part: Any, seen: tuple[Any, ...] = ()) -> Iterator[str]:
    """Yields texts that change when the code of a function or class changes.

    They are its syntax tree, the trees of the definitions in its own file that it uses, and the values in its closure.
    Code that is imported from other files is not covered.
    """
    if isinstance(part, functools.partial):
        yield without_addresses(f"{part.args} {part.keywords}")
        yield from _user_code(part.func, seen)
    elif isinstance(part, MethodType):
        yield from _user_code(part.__self__, seen)
    elif not isinstance(part, FunctionType | type):
        yield without_addresses(repr(part))
        if callable(part):
            yield from _user_code(type(part), seen)
    elif part not in seen and part.__module__ != "builtins":
        yield part.__qualname__
        if not _in_package(part):
            yield from _with_uses(part)
        for cell in getattr(part, "__closure__", None) or ():
            yield from _user_code(cell.cell_contents, (*seen, part))


def _with_uses(part: Any) -> Iterator[str]:
    """Yields the syntax of a function or class, and of the top-level statements of its file whose names it uses."""
    waiting: list[Any] = [_tree(part)]
    try:
        statements = ast.parse(inspect.getsource(sys.modules[part.__module__])).body
    except (KeyError, OSError, TypeError, SyntaxError):
        statements = []
    bound = {name: statement for statement in statements for name in _names(statement, ast.Store)}
    used = dict[str, str]()
    while waiting:
        for name in _names(waiting.pop(), ast.Load):
            if name in bound and name not in used:
                used[name] = _dump(bound[name])
                waiting.append(bound[name])
        # sorted, because the order in which a file defines its names does not matter
    yield _dump(_tree(part))
    yield from (used[name] for name in sorted(used))


def _names(tree: ast.AST, context: type) -> set[str]:
    """Returns the names that a tree reads (`ast.Load`), or that it binds at its top level (`ast.Store`)."""
    if context is ast.Store and isinstance(tree, ast.FunctionDef | ast.ClassDef):
        return {tree.name}
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, context)}


def _program(decoder: Decoder, controls: Callable[[], Controls]) -> Iterator[str]:
    program, params = decoder.program, decoder.params
    engine = program.engine if type(program) is OracleStopping else program
    if isinstance(engine, Engine):
        yield from _engine(engine, params)
        known = _is_ours(engine)
    elif type(program) is SequenceCascade:
        score, known = SCORES[program.score], True
        yield lowered(score, _shape(1, 4), _shape(1, 4, dtype=bool)) if score else program.score
    else:
        known = False
    if not known:
        pair = decoder.pair
        prompt = make_prompt(pair, [[0]] * fewest_rows(pair.mesh))

        def generate(params: Params, prompt: Any, controls: Controls) -> Any:
            return run(program, params, prompt, 0, controls=controls, max_new_tokens=4)

        yield lowered(generate, params, prompt, controls())


def _is_ours(engine: Engine) -> bool:
    """Returns whether `_engine` can digest the verifiers and drafters of an engine and of all engines nested in it."""
    drafter = engine.drafter
    known = _is_ours(drafter.engine) if type(drafter) is NestedDrafter else type(drafter) in _KNOWN
    return known and isinstance(engine.verifier, TokenWise)


_KNOWN = (ModelDrafter, NoDrafter, PlannedDrafter, BranchingDrafter)


def _engine(engine: Engine, params: Params) -> Iterator[str]:
    verifier, drafter, drafter_params = engine.verifier, engine.drafter, params["drafter"]
    yield f"{verifier.reads_q} {verifier.reads_logs} {verifier.lossless} {verifier.defers} {engine.verify_final}"
    if isinstance(verifier, TokenWise):
        yield _law(verifier, engine.target.vocab_size)
        # `_law` covers only decisions on single tokens, so other verifiers add their source
        if verifier.joint or engine.tree is not None:
            yield _source(type(verifier))
    yield _source(type(drafter))
    if type(drafter) is NestedDrafter:
        yield from _engine(drafter.engine, drafter_params)
    elif type(drafter) is ModelDrafter:
        yield _policy(drafter, drafter_params)
    elif type(drafter) is PlannedDrafter:
        yield _plan(drafter)
    elif type(drafter) is BranchingDrafter:
        yield str(drafter.tree)
    else:
        yield fingerprints.of_model(BoundModel(params=drafter_params, model=None))


def _law(verifier: TokenWise, size: int) -> str:
    """Returns a digest of a verifier's decision on a block of one token, for the target's vocabulary size.

    The decision consists of the acceptance probability of the draft, the replacement after a rejection, the output
    distribution, and the deferral.
    """

    def decide(pair: LawPair, alpha: Array, tokens: Array) -> Any:
        column = alpha[:, None, None]
        padded_tokens = jnp.pad(tokens, [(0, 0), (0, 1)])
        kept = verifier(pair, column), verifier.law(pair, column), verifier.kept_at(pair, column, padded_tokens)
        return kept, verifier.deferred(pair, alpha, tokens)

    law = _shape(1, 2, size)
    laws = dict.fromkeys(("q", "p", "q_tilde", "p_tilde"), law)
    pair = LawPair(**laws, greedy=_shape(1, 2, 1, dtype=bool), logs=LogPair(**laws))
    return lowered(decide, pair, _shape(1), _shape(1, 1, dtype=jnp.int32))


def _policy(drafter: ModelDrafter, params: Params) -> str:
    """Returns a digest of a stop policy's first decision.

    Its inputs include the model's hidden states if the policy is an acceptance head or the user's own.
    """
    stop, row = drafter.stop, _shape(1)
    ours = type(stop).__module__ == AcceptanceHead.__module__ and not isinstance(stop, AcceptanceHead)
    width = None if ours else teacher_forcing.features(BoundModel(params=params["model"], model=drafter.model))
    hidden = None if width is None else _shape(1, width)
    step = DraftStep(
        _shape(1, drafter.model.vocab_size), row, hidden, _shape(dtype=jnp.int32), _shape(1, dtype=jnp.int32), row
    )
    stop_params = _shape(1, 8, dtype=bool) if isinstance(stop, Oracle) else params.get("stop")

    def decide(stop_params: Params, step: DraftStep, controls: Controls) -> Any:
        return stop(stop_params, stop.init(1), step, controls)

    return lowered(decide, stop_params, step, make_controls(1))


def _plan(drafter: PlannedDrafter) -> str:
    """Returns a digest of the code that chooses block lengths.

    The costs of the lengths are inputs of the digested program, because they differ between machines while outputs do
    not.
    """
    plan, row = drafter.plan, _shape(1)
    costs = Costs(_shape(len(plan.lengths)), _shape(), _shape(), _shape())
    first = lowered(plan.drafts, costs, _shape(dtype=jnp.int32))
    return first + lowered(plan.choose, costs, plan.init(1), _shape(1, dtype=bool), row)


def lowered(function: Callable[..., Any], *arguments: Any) -> str:
    """Returns a digest of the program that JAX lowers for a function; of the arguments, only shape and dtype matter."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), arguments)
    text = jax.jit(function).lower(*shapes).as_text()
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _shape(*shape: int, dtype: Any = jnp.float32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def _source(kind: type) -> str:
    """Returns a class's syntax tree as text, without comments and docstrings; empty if its source is not available."""
    try:
        return _dump(ast.parse(textwrap.dedent(inspect.getsource(kind))))
    except (OSError, TypeError, SyntaxError):
        return ""


def _tree(part: Any) -> ast.AST:
    """Returns the syntax tree of a function or class; for a lambda, a tree of the words in its source lines."""
    try:
        text = textwrap.dedent(inspect.getsource(part))
        return ast.parse(text)
    # if there is no source, for instance for code typed at a prompt, use the compiled code
    except (OSError, TypeError):
        functions = [value for value in (part, *vars(part).values()) if isinstance(value, FunctionType)]
        codes = [(f.__code__.co_code, f.__code__.co_consts, f.__code__.co_names) for f in functions]
        return ast.Constant(without_addresses(repr(codes)))
    except SyntaxError:  # the source lines of a lambda may not be a complete statement
        words: list[ast.expr] = [ast.Name(word, ast.Load()) for word in re.findall(r"[^\W\d]\w*", text)]
        return ast.Tuple([ast.Constant(text), *words], ast.Load())


def _dump(tree: ast.AST) -> str:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            del node.body[0]
    return ast.dump(tree)
