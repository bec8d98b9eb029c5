"""Second reader of compiled programs, written from the formats alone, to check `speccascade_jax.preflight` against.

It shares no code and no method with the package. A program is a flat table of rows, and the costs of a computation are
summed from the leaves of the call graph upwards. The bytes of a fusion follow from the share of each value that its
results need. Cycles follow from arrays over a loop's iterations, which tell in which iterations a region is skipped.
"""

from __future__ import annotations

import functools
import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

ROW = re.compile(r"^  (ROOT )?%(\S+) = (.*?) ([a-z][\w-]*)\((.*)$")
LEAF = re.compile(r"(pred|[a-z]+\d+[a-z0-9]*|token|opaque)\[([\d,]*)\](\{[^{}]*\})?")
SILENT = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier"}
SILENT |= {"add-dependency", "partition-id", "replica-id", "domain", "while", "conditional", "call"}
NOTIONS = {"ConcatBitcast", "AllocateBuffer", "AssumeGatherIndicesInBound"}
MESSAGES = {"all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all"}
WHOLE = {"convolution", "dot", "reduce", "reduce-window", "sort", "fft", "custom-call", "rng-bit-generator"}
WHOLE |= {"select-and-scatter"}


@dataclass(frozen=True)
class Leaf:
    """One array: elements without padding, bytes with padding, and whether HBM holds it."""

    elements: int
    bytes: float
    hbm: bool
    text: tuple[str, str, str] = ("", "", "")

    @property
    def width(self) -> float:
        """Bytes of an element."""
        return leaf_of(self.text[0], "8,128", "").bytes / 1024

    def padded(self, other: Leaf) -> float:
        """Returns the bytes of an array of another's sizes in this one's layout, or its own bytes elsewhere."""
        same = self.text[1].count(",") == other.text[1].count(",") and self.elements > 0
        return leaf_of(self.text[0], other.text[1], self.text[2]).bytes if same else other.bytes


@dataclass
class Row:
    """One instruction of the flat table."""

    room: str
    name: str
    opcode: str
    leaves: list[Leaf]
    operands: list[str]
    rest: str
    root: bool

    def attribute(self, name: str) -> str:
        match = re.search(rf"[ ,]{name}=%?([\w.\-]+)", self.rest)
        return match.group(1) if match else ""

    @property
    def size(self) -> float:
        return sum(leaf.bytes for leaf in self.leaves)

    @property
    def in_hbm(self) -> float:
        return sum(leaf.bytes for leaf in self.leaves if leaf.hbm)


@functools.cache
def leaf_of(dtype: str, sizes: str, layout: str) -> Leaf:
    """Returns an array of a type: every level of tiles divides the axes it covers into whole tiles."""
    shape = [int(size) for size in sizes.split(",") if size]
    elements = math.prod(shape)
    order = [int(axis) for axis in layout.strip("{}").split(":")[0].split(",") if axis]
    physical = [shape[axis] for axis in reversed(order)] if order else list(shape)
    tiles = re.search(r"T((?:\([^)]*\))+)", layout)
    for tile in re.findall(r"\(([\d,]+)\)", tiles.group(1)) if tiles and shape else []:
        inner = [int(size) for size in tile.split(",")]
        physical = [1] * (len(inner) - len(physical)) + physical
        outer = [math.ceil(size / part) for size, part in zip(physical[-len(inner) :], inner, strict=True)]
        physical = physical[: -len(inner)] + outer + inner
    bits = re.search(r"E\((\d+)\)", layout) or re.search(r"(\d+)", dtype)
    width = 8 if dtype == "pred" else 0 if dtype in ("token", "opaque") else int(bits.group(1) if bits else 0)
    memory = re.search(r"S\((\d+)\)", layout)
    return Leaf(
        elements, math.prod(physical) * width / 8, memory is None or memory.group(1) == "0", (dtype, sizes, layout)
    )


