/* Schedules in the browser, for the playground that needs no server: programs are unpacked, timed and counted here. The
   rules are those of schedule/semantics.py and schedule/simulate.py, stated again; a test compares the two on hundreds of
   programs. An action is {stage, kind, microbatch}; microbatch is -1 where it has none. */
const FIRST_LETTER = { F: "a", B: "i", I: "q", W: "A", STEP: "I" };
const INPUT_KINDS = ["B", "I"], WEIGHT_KINDS = ["B", "W"];
const tidy = (number) => Math.round(number * 1e9) / 1e9;
const named = (action) => action.stage + action.kind + (action.microbatch < 0 ? "" : action.microbatch);

/* ranksOf[stage]: the ranks that hold it, in the order of the units they take. */
function placed(form, p, v) {
  if (form === "two_ways") return Array.from({ length: p }, (_, stage) => (stage === p - 1 - stage ? [stage] : [stage, p - 1 - stage]));
  const down = Array.from({ length: p }, (_, rank) => rank), wave = [...down, ...down.slice().reverse()];
  return Array.from({ length: p * v }, (_, stage) => [form === "zigzag" ? wave[stage % (2 * p)] : stage % p]);
}
const homeOf = (ranksOf, stage, microbatch) => ranksOf[stage][microbatch % ranksOf[stage].length];
const held = (ranksOf, rank) => ranksOf.flatMap((ranks, stage) => (ranks.includes(rank) ? [stage] : []));

/* A row is a letter per action, kind and place of the stage among those of the rank; a number follows where the
   microbatch is not the next one of its stage and kind. */
function unpack(text, ranksOf) {
  return text.split("|").map((row, rank) => {
    const stages = held(ranksOf, rank), next = new Map();
    return [...row.matchAll(/([a-zA-Z])(\d*)/g)].map(([, letter, number]) => {
      const [kind, first] = Object.entries(FIRST_LETTER).find(([, start]) => letter >= start && letter.charCodeAt(0) < start.charCodeAt(0) + 8);
      const stage = stages[letter.charCodeAt(0) - first.charCodeAt(0)];
      if (kind === "STEP") return { stage, kind, microbatch: -1 };
      const key = stage + kind, microbatch = number ? Number(number) : next.has(key) ? next.get(key) : ranksOf[stage].indexOf(rank);
      next.set(key, microbatch + ranksOf[stage].length);
      return { stage, kind, microbatch };
    });
  });
}

const toCsv = (rows) => rows.map((row) => row.map(named).join(",") + "\n").join("");
function fromCsv(text) {
  const lines = text.trimEnd().split("\n");
  return lines.map((line, row) => line.split(",").map((cell) => cell.trim()).filter(Boolean).map((cell, column) => {
    const found = /^(\d{1,6})(?:(F|B|I|W)(\d{1,6})|(STEP))$/.exec(cell);
    if (!found) throw new Error(`the edited program, row ${row + 1}, column ${column + 1}: '${cell}' is not an action such as 0F3 or 2STEP`);
    return { stage: Number(found[1]), kind: found[2] || found[4], microbatch: found[3] === undefined ? -1 : Number(found[3]) };
  }));
}

/* Replicas of a stage meet before they update: updates that follow each other are preceded by one meeting a stage. */
function withMeetings(rows, ranksOf) {
  return rows.map((row) => {
    const made = [];
    row.forEach((action, index) => {
      if (action.kind === "STEP" && (index === 0 || row[index - 1].kind !== "STEP")) {
        let end = index;
        while (end < row.length && row[end].kind === "STEP") end += 1;
        const owed = [...new Set(row.slice(index, end).map((each) => each.stage))].filter((stage) => ranksOf[stage] && ranksOf[stage].length > 1);
        for (const stage of owed.sort((a, b) => a - b)) made.push({ stage, kind: "REDUCE", microbatch: -1 });
      }
      made.push(action);
    });
    return made;
  });
}

/* Times of a rank's whole share of a microbatch are divided by the stages that it holds for one direction. */
function shares(ranksOf) {
  const part = (rank) => { const mine = held(ranksOf, rank); return mine.length / new Set(mine.map((stage) => ranksOf[stage].indexOf(rank))).size; };
  return ranksOf.map((ranks) => 1 / Math.max(...ranks.map(part)));
}

