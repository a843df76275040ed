// Memory over time, stacked: what a budget counts stands on zero, up to the peak and its cause. What is held with or
// without a plan hangs below zero, so that the axis is the budget's.

const DEEPEST = 0.3; // of the part above zero: large parameters would press it flat
const LAYERS = [
  ['snapshots', 'snapshots'],
  ['tape', 'tape'],
  ['cotangent', 'cotangents'],
  ['working', 'working set'],
];

function showMemory(data, view) {
  const { timeline } = view;
  const { memory, worst } = timeline;
  const host = byId('memory');
  const width = host.clientWidth;
  const height = width < 560 ? 300 : 360;
  const { layers = LAYERS } = view;
  // A model's peak counts what a budget does not.
  const constant = data.model !== null ? [] : [['parameters', 'parameters', data.chain.parameters], ['gradients', 'gradients', data.chain.gradients]].filter(([, , bytes]) => bytes > 0);
  const base = constant.reduce((sum, [, , bytes]) => sum + bytes, 0);
  const curve = data.receipt === null ? [] : data.receipt.curve;
  const total = (i) => layers.reduce((sum, [key]) => sum + memory[key][i], 0);
  const peak = total(worst);
  const budget = view.budget !== null && view.budget <= 2.5 * peak ? view.budget : null;
  const most = Math.max(peak, budget ?? 0, view.own ? Math.max(0, ...curve) : 0) * 1.06 || 1;
  const depth = Math.min(base, DEEPEST * most);
  const box = { left: 74, right: width - 14, top: 48, bottom: height - 46 };
  const x = linear(0, timeline.ticks, box.left, box.right);
  const time = timeOf(data, timeline);
  const y = linear(-depth, most, box.bottom, box.top);

  const svg = chart(width, height, `Memory over ${time.total}: at most ${view.text.peak}, ${memory.what[worst]}. Arrow keys walk through it.`,
    { class: 'memory', tabindex: 0 });
  const scale = evenSizes(0, most, 5);
  svg.append(axes(box, {
    x: linear(0, time.whole, box.left, box.right), y,
    xTicks: roundTicks(0, time.whole, width / 110), yTicks: scale.ticks,
    xText: time.text, yText: scale.text, xTitle: time.title, yTitle: 'memory',
  }));
  let under = 0;
  for (const [name, , bytes] of constant) {
    const deep = (bytes / base) * depth;
    svg.append(draw('rect', { x: box.left, y: y(-under), width: box.right - box.left, height: y(0) - y(deep), class: name, 'data-test': `band-${name}` }));
    under += deep;
  }
  const levels = new Array(memory.start.length).fill(0);
  for (const [key] of layers) {
    if (!memory[key].some((bytes) => bytes > 0)) continue;
    const before = levels.slice();
    levels.forEach((level, i) => { levels[i] = level + memory[key][i]; });
    svg.append(draw('path', { d: band(memory, before, levels, x, y), class: key, 'data-test': `band-${key}` }));
  }
  if (budget !== null) {
    const line = y(budget);
    svg.append(draw('line', { x1: box.left, x2: box.right, y1: line, y2: line, class: 'budget', 'data-test': 'memory-budget' }));
    svg.append(draw('text', { x: box.left + 6, y: line + (line - box.top > 16 ? -6 : 15), class: 'budget-text halo' }, `${data.limit.label} ${view.text.budget}`));
  }
  if (curve.length > 0) {
    const wide = (box.right - box.left) / curve.length;
    const steps = curve.map((bytes, i) => `${i ? 'L' : 'M'}${(box.left + i * wide).toFixed(1)} ${y(bytes).toFixed(1)}h${wide.toFixed(2)}`);
    svg.append(draw('path', { d: steps.join(''), class: `curve${view.own ? '' : ' dim'}`, 'data-test': 'curve' }));
  }
  if (base > 0) svg.append(draw('line', { x1: box.left, x2: box.right, y1: y(0), y2: y(0), class: 'zero', 'data-test': 'zero' }));
  const middle = (i) => x((memory.start[i] + memory.stop[i]) / 2);
  const [px, py] = [middle(worst), y(peak)];
  svg.append(draw('line', { x1: px, x2: px, y1: box.top - 8, y2: y(0), class: 'peak-line' }));
  svg.append(draw('circle', { cx: px, cy: py, r: 5, class: 'peak-dot' }));
  const told = `peak ${view.text.peak}, ${memory.what[worst]}`;
  const label = cutToWidth(told, box.right - box.left - 20);
  const half = textWidth(label) / 2 + 6;
  svg.append(draw('text', { x: within(px, box.left + half, box.right - half), y: box.top - 14, 'text-anchor': 'middle', class: 'peak-text' }, label));

  const pointer = draw('line', { class: 'pointer', y1: box.top, y2: box.bottom, visibility: 'hidden' });
  svg.append(pointer);
  const describe = (i) => ({
    key: i,
    x: middle(i),
    y: y(total(i)),
    lines: [memory.what[i], `${formatSize(total(i))} at ${time.text(time.at(memory.start[i]))}`,
      ...layers.filter(([key]) => memory[key][i] > 0).map(([key, name]) => `${name} ${formatSize(memory[key][i])}`)],
  });
  probe(svg, {
    at: (at) => (at < box.left || at > box.right ? null : describe(lastUpTo(memory.start, x.invert(at)))),
    walk: (i, by) => describe(i === null ? worst : within(i + by, 0, memory.start.length - 1)),
    mark: (place) => fill(pointer, place === null ? { visibility: 'hidden' } : { visibility: 'visible', x1: place.x, x2: place.x }, []),
  });
  host.replaceChildren(svg);
  explain(data, view, timeline, constant, { isFarBudget: budget === null && view.budget !== null, isCutOff: depth < base });
}

