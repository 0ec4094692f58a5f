/* Curves as SVG: a grid, one or more series, a cursor that reads the nearest point. */
const DASHES = ["", "6 3", "2 3", "8 3 2 3", "1 2", "10 4", "4 2 1 2", "12 2"];

/* `nested` draws curves that may lie on one another: the first is the widest, so every one can be seen. `ends` writes
   each curve's name at its end. `calm` lets what is far above the median leave the picture: warm-up, a recovery. */
function chart({ series, format, xFormat, xName = "iteration", fromZero = false, log = false, nested = false, ends = false, calm = false, size = [560, 210] }) {
  const [width, height] = size, left = 52, right = ends ? 34 : 10, top = 8, bottom = 26;
  const usable = (value) => isNumber(value) && (!log || value > 0);
  const points = series.map(({ x, y }) => x.map((value, index) => [value, y[index]]).filter(([a, b]) => isNumber(a) && usable(b)));
  const all = points.flat();
  if (!all.length) return h("p.faint", null, "nothing measured yet");
  const xs = all.map((point) => point[0]), ys = all.map((point) => point[1]);
  let x0 = xs.reduce((a, b) => Math.min(a, b)), x1 = xs.reduce((a, b) => Math.max(a, b));
  let y0 = fromZero ? 0 : ys.reduce((a, b) => Math.min(a, b)), y1 = ys.reduce((a, b) => Math.max(a, b));
  if (calm) y1 = Math.min(y1, 3 * median(ys) || y1);
  if (x0 === x1) x1 = x0 + 1;
  const margin = (y1 - y0) * 0.06 || Math.abs(y1) * 0.1 || 1;
  y1 += margin;
  if (!fromZero) y0 = y0 >= 0 ? Math.max(0, y0 - margin) : y0 - margin;
  const px = (value) => left + ((value - x0) / (x1 - x0)) * (width - left - right);
  const py = (value) => Math.max(2, top + (1 - (value - y0) / (y1 - y0)) * (height - top - bottom));
  const grid = rounds(y0, y1, 5).map((value) => [s("line", { class: "grid", x1: left, x2: width - right, y1: py(value), y2: py(value) }), s("text", { x: left - 6, y: py(value) + 4, "text-anchor": "end" }, format(value))]);
  const axis = rounds(x0, x1, Math.round(width / 90)).map((value) => s("text", { x: px(value), y: height - 8, "text-anchor": "middle" }, xFormat ? xFormat(value) : short(value)));
  const lines = series.map(({ tint, dots, faint }, index) => {
    const path = points[index].map(([x, y], number) => (number ? "L" : "M") + px(x).toFixed(1) + " " + py(y).toFixed(1)).join("");
    const alone = points[index].length === 1, wide = nested ? 1.6 + 1.5 * (series.length - 1 - index) : 1.6;
    const marks = dots || alone ? points[index].map(([x, y]) => s("circle", { cx: px(x), cy: py(y), r: nested ? 2 + wide : 3, fill: tint })) : [];
    const last = points[index].at(-1);
    const name = ends && last ? s("text", { x: px(last[0]) + 5, y: py(last[1]) + 4 }, series[index].short) : null;
    return [s("path", { d: path, stroke: tint, "stroke-opacity": faint ? 0.4 : 1, style: { strokeWidth: wide }, "stroke-dasharray": ends || nested ? DASHES[index % DASHES.length] : "" }), marks, name];
  });
  const cursor = s("line", { class: "cursor", y1: top, y2: height - bottom, visibility: "hidden" });
  const drawing = s("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": series.map((each) => each.name).join(", ") }, grid.flat(), axis, lines.flat(2).filter(Boolean), cursor);
  drawing.addEventListener("pointermove", (event) => {
    const box = drawing.getBoundingClientRect();
    const at = x0 + (((event.clientX - box.left) / box.width) * width - left) / (width - left - right) * (x1 - x0);
    const nearest = (list) => list.reduce((best, point) => (!best || Math.abs(point[0] - at) < Math.abs(best[0] - at) ? point : best), null);
    const found = points.map(nearest), main = found.find(Boolean);
    cursor.setAttribute("x1", px(main[0]));
    cursor.setAttribute("x2", px(main[0]));
    cursor.setAttribute("visibility", "visible");
    tip.show(event, xName + " " + (xFormat ? xFormat(main[0]) : main[0].toLocaleString("en")), found.map((point, index) => point && series[index].name + " " + format(point[1])).filter(Boolean));
  });
  drawing.addEventListener("pointerleave", () => { tip.hide(); cursor.setAttribute("visibility", "hidden"); });
  return drawing;
}

/* A line through a noisy curve: the mean of the neighbours on both sides. */
function smooth(values) {
  const reach = Math.max(2, Math.round(values.length / 60));
  return values.map((value, index) => {
    const near = values.slice(Math.max(0, index - reach), index + reach + 1).filter(isNumber);
    return near.length ? near.reduce((sum, each) => sum + each, 0) / near.length : null;
  });
}

function key(series) {
  return h("div.legend", null, series.map(({ name, tint, faint }) => h("span", null, h("i", { style: { background: tint, opacity: faint ? 0.4 : 1 } }), name)));
}
