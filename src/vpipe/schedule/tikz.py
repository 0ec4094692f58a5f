"""The picture of a simulated program for a paper set in LaTeX: TikZ, to be read with \\input.

    \\usepackage{tikz}  …  \\begin{figure}\\input{1f1b.tex}\\caption{…}\\end{figure}

Fonts are the document's own. Kinds differ in grey as well as in colour.
"""

from __future__ import annotations

from vpipe.schedule.draw import figures
from vpipe.schedule.semantics import NAMES, TRAITS
from vpipe.schedule.simulate import Simulation

ROW = 0.42
"""Height of a rank's line in centimetres."""
MARGIN = 1.3
"""Room for the ranks' names."""
_SPECIAL = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}


def tikz(simulation: Simulation, title: str | None, width: float) -> str:
    """The picture, ``width`` centimetres wide."""
    spans = simulation.spans
    origin = min((row[0].begin for row in spans if row), default=0.0)
    scale = (width - MARGIN) / max(simulation.makespan, 1e-12)
    kinds = [kind for kind in NAMES if any(span.action.kind is kind for row in spans for span in row)]
    lines = [rf"\definecolor{{vpipe{kind}}}{{HTML}}{{{TRAITS[kind].fills[0][1:].upper()}}}" for kind in kinds]
    lines.append(r"\begin{tikzpicture}[x=1cm,y=1cm,every node/.style={font=\tiny,inner sep=0pt}]")
    if title is not None:
        lines.append(rf"\node[anchor=base west,font=\small] at (0,{ROW + 0.15:.2f}) {{{escaped(title)}}};")
    for rank, row in enumerate(spans):
        top = -rank * (ROW + 0.06)
        lines.append(rf"\node[anchor=west,font=\scriptsize] at (0,{top + ROW / 2:.3f}) {{rank {rank}}};")
        for span in row:
            left, right = (MARGIN + (time - origin) * scale for time in (span.begin, span.end))
            if right <= left:
                lines.append(rf"\draw ({left:.3f},{top:.3f}) -- +(0,{ROW});")
                continue
            box = f"({left:.3f},{top:.3f}) rectangle ({right:.3f},{top + ROW:.3f})"
            lines.append(rf"\filldraw[fill=vpipe{span.action.kind},draw=black!50,line width=0.2pt] {box};")
            number = span.action.microbatch
            if number >= 0 and right - left > 0.1 * len(str(number)) + 0.06:
                centre = f"({(left + right) / 2:.3f},{top + ROW / 2:.3f})"
                lines.append(rf"\node at {centre} {{{number}}};")
    lines += _key([(str(kind), NAMES[kind]) for kind in kinds], -len(spans) * (ROW + 0.06) - 0.12)
    lines += [r"\end{tikzpicture}", f"% {figures(simulation)}", ""]
    return "\n".join(lines)


def _key(kinds: list[tuple[str, str]], top: float) -> list[str]:
    lines, left = [], MARGIN
    for kind, name in kinds:
        lines.append(rf"\filldraw[fill=vpipe{kind},draw=black!50] ({left:.2f},{top:.2f}) rectangle +(0.22,0.22);")
        lines.append(rf"\node[anchor=west] at ({left + 0.3:.2f},{top + 0.11:.2f}) {{{name}}};")
        left += 0.75 + 0.14 * len(name)
    return lines


def escaped(text: str) -> str:
    """Plain text for TeX."""
    return "".join(_SPECIAL.get(letter, rf"\{letter}" if letter in "&%$#_{}" else letter) for letter in text)
