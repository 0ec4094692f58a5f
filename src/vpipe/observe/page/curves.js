/* Curves over the run: loss, throughput, gradient norm, learning rate, and the ranks one by one. */
const RANKS = ["#2f6db5", "#d1672f", "#2f8f5b", "#a04fb5", "#b08712", "#2a9aa3", "#c2476b", "#6b7a8f"];
const MANY = 8;
const SMALL = [300, 190];
const large = () => (innerWidth < 640 ? SMALL : [620, 190]);

function section(id, title, ...inside) { return h("section", { id }, h("h2", null, title), ...inside); }

function lossCharts(data) {
  const { train, evaluation } = data.metrics, accent = "var(--accent)", digits = (value) => Number(value.toPrecision(4)) + "";
  const loss = [{ name: "loss", x: train.iteration, y: train.loss, tint: accent, faint: train.loss.length > 60 }];
  if (train.loss.length > 60) loss.push({ name: "smoothed", x: train.iteration, y: smooth(train.loss), tint: accent });
  if (evaluation.loss.length) loss.push({ name: "evaluation", x: evaluation.iteration, y: evaluation.loss, tint: "var(--imbalance)", dots: evaluation.loss.length < 40 });
  const one = (name, y, tint) => [{ name, x: train.iteration, y, tint }];
  const rate = one(data.metrics.unit + " per second", train.tokens_per_second, "var(--good)"), norm = one("gradient norm", train.gradient_norm, "var(--overhead)"), pace = one("learning rate", train.learning_rate, "var(--communication)");
  const found = [section("loss", "Loss", chart({ series: loss, format: digits, size: large() }), key(loss)), section("throughput", "Throughput", chart({ series: rate, size: SMALL, format: short, fromZero: true }), key(rate))];
  if (train.gradient_norm.some(isNumber)) found.push(section("norm", "Gradient norm", chart({ series: norm, size: SMALL, format: digits, fromZero: true }), h("p.faint", null, data.facts.synchronous === false ? "before clipping, of rank 0's stages" : "before clipping, over all stages")));
  const parts = data.metrics.norms, last = parts.of.at(-1) || {}, named = Object.keys(last).sort((a, b) => last[b] - last[a]).slice(0, MANY);
  const each = named.map((name, index) => ({ name, x: parts.iteration, y: parts.of.map((norms) => norms[name]), tint: RANKS[index] }));
  if (each.length) found.push(section("norms", "Gradient norm of layers and groups", chart({ series: each, size: SMALL, format: digits, fromZero: true }), key(each), h("p.faint", null, "after clipping; the largest")));
  if (train.learning_rate.some(isNumber)) found.push(section("rate", "Learning rate", chart({ series: pace, size: SMALL, format: (value) => Number(value.toPrecision(2)).toString(), fromZero: true })));
  return found;
}

/* Of many ranks those that matter: the stragglers, the one that works most and the one that works least. */
function worthDrawing(trend) {
  const all = trend.busy.map((_, rank) => rank);
  if (all.length <= MANY) return all;
  const typical = all.map((rank) => median(trend.busy[rank])), order = [...all].sort((a, b) => typical[b] - typical[a]);
  const chosen = new Set([...Object.keys(trend.stragglers).map(Number), order[0], order.at(-1), order[Math.floor(order.length / 2)]]);
  return all.filter((rank) => chosen.has(rank)).slice(0, MANY);
}

function trendCharts(data) {
  const trend = data.trend;
  if (!trend || !trend.iterations.length) return [];
  const ranks = worthDrawing(trend), left = trend.busy.length - ranks.length;
  const lines = (columns) => ranks.map((rank, index) => ({ name: "rank " + rank + (trend.stragglers[rank] ? " ▲" : ""), short: rank + (trend.stragglers[rank] ? "▲" : ""), x: trend.iterations, y: columns[rank], tint: RANKS[index % RANKS.length] }));
  const share = trend.busy.map((row, rank) => row.map((value, index) => (value + trend.waited[rank][index] > 0 ? trend.waited[rank][index] / (value + trend.waited[rank][index]) : null)));
  const note = left ? h("p.faint", null, "drawn: who works most, least and in between, and stragglers; " + left + " ranks are left out") : null;
  const made = (id, title, columns, format) => section(id, title, chart({ series: lines(columns), size: SMALL, format, fromZero: true, calm: true, ends: true }), key(lines(columns)), note && note.cloneNode(true));
  const found = [made("work", "Work of each rank", trend.busy, seconds), made("waits", "Waiting of each rank", share, (value) => percent(value, 0))];
  if (trend.ahead) found.push(made("ahead", "The host's lead over its device", trend.ahead, seconds));
  const held = trend.tensors || trend.process;
  if (held) found.push(made("held", trend.tensors ? "Memory of tensors" : "Memory of the process", held, bytes));
  return found;
}