/* Every rank runs its row as far as it gets; what is left when none can go on is stuck. Per rank: [{action, free, begin, end}]. */
function timed(given, ranksOf, costs, blocking) {
  const rows = withMeetings(given, ranksOf), share = shares(ranksOf), stages = ranksOf.length;
  const price = { F: costs.forward, B: costs.input_grad + costs.weight_grad, I: costs.input_grad, W: costs.weight_grad, STEP: 0, REDUCE: 0 };
  const ended = new Map(), sent = new Map(), clock = rows.map(() => 0), at = rows.map(() => 0), ran = rows.map(() => []), rounds = rows.map(() => new Map());
  const key = (stage, kinds, microbatch) => kinds.map((kind) => stage + kind + microbatch).find((name) => ended.has(name));
  const from = (rank, stage, kinds, microbatch) => {  // when a result of another stage is here; -1: not yet
    const name = key(stage, kinds, microbatch);
    if (name === undefined) return -1;
    return homeOf(ranksOf, stage, microbatch) === rank ? ended.get(name) : sent.get(name);
  };
  const needs = (rank, { stage, kind, microbatch }) => {
    if (kind === "F") return stage ? [from(rank, stage - 1, ["F"], microbatch)] : [];
    if (kind === "W") return [from(rank, stage, ["I"], microbatch)];
    if (INPUT_KINDS.includes(kind)) return [from(rank, stage, ["F"], microbatch), ...(stage + 1 < stages ? [from(rank, stage + 1, INPUT_KINDS, microbatch)] : [])];
    if (kind !== "REDUCE") return [];
    const round = rounds[rank].get(stage) || 0;
    return ranksOf[stage].map((other) => { const came = ran[other].came; const when = came && came.get(stage + ":" + round); return when === undefined ? -1 : when; });
  };
  for (let moved = true; moved; ) {
    moved = false;
    rows.forEach((row, rank) => {
      for (; at[rank] < row.length; at[rank] += 1) {
        const action = row[at[rank]];
        if (action.kind === "REDUCE") {
          ran[rank].came = ran[rank].came || new Map();
          const name = action.stage + ":" + (rounds[rank].get(action.stage) || 0);
          if (!ran[rank].came.has(name)) { ran[rank].came.set(name, clock[rank]); moved = true; }
        }
        const when = needs(rank, action);
        if (when.some((time) => time < 0)) return;
        const begin = Math.max(clock[rank], ...when), end = begin + price[action.kind] * share[action.stage];
        ran[rank].push({ action, free: clock[rank], begin, end });
        clock[rank] = end;
        moved = true;
        if (action.kind === "REDUCE") rounds[rank].set(action.stage, (rounds[rank].get(action.stage) || 0) + 1);
        const reader = action.kind === "F" ? action.stage + 1 : INPUT_KINDS.includes(action.kind) ? action.stage - 1 : -1;
        ended.set(named(action), end);
        if (reader >= 0 && reader < stages && homeOf(ranksOf, reader, action.microbatch) !== rank) {
          if (blocking) clock[rank] = end + costs.latency;
          sent.set(named(action), end + costs.latency);
        }
      }
    });
  }
  return { ran, clock, share, stuck: rows.flatMap((row, rank) => (at[rank] < row.length ? [{ rank, action: row[at[rank]] }] : [])) };
}

function memoryPeak(row, share) {
  const changes = row.flatMap(({ action, begin, end }) => (action.kind === "F" ? [[tidy(begin), share[action.stage]]] : WEIGHT_KINDS.includes(action.kind) ? [[tidy(end), -share[action.stage]]] : []));
  changes.sort((a, b) => a[0] - b[0] || a[1] - b[1]);
  let now = 0, most = 0;
  for (const [, change] of changes) { now += change; most = Math.max(most, now); }
  return tidy(most);
}

/* Which version of its weights every unit reads, which update takes its gradient, and how many versions live at once. */
function weightFacts(rows, ranksOf, delayed) {
  const read = new Map(), taken = new Map();
  rows.forEach((row) => {
    const made = new Map();
    for (const { stage, kind, microbatch } of row) {
      if (kind === "STEP") made.set(stage, (made.get(stage) || 0) + 1);
      else if (kind === "F") read.set(stage + ":" + microbatch, made.get(stage) || 0);
      else if (WEIGHT_KINDS.includes(kind)) taken.set(stage + ":" + microbatch, made.get(stage) || 0);
    }
  });
  if (delayed) { read.clear(); taken.forEach((update, unit) => read.set(unit, Math.max(0, update - 1))); }
  const staleness = ranksOf.map(() => 0), versions = ranksOf.map(() => 1);
  taken.forEach((update, unit) => { const stage = Number(unit.split(":")[0]); staleness[stage] = Math.max(staleness[stage], update - (read.has(unit) ? read.get(unit) : update)); });
  rows.forEach((row) => {
    const last = new Map(), alive = new Map();
    row.forEach(({ stage, kind, microbatch }, index) => { const unit = stage + ":" + microbatch; if (WEIGHT_KINDS.includes(kind) && read.has(unit)) last.set(stage + ":" + read.get(unit), index); });
    row.forEach(({ stage, kind }, index) => {
      if (kind !== "STEP") return;
      const before = alive.get(stage) || [0], newest = Math.max(...before) + 1;
      alive.set(stage, [...before.filter((version) => (last.has(stage + ":" + version) ? last.get(stage + ":" + version) : -1) > index), newest]);
      versions[stage] = Math.max(versions[stage], alive.get(stage).length);
    });
  });
  return { staleness, versions };
}

function summed({ ran, clock, share }, rows, ranksOf, delayed) {
  const begins = ran.flatMap((row) => (row.length ? [row[0].begin] : [])), spans = ran.flatMap((row, rank) => (row.length ? [clock[rank] - row[0].begin] : []));
  const makespan = Math.max(0, ...clock) - Math.min(...begins, Infinity), busy = ran.map((row) => row.reduce((sum, item) => sum + item.end - item.begin, 0));
  const weights = weightFacts(rows, ranksOf, delayed);
  return {
    makespan: tidy(makespan), maxspan: tidy(Math.max(0, ...spans)), ideal: tidy(Math.max(0, ...busy)),
    bubble: makespan ? tidy(Math.max(0, 1 - busy.reduce((a, b) => a + b, 0) / (rows.length * makespan))) : 0,
    utilisation: busy.map((time) => (makespan ? tidy(time / makespan) : 0)),
    peak_activations: ran.map((row) => memoryPeak(row, share)), weight_versions: weights.versions, staleness: weights.staleness,
  };
}
