// Returns the problems of the report in its present layout, one sentence each; an empty list when there are none. The
// viewport must be as high as the page, because elementsFromPoint works only inside the viewport.
() => {
  const problems = [];
  const rgba = (css) => {
    const [r, g, b, a = 1] = css.match(/[\d.]+/g)?.map(Number) ?? [0, 0, 0, 0];
    return { rgb: [r, g, b], a };
  };
  const over = (below, { rgb, a }) => below.map((channel, i) => channel * (1 - a) + rgb[i] * a);
  const luminance = (rgb) => {
    const [r, g, b] = rgb.map((c) => c / 255).map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (one, other) => {
    const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const opacity = (element) => (element ? Number(getComputedStyle(element).opacity) * opacity(element.parentElement) : 1);
  const inSvg = (element) => element instanceof SVGElement && !(element instanceof SVGSVGElement);
  const paint = (element) => {
    const style = getComputedStyle(element);
    const color = rgba(inSvg(element) ? (style.fill === "none" ? "" : style.fill) : style.backgroundColor);
    return { rgb: color.rgb, a: color.a * opacity(element) };
  };
  const paper = matchMedia("print").matches ? [255, 255, 255] : rgba(getComputedStyle(document.body).backgroundColor).rgb;

  const texts = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement, words = walker.currentNode.textContent.trim();
    if (!words || element.closest("script, style") || !element.checkVisibility()) continue;
    const range = document.createRange();
    range.selectNodeContents(walker.currentNode);
    texts.push({ element, words: words.slice(0, 40), boxes: [...range.getClientRects()].filter((box) => box.width > 0) });
  }

  for (const { element, words, boxes } of texts) {
    const scroller = element.closest(".wide, .text, pre")?.closest(".wide, pre")?.getBoundingClientRect();
    let worst = Infinity;
    for (const box of boxes) {
      for (const part of [0.02, 0.5, 0.98]) {
        const [x, y] = [Math.floor(box.left + part * box.width), box.top + box.height / 2];
        if (scroller && (x < scroller.left || x > scroller.right)) continue;
        const stack = document.elementsFromPoint(x, y);
        if (!stack.length) problems.push(`“${words}” lies outside the page, at ${x}, ${y}`);
        const below = stack.slice(Math.max(0, stack.indexOf(element))).filter((each) => !(each instanceof SVGTextElement));
        const behind = below.reverse().reduce((color, each) => over(color, paint(each)), paper);
        const style = getComputedStyle(element), ink = rgba(inSvg(element) ? style.fill : style.color);
        worst = Math.min(worst, contrast(over(behind, { rgb: ink.rgb, a: ink.a * opacity(element) }), behind));
      }
    }
    if (worst < 4.5) problems.push(`“${words}” has a contrast of ${worst.toFixed(2)}`);
  }

  const root = document.documentElement;
  if (root.scrollWidth > root.clientWidth) problems.push(`the page is ${root.scrollWidth} wide in ${root.clientWidth}`);

  for (const figure of document.querySelectorAll("figure")) {
    const title = figure.querySelector("figcaption").firstChild.textContent, frame = figure.getBoundingClientRect();
    const svg = figure.querySelector("svg"), inside = svg.getBoundingClientRect();
    const marks = [...svg.querySelectorAll("path, polygon, rect, circle")].filter((mark) => {
      const box = mark.getBoundingClientRect(), style = getComputedStyle(mark);
      const color = rgba(style.fill === "none" ? style.stroke : style.fill);
      return (
        box.width + box.height > 1 && box.left >= inside.left - 4 && box.right <= inside.right + 4 &&
        box.top >= inside.top - 4 && box.bottom <= inside.bottom + 4 && contrast(over(paper, color), paper) > 1.3
      );
    });
    if (!marks.length) problems.push(`${title}: nothing is drawn`);
    for (const swatch of figure.querySelectorAll(".legend i")) {
      const color = getComputedStyle(swatch).backgroundColor, box = swatch.getBoundingClientRect();
      const drawn = marks.some((mark) => [getComputedStyle(mark).fill, getComputedStyle(mark).stroke].includes(color));
      if (!drawn || box.width < 5 || box.height < 5) {
        problems.push(`${title}: “${swatch.parentElement.textContent}” of the legend is not in the picture`);
      }
    }
    // The box of a line of text has some room above and below its letters, which may overlap another box.
    const labels = texts.filter(({ element }) => figure.contains(element)).flatMap(({ words, boxes }) =>
      boxes.map((box) => ({ words, left: box.left, right: box.right, top: box.top + 2, bottom: box.bottom - 2 })));
    labels.forEach((one, index) => {
      if (one.left < frame.left - 1 || one.right > frame.right + 1 || one.top < frame.top - 1 || one.bottom > frame.bottom + 1) {
        problems.push(`${title}: “${one.words}” leaves the figure`);
      }
      for (const other of labels.slice(index + 1)) {
        if (one.left < other.right && other.left < one.right && one.top < other.bottom && other.top < one.bottom) {
          problems.push(`${title}: “${one.words}” and “${other.words}” overlap`);
        }
      }
    });
  }
  return problems;
}