def table_of(text: str) -> tuple[dict[str, dict[str, Row]], str]:
    """Returns the rows by computation and name, and the name of the entry."""
    rooms: dict[str, dict[str, Row]] = defaultdict(dict)
    room = entry = ""
    for line in text.splitlines():
        if line[:1] in ("%", "E") and line.endswith("{"):
            room = line.removeprefix("ENTRY ").lstrip("%").split(" ")[0]
            entry = room if line.startswith("ENTRY") else entry
        match = ROW.match(line)
        if match is None:
            continue
        root, name, kind, opcode, rest = match.groups()
        inside = rest.split("), ")[0] if opcode != "custom-call" else rest.split("), custom_call_target")[0]
        operands = re.findall(r"%([\w.\-]+)", inside)
        if opcode == "parameter":
            operands = [rest.split(")")[0]]
        leaves = [leaf_of(*groups) for groups in LEAF.findall(re.sub(r"/\*.*?\*/", "", kind))]
        rooms[room][name] = Row(room, name, opcode, leaves, operands, rest, bool(root))
    return rooms, entry


@dataclass
class Costs:
    """Sums over a run."""

    hbm: float = 0.0
    cycles: float = 0.0
    ops: float = 0.0
    transfers: float = 0.0
    messages: float = 0.0
    steps: int = 0

    def __add__(self, other: Costs) -> Costs:
        return Costs(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))

    def times(self, count: float) -> Costs:
        scaled = [getattr(self, name) * count for name in self.__dataclass_fields__]
        # a computation's instructions count once where the larger branch is sought
        return Costs(*scaled[:-1], self.steps)


