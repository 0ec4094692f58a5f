/* The drawn timeline: time from left to right, one lane per rank or per stage, and below it one for what the rank swaps.
   Timelines that share a View zoom together. */
const SWAPS = new Set(["OUT", "IN"]);
const drawnAsBox = (item) => !/^(SEND|RECV)_/.test(item.kind);

/* Lines laid over the colour of a kind, so that kinds differ in greyscale and for colour-blind eyes. The data have them
   as paths of a square of six. */
const woven = new Map();
function weave(pen, fill, path) {
  const name = fill + path + isDark();
  if (!woven.has(name)) {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 12;
    const brush = tile.getContext("2d");
    brush.scale(2, 2);
    brush.fillStyle = fill;
    brush.fillRect(0, 0, 6, 6);
    brush.strokeStyle = isDark() ? "rgb(255 255 255 / 20%)" : "rgb(0 0 0 / 16%)";
    brush.stroke(new Path2D(path));
    const made = pen.createPattern(tile, "repeat");
    made.setTransform(new DOMMatrix().scale(0.5));
    woven.set(name, made);
  }
  return woven.get(name);
}

/* What part of time is shown, and which microbatch is looked at. */
class View {
  constructor() {
    this.full = [0, 1];
    this.shown = null;
    this.focus = null;
    this.byStage = false;
    this.drawings = [];
    this.waiting = false;
  }
  get range() { return this.shown || this.full; }
  get zoomed() { return this.shown !== null; }
  setFull(end) { this.full = [0, Math.max(1, end)]; this.redraw(); }
  zoom(factor, at) {
    const [low, high] = this.range;
    const length = Math.min(this.full[1], Math.max(20, (high - low) * factor));
    const share = (at - low) / (high - low);
    this.show(at - share * length, length);
  }
  pan(ticksMoved) { const [low, high] = this.range; this.show(low + ticksMoved, high - low); }
  show(low, length) {
    if (length >= this.full[1] * 0.999) this.shown = null;
    else { low = Math.max(0, Math.min(low, this.full[1] - length)); this.shown = [low, low + length]; }
    this.redraw();
  }
  reset() { this.shown = null; this.redraw(); }
  look(focus) {
    const same = JSON.stringify(focus) === JSON.stringify(this.focus);
    this.focus = focus;
    if (!same) this.redraw();
  }
  redraw() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => { this.waiting = false; for (const each of this.drawings) each.draw(); });
  }
}

/* Differences back to times: {kind, stage, microbatch, rank, begin, ready, end}. */
function decode(rows, ranks) {
  return rows.map((row, rank) => {
    let at = 0;
    const times = ranks[rank];
    return row.map(([kind, stage, microbatch], index) => {
      const begin = at + times[3 * index], ready = begin + times[3 * index + 1], end = ready + times[3 * index + 2];
      at = end;
      return { kind, stage, microbatch, rank, begin, ready, end };
    });
  });
}

function decodeSwaps(lane, rank) {
  let at = 0;
  return lane.map(([kind, stage, microbatch, gap, took]) => {
    const begin = at + gap;
    at = begin + took;
    return { kind, stage, microbatch, rank, begin, ready: begin, end: at };
  });
}

class Timeline {
  constructor(view, data, label) {
    this.view = view;
    this.data = data;
    this.label = label;
    this.ranks = [];
    this.swaps = [];
    this.lanes = [];
    this.marks = {};
    this.canvas = h("canvas", { role: "img", "aria-label": label, tabindex: 0 });
    this.element = h("div.lane", null, this.canvas);
    view.drawings.push(this);
    this.listen();
    new ResizeObserver(() => view.redraw()).observe(this.element);
  }

  set(rows, { ranks, swaps }) {
    this.ranks = decode(rows, ranks).map((items) => items.filter((item) => !SWAPS.has(item.kind)));
    this.swaps = (swaps || []).map(decodeSwaps);
    this.laid = null;
    this.digits = String(Math.max(0, ...this.ranks.map((row) => row.reduce((most, item) => Math.max(most, item.microbatch), 0)))).length;
    this.view.redraw();
  }

  layOut() {
    const mode = this.view.byStage;
    if (this.laid === mode) return;
    this.laid = mode;
    this.lanes = [];
    const ranksOf = new Map();
    this.ranks.forEach((items, rank) => {
      const stages = [...new Set(items.map((item) => item.stage))].sort((a, b) => a - b);
      stages.forEach((stage) => ranksOf.set(stage, [...(ranksOf.get(stage) || []), rank]));
      if (!mode) this.addLanes("rank " + rank + (this.marks[rank] ? " ▲" : ""), rank, stages, () => true);
    });
    if (!mode) return;
    for (const stage of [...ranksOf.keys()].sort((a, b) => a - b)) {
      for (const rank of ranksOf.get(stage)) {
        const name = "stage " + stage + (ranksOf.get(stage).length > 1 ? "·r" + rank : "");
        this.addLanes(name, rank, [stage], (item) => item.stage === stage);
      }
    }
  }

