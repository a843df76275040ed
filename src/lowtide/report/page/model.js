// A whole model: a view for every choice on its frontier. Its table and its pictures are made from the menus when it is
// shown; reasons and decisions were written in Python and are shown as they are.

const MODEL_TICKS = 100000;
const REST = 'gradients so far and transients';

function modelViews(data) {
  return data.model.points.map((_, index) => new ModelView(data, index));
}

class ModelView {
  constructor(data, index) {
    const [peak, extra, letters, needs, asked] = data.model.points[index];
    const plain = data.plain.seconds;
    this.data = data;
    this.own = index === data.chosen;
    // A plan may be asked for more than it takes; what it needs says which memory it fits in.
    this.needs = needs;
    this.budget = this.own ? data.budget : needs;
    this.margin = this.own ? data.model.margin : needs - peak;
    this.name = this.own ? data.knob : `peak=${asked}`;
    this.peak = peak;
    this.extra = extra;
    this.factor = plain > 0 ? (plain + extra) / plain : 1;
    this.letters = letters;
    this.disk = 0;
    this.planner = data.model.planner;
    this.text = {
      peak: formatSize(peak),
      share: `${rounded((100 * peak) / data.plain.memory, 1).toFixed(1)}% of all kept`,
      budget: this.own ? (data.budget === null ? 'none' : formatSize(data.budget)) : asked,
      factor: `${rounded(this.factor, 3).toFixed(3)}x`,
      extra: formatTime(extra, data.model.unit),
    };
  }

  get entries() {
    return this.data.model.steps.map((step, k) => step.menu[this.letters.charCodeAt(k) - 48]);
  }

  // At the worst moment of each step: bytes of the blocks' tapes, of what steps outside of blocks hold, and of everything.
  get levels() {
    const blocks = new Set(this.data.model.blocks);
    let [tapes, others] = [0, 0];
    return this.entries.map((entry, k) => {
      if (blocks.has(k)) tapes += entry.tape;
      else others += entry.tape;
      return { tapes, others, total: tapes + others + Math.max(this.data.model.steps[k].taping, entry.pulling) };
    });
  }

  get worst() {
    const { levels } = this;
    return levels.reduce((found, level, k) => (level.total > levels[found].total ? k : found), 0);
  }

  // How many blocks are kept, lean and so on: "4 kept, 8 lean".
  get kinds() {
    const { entries } = this;
    const found = this.data.model.blocks.map((k) => entries[k].kind);
    const kinds = this.data.model.kinds.filter((kind) => found.includes(kind));
    return kinds.map((kind) => `${grouped(found.filter((other) => other === kind).length)} ${kind}`).join(', ') || 'none';
  }

  get tiles() {
    return [
      ['factor', 'time', this.text.factor, `the ${this.data.plain.name}, predicted`],
      ['extra', 'extra time', this.text.extra, 'a training step, predicted'],
      ['kinds', 'blocks', this.kinds, `of ${grouped(this.data.model.blocks.length)}`],
      ['worst', 'worst moment', this.data.model.steps[this.worst].where, 'where memory peaks'],
    ];
  }

  get brief() {
    return [`peak ${this.text.peak}, ${this.text.extra} extra`, this.kinds];
  }

  get lines() {
    return this.own ? this.data.model.lines : [];
  }

  get code() {
    const { code, otherCode, place } = this.data.model;
    return this.own ? code : otherCode.map(([name, lines]) => [name, lines.replace(place, String(this.needs))]);
  }

  get rows() {
    const { entries, levels } = this;
    return this.data.model.blocks.map((k) => {
      const { name, forward, backward, menu } = this.data.model.steps[k];
      const { tape, extra, name: decision, why } = entries[k];
      return [name, decision, menu[0].tape, tape, forward + backward, extra, levels[k].total, why];
    });
  }

  get layers() {
    return [...this.data.model.fixed.map(([key, name]) => [key, name]), ['tape', 'tapes'], ['working', REST]];
  }

  // Every step forward, then every step back; what is made again comes right before its own backward.
  get timeline() {
    const { steps, fixed } = this.data.model;
    const { entries, levels } = this;
    const runs = { kind: [], step: [], start: [], stop: [] };
    const memory = { start: [], stop: [], what: [], tape: [], working: [] };
    for (const [key] of fixed) memory[key] = [];
    const timed = steps.some((step, k) => step.forward + step.backward + entries[k].extra > 0);
    let now = 0;
    const run = (kind, step, seconds) => {
      runs.kind.push(kind);
      runs.step.push(step);
      runs.start.push(now);
      now += seconds;
      runs.stop.push(now);
    };
    const held = fixed.reduce((sum, [, , size]) => sum + size, 0);
    const hold = (what, began, { tapes, others }, beside) => {
      let left = Math.max(others + beside, Math.min(held, this.peak - tapes)); // what is held all along is there then too
      for (const [key, , size] of fixed) {
        memory[key].push(Math.min(size, left));
        left -= Math.min(size, left);
      }
      memory.start.push(began);
      memory.stop.push(now);
      memory.what.push(what);
      memory.tape.push(tapes);
      memory.working.push(left);
    };
    const blocks = new Set(this.data.model.blocks);
    const told = (k, pass) => (blocks.has(k) ? `in the ${pass} of ${cut(steps[k].name, 40)}` : steps[k].where);
    steps.forEach((step, k) => {
      const began = now;
      run(1, k, timed ? step.forward : 1);
      hold(told(k, 'forward'), began, levels[k], step.taping);
    });
    for (let k = steps.length - 1; k >= 0; k -= 1) {
      const began = now;
      if (entries[k].extra > 0) run(3, k, entries[k].extra);
      run(4, k, timed ? steps[k].backward : 2);
      hold(told(k, 'backward'), began, levels[k], entries[k].pulling);
    }
    const ticks = (times) => times.map((time) => Math.round((time / now) * MODEL_TICKS));
    for (const table of [runs, memory]) Object.assign(table, { start: ticks(table.start), stop: ticks(table.stop) });
    const totals = memory.tape.map((_, i) => this.layers.reduce((sum, [key]) => sum + memory[key][i], 0));
    return {
      seconds: now, ticks: MODEL_TICKS, runs, memory, raster: null,
      stored: { step: [], disk: [], start: [], stop: [] },
      worst: totals.indexOf(Math.max(...totals)),
    };
  }
}

// The words of the page that are not about a budget.
function nameForModel() {
  const words = {
    'bar-word': 'Peak shown',
    'have-word': 'Peak I may reach',
    'frontier-lead': 'Each step of the line is a breakpoint: the fastest choice for that peak. Diamonds are the usual choices, on paper; '
      + 'crosses were measured. Choose a point, or move the slider; every panel follows.',
    'table-title': 'Block by block',
  };
  for (const [id, text] of Object.entries(words)) byId(id).textContent = text;
  byId('have-size').placeholder = '8 GiB';
  byId('bar').setAttribute('aria-label', 'Choose the peak that every panel shows');
  byId('slider').setAttribute('aria-label', 'Peak');
  for (const [id, text] of [['prev', 'Next smaller peak'], ['next', 'Next larger peak']]) fill(byId(id), { 'aria-label': text, title: text }, []);
}
