"""What a tile asks for ahead of reading it, by processor."""

import pytest

llvm = pytest.importorskip("llvmlite.binding", reason="the code is made with llvmlite")
ir = pytest.importorskip("llvmlite.ir")
tiles = pytest.importorskip("speccascade_jax.runtime.products.tiles")


@pytest.mark.parametrize(("processor", "lines"), [("sapphirerapids", 4), ("znver4", 0), ("znver5", 0), ("generic", 4)])
def test_only_where_it_pays_lines_are_asked_for(monkeypatch, processor, lines):
    """One for each 64 bytes of a row of the panel."""
    monkeypatch.setattr(llvm, "get_host_cpu_name", lambda: processor)
    monkeypatch.setattr(tiles, "ahead", tiles.ahead.__wrapped__)
    module = ir.Module()
    tiles.tile(module, "float32", 2, 64)
    assert str(module).count('call void @"llvm.prefetch.p0"') == lines
