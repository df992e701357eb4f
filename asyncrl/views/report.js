// Shows the numbers of the nearest step under the pointer. It sets text by textContent, so that text of a run is never
// markup.
for (const figure of document.querySelectorAll("figure")) {
  const source = figure.querySelector("script[type='application/json']");
  if (!source) continue;
  const data = JSON.parse(source.textContent), svg = figure.querySelector("svg");
  const width = svg.viewBox.baseVal.width, height = svg.viewBox.baseVal.height;
  const [left, right, top, bottom] = document.body.dataset.margins.split(" ").map(Number);
  const first = data.xs[0], span = (data.xs[data.xs.length - 1] - first) || 1;
  const cursor = document.createElementNS("http://www.w3.org/2000/svg", "line");
  cursor.setAttribute("class", "cursor");
  cursor.setAttribute("y1", top); cursor.setAttribute("y2", height - bottom);
  const tip = document.createElement("div");
  tip.className = "tip";
  const text = (v) => data.percent ? (100 * v).toFixed(1) + " %" : Number(v.toPrecision(4));
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