@dataclass
class Reader:
    """Costs of a compiled program.

    Attributes:
        text: the program; folder: the dump of final bundles, `None` for none.
        loops: pattern of a scope -> turns; branches: pattern of a scope and number of branches -> branch.
    """

    text: str
    folder: Path | None = None
    loops: Mapping[str, float] = field(default_factory=dict)
    branches: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rooms, self.entry = table_of(self.text)
        self.bundles = {} if self.folder is None else cycles_by_name(self.folder)
        roots = ((name, row) for name, rows in self.rooms.items() for row in rows.values() if row.root)
        self.replacing = {name for name, row in roots if row.opcode == "parameter"}
        self.summed: dict[str, Costs] = {}
        self.entering: dict[str, list[int | None]] = {}

    def total(self) -> Costs:
        return self.of(self.entry)

    def of(self, room: str) -> Costs:
        if room not in self.summed:
            self.summed[room] = sum((self.row(row) for row in self.rooms[room].values()), Costs())
        return self.summed[room]

    def row(self, row: Row) -> Costs:
        scope = re.search(r'op_name="([^"]*)"', row.rest)
        path = scope.group(1) if scope else ""
        if row.opcode == "while":
            turns = self.turns(row, path)
            inside = self.of(row.attribute("body")).times(turns) if turns else Costs()
            return inside + self.of(row.attribute("condition")).times(turns + 1)
        if row.opcode == "conditional":
            return self.of(self.branch(row, path))
        if row.opcode == "call":
            return self.of(row.attribute("to_apply"))
        target = re.search(r'custom_call_target="([^"]*)"', row.rest)
        if row.opcode in SILENT or row.opcode.endswith("-done") or (target and target.group(1) in NOTIONS):
            return Costs()
        kind = row.opcode.removesuffix("-start")
        message = kind in MESSAGES
        transfer = row.opcode.endswith("-start") and not message
        scheduled = row.name in self.bundles or self.folder is None
        ops = float((scheduled and not transfer) or message)
        cycles = self.bundles.get(row.name, 0)
        # a kernel's own figure does not tell what it finds in VMEM, so it is only an upper bound
        estimate = re.search(r'"bytes_accessed":\D*(\d+)', row.rest) if row.opcode == "custom-call" else None
        moved = min(self.traffic(row), float(estimate.group(1)) if estimate else math.inf)
        if estimate and (again := float(estimate.group(1)) - self.once(row)) > 0:
            moved = self.traffic(row) + again  # the kernel reads some arrays more than once
        return Costs(moved, cycles, ops, float(transfer), float(message), steps=1)

    def turns(self, row: Row, path: str) -> float:
        body, condition = row.attribute("body"), row.attribute("condition")
        state = self.leaving(row.room, row.operands[0])
        self.entering[body] = self.entering[condition] = state
        counted = self.run_loop(body, condition, state)
        if counted is not None:
            return counted
        return next((count for pattern, count in self.loops.items() if re.search(pattern, path)), 1)

    def run_loop(self, body: str, condition: str, state: list[int | None]) -> int | None:
        """Returns the turns of a loop by running its integers; `None` if they depend on more than constants."""
        last, test = (next(row.name for row in self.rooms[name].values() if row.root) for name in (body, condition))
        lasting = state
        for turns in range(100_000):
            self.entering[condition] = self.entering[body] = state
            going_on = self.integer(condition, test)
            if not going_on:
                # loops within this one know only what no turn changes
                self.entering[body] = lasting
                return None if going_on is None else turns
            after = self.leaving(body, last)
            lasting = [old if old == new else None for old, new in zip(lasting, after, strict=True)]
            state = after
        return None

    def leaving(self, room: str, name: str) -> list[int | None]:
        """Returns the integers of a tuple."""
        row = self.rooms[room].get(name)
        if row is None or row.opcode != "tuple":
            return [None] * (len(row.leaves) if row else 0)
        return [self.integer(room, operand) for operand in row.operands]

    def integer(self, room: str, name: str) -> int | None:
        """Returns a scalar's integer, `None` if it depends on more than constants."""
        row = self.rooms[room].get(name)
        if row is None or len(row.leaves) != 1 or row.leaves[0].elements != 1:
            return None
        if row.opcode == "constant":
            text = row.rest.split(")")[0]
            return int(text) if re.fullmatch(r"-?\d+", text) else None
        if row.opcode == "get-tuple-element":
            source, index = self.rooms[room].get(row.operands[0]), int(row.attribute("index"))
            known = self.entering.get(room, []) if source is not None and source.opcode == "parameter" else []
            return known[index] if index < len(known) else None
        if row.opcode not in ("copy", "bitcast", "add", "subtract", "compare"):
            return None
        values = [self.integer(room, operand) for operand in row.operands]
        if None in values:
            return None
        if row.opcode == "compare":
            kinds = {"LT": "__lt__", "LE": "__le__", "GT": "__gt__", "GE": "__ge__", "NE": "__ne__", "EQ": "__eq__"}
            return int(getattr(values[0], kinds[row.attribute("direction")])(values[1]))
        return {"add": sum(values), "subtract": values[0] - values[-1]}.get(row.opcode, values[0])

    def branch(self, row: Row, path: str) -> str:
        listed = re.search(r"branch_computations=\{([^}]*)\}", row.rest)
        names = [part.strip(" %") for part in listed.group(1).split(",")] if listed else []
        names = names or [row.attribute("false_computation"), row.attribute("true_computation")]
        for pattern, index in self.branches.items():
            if re.search(pattern, f"{path}:{len(names)}"):
                return names[index]
        return max(names, key=lambda name: self.of(name).steps)

    # ---- bytes

    def traffic(self, row: Row) -> float:
        room = self.rooms[row.room]
        sources = [room[name] for name in row.operands if name in room]
        if row.opcode in ("copy-start", "slice-start", "dynamic-slice-start"):
            moved = row.leaves[0 if row.opcode == "copy-start" else -2]
            return moved.bytes * (bool(sources[0].in_hbm) + moved.hbm)
        if row.opcode == "fusion":
            return self.fused(row, sources)
        if row.opcode in MESSAGES or row.opcode.removesuffix("-start") in MESSAGES:
            sent = sum(source.in_hbm for source in sources)
            arrived = max((leaf.bytes for leaf in row.leaves if leaf.hbm), default=0.0)
            return sent + (arrived if row.opcode.endswith("-start") else row.in_hbm)
        shares, written = demands(room, row, 1.0, self.replacing, False)
        read = sum(source.in_hbm * share for source, share in zip(sources, shares, strict=False))
        return read + sum(leaf.bytes * part for leaf, part in zip(row.leaves, written, strict=True) if leaf.hbm)

    def once(self, row: Row) -> float:
        """Returns the bytes of all operands and results, wherever they lie."""
        room = self.rooms[row.room]
        return row.size + sum(room[name].size for name in row.operands if name in room)

    def fused(self, row: Row, sources: list[Row]) -> float:
        shares, written = self.demand(row.attribute("calls"), [1.0] * len(row.leaves))
        read = sum(source.in_hbm * share for source, share in zip(sources, shares, strict=True))
        return read + sum(leaf.bytes * part for leaf, part in zip(row.leaves, written, strict=True) if leaf.hbm)

    def demand(self, room: str, wanted: list[float]) -> tuple[list[float], list[float]]:
        """Returns the share of every parameter that a fused computation reads, and of every result that it writes."""
        rows = self.rooms[room]
        need: dict[str, float] = defaultdict(float)
        writes: dict[str, float] = {}
        root = next(row for row in rows.values() if row.root)
        results = root.operands if root.opcode == "tuple" else [root.name]
        for name, share in zip(results, wanted, strict=False):
            need[name] = max(need[name], share)
        for row in reversed(list(rows.values())):
            if row.opcode in ("parameter", "constant", "iota") or (row is root and root.opcode == "tuple"):
                continue
            share = min(1.0, need[row.name])
            if row.opcode == "fusion":
                shares, inner = self.demand(row.attribute("calls"), [share] * max(1, len(row.leaves)))
                writes[row.name] = inner[0]
            else:
                shares, part = demands(rows, row, share, self.replacing, True)
                writes[row.name] = part[0]
            for name, part_read in zip(row.operands, shares, strict=False):
                need[name] += part_read
        parameters = sorted(
            (row for row in rows.values() if row.opcode == "parameter"), key=lambda r: int(r.operands[0])
        )
        return [min(1.0, need[row.name]) for row in parameters], [self.written(rows, writes, name) for name in results]

    def written(self, rows: dict[str, Row], writes: dict[str, float], name: str) -> float:
        """Returns the share of a result that is written: the sum of the updates in place that made it, or all."""
        chain = [name]
        while rows[chain[-1]].opcode in ("bitcast", "dynamic-update-slice", "scatter"):
            chain.append(rows[chain[-1]].operands[0])
        updates = [writes[step] for step in chain if rows[step].opcode in ("dynamic-update-slice", "scatter")]
        return min(1.0, sum(updates)) if updates else writes.get(name, 1.0)


