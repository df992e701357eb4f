"""The style and layout of `report.html`: a page without external files, for light and dark, narrow and wide screens.

The page can be printed. A print is always on white paper and shows the configuration, which is folded on the screen.
tests/views/test_report_in_chromium.py checks all of this in a real browser.
"""

from collections.abc import Sequence
from html import escape

STYLE = """
:root { color-scheme: light;
  --paper: #ffffff; --ink: #16181d; --soft: #59616e; --rule: #e2e5ea; --panel: #f6f7f9; --grid: #e9ecf0;
  --blue: #2563c9; --green: #2a9d6f; --amber: #e2941f; --violet: #8457c9; --red: #c0362f; --teal: #46b8c9;
  --rose: #cf5f93; --gray: #b4bac4; --good: #1a7350; --bad: #b3261e; --going: #1f58b8;
  --age-0: #a5dcd3; --age-1: #7ac7cb; --age-2: #52acc3; --age-3: #378eb8; --age-4: #2f6fa6; --age-5: #2b518e;
  --age-6: #29336d; }
@media screen and (prefers-color-scheme: dark) { :root { color-scheme: dark;
  --paper: #14161a; --ink: #e7e9ed; --soft: #a1a9b6; --rule: #2b2f37; --panel: #1b1e24; --grid: #282c34;
  --blue: #6ea3f5; --green: #49b98b; --amber: #e5a54b; --violet: #a98ae0; --red: #e5716b; --teal: #5cc0cc;
  --rose: #e089b2; --gray: #565d69; --good: #57c898; --bad: #f08a84; --going: #82b1f8;
  --age-0: #3b6f8c; --age-1: #3f829a; --age-2: #4896a6; --age-3: #5ca9ae; --age-4: #78bbb4; --age-5: #97cbbd;
  --age-6: #b9dccb; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1240px; padding: 40px 28px 64px; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "Helvetica Neue", Arial, sans-serif; }
h1, p, th { overflow-wrap: anywhere; }
h1 { font-size: 26px; line-height: 1.25; margin: 0; letter-spacing: -0.01em; }
h2 { font-size: 18px; margin: 40px 0 12px; padding-top: 20px; border-top: 1px solid var(--rule); }
h2 + p { margin: -6px 0 16px; color: var(--soft); max-width: 88ch; }
header p { margin: 6px 0 0; color: var(--soft); }
header p.lead { color: var(--ink); font-size: 17px; max-width: 78ch; margin-top: 16px; }
header p.lead.warns { color: var(--bad); }
header p.reason { margin-top: 16px; padding: 2px 0 2px 14px; border-left: 3px solid currentColor;
  white-space: pre-wrap; }
.badge { display: inline-block; font-size: 12px; font-weight: 600; letter-spacing: 0; vertical-align: 4px;
  margin-left: 12px; padding: 1px 9px; border: 1px solid currentColor; border-radius: 99px; }
.finished { color: var(--good); } .running { color: var(--going); }
.failed, .died, header p.failed, header p.died { color: var(--bad); }
.stopped { color: var(--soft); }
.tiles { display: grid; grid-template-columns: repeat(4, 1fr); gap: 12px; margin: 26px 0 0; }
.tiles div { background: var(--panel); border-radius: 10px; padding: 12px 16px; }
.tiles dt { color: var(--soft); font-size: 13px; }
.tiles dd { margin: 2px 0 0; font-size: 22px; font-weight: 600; font-variant-numeric: tabular-nums; }
.tiles dd small { display: block; font-size: 12px; font-weight: 400; color: var(--soft); }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(340px, 100%), 1fr)); gap: 26px 24px; }
figure { margin: 0; position: relative; min-width: 0; break-inside: avoid; }
figcaption { font-weight: 600; font-size: 14px; margin: 0 0 4px; }
figcaption small { font-weight: 400; color: var(--soft); margin-left: 8px; }
svg { display: block; width: 100%; height: auto; overflow: visible; }
svg text { font: 10.5px system-ui, -apple-system, "Segoe UI", Arial, sans-serif; fill: var(--soft); }
svg .value { fill: var(--ink); font-size: 9.5px; }
svg .grid { stroke: var(--grid); } svg polygon ~ .grid { stroke: var(--paper); opacity: 0.35; }
svg polygon { stroke: var(--paper); stroke-width: 0.6; }
svg .limit { stroke: var(--bad); stroke-dasharray: 4 3; } svg .limit-label { fill: var(--bad); }
svg .line { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
svg .faint { fill: none; stroke-width: 1; opacity: 0.35; }
svg .cursor { stroke: var(--soft); stroke-dasharray: 2 2; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 2px 14px; margin: 6px 0 0; padding: 0;
  font-size: 12px; color: var(--soft); }
i { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 6px;
  print-color-adjust: exact; }
.tip { position: absolute; top: 30px; pointer-events: none; background: var(--paper); border: 1px solid var(--rule);
  border-radius: 6px; padding: 5px 10px; font-size: 12px; line-height: 1.5; white-space: pre; z-index: 1;
  box-shadow: 0 2px 8px #0003; font-variant-numeric: tabular-nums; }
.columns { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(340px, 100%), 1fr)); gap: 8px 40px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
td, th { text-align: left; padding: 6px 24px 6px 0; border-bottom: 1px solid var(--rule); vertical-align: top; }
td:last-child, th:last-child { padding-right: 0; }
th { color: var(--soft); font-weight: 500; font-size: 13px; vertical-align: bottom; overflow-wrap: normal; }
td.n, th.n { text-align: right; white-space: nowrap; width: 1%; }
.text { display: block; min-width: 12ch; white-space: pre-wrap; overflow-wrap: anywhere; max-height: 15em;
  overflow-y: auto; }
td.n .text { min-width: 0; white-space: nowrap; }
.verbatim { font: 13px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
.wide { overflow-x: auto; }
details pre { background: var(--panel); border-radius: 10px; padding: 14px 18px; overflow-x: auto;
  font: 12.5px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
summary { cursor: pointer; color: var(--soft); }
@media (max-width: 720px) { body { padding: 24px 16px 40px; } .tiles { grid-template-columns: repeat(2, 1fr); }
  .tiles div { padding: 10px 12px; } .tiles dd { font-size: 19px; } }
@page { margin: 14mm; }
@media print { body { max-width: none; padding: 0; font-size: 13px; }
  h2 { margin-top: 22px; padding-top: 14px; } h2, h2 + p, thead { break-after: avoid; } tr { break-inside: avoid; }
  .tiles { grid-template-columns: repeat(4, 1fr); gap: 8px; } .tiles dd { font-size: 17px; }
  .tiles div { border: 1px solid var(--rule); padding: 8px 10px; break-inside: avoid; }
  .charts { grid-template-columns: repeat(2, 1fr); gap: 18px 20px; }
  .columns { grid-template-columns: 1fr 1fr; }
  table { font-size: 12px; } .verbatim { font-size: 11px; } .text { max-height: none; } .wide { overflow: visible; }
  summary { display: none; } details::details-content { content-visibility: visible; }
  details pre { columns: 3; column-gap: 20px; margin: 0; padding: 0; background: none; overflow: visible;
    white-space: pre-wrap; overflow-wrap: anywhere; font-size: 9.5px; } }
"""

