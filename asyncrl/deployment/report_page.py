"""The look of `report.html`: one page without any outside asset, light and dark, that prints."""

from collections.abc import Sequence
from html import escape

STYLE = """
:root { color-scheme: light dark;
  --paper: #ffffff; --ink: #16181d; --soft: #636b78; --rule: #e4e7ec; --panel: #f7f8fa; --grid: #eceef2;
  --blue: #2563c9; --green: #2a9d6f; --amber: #dd8a1d; --violet: #8457c9; --red: #c8403b; --teal: #3aa7b5;
  --rose: #cf5f93; --gray: #b4bac4; }
@media (prefers-color-scheme: dark) { :root {
  --paper: #14161a; --ink: #e7e9ed; --soft: #9aa2af; --rule: #2b2f37; --panel: #1b1e24; --grid: #262a31;
  --blue: #6ea3f5; --green: #49b98b; --amber: #e5a54b; --violet: #a98ae0; --red: #e5716b; --teal: #5cc0cc;
  --rose: #e089b2; --gray: #565d69; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1240px; padding: 40px 28px 64px; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 26px; line-height: 1.2; margin: 0; letter-spacing: -0.01em; }
h2 { font-size: 17px; margin: 40px 0 12px; padding-top: 20px; border-top: 1px solid var(--rule); }
h2 + p { margin: -6px 0 14px; color: var(--soft); max-width: 78ch; }
header p { margin: 6px 0 0; color: var(--soft); }
header p.lead { color: var(--ink); font-size: 17px; max-width: 78ch; margin-top: 14px; }
.badge { font-size: 12px; font-weight: 600; vertical-align: 4px; margin-left: 10px; padding: 2px 9px;
  border: 1px solid currentColor; border-radius: 99px; }
.finished { color: var(--green); } .failed { color: var(--red); } .running { color: var(--blue); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(250px, 1fr)); gap: 12px; margin: 26px 0 0; }
.tiles div { background: var(--panel); border-radius: 10px; padding: 12px 16px; }
.tiles dt { color: var(--soft); font-size: 13px; }
.tiles dd { margin: 2px 0 0; font-size: 22px; font-weight: 600; font-variant-numeric: tabular-nums; }
.tiles dd small { display: block; font-size: 12px; font-weight: 400; color: var(--soft); }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(340px, 1fr)); gap: 22px 20px; }
figure { margin: 0; position: relative; break-inside: avoid; }
figcaption { font-weight: 600; font-size: 14px; margin: 0 0 4px 2px; }
figcaption small { font-weight: 400; color: var(--soft); margin-left: 8px; }
svg { display: block; width: 100%; height: auto; overflow: visible; }
svg text { font: 10.5px system-ui, -apple-system, "Segoe UI", Arial, sans-serif; fill: var(--soft); }
svg .axis-name { fill: var(--soft); opacity: 0.8; }
svg .value { fill: var(--ink); } svg .inside { fill: var(--paper); }
svg .grid { stroke: var(--grid); } svg polygon ~ .grid { stroke: var(--paper); opacity: 0.35; }
svg .limit { stroke: var(--red); stroke-dasharray: 4 3; } svg .limit-label { fill: var(--red); }
svg .line { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
svg .faint { fill: none; stroke-width: 1; opacity: 0.35; }
svg .cursor { stroke: var(--soft); stroke-dasharray: 2 2; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 2px 14px; margin: 6px 0 0 4px; padding: 0;
  font-size: 12px; color: var(--soft); }
.legend i { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 5px; }
.tip { position: absolute; top: 26px; pointer-events: none; background: var(--paper); border: 1px solid var(--rule);
  border-radius: 6px; padding: 4px 9px; font-size: 12px; line-height: 1.45; white-space: nowrap; z-index: 1;
  font-variant-numeric: tabular-nums; }
.columns { display: grid; grid-template-columns: repeat(auto-fit, minmax(340px, 1fr)); gap: 8px 40px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
td, th { text-align: left; padding: 5px 12px 5px 0; border-bottom: 1px solid var(--rule); vertical-align: top; }
th { color: var(--soft); font-weight: 500; font-size: 13px; }
td.n, th.n { text-align: right; padding-right: 18px; }
td code, td pre { font: 13px/1.45 ui-monospace, "SF Mono", Menlo, Consolas, monospace; margin: 0; }
td pre, .text { white-space: pre-wrap; overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
details pre { background: var(--panel); border-radius: 10px; padding: 14px 18px; overflow-x: auto;
  font: 12.5px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
summary { cursor: pointer; color: var(--soft); }
@media print { body { max-width: none; padding: 0; } .charts { grid-template-columns: repeat(3, 1fr); } }
"""