def demands(
    rows: dict[str, Row], row: Row, share: float, replacing: set[str], fused: bool
) -> tuple[list[float], list[float]]:
    """Returns the share of every operand that an instruction reads, and of every result that it writes."""
    leaf = row.leaves[0] if row.leaves else Leaf(0, 0, False)
    sources = [rows.get(name) for name in row.operands]
    sizes = [source.size if source else 0.0 for source in sources]
    everything = [1.0 if share else 0.0] * len(sources)
    written = [1.0] * len(row.leaves)
    if row.opcode in ("slice", "dynamic-slice", "gather"):
        tiles = row.size if row.opcode == "gather" or not sources[0] else sources[0].leaves[0].padded(leaf)
        part = share * tiles / sizes[0] if sizes[0] else 1.0
        return [min(1.0, part), *everything[1:]], written
    if row.opcode in ("dynamic-update-slice", "scatter"):
        values = 1 if row.opcode == "dynamic-update-slice" else 2
        if fused and root_of(rows, row.operands[0]).opcode != "parameter":
            return everything, written  # nothing lies there yet: all of it is written
        source = sources[values]
        if row.opcode == "scatter":
            part = sizes[values] / leaf.bytes
            return [0.0 if row.attribute("to_apply") in replacing else part, *everything[1:]], [part]
        tiles = leaf.padded(source.leaves[0]) / leaf.bytes
        full = math.isclose(tiles * leaf.bytes / source.leaves[0].elements, leaf.width)
        return [0.0 if full else tiles, *everything[1:]], [tiles]
    if row.opcode in WHOLE:
        return everything, written
    if row.opcode == "concatenate":
        return [share] * len(sources), written
    # an element-wise operation reads as many elements of an operand as it writes, at most all of them
    return [min(share * leaf.elements / max(1, source.leaves[0].elements), share) if source and source.leaves else share
            for source in sources], written  # fmt: skip


def root_of(rows: dict[str, Row], name: str) -> Row:
    """Returns the instruction that made a value, through views and updates in place."""
    while rows[name].opcode in ("bitcast", "reshape", "dynamic-update-slice", "scatter"):
        name = rows[name].operands[0]
    return rows[name]


# ---- cycles


