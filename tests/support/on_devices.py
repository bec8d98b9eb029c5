"""Programs on eight simulated devices, in a new process, because JAX fixes the number of devices when it starts.

`python -m tests.support.on_devices CASE [CASE …]` prints results as JSON; the function `found` runs this command.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

COUNT = 8
ROOT = Path(__file__).parents[2]
ROWS, READ, WRITTEN, GAMMA, VOCABULARY = 8, 9, 14, 3, 512


def found(*cases: str, timeout: float = 900) -> dict[str, Any]:
    """Returns the results of the cases by name."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={COUNT}"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", __name__, *cases]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


if __name__ == "__main__":
    import jax
    import jax.numpy as jnp
    import numpy as np
    from flax.traverse_util import flatten_dict, unflatten_dict

    import speccascade_jax as sc
    from speccascade_jax.core.protocols import AttachedModel
    from speccascade_jax.core.types import BoundModel, Prompt
    from speccascade_jax.engine.generate import compiled_for
    from speccascade_jax.methods import table
    from speccascade_jax.methods.build import build
    from speccascade_jax.methods.settings import Settings
    from speccascade_jax.models import sharding, t5
    from speccascade_jax.models.decoder import DecoderLM, tiny
    from speccascade_jax.models.eagle3 import Eagle3, Eagle3Config
    from speccascade_jax.models.families import family_of
    from speccascade_jax.models.gemma4_assistant import Assistant, AssistantConfig
    from speccascade_jax.models.layers import fuse
    from speccascade_jax.models.t5 import T5, T5Config
    from speccascade_jax.pairs.pair import Pair
    from speccascade_jax.runtime import compilation_cache, platforms
    from speccascade_jax.runtime import mesh as meshes
    from tests.support import tiny_decoders, tiny_pair

    def models(kind: str, entries: int = VOCABULARY) -> dict[str, Any]:
        """Returns a target, a draft and a model of middle size; eight (T5) or four devices can divide their sizes."""
        if kind in ("t5", "umt5"):
            # three rows of the embedding are padding, so the vocabulary is smaller
            sizes = {"target": (64, 8, 8, 128, 2, 3), "middle": (32, 8, 4, 64, 1, 2), "draft": (16, 8, 4, 32, 1, 1)}
            biases = {"layer_biases": kind == "umt5"}
            return {name: T5(T5Config(entries - 3, entries, *size, **biases)) for name, size in sizes.items()}
        # with this window, caches are ring buffers
        presets = {"normed": "gemma3_4b", "experts": "qwen3_30b_a3b", "t5gemma": "t5gemma_9b_2b"}
        presets["t5gemma2"] = "t5gemma2_4b_4b"
        preset = presets.get(kind, "gemma2_2b")
        config = tiny(preset, vocab_size=entries - 3, window=6)
        if kind == "normed":
            config = replace(config, pattern=("local", "unrotated", "global"))
        sizes = {"num_embeddings": entries, "num_heads": 8, "num_kv_heads": 4}
        if config.merged_attention:
            sizes["pattern"] = ("local", "global")
        if config.encoder is not None:
            # a small encoder, whose fused kernels have other widths; the keys of cross-attention have its width
            width = config.encoder.d_model if config.merged_attention else 24
            sizes |= {"encoder": replace(config.encoder, **sizes | {"num_heads": 4}), "d_model": width}
        config = replace(config, **sizes)
        depths = {"target": 3, "middle": 2, "draft": 1}
        if kind == "head":
            config = replace(config, pattern=("global",))
            options = {f.name: getattr(config, f.name) for f in fields(config)} | {"num_layers": 1}
            drafted = tuple(range(1, entries - 3, 2))[: entries // 4]
            more = {"draft_vocab_size": len(drafted), "target_ids": drafted, "target_width": config.d_model}
            heads = {"draft": Eagle3(Eagle3Config(**options, **more, layers=(0, 1, 2)))}
            return {"target": DecoderLM(config), "middle": DecoderLM(replace(config, num_layers=2)), **heads}
        if kind == "shared":
            # the target's third layer has no keys and values
            config = replace(tiny_decoders.SHARED, vocab_size=entries - 3, num_embeddings=entries, num_heads=8)
            config = replace(config, num_kv_heads=4, global_kv_heads=4)
        if kind == "parallel":
            # the draft is the target's first layer
            config = replace(tiny_decoders.PARALLEL, vocab_size=entries - 3, num_embeddings=entries, num_heads=8)
            config, depths = replace(config, num_kv_heads=4, global_kv_heads=4), depths | {"target": 2}
        if kind == "assistant":
            config = replace(tiny("gemma4_31b", vocab_size=entries - 4, window=6), pattern=("local", "global"))
            config = replace(config, num_embeddings=entries, num_heads=8, num_kv_heads=4, global_kv_heads=None)
            options = {f.name: getattr(config, f.name) for f in fields(config)} | {"d_model": 16, "num_layers": 2}
            more = {"target_width": config.d_model, "num_centroids": 4, "active_centroids": 2}
            large = DecoderLM(replace(config, num_layers=4))
            return {"target": large, "middle": large, "draft": Assistant(AssistantConfig(**options, **more))}
        return {name: DecoderLM(replace(config, num_layers=depth)) for name, depth in depths.items()}

    def with_layout(kind: str, entries: int = VOCABULARY) -> dict[str, Any]:
        """Returns the models of a kind, such as "t5" or, with layers as a scan, "t5 scan"."""
        family, _, layout = kind.partition(" ")
        scan = layout == "scan"
        known = models(family, entries).items()
        return {name: replace(model, config=replace(model.config, scan_layers=scan)) for name, model in known}

    def initial(model: Any, seed: int) -> Any:
        if isinstance(model, AttachedModel):
            draws, shapes = np.random.default_rng(seed), family_of(model.config).shapes(model.config)
            drawn = {k: draws.normal(size=s).astype(np.float32) / 4 for k, s in shapes.items()}
            ids = {k: draws.permutation(s[0]).astype(np.int32) for k, s in shapes.items() if k.endswith("/ids")}
            return unflatten_dict(drawn | ids, sep="/")
        tokens = jnp.ones((1, 2), jnp.int32)
        inputs = (tokens, tokens) if model.is_encoder_decoder else (tokens,)
        return jax.jit(model.module.init)(jax.random.key(seed), *inputs)["params"]

    def with_unlike_norms(params: Any) -> Any:
        """Returns the parameters with norms of random scales, so that no layer's norm equals another's."""
        draws = np.random.default_rng(0)
        flat = flatten_dict(params, sep="/")
        scales = {name: leaf for name, leaf in flat.items() if name.endswith("scale")}
        return unflatten_dict(flat | {n: x + draws.normal(size=x.shape) * 0.3 for n, x in scales.items()}, sep="/")

    def prompts(kind: str) -> Prompt:
        draws = np.random.default_rng(0)
        read = draws.integers(2, VOCABULARY - 3, (ROWS, READ)).astype(np.int32)
        if "t5" in kind:
            return Prompt(np.zeros((ROWS, 1), np.int32), np.ones(ROWS, np.int32), read)
        return Prompt(read, draws.integers(2, READ + 1, ROWS).astype(np.int32))

    def on(mesh: Any, model: Any, params: Any, fused: bool = True, is_whole: bool = False) -> BoundModel:
        if mesh is None:
            return BoundModel(fuse(params), model)
        if is_whole:
            return BoundModel(jax.tree.map(lambda x: sharding.whole(np.asarray(x), mesh), params), model)
        laid = fuse(params, mesh.shape["model"]) if fused else params
        return BoundModel(sharding.place(laid, mesh), replace(model, mesh=mesh))

    def pair(kind: str, mesh: Any, fused: bool = True, whole: tuple[str, ...] = ()) -> Pair:
        bound = {
            name: on(mesh, model, initial(model, seed), fused, name in whole)
            for seed, (name, model) in enumerate(with_layout(kind).items())
        }
        if isinstance(bound["draft"].model, Assistant):
            bound["draft"] = bound["draft"].model.attached(bound["draft"].params, bound["target"])
        return Pair(bound["target"], bound["draft"], others={"middle": bound["middle"]})

    STACK = (sc.Level(model="middle", budget=4, block_size=2, drafters=("draft",)),)
    WAYS: dict[str, Settings] = {
        "greedy": Settings(method="token_v3", alpha=0.3, block_size=GAMMA),
        "sampled": Settings(block_size=GAMMA, temperature=1.0, top_p=0.9),
        "blocks": Settings(block_size=GAMMA, verify="block", temperature=1.0),
        "tree": Settings(tree=(2, 2, 1)),
        "sampled tree": Settings(tree=(2, 2, 1), temperature=1.0, top_p=0.9),
        "stack": Settings(drafters=STACK),
        "sampled stack": Settings(drafters=STACK, temperature=0.8),
        "chosen": Settings(drafters=("draft", "middle", "autoregressive"), choose="random", block_size=GAMMA),
    }

    def generation(kind: str, way: str, mesh: Any, **more: Any) -> Any:
        settings, models = WAYS[way], pair(kind, mesh, **more)
        decoder = build(models, settings, stop_ids=(1,))
        prompt, ids = sharding.by_rows((prompts(kind), np.arange(ROWS, dtype=np.int32)), mesh)
        controls = decoder.controls(ROWS)
        return decoder.generate(prompt, 0, controls=controls, example_ids=ids, max_new_tokens=WRITTEN)

    def in_chunks(case: Any) -> Any:
        """Returns a case's result with an encoder's prompts attending in chunks of two tokens."""
        t5.CHUNK = 2
        return case()

    def same(kind: str, way: str, shape: tuple[int, int], **more: Any) -> dict[str, Any]:
        single, spread = generation(kind, way, None), generation(kind, way, meshes.make(shape), **more)
        alike = jax.tree.map(
            lambda a, b: bool((np.asarray(a) == np.asarray(b)).all()),
            (single.stats, single.inner),
            (spread.stats, spread.inner),
        )
        rows = (np.asarray(single.tokens) == np.asarray(spread.tokens)).all(1)
        lengths = np.asarray(single.lengths)
        return {"rows": int(rows.sum()), "counters": all(jax.tree.leaves(alike)), "longest": int(lengths.max())}

    def fed(kind: str, shape: tuple[int, int]) -> float:
        """Returns the largest difference between a block's logits on a mesh and on one device, after a prefill.

        It is relative to the standard deviation of the logits.
        """
        logits, model = [], with_layout(kind)["target"]
        params = initial(model, 0)
        for mesh in (None, meshes.make(shape)):
            target, prompt = on(mesh, model, params), sharding.by_rows(prompts(kind), mesh)

            def run(params: Any, prompt: Any, model: Any = target.model) -> Any:
                cache = model.prefill(params, prompt, READ + GAMMA + 1, GAMMA)
                block = prompt.tokens if prompt.encoder_tokens is None else prompt.encoder_tokens
                return model.extend(params, cache, block[:, : GAMMA + 1])[0].logits

            logits.append(np.asarray(jax.jit(run)(target.params, prompt))[..., : VOCABULARY - 3])
        return float(np.abs(logits[0] - logits[1]).max() / logits[0].std())

    def fed_to_kernels(kind: str, shape: tuple[int, int], **sizes: int) -> dict[str, Any]:
        """Compares interpreted kernels on a mesh with XLA on one device.

        Returns the largest difference of two blocks' logits, relative to their standard deviation, and the number of
        kernels in the program. The second block attends to cache entries that the first one wrote.
        """
        model, results = with_layout(kind)["target"], []
        model = replace(model, config=replace(model.config, head_dim=128, **sizes))
        params, size = with_unlike_norms(initial(model, 0)), GAMMA + 1
        for mesh in (None, meshes.make(shape)):
            target, prompt = on(mesh, model, params), sharding.by_rows(prompts(kind), mesh)

            def run(params: Any, prompt: Any, model: Any = target.model) -> Any:
                cache = model.prefill(params, prompt, READ + 2 * size, size)
                block = prompt.tokens if prompt.encoder_tokens is None else prompt.encoder_tokens
                first, cache = model.extend(params, cache, block[:, :size])
                return jnp.stack([first.logits, model.extend(params, cache, block[:, size : 2 * size])[0].logits])

            with platforms.interpreted(True) if mesh else contextlib.nullcontext():
                traced = jax.jit(run).trace(target.params, prompt)
                logits = traced.lower().compile()(target.params, prompt)
            results.append(np.asarray(logits)[..., : VOCABULARY - 3])
        error = np.abs(results[0] - results[1]).max() / results[0].std()
        names = {"kernels": "decode_attention", "chains": "product_chain"}
        return {"error": float(error), **{key: str(traced.jaxpr).count(name) for key, name in names.items()}}

    def collectives(kind: str, shape: tuple[int, int], entries: int, *, merged: bool = False) -> dict[str, Any]:
        """Compiles a program from shapes alone; returns the sizes of its collectives' results by kind of collective."""
        mesh = meshes.make(shape)
        assert mesh is not None
        bound = {}
        for name, model in with_layout(kind, entries).items():
            params = jax.eval_shape(lambda model=model: initial(model, 0))
            laid = jax.tree_util.tree_map_with_path(lambda path, leaf: abstract(path, leaf, mesh), params)
            # merged: only the weights are laid out, so XLA has to find the layout of caches, whose rows and heads
            # share an axis
            bound[name] = BoundModel(laid, model if merged else replace(model, mesh=mesh))
        models_on_mesh = Pair(bound["target"], bound["draft"])
        method = table.get("token_v3")
        settings = method.resolved(Settings(method="token_v3", alpha=0.3, block_size=GAMMA, top_p=0.9, top_k=40))
        engine, params = method.program(models_on_mesh, settings, (1,))
        rows = jax.NamedSharding(mesh, sharding.ROWS)
        controls = method.controls(replace(settings, temperature=1.0), ROWS)
        inputs = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(np.shape(x), np.asarray(x).dtype, sharding=rows), (prompts(kind), controls)
        )
        text = compiled_for(engine, params, *inputs, max_new_tokens=3 * WRITTEN).as_text()
        target = with_layout(kind, entries)["target"].config
        heads = getattr(target, "num_kv_heads", target.num_heads)
        device_rows = ROWS // shape[0]  # number of rows per device
        sizes_by_kind: dict[str, list[int]] = {}
        for line in text.splitlines():
            hit = re.search(r"= \(?\w+\[([\d,]*)\]\S* (all-gather|collective-permute|all-to-all)(?:-start)?\(", line)
            if hit:
                sizes_by_kind.setdefault(hit[2], []).append(
                    int(np.prod([int(n) for n in hit[1].split(",") if n] or [1]))
                )
        return {
            "largest": {name: max(sizes) for name, sizes in sizes_by_kind.items()},
            "counts": {name: len(sizes) for name, sizes in sizes_by_kind.items()},
            "cache": device_rows * heads * target.head_dim * 2 * WRITTEN,  # the size of the shortest cache
            # values that sampling and breaking ties exchange (core/sampling.py)
            "block_sums": device_rows * (GAMMA + 1) * entries // 256,
        }

    def abstract(path: Any, leaf: Any, mesh: Any) -> Any:
        spec = sharding.spec_of("/".join(str(key.key) for key in path))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=jax.NamedSharding(mesh, spec))

    def rows() -> str:
        try:
            sharding.by_rows(np.zeros(7), meshes.make((2, 4)))
        except ValueError as error:
            return str(error)
        return ""

    def loaded() -> dict[str, Any]:
        """Loads a pair from disk onto a mesh; returns each device's share, the pair's identity and its output."""
        with tempfile.TemporaryDirectory() as folder:
            tiny_pair.write(Path(folder))
            single, spread, narrow = (sc.load_pair(folder, mesh=shape) for shape in (None, (4, 2), (1, 2)))
        leaves = flatten_dict(spread.target.params, sep="/")
        share = {path: leaf.size // leaf.addressable_shards[0].data.size for path, leaf in leaves.items()}
        settings: dict[str, Any] = {"rule": "token_v3", "alpha": 0.3, "block_size": GAMMA, "temperature": 0.0}
        texts = ["Hello.", "a b", "c", "The cat."]
        tokens = [sc.decode(pair, texts, max_new_tokens=WRITTEN, **settings).tokens for pair in (single, spread)]
        streams = [sc.stream(pair, texts[0], max_new_tokens=WRITTEN, **settings) for pair in (single, narrow)]
        streamed = [[token.id for token in stream] for stream in streams]
        return {
            "fingerprint": single.fingerprint == spread.fingerprint,
            "split": all(parts == (1 if path.endswith("scale") else 2) for path, parts in share.items()),
            "tokens": bool(np.array_equal(*tokens)),
            "stream": streamed[0] == streamed[1] and len(streamed[0]) > 1,
        }

    CASES = {
        "rows": rows,
        "loaded": loaded,
        "t5 1x8": lambda: same("t5", "greedy", (1, 8)),
        "t5 2x4": lambda: same("t5", "greedy", (2, 4)),
        "t5 2x4 unfused": lambda: same("t5", "greedy", (2, 4), fused=False),
        "t5 2x4 sampled": lambda: same("t5", "sampled", (2, 4)),
        "t5 2x4 in chunks": lambda: in_chunks(lambda: same("t5", "greedy", (2, 4))),
        "t5 2x4 whole draft": lambda: same("t5", "greedy", (2, 4), whole=("draft", "middle")),
        "decoder 2x4": lambda: same("decoder", "greedy", (2, 4)),
        "t5gemma 2x4": lambda: same("t5gemma", "greedy", (2, 4)),
        "t5gemma2 scan 2x4": lambda: fed("t5gemma2 scan", (2, 4)),
        "normed 2x4": lambda: same("normed", "greedy", (2, 4)),
        "normed 2x4 unfused": lambda: same("normed", "greedy", (2, 4), fused=False),
        "experts scan 2x4": lambda: fed("experts scan", (2, 4)),
        "parallel 2x4": lambda: fed("parallel", (2, 4)),
        "shared 2x4": lambda: same("shared", "greedy", (2, 4)),
        "normed scan 2x4": lambda: same("normed scan", "greedy", (2, 4)),
        "decoder 2x4 sampled": lambda: same("decoder", "sampled", (2, 4)),
        "t5 scan 2x4 sampled": lambda: same("t5 scan", "sampled", (2, 4)),
        "umt5 scan 2x4 whole draft": lambda: same("umt5 scan", "greedy", (2, 4), whole=("draft", "middle")),
        "decoder scan 2x4": lambda: same("decoder scan", "greedy", (2, 4)),
        "decoder scan tree 2x4": lambda: same("decoder scan", "tree", (2, 4)),
        "assistant 2x4": lambda: same("assistant", "greedy", (2, 4)),
        "head 2x4": lambda: same("head", "greedy", (2, 4)),
        "blocks 2x4": lambda: same("t5", "blocks", (2, 4)),
        "tree 2x4": lambda: same("t5", "tree", (2, 4)),
        "tree 2x4 sampled": lambda: same("t5", "sampled tree", (2, 4)),
        "decoder tree 2x4": lambda: same("decoder", "tree", (2, 4)),
        "stack 2x4": lambda: same("t5", "stack", (2, 4)),
        "stack 2x4 sampled": lambda: same("t5", "sampled stack", (2, 4)),
        "selection 8x1": lambda: same("t5", "chosen", (8, 1)),
        **{
            f"kernels {kind} {a}x{b}": lambda kind=kind, a=a, b=b: fed_to_kernels(kind, (a, b))
            for kind in ("t5", "decoder", "decoder scan")
            for a, b in ((1, 2), (2, 1), (2, 2), (1, 4))
        },
        **{
            f"chains {kind} {a}x{b}": lambda kind=kind, a=a, b=b: fed_to_kernels(kind, (a, b), d_model=128, d_ff=512)
            for kind in ("t5", "decoder scan")
            for a, b in ((1, 2), (2, 2))
        },
        **{
            f"gathers {kind} {a}x{b} {entries}": lambda kind=kind, a=a, b=b, entries=entries: collectives(
                kind, (a, b), entries
            )
            for kind in ("t5", "decoder", "decoder scan")
            for a, b in ((1, 8), (2, 4))
            for entries in (32_768, 262_144)
        },
        "gathers merged": lambda: collectives("t5", (2, 4), 32_768, merged=True),
    }

    compilation_cache.switch_on()
    print(json.dumps({name: CASES[name]() for name in sys.argv[1:]}))
