/* The page of a comparison: one table, bars with their spread, loss curves by iteration and by time. */
const TINTS = ["#2f6db5", "#d1672f", "#2f8f5b", "#a04fb5", "#c29a1b", "#2a9aa3", "#c2476b", "#6b7a8f", "#7a5c3e", "#5263d1"];

function start() {
  document.documentElement.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  const data = JSON.parse(document.getElementById("data").textContent);
  const groups = data.groups, done = groups.filter((group) => isNumber(group.throughput));
  const several = (key) => new Set(groups.map((group) => group[key])).size > 1;
  const label = (group) => [several("model") && group.model, group.schedule, several("num_microbatches") && "m=" + group.num_microbatches].filter(Boolean).join(" ");
  const tint = (group) => TINTS[[...new Set(groups.map((each) => each.schedule))].indexOf(group.schedule) % TINTS.length];
  const main = h("main", null, h("header", null, h("h1", null, data.title), h("span.subtitle", null, data.about.subtitle || ""), h("span.spacer"), h("button", { id: "theme", onclick: () => { document.documentElement.dataset.theme = isDark() ? "light" : "dark"; } }, "◐")),
    h("section", { id: "results" }, h("h2", null, "Results"), results(groups, several), verdict(groups), data.caveats.map((sentence) => h("p.caveat", null, sentence))),
    h("div.pair", null,
      h("section", { id: "throughput" }, h("h2", null, "Throughput, tokens per second"), bars(done, label, tint, (group) => group.throughput, short, (group) => group.spread)),
      h("section", { id: "bubble" }, h("h2", null, "Idle time of all ranks, by cause"), causes(done, label)),
      h("section", null, h("h2", null, "Memory of tensors, largest rank"), bars(done.filter((group) => isNumber(group.memory)), label, tint, (group) => group.memory, bytes)),
      h("section", null, h("h2", null, "Time per iteration"), bars(done.filter((group) => isNumber(group.seconds)), label, tint, (group) => group.seconds, seconds))),
    h("div.pair", null, curve("Loss by iteration", done, label, tint, 1), curve("Loss by training time", done, label, tint, 0)),
    h("p.faint", null, data.about.footer || ""));
  document.getElementById("app").replaceChildren(main);
}

function results(groups, several) {
  const best = Math.max(...groups.map((group) => group.throughput || 0)), sync = groups.find((group) => group.mode === "bsp" && isNumber(group.final_loss));
  const rows = groups.map((group) => {
    const rate = isNumber(group.throughput) ? fixed(group.throughput, 0) + (isNumber(group.spread) ? " ± " + fixed(group.spread, 0) : "") : DASH;
    const apart = group.mode !== "bsp" && sync && isNumber(group.final_loss) ? (group.final_loss >= sync.final_loss ? "+" : "−") + fixed(Math.abs(group.final_loss - sync.final_loss), 4) + " against " + sync.schedule + (sync.updates && group.updates !== sync.updates ? " after " + fixed(group.updates / sync.updates, 1) + " times as many updates" : "") : "";
    const says = group.failed.length ? h("span.bad", null, group.failed[0]) : group.mode !== "bsp" ? "asynchronous: staleness " + (group.staleness || []).join(" ") + (apart && "; loss " + apart) : group.equal === "equal" ? h("span.good", null, "equal to the bit") : h("span.bad", null, group.equal || "");
    return [group.schedule, ...(several("model") ? [group.model] : []), group.num_microbatches, group.runs, isNumber(group.updates) ? fixed(group.updates, 0) : DASH, rate, isNumber(group.throughput) ? percent(group.throughput / best, 0) : DASH, isNumber(group.mfu) ? percent(group.mfu) : "n/a", percent(group.bubble), bytes(group.memory), fixed(group.final_loss, 4), fixed(group.evaluation_loss, 4), says];
  });
  const head = ["schedule", ...(several("model") ? ["model"] : []), "m", "runs", "updates", "tokens/s", "of best", "MFU", "bubble", "memory", "loss", "evaluation", "losses"];
  return table(head, rows, { wide: [head.length - 1] });
}

function verdict(groups) {
  const sync = groups.filter((group) => group.mode === "bsp" && group.equal);
  const wrong = sync.filter((group) => group.equal !== "equal");
  if (sync.length < 1) return h("p.faint", null, "No synchronous run to compare losses with.");
  return wrong.length ? h("p.bad", { id: "verdict" }, "Synchronous schedules do not agree: " + wrong.map((group) => group.schedule + " " + group.equal).join("; ")) : h("p.good", { id: "verdict" }, "All synchronous runs of the same model and number of microbatches gave the same losses to the bit.");
}

function bars(groups, label, tint, value, format, spread = () => null) {
  if (!groups.length) return h("p.faint", null, "nothing measured");
  const width = 560, row = 24, left = 150, right = 84, height = groups.length * row + 4;
  const most = Math.max(...groups.map((group) => value(group) + (spread(group) || 0))) || 1;
  const scale = (amount) => (amount / most) * (width - left - right);
  const drawn = groups.map((group, index) => {
    const y = index * row + 3, wide = scale(value(group)), error = spread(group);
    const whisker = isNumber(error) ? s("path", { d: `M${left + scale(Math.max(0, value(group) - error))} ${y + 8}H${left + scale(value(group) + error)}`, stroke: "currentColor" }) : null;
    return [s("text", { x: left - 8, y: y + 13, "text-anchor": "end" }, label(group)), s("rect", { x: left, y, width: Math.max(1, wide), height: 16, rx: 2, fill: tint(group) }, s("title", null, label(group) + ": " + format(value(group)))), whisker, s("text", { x: left + scale(value(group) + (error || 0)) + 6, y: y + 13 }, format(value(group)))];
  });
  return s("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "img" }, drawn.flat());
}

function causes(groups, label) {
  const names = [["warmup_drain", "warm-up and drain"], ["imbalance", "imbalance"], ["communication", "communication"], ["data", "waiting for data"], ["overhead", "runtime overhead"], ["cores", "waiting for a core"]];
  const rows = groups.filter((group) => group.idle_by_cause).map((group) => [label(group), h("div.bar", null, group.idle_by_cause.map((share, index) => h("i", { title: names[index][1] + " " + percent(share), style: { width: 100 * share + "%", background: `var(--${names[index][0]})` } }))), percent(group.bubble)]);
  return h("div", null, table(["", "", "idle"], rows, { wide: [1] }), h("div.legend", null, names.map(([name, text]) => h("span", null, h("i", { style: { background: `var(--${name})` } }), text))));
}

function curve(title, groups, label, tint, column) {
  const series = groups.map((group) => ({ name: label(group), x: group.curve.map((point) => point[column]), y: group.curve.map((point) => point[2]), tint: tint(group) }));
  return h("section", null, h("h2", null, title), chart({ series, nested: true, format: (value) => String(Number(value.toPrecision(5))), xFormat: column ? null : seconds, xName: column ? "iteration" : "after" }), key(series));
}