// The outline of one layer: along the top from left to right, back along the bottom.
function band(memory, before, after, x, y) {
  const edge = (levels, i) => `${x(memory.start[i]).toFixed(1)} ${y(levels[i]).toFixed(1)}H${x(memory.stop[i]).toFixed(1)}`;
  const back = (levels, i) => `${x(memory.stop[i]).toFixed(1)} ${y(levels[i]).toFixed(1)}H${x(memory.start[i]).toFixed(1)}`;
  const places = after.map((_, i) => i);
  return `M${places.map((i) => edge(after, i)).join('L')}L${places.reverse().map((i) => back(before, i)).join('L')}Z`;
}

// The words around the chart: the cause of the peak, sizes at the peak, and how the measured curve is to be read.
function explain(data, view, timeline, constant, { isFarBudget, isCutOff }) {
  const { memory, worst } = timeline;
  const hasCurve = data.receipt !== null && data.receipt.curve.length > 0;
  const { layers = LAYERS } = view;
  const held = layers.filter(([key]) => memory[key][worst] > 0);
  refill(byId('memory-cause'), 'The peak of ', make('b', {}, view.text.peak), data.model === null ? ' is reached while ' : ' is reached ',
    named('b', memory.what[worst], 80), ': ', held.map(([key, name]) => `${name} ${formatSize(memory[key][worst])}`).join(', '), '.');
  const entry = (name, label, bytes) => make('li', {}, swatch(name), label, bytes === null ? null : make('span', { class: 'muted' }, ` ${formatSize(bytes)}`));
  refill(byId('memory-legend'),
    ...constant.map(([name, label, bytes]) => entry(name, label, bytes)),
    ...layers.filter(([key]) => memory[key].some((bytes) => bytes > 0)).map(([key, name]) => entry(key, name, memory[key][worst])),
    !hasCurve ? null : entry('curve thin', view.own ? 'measured' : "measured, the plan's own run", null));
  const notes = [];
  if (constant.length > 0) notes.push(`Below zero: ${constant.map(([name]) => name).join(' and ')}, held with or without a plan; no budget counts them.`);
  if (isCutOff) notes.push('They are not to scale, or they would press the rest flat.');
  if (isFarBudget) notes.push(`The ${data.limit.name} of ${view.text.budget} lies far above this scale.`);
  if (hasCurve) {
    notes.push(`Measured: most bytes alive in each of ${data.receipt.curve.length} equal shares of the recorded time, `
      + 'without results and gradients.');
    if (!view.own) notes.push(`It belongs to the plan itself, not to the ${data.limit.name} shown.`);
  }
  byId('memory-note').textContent = notes.join(' ');
}
