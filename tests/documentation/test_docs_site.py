"""The site: formulas, short code, and the notebook that becomes a page."""

import importlib
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
from doc_pages import DOCS, ROOT, pages


def load(name: str) -> ModuleType:
    """A hook of the site."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pages
def test_formulas_can_be_typeset(page: Path) -> None:
    formulas = load("formulas")
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    for display in re.findall(r"\$\$(.*?)\$\$", text, re.DOTALL):
        lines = re.sub(r"\\(begin|end)\{aligned\}", "", display).split(r"\\")
        for part in (part for line in lines for part in line.split("&") if part.strip()):
            assert formulas.to_svg(part.strip()).startswith("<svg")
    for inline in re.findall(r"(?<!\$)\$([^$\n]+)\$(?!\$)", text):
        assert "<path" in formulas.to_svg(inline)


def test_a_formula_that_cannot_be_typeset_ends_the_build() -> None:
    formulas = load("formulas")
    html = r'<span class="arithmatex">\(\frac{1}\)</span>'
    with pytest.raises(ValueError, match="cannot typeset"):
        formulas.on_page_content(html)
    aligned = r'<div class="arithmatex">\[a &amp;= b \\ &amp;\leq c\]</div>'
    assert formulas.on_page_content(aligned).count("<svg") == 3


@pytest.mark.parametrize(
    ("tex", "spaced"),
    [
        (r"\sum_j \log p_j", r"\sum_j\, \log p_j"),
        (r"\sum_{i=1}^N [x]", r"\sum_{i=1}^N\, [x]"),
        (r"(1 - p)^\gamma \log p", r"(1 - p)^\gamma\, \log p"),
        (r"\frac{1}{N} \sum_i\, a_i", r"\frac{1}{N}\, \sum_i\, a_i"),
    ],
)
def test_formulas_have_the_spaces_of_tex(tex: str, spaced: str) -> None:
    paths = [re.findall(r' d="[^"]*"', load("formulas").to_svg(one)) for one in (tex, spaced)]
    assert len(paths[0]) == 1
    assert paths[0] == paths[1]


def test_short_code_is_not_broken() -> None:
    change = load("hooks").on_page_content
    assert change(":func:<code>--resume</code>") == '<code class="short">--resume</code>'
    assert change("<code>OUT/&lt;recipe&gt;/&lt;seed&gt;/</code>").startswith(
        '<code class="short">'
    )
    flags = "--lambda-0 0.25 --epochs 40"
    marked = '<span class="short">--lambda-0</span> 0.25 <span class="short">--epochs</span> 40'
    assert change(f"<code>{flags}</code>") == f"<code>{marked}</code>"
    for long in ("<code>isda train cifar100-resnet32-isda</code>", "<code>a\nb</code>"):
        assert change(long) == long


def test_names_and_units_are_not_broken() -> None:
    change = load("hooks").on_page_content
    text = '<td title="1 %">CIFAR-100, λ₀ = 0.5: 1.2 ± 0.3 % in 4 ms, 5 MiB</td>'
    assert change(text).replace("\xa0", "~") == (
        '<td title="1 %"><span class="short">CIFAR-100</span>, λ₀~=~0.5: 1.2 ±~0.3~% in 4~ms, '
        "5~MiB</td>"
    )
    assert change("<td>64, 100, 2190</td>") == "<td>64,\xa0100,\xa02190</td>"
    for verbatim in ("<pre><span>ResNet-32</span> 1 %</pre>", "<svg><text>1 %</text></svg>"):
        assert change(verbatim) == verbatim


def test_notebook(tmp_path: Path) -> None:
    """Text, code, output and figures become a page; a script without figures is refused."""
    pytest.importorskip("mkdocs")
    notebook = load("notebook")
    script = tmp_path / "cells.py"
    cells = [
        "# %% [markdown]\n# # Title\n#\n# words\n",
        "# %%\nimport matplotlib.pyplot as plt\nx = 2\nprint(x + 1)\n",
        "# %%\nplt.plot([1, x])\nplt.gca().set_title('a line', loc='left')\nplt.show()\n",
    ]
    script.write_text("\n".join(cells))
    page = notebook.to_markdown(script)
    assert page.startswith("# Title\n\nwords")
    assert "```text\n3\n```" in page
    assert 'aria-label="a line"' in page
    assert page.count("<svg") == 1
    assert "currentColor" in page
    script.write_text(cells[0])
    with pytest.raises(ValueError, match="draws nothing"):
        notebook.to_markdown(script)


def test_two_dimensions(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The notebook runs, and its text is true: lower NLL and ECE, but not with a large λ₀."""
    import matplotlib.pyplot as plt

    monkeypatch.setattr(plt, "show", lambda: None)
    source = (ROOT / "examples" / "two_dimensions.py").read_text()
    exec(compile(source, "two_dimensions.py", "exec"), {"__name__": "__main__"})
    plt.close("all")
    lines = capsys.readouterr().out.splitlines()
    found = [
        [float(value) for value in re.search(r"error (\S+)%, NLL (\S+), ECE (\S+)%", line).groups()]
        for line in lines
    ]
    base, _, good, large = found
    assert all(ours < theirs for ours, theirs in zip(good, base, strict=True))
    assert large[2] > base[2]