  addLanes(name, rank, stages, belongs) {
    this.lanes.push({ name, items: this.ranks[rank].filter(belongs), stages });
    const swaps = (this.swaps[rank] || []).filter(belongs);
    if (swaps.length) this.lanes.push({ name: "  swaps", items: swaps, stages });
  }

  get left() { return 62; }
  x(time) { const [low, high] = this.view.range; return this.left + ((time - low) / (high - low)) * (this.width - this.left - 6); }
  time(x) { const [low, high] = this.view.range; return low + ((x - this.left) / (this.width - this.left - 6)) * (high - low); }

  draw() {
    this.layOut();
    const count = Math.max(1, this.lanes.length);
    this.row = count > 24 ? 10 : count > 12 ? 14 : count > 8 ? 18 : 24;
    this.gap = count > 12 ? 2 : 4;
    this.width = Math.max(260, this.element.clientWidth);
    this.height = count * (this.row + this.gap) + 24;
    const scale = Math.max(2, devicePixelRatio || 1);
    if (this.canvas.width !== Math.round(this.width * scale) || this.canvas.height !== Math.round(this.height * scale)) {
      this.canvas.width = Math.round(this.width * scale);
      this.canvas.height = Math.round(this.height * scale);
      this.canvas.style.height = this.height + "px";
    }
    const pen = (this.pen = this.canvas.getContext("2d"));
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, this.width, this.height);
    this.ink = { text: colour("ink"), soft: colour("soft"), faint: colour("faint"), row: colour("row"), line: colour("line"), send: colour("communication") };
    const textures = this.data.textures || {};
    this.fills = Object.fromEntries(Object.entries(this.data.colours).map(([kind, pair]) => [kind, textures[kind] ? weave(pen, pair[isDark() ? 1 : 0], textures[kind]) : pair[isDark() ? 1 : 0]]));
    this.lanes.forEach((lane, number) => this.drawLane(lane, number * (this.row + this.gap)));
    this.drawAxis(count * (this.row + this.gap));
  }

  drawLane(lane, top) {
    const pen = this.pen, [low, high] = this.view.range, right = this.width - 6;
    pen.globalAlpha = 1;
    pen.fillStyle = this.ink.row;
    pen.fillRect(this.left, top, right - this.left, this.row);
    pen.save();
    pen.beginPath();
    pen.rect(this.left, top, right - this.left, this.row);
    pen.clip();
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    const items = lane.items;
    let first = 0, last = items.length;
    while (first < last) { const middle = (first + last) >> 1; if (items[middle].end < low) first = middle + 1; else last = middle; }
    for (let index = first; index < items.length && items[index].begin <= high; index += 1) this.drawItem(items[index], lane, top);
    pen.restore();
    pen.globalAlpha = 1;
    pen.fillStyle = this.ink.soft;
    pen.font = "12px ui-sans-serif, system-ui, 'DejaVu Sans', sans-serif";
    pen.textAlign = "left";
    pen.textBaseline = "middle";
    pen.fillText(lane.name, 0, top + this.row / 2 + 1);
  }

  drawItem(item, lane, top) {
    const pen = this.pen, focus = this.view.focus;
    const dim = focus && (focus.microbatch !== item.microbatch || item.microbatch < 0);
    if (!drawnAsBox(item)) {
      pen.globalAlpha = dim ? 0.25 : 0.9;
      pen.fillStyle = this.ink.send;
      pen.fillRect(this.x(item.begin), top + this.row - 3, Math.max(1, this.x(item.end) - this.x(item.begin)), 3);
      return;
    }
    const left = this.x(item.ready), wide = this.x(item.end) - left;
    const from = this.x(item.begin);
    if (left - from > 2) {
      pen.globalAlpha = 0.55;
      pen.fillStyle = this.ink.line;
      pen.fillRect(from + 0.5, top + this.row / 2 - 1, left - from - 1, 2);
    }
    const chunk = lane.stages.indexOf(item.stage);
    const shade = lane.stages.length > 1 ? 1 - (0.55 * chunk) / (lane.stages.length - 1) : 1;
    pen.globalAlpha = dim ? 0.22 : shade;
    pen.fillStyle = this.fills[item.kind];
    const gap = wide > 5 ? 1 : 0;
    pen.fillRect(left, top, Math.max(0.75, wide - gap), this.row);
    const text = item.microbatch < 0 ? "" : wide > 7 * (this.digits + 1) + 5 ? item.kind + item.microbatch : String(item.microbatch);
    if (text && this.row >= 13 && wide > 7 * this.digits + 3) {
      pen.globalAlpha = dim ? 0.3 : 1;
      pen.fillStyle = this.ink.text;
      pen.font = (this.row > 16 ? 11 : 10) + "px ui-sans-serif, system-ui, 'DejaVu Sans', sans-serif";
      pen.fillText(text, left + wide / 2, top + this.row / 2 + 1);
    }
  }

  drawAxis(top) {
    const pen = this.pen, [low, high] = this.view.range;
    pen.fillStyle = this.ink.faint;
    pen.font = "11px ui-sans-serif, system-ui, 'DejaVu Sans', sans-serif";
    pen.textAlign = "center";
    pen.textBaseline = "top";
    for (const value of rounds(low, high, Math.floor((this.width - this.left) / 90))) {
      const x = this.x(value);
      pen.fillRect(x, top, 1, 4);
      pen.fillText(this.data.unitless ? Number((value * 1e-7).toPrecision(6)) : value === 0 ? "0" : ticks(value), Math.min(x, this.width - 24), top + 7);
    }
  }

  hit(event) {
    const box = this.canvas.getBoundingClientRect();
    const x = event.clientX - box.left, y = event.clientY - box.top;
    const lane = this.lanes[Math.floor(y / (this.row + this.gap))];
    if (!lane || x < this.left) return null;
    const slack = this.time(x + 1.5) - this.time(x), time = this.time(x);
    const inside = (item) => item.ready - slack <= time && time <= item.end + slack;
    return lane.items.find((item) => drawnAsBox(item) && inside(item)) || lane.items.find((item) => !drawnAsBox(item) && item.begin - slack <= time && time <= item.end + slack) || { waiting: true, next: lane.items.find((item) => drawnAsBox(item) && item.ready > time), lane };
  }

  listen() {
    const canvas = this.canvas, view = this.view;
    let drag = null;
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      const x = event.clientX - canvas.getBoundingClientRect().left;
      if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) view.pan(this.time(event.deltaX || event.deltaY) - this.time(0));
      else view.zoom(Math.exp(Math.max(-60, Math.min(60, event.deltaY)) * 0.004), this.time(Math.max(x, this.left)));
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => { drag = event.clientX; canvas.setPointerCapture(event.pointerId); canvas.classList.add("dragging"); });
    canvas.addEventListener("pointerup", () => { drag = null; canvas.classList.remove("dragging"); });
    canvas.addEventListener("pointermove", (event) => {
      if (drag !== null && event.buttons) {
        view.pan(this.time(drag) - this.time(event.clientX));
        drag = event.clientX;
        return;
      }
      this.hover(event);
    });
    canvas.addEventListener("pointerleave", () => { tip.hide(); view.look(null); });
    canvas.addEventListener("dblclick", () => view.reset());
    canvas.addEventListener("keydown", (event) => {
      const [low, high] = view.range, middle = (low + high) / 2, part = (high - low) / 6;
      const act = { "+": () => view.zoom(0.7, middle), "=": () => view.zoom(0.7, middle), "-": () => view.zoom(1.4, middle), ArrowLeft: () => view.pan(-part), ArrowRight: () => view.pan(part), "0": () => view.reset(), Escape: () => view.reset() }[event.key];
      if (act) { event.preventDefault(); act(); }
    });
  }

  hover(event) {
    const item = this.hit(event);
    if (!item) { tip.hide(); this.view.look(null); return; }
    const when = (value) => (this.data.unitless ? Number((value * 1e-7).toPrecision(6)) : ticks(value));
    if (item.waiting) {
      this.view.look(null);
      const next = item.next ? "next: " + item.next.stage + item.next.kind + (item.next.microbatch < 0 ? "" : item.next.microbatch) : "nothing left to do in this step";
      tip.show(event, "idle", [item.lane.name, next]);
      return;
    }
    this.view.look(item.microbatch >= 0 ? { microbatch: item.microbatch } : null);
    const lines = [(this.data.kinds[item.kind] || "message") + (item.microbatch >= 0 ? ", microbatch " + item.microbatch : ""), "stage " + item.stage + " on rank " + item.rank, "from " + when(item.ready) + " to " + when(item.end) + " (" + when(item.end - item.ready) + ")"];
    if (item.ready - item.begin > 10) lines.push("waited " + when(item.ready - item.begin));
    tip.show(event, item.stage + item.kind + (item.microbatch < 0 ? "" : item.microbatch), lines);
  }
}

/* The box of a kind as the timeline draws it. */
function swatch(data, kind) {
  const path = (data.textures || {})[kind], fill = data.colours[kind][isDark() ? 1 : 0];
  const lines = path ? s("path", { d: path + "M0 0", transform: "scale(2)", stroke: isDark() ? "#fff" : "#000", "stroke-opacity": 0.25, fill: "none", "stroke-width": 0.6 }) : null;
  return s("svg", { class: "swatch", viewBox: "0 0 12 12" }, s("rect", { width: 12, height: 12, rx: 2, fill }), lines);
}

function legend(data, used) {
  const parts = Object.entries(data.kinds).filter(([kind]) => used.has(kind)).map(([kind, name]) => h("span", null, swatch(data, kind), kind.length === 1 ? kind + " " + name : name));
  return [...parts, h("span", null, h("i", { style: { background: "var(--communication)", height: "4px", verticalAlign: "3px" } }), "message posted"), h("span", null, h("i", { style: { background: "var(--row)" } }), "idle")];
}
