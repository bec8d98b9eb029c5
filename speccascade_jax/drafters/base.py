"""★ What the engine asks of a drafter: anything that writes a block and says what each token was drawn from."""

from __future__ import annotations
