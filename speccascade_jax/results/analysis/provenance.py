"""Versions of the software that measured the records, and notes on tables whose records mix versions. Needs no JAX."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from speccascade_jax.results.analysis.panels import Panel, Spot
from speccascade_jax.results.store.result_store import Record

_OURS = "speccascade_jax"


def notes(panels: Sequence[Panel]) -> list[str]:
    """Returns notes on software versions that differ between records, and on curves whose code changed meanwhile."""
    versions = [_versions(record) for panel in panels for record in panel.records]
    several = []
    for name in dict.fromkeys(name for record_versions in versions for name in record_versions):
        values = list(dict.fromkeys(record_versions.get(name, "an unknown version") for record_versions in versions))
        several += [f"{name} {' and '.join(values)}"] if len(values) > 1 else []
    versions_note = [
        f"Measured by several versions of the code, whose numbers may not be comparable: {'; '.join(several)}."
    ]
    changed = [curve[0].label for panel in panels for curve in panel.curves.values() if _is_changed(curve)]
    said = f"The rule, stop policy or drafter changed between points of {', '.join(changed)}: measure them again."
    return versions_note * bool(several) + [said] * bool(changed)


def package(record: Record) -> str:
    """Returns the version of this package that measured a record, with git's revision; empty if it is not recorded."""
    if not (known := record.get("package")):
        return ""
    inside = [(known["revision"] or "")[:10]] * bool(known["revision"]) + ["files changed"] * bool(known["dirty"])
    return (known["version"] or "not installed") + (f" ({', '.join(inside)})" if inside else "")


def _versions(record: Record) -> dict[str, str]:
    """Returns the versions of the software that measured a record, by name, this package first."""
    ours = package(record)
    libraries = {name: version for name, version in record.get("versions", {}).items() if name not in ("python", _OURS)}
    return ({_OURS: ours} if ours else {}) | libraries


def _is_changed(curve: Iterable[Spot]) -> bool:
    """Returns whether different code, under one toolchain, measured the points of a curve.

    Code digests are comparable only under the same toolchain.
    """
    codes: dict[str, set[str]] = defaultdict(set)
    for provenance in (record.get("provenance", {}) for spot in curve for record in spot.records):
        if code := provenance.get("code"):
            codes[repr(sorted(provenance["toolchain"].items()))].add(code)
    return any(len(digests) > 1 for digests in codes.values())
