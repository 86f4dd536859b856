"""Run the demo and draw it as an animated SVG: each picture that `make demo` prints is a frame.

.venv/bin/python examples/record_demo.py docs/demo.svg
"""

import asyncio
import io
import os
import sys
import tempfile
from html import escape
from itertools import accumulate
from pathlib import Path
from typing import Any

import demo
from rich.cells import cell_len
from rich.console import Console, Group
from rich.segment import Segment
from rich.terminal_theme import SVG_EXPORT_THEME

COLUMNS, ROWS = 112, 24
CHAR_PX, LINE_PX, MARGIN_PX = 7.2, 17, 14
FRAME_S = 4
Lines = list[list[Segment]]

STYLE = """
rect {{ fill: #16181d }}
text {{ font: 12px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace }}
.frame {{ fill: #d5d8de; opacity: 0; animation: show {total_s}s step-end infinite }}
.frame:nth-last-child(2) {{ opacity: 1 }}
@keyframes show {{ 0% {{ opacity: 1 }} {share:.3f}% {{ opacity: 0 }} 100% {{ opacity: 0 }} }}
@media (prefers-reduced-motion) {{ .frame {{ animation: none }} }}
"""


class Recorder(Console):
    """A terminal of fixed size that keeps what is printed: a frame for each picture, and one for the summary."""

    def __init__(self) -> None:
        super().__init__(width=COLUMNS, height=ROWS, file=io.StringIO(), color_system="truecolor")
        self.pictures: list[Lines] = []
        self.summary: Lines = []

    def print(self, *objects: Any, style: Any = None, **options: Any) -> None:
        parts = [self.render_str(one) if isinstance(one, str) else one for one in objects]
        lines = self.render_lines(Group(*parts), style=style and self.get_style(style), pad=False)
        if any(isinstance(one, Group) for one in objects):
            self.pictures.append(lines)
        else:
            self.summary += lines


def main() -> int:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    recorder = Recorder()
    with tempfile.TemporaryDirectory(prefix="flyball-demo-") as folder:
        exit_code = asyncio.run(demo.session(recorder, Path(folder)))
    if exit_code == 0:
        Path(sys.argv[1]).write_text(svg([*recorder.pictures, recorder.summary]))
    print("\n".join("".join(part.text for part in line) for line in recorder.summary))
    return exit_code


def svg(frames: list[Lines]) -> str:
    width = COLUMNS * CHAR_PX + 2 * MARGIN_PX
    height = max(map(len, frames)) * LINE_PX + 2 * MARGIN_PX
    style = STYLE.format(total_s=FRAME_S * len(frames), share=100 / len(frames))
    groups = (
        f'<g class="frame" style="animation-delay: {(i - len(frames)) * FRAME_S}s">\n{_texts(lines)}</g>'
        for i, lines in enumerate(frames)
    )
    size = f'viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" height="{height}"'
    title = "<title>make demo: two replicas, long prompts, a limit that follows, a drain</title>"
    body = "\n".join((f"<style>{style}</style>", '<rect width="100%" height="100%" rx="8"/>', *groups))
    return f'<svg xmlns="http://www.w3.org/2000/svg" xml:space="preserve" {size}>\n{title}\n{body}\n</svg>\n'


def _texts(lines: Lines) -> str:
    return "".join(_text(line, MARGIN_PX + (row + 0.8) * LINE_PX) for row, line in enumerate(lines))


def _text(line: list[Segment], y: float) -> str:
    """One element for each run of one style; its length is given, so that columns stand under each other in any font."""
    parts = [part for part in Segment.simplify(line) if not part.control]
    starts = accumulate((cell_len(part.text) for part in parts), initial=0)
    return "".join(_run(part, start, y) for part, start in zip(parts, starts, strict=False) if part.text.strip())


def _run(part: Segment, start: int, y: float) -> str:
    text = part.text.rstrip()
    x = MARGIN_PX + (start + len(text) - len(text.lstrip())) * CHAR_PX
    length = cell_len(text.strip()) * CHAR_PX
    return f'<text x="{x:.1f}" y="{y:.1f}" textLength="{length:.1f}"{_look(part)}>{escape(text.strip())}</text>\n'


def _look(part: Segment) -> str:
    style = part.style
    if style is None:
        return ""
    color = (
        f' fill="{style.color.get_truecolor(SVG_EXPORT_THEME).hex}"'
        if style.color and not style.color.is_default
        else ""
    )
    return color + ' font-weight="bold"' * bool(style.bold) + ' opacity="0.6"' * bool(style.dim)


if __name__ == "__main__":
    sys.exit(main())
