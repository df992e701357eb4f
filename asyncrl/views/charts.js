// Shows the numbers at the nearest place under the pointer. It sets text by textContent, so that text of a run is never
// markup.
for (const figure of document.querySelectorAll("figure")) {
  const source = figure.querySelector("script[type='application/json']");
  if (!source) continue;
  const data = JSON.parse(source.textContent), svg = figure.querySelector("svg");
  const width = svg.viewBox.baseVal.width, height = svg.viewBox.baseVal.height;
  const [left, right, top, bottom] = document.body.dataset.margins.split(" ").map(Number);
  const placesOf = (series) => series.xs ?? data.xs;
  const places = [...new Set(data.series.flatMap(placesOf))].sort((one, other) => one - other);
  const first = places[0], span = (places[places.length - 1] - first) || 1;
  const nearest = (xs, at) => xs.reduce((best, x, i) => (Math.abs(x - at) < Math.abs(xs[best] - at) ? i : best), 0);
  const cursor = document.createElementNS("http://www.w3.org/2000/svg", "line");
  cursor.setAttribute("class", "cursor");
  cursor.setAttribute("y1", top); cursor.setAttribute("y2", height - bottom);
  const tip = document.createElement("div");
  tip.className = "tip";
  const text = (v) => data.percent ? (100 * v).toFixed(1) + " %" : Number(v.toPrecision(4));
  const line = (words) => Object.assign(document.createElement("div"), { textContent: words });
  const hide = () => { cursor.remove(); tip.remove(); };
  // The value of a line at its own place that is nearest to `at`; null before the line begins and after it ends.
  const valueAt = (series, at) => {
    const xs = placesOf(series);
    return at < xs[0] || at > xs[xs.length - 1] ? null : series.ys[nearest(xs, at)];
  };
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const pointed = first + ((event.clientX - box.left) / box.width * width - left) / (width - left - right) * span;
    const at = places[nearest(places, pointed)];
    const x = left + (at - first) / span * (width - left - right);
    cursor.setAttribute("x1", x); cursor.setAttribute("x2", x);
    const entries = data.series.map((series) => [series, valueAt(series, at)]).filter(([, value]) => value !== null);
    tip.replaceChildren(line(data.x === "step" ? "step " + at : at + " " + data.x), ...entries.map(([series, value]) => {
      const entry = line(series.name + "  " + text(value)), swatch = document.createElement("i");
      swatch.style.background = `var(--${series.color})`;
      entry.prepend(swatch);
      return entry;
    }));
    svg.append(cursor); figure.append(tip);
    const place = x / width * box.width, beside = place > box.width / 2 ? place - tip.offsetWidth - 10 : place + 10;
    tip.style.left = Math.max(0, Math.min(box.width - tip.offsetWidth, beside)) + "px";
  });
}
