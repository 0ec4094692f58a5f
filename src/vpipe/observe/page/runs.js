/* The list of a directory of runs: open one, or choose two and lay them side by side. */
function start() {
  document.documentElement.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  const token = new URLSearchParams(location.search).get("token") || "", chosen = new Set();
  const link = (parts) => "?" + new URLSearchParams({ token, ...parts });
  const button = h("button", { id: "compare", disabled: true, onclick: () => { const [a, b] = chosen; location.href = link({ a, b }); } }, "lay two side by side");
  const choose = (name, box) => {
    if (box.checked) chosen.add(name); else chosen.delete(name);
    button.disabled = chosen.size !== 2;
    for (const each of document.querySelectorAll("#runs input")) each.disabled = chosen.size === 2 && !each.checked;
  };
  const body = h("section", { id: "runs" }, h("p.faint", null, "reading the runs …"));
  document.getElementById("app").replaceChildren(h("main", null, h("header", null, h("h1", null, "Runs"), h("span.spacer"), button, h("button", { id: "theme", "aria-label": "light or dark", onclick: () => { document.documentElement.dataset.theme = isDark() ? "light" : "dark"; } }, "◐")), body));
  const row = (run) => {
    const box = h("input", { type: "checkbox", "aria-label": "choose " + run.name, checked: chosen.has(run.name), onchange: () => choose(run.name, box) });
    const place = run.num_ranks ? `${run.num_ranks} × ${run.num_microbatches}` : DASH;
    return [h("span.pick", null, box, h("a", { href: link({ run: run.name }) }, run.name)), h("span.badge." + run.state.kind, { title: run.state.sentence }, run.state.kind), run.model || DASH, run.schedule || DASH, place, isNumber(run.iteration) ? run.iteration.toLocaleString("en") : DASH, isNumber(run.loss) && run.loss >= 1000 ? short(run.loss) : fixed(run.loss, 4), short(run.tokens_per_second)];
  };
  const read = () => fetch("runs?token=" + encodeURIComponent(token)).then((reply) => reply.json()).then((found) => {
    body.replaceChildren(found.length ? table(["run", "state", "model", "schedule", "ranks × microbatches", "iteration", "loss", "tokens/s"], found.map(row), { wide: [1, 2, 3] }) : h("p", null, "there is no run here yet"));
    for (const each of body.querySelectorAll("input")) each.disabled = chosen.size === 2 && !each.checked;
  }).catch(() => {});
  read();
  setInterval(read, 3000);
}
