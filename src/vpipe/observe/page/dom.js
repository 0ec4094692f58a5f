/* Elements from data. Text is only ever set as text: nothing of a run is parsed as HTML. */
const SVG = "http://www.w3.org/2000/svg";

function h(tag, attributes, ...children) {
  const [name, ...classes] = tag.split(".");
  const made = document.createElement(name);
  if (classes.length) made.className = classes.join(" ");
  return filled(made, attributes, children);
}

function s(tag, attributes, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(made, attributes, children) {
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (key === "style") Object.assign(made.style, value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  for (const child of children.flat()) if (child !== null && child !== undefined) made.append(child);
  return made;
}

function table(head, rows, { wide = [] } = {}) {
  const cell = (tag, value, column) => h(wide.includes(column) ? tag + ".wide" : tag, tag === "td" ? { "data-label": head[column] instanceof Node ? head[column].textContent : head[column] } : null, value instanceof Node ? value : String(value));
  const body = rows.map((row) => h(row.total ? "tr.total" : "tr", null, (row.cells || row).map((value, column) => cell("td", value, column))));
  return h("div.scroll", null, h("table", null, h("thead", null, h("tr", null, head.map((value, column) => cell("th", value, column)))), h("tbody", null, body)));
}

const DASH = "–";
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

function fixed(value, digits) {
  return isNumber(value) ? value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }) : DASH;
}
function percent(value, digits = 1) {
  return isNumber(value) ? fixed(value * 100, digits) + " %" : DASH;
}
function seconds(value) {
  if (!isNumber(value)) return DASH;
  const size = Math.abs(value);
  if (size >= 100) return fixed(value, 0) + " s";
  if (size >= 1) return fixed(value, 2) + " s";
  if (size >= 1e-3) return fixed(value * 1e3, size >= 0.1 ? 0 : size >= 0.01 ? 1 : 2) + " ms";
  return fixed(value * 1e6, size >= 1e-5 || size === 0 ? 0 : 1) + " µs";
}
const ticks = (value) => seconds(value * 1e-7);
function bytes(value) {
  if (!isNumber(value)) return DASH;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (Math.abs(value) >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
  return fixed(value, unit && value < 100 ? 1 : 0) + " " + units[unit];
}
function short(value) {
  if (!isNumber(value)) return DASH;
  for (const [size, unit] of [[1e9, "B"], [1e6, "M"], [1e3, "K"]]) if (Math.abs(value) >= size) return Number((value / size).toPrecision(3)) + unit;
  return String(Number(value.toPrecision(4)));
}
function median(values) {
  const known = values.filter(isNumber).sort((a, b) => a - b);
  return known.length ? known[Math.floor((known.length - 1) / 2)] : null;
}
/* Round numbers between low and high, at most `most` of them. */
function rounds(low, high, most) {
  const raw = (high - low) / Math.max(1, most) || 1;
  const size = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * size).find((each) => each >= raw) || raw;
  const found = [];
  for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + step * 1e-9; value += step) found.push(Math.abs(value) < step * 1e-9 ? 0 : value);
  return found;
}
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const isDark = () => document.documentElement.dataset.theme === "dark";

const tip = {
  show(event, title, lines) {
    let box = document.getElementById("tip");
    if (!box) document.body.append((box = h("div", { id: "tip", role: "status" })));
    box.replaceChildren(h("b", null, title), ...lines.map((line) => h("div", null, line)));
    box.hidden = false;
    const { width, height } = box.getBoundingClientRect();
    box.style.left = Math.min(event.clientX + 14, innerWidth - width - 8) + "px";
    box.style.top = (event.clientY + 18 + height > innerHeight ? event.clientY - height - 12 : event.clientY + 18) + "px";
  },
  hide() {
    const box = document.getElementById("tip");
    if (box) box.hidden = true;
  },
};
