"""Layouts of the benchmarks' tables: the columns with their number formats, and the notes below each table."""

from benchmarks.columns import Column, Layout, number, optional, percent, spread
from benchmarks.compilation import STEPS
from benchmarks.memory import PARTS

_POINT = (
    Column("rule", "rule"),
    Column("α", "alpha", optional),
    Column("γ", "block_size", optional),
    Column("T", "temperature", optional),
)
_AGAINST_FLOOR = (
    Column("µs", "microseconds", number(0)),
    Column("/ floor", "ratio", number(2)),
    Column("memory / floor", "temporary_ratio", number(2)),
)

LAYOUTS = {
    "capacity": Layout(
        "Short blocks under a large capacity, T = 1",
        (
            Column("engine", "engine"),
            Column("target calls", "target_calls", number(1)),
            Column("draft steps", "draft_steps", number(1)),
            Column("ms per example", "ms_per_example", spread(2)),
            Column("ratio", "ratio", spread(3)),
        ),
        ("All three engines write the same tokens; they differ in the length of the longest block that they allow.",),
    ),
    "heads": Layout(
        "Time of an acceptance head against the time of drafting a token, batch 1, T = 1",
        (
            Column("depth", "depth"),
            Column("reads", "reads"),
            Column("head, µs", "microseconds", spread(2)),
            Column("token, µs", "draft_step_microseconds", spread(1)),
            Column("share, %", "share", spread(2)),
        ),
        ("Token: the draft's pass, its distribution and the draw, in blocks of the engine.",),
    ),
    "bandwidth": Layout(
        "Bandwidth of a float32 matrix-vector product",
        (
            Column("working set", "working_set"),
            Column("MB", "megabytes", number(1)),
            Column("GB/s", "gigabytes_per_second", spread(1)),
            Column("floor of", "floor_of"),
        ),
        (
            "The fastest of three products: W x, x W and, on a CPU, the product with packed weights.",
            "A working set of about ten MB may fit in a cache, like the weights of a small model.",
        ),
    ),
    "steps": Layout(
        "Greedy decoding of one model against its floor, batch 1",
        (
            Column("model", "model"),
            Column("parameters", "parameters", number(0)),
            Column("MB read / step", "megabytes_read", number(2)),
            Column("ms / token", "ms_per_token", spread(3)),
            Column("cache floor, ms", "cache_floor_ms", number(3)),
            Column("/ cache floor", "cache_ratio", spread(2)),
            Column("memory floor, ms", "memory_floor_ms", number(3)),
            Column("/ memory floor", "memory_ratio", spread(2)),
            Column("prefill, ms", "prefill_ms", number(2)),
            Column("ms / token with prefill", "whole_ms_per_token", number(3)),
        ),
        (
            "ms / token: the difference of a long and a short generation, which excludes prefill.",
            "Floors: the time of one read of the weights and caches that a step needs. Cache floor: at the bandwidth "
            "for a working set of this size (as if nothing else used the cache). Memory floor: at the bandwidth for "
            "arrays far larger than the caches.",
        ),
    ),
    "scoring": Layout(
        "Time of a call by its number of tokens T, batch 1",
        (
            Column("model", "model"),
            Column("T", "width"),
            Column("ms", "ms", spread(3)),
            Column("/ T = 1", "ratio", spread(2)),
        ),
    ),
    "rounds": Layout(
        "Time of the engine against the time of its calls, per example",
        (
            Column("target", "target"),
            *_POINT,
            Column("draft steps", "draft_steps", number(1)),
            Column("target calls", "target_calls", number(1)),
            Column("draft step, ms", "draft_step_ms", number(3)),
            Column("target call, ms", "target_call_ms", number(3)),
            Column("calls, ms", "calls_ms", number(2)),
            Column("engine, ms", "engine_ms", number(2)),
            Column("engine / calls", "ratio", spread(2)),
        ),
        ("Engine: a generation without prefill. Calls: draft steps · t_draft + target calls · t_target(T = γ + 1).",),
    ),
    "sizes": Layout(
        "Models with random weights by the dtype of their matrices, batch 1",
        (
            Column("model", "model"),
            Column("weights", "weights"),
            Column("MB read / step", "megabytes_read", number(1)),
            Column("step, ms", "step_ms", spread(2)),
            Column("memory floor, ms", "memory_floor_ms", number(2)),
            Column("/ floor", "memory_ratio", spread(2)),
            *(Column(f"block of {n}, steps", f"block_{n}", spread(2)) for n in (4, 6, 8)),
            *(Column(f"block of {n}, ms", f"block_{n}_ms", number(2)) for n in (4, 6, 8)),
        ),
        (
            "Floor: one read of the stored weights and the caches, at the bandwidth of arrays much larger than the "
            "caches, measured in the same turns.",
        ),
    ),
    "weights": Layout(
        "A trained pair by the dtype of its matrices, T = 0",
        (
            Column("dtype", "dtype"),
            Column("task", "task"),
            Column("examples", "examples"),
            Column("metric", "metric"),
            Column("quality", "quality", number(2)),
            Column("outputs equal to float32", "same_output", percent),
            Column("target alone, / float32", "alone_speed_up", spread(2)),
            Column("lossless, / float32", "lossless_speed_up", spread(2)),
            Column("lossless / alone", "gain", spread(2)),
        ),
        ("Speed relative to float32, batch 1, with prefill; lossless / alone: the speed-up of spec_decode.",),
    ),
    "verification": Layout(
        "Verification of a block of 6 (γ = 5) against one read of q̃ and p̃, batch 1",
        (Column("rule", "rule"), *_AGAINST_FLOOR),
        (
            "Floor of the time: at the bandwidth of arrays much larger than the caches. At 8k the distributions fit in "
            "a cache and the floor is a few µs: the ratio then shows fixed costs, not memory traffic.",
            "Floor of the memory: the bytes of q̃ and p̃; the arguments do not count as temporary memory.",
        ),
        across="vocab_size",
    ),
    "block_wise": Layout(
        "A round's work over the vocabulary with token-wise and block verification (γ = 5, T = 1, batch 1)",
        (
            Column("rule", "rule"),
            Column("V", "vocab_size", number(0)),
            Column("token-wise µs", "token_wise_microseconds", spread(0)),
            Column("block-wise µs", "block_wise_microseconds", spread(0)),
            Column("block-wise / token-wise", "ratio", spread(2)),
            Column("kept of 5, token-wise", "token_wise_kept", number(2)),
            Column("block-wise", "block_wise_kept", number(2)),
        ),
        (
            "The target's distributions from its logits, and verification: a round without the models and the draft's "
            "distributions.",
        ),
    ),
    "block_wise_rounds": Layout(
        "Whole rounds of small T5s with token-wise and block verification (γ = 5, T = 1, batch 1)",
        (
            Column("rule", "rule"),
            Column("V", "vocab_size", number(0)),
            Column("token-wise ms", "token_milliseconds", spread(2)),
            Column("block-wise ms", "block_milliseconds", spread(2)),
            Column("block-wise / token-wise", "ratio", spread(2)),
        ),
        ("Time of a generation with prefill over its rounds; d_model 256 and 128, 4 layers and 1, random weights.",),
    ),
    "sampling": Layout(
        "The sampling transform of 6 positions against one read of logits and one write of distributions, batch 1",
        (Column("sampling", "sampling"), *_AGAINST_FLOOR),
        across="vocab_size",
    ),
    "speedup": Layout(
        "Speed-up over the target alone, per token, and its prediction, batch 1",
        (
            *_POINT,
            Column("acceptance", "acceptance_rate", percent),
            Column("tokens / round", "tokens_per_round", number(2)),
            Column("speed-up", "speed_up", spread(2)),
            Column("predicted", "predicted", number(2)),
            Column("measured / predicted", "of_predicted", number(2)),
            Column("from acceptance", "textbook", number(2)),
            Column("as the target's", "same_output", percent),
        ),
        (
            "Predicted: from prefill, and from the counts of target calls and draft steps times their measured costs. "
            "From acceptance: the same, if each round gives (1 − a^(γ+1)) / (1 − a) tokens.",
            "As the target's: outputs equal to the target's greedy outputs, for settings that guarantee it.",
        ),
    ),
    "trees": Layout(
        "Lossless decoding with tree drafts and with chains, batch 1",
        (
            Column("children by depth", "shape"),
            Column("drafted", "drafted"),
            Column("T", "temperature", number(0)),
            Column("tokens / round", "tokens_per_round", number(2)),
            Column("speed-up", "speed_up", spread(2)),
            Column("predicted by calls", "predicted", number(2)),
            Column("on paper", "on_paper", number(2)),
            Column("as the target's", "same_output", percent),
        ),
        (
            "Speed-up over the target alone, per token. Predicted: measured times of calls on this many tokens, "
            "without prefill. On paper: calls of any width take the same time, the draft's in proportion to its bytes.",
        ),
    ),
    "batches": Layout(
        "Tokens per second by batch size, T = 0",
        (
            Column("method", "method"),
            Column("γ", "block_size", optional),
            Column("batch", "batch"),
            Column("tokens / s", "tokens_per_second", spread(0)),
            Column("/ batch 1", "ratio", spread(2)),
        ),
    ),
    "selection": Layout(
        "A selection that always chooses the same drafter among several, T = 0",
        (
            Column("batch", "batch"),
            Column("drafters", "drafters"),
            Column("ms / round", "ms_per_round", spread(3)),
            Column("added per round, µs", "added_us", spread(1)),
            Column("/ alone", "ratio", spread(3)),
        ),
        ("1 drafter: no selection. All settings write the same tokens. Ratios are computed within each turn.",),
    ),
    "auto": Layout(
        "Planned block lengths against fixed ones, ms per token",
        (
            Column("batch", "batch"),
            Column("T", "temperature", optional),
            Column("γ", "block_size"),
            Column("ms / token", "ms_per_token", spread(3)),
            Column("/ best fixed", "ratio", spread(3)),
            Column("rounds by γ", "rounds"),
        ),
        ("γ 0 is the target alone. Ratios are computed within each turn, to the fixed γ with the lowest median.",),
    ),
    "compilation": Layout(
        "Seconds from a program's source to its first result, batch 1",
        (
            Column("compilation cache", "cache"),
            Column("method", "method"),
            Column("γ", "block_size", optional),
            *(Column(name.replace("_", " "), f"{name}_seconds", number(2)) for name in STEPS),
        ),
    ),
    "startup": Layout(
        "Seconds before the compilation, in the same processes",
        (
            Column("compilation cache", "cache"),
            Column("start and imports", "import_seconds", number(2)),
            Column("weights and prompts", "load_seconds", number(2)),
        ),
    ),
    "memory": Layout(
        "Memory of a generation's program, MB, reported by the compiler",
        (
            Column("method", "method"),
            Column("drafts", "drafts"),
            Column("γ", "block_size", optional),
            Column("batch", "batch"),
            *(Column(name, f"{name}_megabytes", number(2)) for name in PARTS),
        ),
        ("Arguments: weights and prompts. Temporaries: caches, distributions and intermediate values.",),
    ),
    "vocabulary": Layout(
        "Temporary memory of a generation's program with a vocabulary of 256,000, MB, reported by the compiler",
        (
            Column("rule", "rule"),
            Column("γ", "block_size"),
            Column("batch", "batch"),
            Column("temporaries", "temporary_megabytes", number(1)),
            Column("floor", "floor_megabytes", number(1)),
            Column("/ floor", "temporary_ratio", number(2)),
        ),
        ("Floor: one copy of the distributions q̃ and p̃ of a block's γ + 1 positions in float32.",),
    ),
    "decode": Layout(
        "Whole calls of decode against those of the target alone, batch 1",
        (
            Column("rule", "rule"),
            Column("α", "alpha", optional),
            Column("γ", "block_size"),
            Column("draft dtype", "draft_dtype"),
            Column("T", "temperature", optional),
            Column("tokens / target call", "tokens_per_call", number(2)),
            Column("target alone, ms", "target_ms", number(1)),
            Column("ms", "ms", number(1)),
            Column("speed-up", "speed_up", spread(2)),
            Column("per token", "per_token", number(2)),
            Column("/ first dtype", "over_first", spread(2)),
            Column("outputs as there", "same_as_first", percent),
        ),
        (
            "In brackets the 95% confidence interval over prompts and trials. Per token: sampled lengths differ.",
            "/ first dtype: speed over that of the row with the first --draft_dtype, timed in turns with it.",
        ),
    ),
    "growth": Layout(
        "Time of a call of a small decoder as one size grows",
        (
            Column("grows", "axis"),
            Column("to", "value"),
            Column("MB read", "megabytes_read", number(1)),
            Column("ms", "call_ms", spread(3)),
            Column("memory floor, ms", "floor_ms", number(3)),
            Column("/ floor", "floor_ratio", spread(2)),
        ),
        (
            "The other sizes: one row, one token, 256 slots half filled, 8,192 entries. Floor: one read of the weights "
            "and of all slots of the cache, at the bandwidth of arrays much larger than the caches, measured in the "
            "same turns. Models: a stack of models with the same weights; the lowest drafts 2 tokens, and each level "
            "passes on one token more; time and reads of all models per written token.",
        ),
    ),
    "hierarchy": Layout(
        "Search for the best stack by number of candidates, budgets up to 15",
        (
            Column("candidates", "candidates"),
            Column("paper, s", "paper_seconds", number(3)),
            Column("overshoot, s", "overshoot_seconds", number(2)),
            Column("models stacked", "levels"),
            Column("speed-up", "speedup", number(2)),
            Column("paper's latency / with overshoot", "of_predicted", number(3)),
            Column("loss of the paper's optimum", "lost", percent),
        ),
        (
            "Paper: exact dynamic programming over (model, budget). Overshoot: heuristic search (hierarchy.solve).",
            "Loss: additional time of the paper's optimum over the best stack found, counted with overshoot.",
        ),
    ),
    "calls": Layout(
        "Time of a call of decode outside its compiled program, batch 1, texts",
        (
            Column("method", "method"),
            Column("γ", "block_size", optional),
            Column("turns", "calls"),
            Column("decode, ms", "decode_ms", number(2)),
            Column("program, ms", "program_ms", number(2)),
            Column("outside, ms", "outside_ms", spread(2)),
        ),
        (
            "Outside: median of the differences within each turn; in brackets the lowest and highest median of five "
            "groups. Program: from arguments on the device to finished results.",
        ),
    ),
    "process": Layout(
        "Memory of the benchmark's process, MB",
        (Column("now", "now_megabytes", number(0)), Column("peak", "peak_megabytes", number(0))),
    ),
    "acceptance": Layout(
        "Acceptance of the draft by the target",
        (
            Column("task", "task"),
            Column("examples", "examples"),
            Column("method", "method"),
            Column("γ", "block_size", optional),
            Column("T", "temperature", optional),
            Column("acceptance", "acceptance_rate", percent),
            Column("tokens / target call", "block_efficiency", number(2)),
            Column("kept / drafted", "draft_utilisation", percent),
            Column("quality", "quality", number(2)),
            Column("metric", "metric"),
            Column("tokens / example", "tokens", number(1)),
        ),
    ),
    "agreement": Layout(
        "Agreement of draft and target along the target's greedy outputs",
        (
            Column("task", "task"),
            Column("examples", "examples"),
            Column("positions", "positions"),
            Column("same greedy token", "greedy_agreement", percent),
            Column("mean overlap Σ min(p, q)", "shared_mass", percent),
        ),
    ),
}