def cycles_by_name(folder: Path) -> dict[str, int]:
    """Returns the cycles of every instruction that has a schedule, from the dump's files and its list of duplicates."""
    files = {path.name.split("-", 1)[1]: path for path in folder.iterdir() if path.name.endswith("-final_bundles.txt")}
    by_key, calls = {}, {}
    for name, path in files.items():
        match = re.fullmatch(r"(.*)-\d+-final_bundles\.txt", name)
        if match and match.group(1) == "TLP" and "schedule-analysis" not in name:
            calls = calls_of(path.read_text())
        elif match and "schedule-analysis" not in name:
            by_key[match.group(1)] = cycles_of(path.read_text())
    table = dict(by_key)
    for path in folder.glob("*deduplication-map.txt"):
        blocks = path.read_text().split("key:")[1:]
        for block in blocks:
            key, *lines = block.splitlines()
            members = [line.strip() for line in lines if line.startswith("  ")]
            table |= {member: by_key[key] for member in members if key in by_key}
    return {name: count + calls.get(name, 0) for name, count in table.items()}


def calls_of(text: str) -> dict[str, int]:
    """Returns the bundles of the program's own schedule that begin with the call of an instruction, by instruction."""
    counts: dict[str, int] = defaultdict(int)
    body = re.sub(r"^= control target key start.*?key end", "", text, flags=re.DOTALL)
    pieces = re.split(r"inlined_call [%\w, ]*/\* %(\S+) = ", body)
    begins = re.compile(r"^ *(?:0x[0-9a-f]+|0) +(?:[A-Z]{2})? ?:", re.MULTILINE)
    for name, piece in zip(pieces[1::2], pieces[2::2], strict=True):
        counts[name] += len(begins.findall(piece))  # the call's bundle begins before its name, as that of the next does
    counts[pieces[-2] if len(pieces) > 1 else ""] += 1
    return dict(counts)


def cycles_of(text: str) -> int:
    """Returns the bundles that a schedule issues, from what its names stand for in every turn of its loops."""
    body = re.sub(r"^= control target key start.*?key end", "", text, flags=re.DOTALL)
    parts = re.split(r"^ *(?:0x[0-9a-f]+|0) +(?:[A-Z]{2})? ?:", body, flags=re.MULTILINE)[1:]
    return round(float(Schedule(parts).weights(0, len(parts) - 1, None).sum()))


