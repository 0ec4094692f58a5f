/* Two runs side by side: state, figures, one step each on the same scale of time, and their curves in one picture. */
async function start() {
  document.documentElement.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  const query = new URLSearchParams(location.search), token = query.get("token") || "", names = [query.get("a") || "", query.get("b") || ""];
  const app = document.getElementById("app");
  app.replaceChildren(h("main", null, h("p.faint", null, "reading the runs …")));
  const read = (name) => fetch("data?" + new URLSearchParams({ token, run: name })).then((reply) => reply.json());
  const found = await Promise.all(names.map(read)).catch(() => null);
  const wrong = found && found.find((each) => each.error);
  if (!found || wrong) { app.replaceChildren(h("main", null, h("p", null, wrong ? wrong.error : "the server does not answer"))); return; }
  const view = new View();
  view.setFull(Math.max(1, ...found.map((data) => (data.steps.at(-1) || { span: 1 }).span)));
  const column = (data) => {
    const drawn = data.steps.at(-1), line = drawn ? new Timeline(view, data, "measured timeline of " + data.title) : null, facts = data.facts;
    if (drawn) line.set(data.programs[drawn.program].rows, drawn);
    const what = [(facts.model || {}).name, facts.schedule, facts.num_ranks && facts.num_ranks + " ranks", facts.num_microbatches && facts.num_microbatches + " microbatches"].filter(Boolean).join(" · ");
    return h("div.column", null, h("header", null, h("h2", null, h("a", { href: "?" + new URLSearchParams({ token, run: data.title }) }, data.title)), h("span.badge." + data.state.kind, null, data.state.kind), h("span.subtitle", null, what)),
      statePanel(data), facts.num_ranks ? verdictPanel(data) : null, facts.num_ranks ? tiles(data) : null,
      line ? h("section", null, h("h2", null, "Step " + drawn.step + ", " + ticks(drawn.span)), line.element, h("div.legend", null, legend(data, new Set(data.programs[drawn.program].rows.flat().map((action) => action[0]))))) : null);
  };
  const both = (title, name, format, fromZero) => {
    const series = found.map((data, index) => ({ name: data.title, x: data.metrics.train.iteration, y: data.metrics.train[name], tint: index ? "var(--imbalance)" : "var(--accent)" }));
    return h("section", null, h("h2", null, title), chart({ series, format, fromZero, nested: true }), key(series));
  };
  app.replaceChildren(h("main.wide", null, h("header", null, h("h1", null, "Two runs"), h("span.spacer"), h("a", { href: "?" + new URLSearchParams({ token }) }, "all runs")),
    h("div.pair", { id: "columns" }, found.map(column)),
    h("div.pair", { id: "both" }, both("Loss", "loss", (value) => Number(value.toPrecision(4)) + ""), both("Throughput, tokens per second", "tokens_per_second", short, true))));
  view.redraw();
}
