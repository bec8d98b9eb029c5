"""What code records were measured by: a table in which several versions meet says so. Needs no JAX."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from speccascade_jax.results.analysis.panels import Panel, Spot
from speccascade_jax.results.store.result_store import Record

_OURS = "speccascade_jax"


def notes(panels: Sequence[Panel]) -> list[str]:
    """A sentence that names the versions of the code, and one the curves in which a method's own code changed."""
    found = [_versions(record) for panel in panels for record in panel.records]
    several = []
    for name in dict.fromkeys(name for each in found for name in each):
        values = list(dict.fromkeys(each.get(name, "of unknown version") for each in found))
        several += [f"{name} {' and '.join(values)}"] if len(values) > 1 else []
    told = [f"Measured by several versions of the code, whose numbers may not compare: {'; '.join(several)}."]
    changed = [curve[0].label for panel in panels for curve in panel.curves.values() if _is_changed(curve)]
    said = f"Rule, stop policy or drafter changed between points of {', '.join(changed)}: measure them again."
    return told * bool(several) + [said] * bool(changed)


def package(record: Record) -> str:
    """The version of this package that a record was measured by, with git's revision; empty where it does not say."""
    if not (known := record.get("package")):
        return ""
    inside = [(known["revision"] or "")[:10]] * bool(known["revision"]) + ["files changed"] * bool(known["dirty"])
    return (known["version"] or "not installed") + (f" ({', '.join(inside)})" if inside else "")


def _versions(record: Record) -> dict[str, str]:
    """Name -> version of what a record was measured by, this package first."""
    ours = package(record)
    others = {name: at for name, at in record.get("versions", {}).items() if name not in ("python", _OURS)}
    return ({_OURS: ours} if ours else {}) | others


def _is_changed(curve: Iterable[Spot]) -> bool:
    """Returns whether a curve's points were measured by several codes that can be compared: under one toolchain."""
    codes: dict[str, set[str]] = defaultdict(set)
    for provenance in (record.get("provenance", {}) for spot in curve for record in spot.records):
        if code := provenance.get("code"):
            codes[repr(sorted(provenance["toolchain"].items()))].add(code)
    return any(len(each) > 1 for each in codes.values())