class Schedule:
    """A final schedule as nested loops over names that are assigned once, evaluated when they are asked for."""

    def __init__(self, parts: list[str]):
        start: dict[str, int] = {}
        for number, part in enumerate(parts):
            for region in re.findall(r"Start(?:/End empty)? region (\d+)", part):
                start.setdefault(region, number)
        plain = [re.sub(r"/\*.*?\*/", "", part, flags=re.DOTALL) for part in parts]
        self.jumps = [
            (number, sign, name, start.get(region, len(parts)))
            for number, part in enumerate(plain)
            for sign, name, region in re.findall(r"sbr\.rel \((!?)%(\w+)\) target = \$region(\d+)", part)
        ]
        self.loops = [(goal, number, sign, name) for number, sign, name, goal in self.jumps if goal <= number]
        self.meaning: dict[str, str] = {}
        self.joins: dict[int, list[tuple[str, str, str]]] = defaultdict(list)
        stored = dict(re.findall(r"sst \[smem:\[#(\w+_spill)\]\] (?:\(!?%\w+\), )?%(\w+)", "".join(plain)))
        for number, part in enumerate(plain):
            for name, text in re.findall(r"%(\w+) = ([^;}]*)", part):
                spilled = re.match(r"sld \[smem:\[#(\w+_spill)\]\]", text)
                self.meaning[name] = f"smov %{stored.get(spilled.group(1))}" if spilled else text.strip()
                if joined := re.match(r"sphi %(\w+), %(\w+)", text):
                    self.joins[number].append((name, *joined.groups()))
        self.known: dict[str, int | None] = {}
        self.memo: dict[str, int | None] = {}
        self.size = len(parts)

    def weights(self, begin: int, end: int, loop: tuple[int, int, str, str] | None) -> np.ndarray:
        """Returns how often every bundle runs when a loop, or the whole schedule, is entered once."""
        last = min(self.size, end + 5) if loop else self.size
        total = np.zeros(last - begin)
        inner = [other for other in self.loops if begin <= other[0] and other[1] <= end and other != loop]
        inner = [part for part in inner if not any(o[0] <= part[0] and part[1] <= o[1] and o != part for o in inner)]
        jumps = [jump for jump in self.jumps if begin <= jump[0] <= end and jump[3] > jump[0]]
        jumps = [jump for jump in jumps if not any(o[0] <= jump[0] <= o[1] for o in inner)]
        for turn in range(1_000_000):
            self.join(begin, turn)
            turned = np.ones(last - begin)
            for part in inner:
                guard = any(self.taken(j) and j[0] + 5 <= part[0] < j[3] for j in jumps)
                if not guard:
                    inside = self.weights(part[0], part[1], part)
                    turned[part[0] - begin : part[0] - begin + len(inside)] *= inside
            for jump in jumps:
                if self.taken(jump):
                    turned[jump[0] + 5 - begin : max(jump[0] + 5, jump[3]) - begin] = 0
            total += turned
            if loop is None or not self.taken((loop[1], loop[2], loop[3], loop[0])):
                return total
        return total

    def join(self, header: int, turn: int) -> None:
        """Gives the names of a loop their values of the next turn."""
        if turn == 0:
            self.memo = {}
        values = {name: self.value(later if turn else first) for name, first, later in self.joins[header]}
        self.known |= values
        self.memo = {}

    def taken(self, jump: tuple[int, str, str, int]) -> bool:
        value = self.value(jump[2])
        return value is not None and bool(value) != (jump[1] == "!")

    def value(self, name: str, depth: int = 0) -> int | None:
        if name in self.known:
            return self.known[name]
        if name not in self.memo:
            self.memo[name] = self.evaluate(self.meaning.get(name, ""), depth) if depth < 150 else None
        return self.memo[name]

    def evaluate(self, text: str, depth: int) -> int | None:
        match = re.match(
            r"([a-z_]+)([.\w]*) ?(?:\((!?)%(\w+)(?:, %(\w+))?\),? ?)?(?:\[\w+:\$\w+\] )?(.*)", text, re.DOTALL
        )
        if match is None:
            return None
        kind, types, sign, predicate, other, rest = match.groups()
        if other and (decided := self.value(predicate, depth + 1)) != 1 - bool(sign):
            return None if decided is None else self.value(other, depth + 1)
        values = [self.operand(operand.strip(), depth) for operand in rest.split(",")]
        if kind in ("smov", "int_to_ptr"):
            return values[0]
        if kind == "pneg":
            return None if values[0] is None else 1 - values[0]
        if kind in ("pand", "pnand", "por"):
            deciding = int(kind == "por")
            if deciding not in values and None in values:
                return None
            joined = deciding if deciding in values else 1 - deciding
            return 1 - joined if kind == "pnand" else joined
        if None in values or len(values) < 2 or "f32" in types or not types:
            return None
        return arithmetic(kind, types, *values[:2])

    def operand(self, text: str, depth: int) -> int | None:
        if re.fullmatch(r"-?\d+", text):
            return int(np.uint32(int(text) % 2**32).astype(np.int32))
        value = self.value(text.lstrip("!%"), depth + 1) if "%" in text else None
        return 1 - value if value is not None and text.startswith("!") else value


def arithmetic(kind: str, types: str, left: int, right: int) -> int | None:
    """Returns a 32-bit result."""
    if "u32" in types:
        left, right = left % 2**32, right % 2**32
    if kind == "scmp":
        compared = (left > right) - (left < right)
        return int({"lt": compared < 0, "le": compared <= 0, "gt": compared > 0, "ge": compared >= 0,
                    "eq": compared == 0, "ne": compared != 0}[types.split(".")[1]])  # fmt: skip
    results = {
        "sadd": left + right, "ssub": left - right, "smul": left * right, "sand": left & right, "sor": left | right,
        "sxor": left ^ right, "smin": min(left, right), "smax": max(left, right),
        "sshll": left << right if 0 <= right < 32 else 0, "sshrl": (left % 2**32) >> max(right, 0),
        "sshra": left >> max(right, 0),
    }  # fmt: skip
    return (results[kind] + 2**31) % 2**32 - 2**31 if kind in results else None
