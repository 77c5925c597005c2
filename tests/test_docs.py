"""The Python in the docs runs, block after block."""

import pathlib
import re

import pytest

DOCS = pathlib.Path(__file__).parent.parent / "docs"
PAGES = ["mixed_precision.md"]


@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs(page):
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.M | re.S)
    assert len(blocks) >= 3
    names = {"__name__": page}
    for number, block in enumerate(blocks):
        exec(compile(block, f"{page}, block {number}", "exec"), names)
    if page == "mixed_precision.md":
        assert names["loss"].shape == ()
        assert float(names["normalized"][0, 0]) == pytest.approx(1, rel=1e-3)