# Shows the nearest step's numbers under the pointer. Text goes in by textContent: nothing of a run is ever markup.
SCRIPT = """
for (const figure of document.querySelectorAll("figure")) {
  const source = figure.querySelector("script[type='application/json']");
  if (!source) continue;
  const data = JSON.parse(source.textContent), svg = figure.querySelector("svg");
  const width = svg.viewBox.baseVal.width, height = svg.viewBox.baseVal.height;
  const [left, right, top, bottom] = [%(left)d, %(right)d, %(top)d, %(bottom)d];
  const first = data.xs[0], span = (data.xs[data.xs.length - 1] - first) || 1;
  const cursor = document.createElementNS("http://www.w3.org/2000/svg", "line");
  cursor.setAttribute("class", "cursor");
  cursor.setAttribute("y1", top); cursor.setAttribute("y2", height - bottom);
  const tip = document.createElement("div");
  tip.className = "tip";
  const text = (v) => v === null ? "–" : data.percent ? (100 * v).toFixed(1) + " %%" : Number(v.toPrecision(4));
  const hide = () => { cursor.remove(); tip.remove(); };
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const at = first + ((event.clientX - box.left) / box.width * width - left) / (width - left - right) * span;
    let nearest = 0;
    data.xs.forEach((x, i) => { if (Math.abs(x - at) < Math.abs(data.xs[nearest] - at)) nearest = i; });
    const x = left + (data.xs[nearest] - first) / span * (width - left - right);
    cursor.setAttribute("x1", x); cursor.setAttribute("x2", x);
    tip.replaceChildren(...["step " + data.xs[nearest],
      ...data.series.filter((s) => s.ys[nearest] !== null).map((s) => s.name + "  " + text(s.ys[nearest]))
    ].map((line) => Object.assign(document.createElement("div"), { textContent: line })));
    svg.append(cursor); figure.append(tip);
    const place = x / width * box.width;
    tip.style.left = (place > box.width / 2 ? place - tip.offsetWidth - 10 : place + 10) + "px";
  });
}
"""


def page(*, title: str, body: str, script_values: dict[str, int]) -> str:
    """The whole document around `body`. `script_values` are the charts' margins."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n"
        f"<body>\n{body}\n<script>{SCRIPT % script_values}</script>\n</body></html>\n"
    )


def section(title: str, note: str, body: str) -> str:
    lead = f"<p>{escape(note)}</p>" if note else ""
    return f"<section><h2>{escape(title)}</h2>{lead}{body}</section>"


def tiles(entries: list[tuple[str, str, str]]) -> str:
    """(name, value, small print) each."""
    cells = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(note)}</small></dd></div>"
        for name, value, note in entries
    )
    return f'<dl class="tiles">{cells}</dl>'


def table(rows: Sequence[tuple[str, ...]], *, head: tuple[str, ...] = (), numeric: frozenset[int] = frozenset()) -> str:
    """A table of text; columns in `numeric` are aligned right."""

    def cells(row: tuple[str, ...], tag: str) -> str:
        return "".join(
            f"<{tag}{' class=n' if index in numeric else ''}>"
            + (f'<span class="text">{escape(cell)}</span>' if tag == "td" else escape(cell))
            + f"</{tag}>"
            for index, cell in enumerate(row)
        )

    top = f"<thead><tr>{cells(head, 'th')}</tr></thead>" if head else ""
    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return f'<div class="wide"><table>{top}<tbody>{body}</tbody></table></div>'