AGE_COLORS = tuple(f"age-{index}" for index in range(7))
"""Colours by age, from the lowest staleness to the highest."""

# Shows the numbers of the nearest step under the pointer. It sets text by textContent, so text of a run is never
# markup.
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
  const text = (v) => data.percent ? (100 * v).toFixed(1) + " %%" : Number(v.toPrecision(4));
  const line = (words) => Object.assign(document.createElement("div"), { textContent: words });
  const hide = () => { cursor.remove(); tip.remove(); };
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const at = first + ((event.clientX - box.left) / box.width * width - left) / (width - left - right) * span;
    let nearest = 0;
    data.xs.forEach((x, i) => { if (Math.abs(x - at) < Math.abs(data.xs[nearest] - at)) nearest = i; });
    const x = left + (data.xs[nearest] - first) / span * (width - left - right);
    cursor.setAttribute("x1", x); cursor.setAttribute("x2", x);
    const at_x = data.x === "step" ? "step " + data.xs[nearest] : data.xs[nearest] + " " + data.x;
    tip.replaceChildren(line(at_x), ...data.series.filter((s) => s.ys[nearest] !== null).map((s) => {
      const entry = line(s.name + "  " + text(s.ys[nearest])), swatch = document.createElement("i");
      swatch.style.background = `var(--${s.color})`;
      entry.prepend(swatch);
      return entry;
    }));
    svg.append(cursor); figure.append(tip);
    const place = x / width * box.width, beside = place > box.width / 2 ? place - tip.offsetWidth - 10 : place + 10;
    tip.style.left = Math.max(0, Math.min(box.width - tip.offsetWidth, beside)) + "px";
  });
}
"""


def page(*, title: str, body: str, script_values: dict[str, int]) -> str:
    """Returns the whole document with this body. `script_values` are the margins of the charts."""
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
    """Returns tiles; each entry is (name, value, note in small print)."""
    cells = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(note)}</small></dd></div>"
        for name, value, note in entries
    )
    return f'<dl class="tiles">{cells}</dl>'


def table(
    rows: Sequence[tuple[str, ...]],
    *,
    head: tuple[str, ...],
    numeric: frozenset[int] = frozenset(),
    verbatim: frozenset[int] = frozenset(),
) -> str:
    """Returns a table of text. `numeric` columns are aligned right; `verbatim` columns keep all white space."""

    def cell(index: int, words: str) -> str:
        css = "text verbatim" if index in verbatim else "text"
        return f'<td{_aligned(index in numeric)}><span class="{css}">{escape(words)}</span></td>'

    top = "".join(f"<th{_aligned(index in numeric)}>{escape(words)}</th>" for index, words in enumerate(head))
    body = "".join(f"<tr>{''.join(cell(*each) for each in enumerate(row))}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _aligned(right: bool) -> str:
    return ' class="n"' if right else ""
