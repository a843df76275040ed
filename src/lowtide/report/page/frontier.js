// Memory against time: every view, the usual tools' choices, what was measured, and what cannot work.

const MOST_DOTS = 80;

function showFrontier(data, index, select) {
  const host = byId('frontier');
  const marks = [
    ...data.peers.map((mark) => ({ ...mark, kind: 'peer' })),
    ...data.measured.map((mark) => ({ ...mark, kind: 'run' })),
  ];
  const map = frontierMap(data, marks, host.clientWidth);
  const [first, last] = [data.views[0], data.views.at(-1)];
  const svg = chart(map.width, map.height, `Frontier of ${data.views.length} plans, from ${first.text.peak} at ${first.text.factor} to `
    + `${last.text.peak} at ${last.text.factor} the ${data.plain.name} time${data.least > 0 ? `; no plan works below ${formatSize(data.least)}` : ''}. `
    + 'The list of marks follows.', { class: 'frontier' });
  drawSea(svg, data, map);
  drawLimits(svg, data, data.views[index], map);
  drawLine(svg, data, index, map);
  drawMarks(svg, data, marks, index, map);
  followPointer(svg, data, marks, map, select);
  host.replaceChildren(svg);

  const { beyond } = map;
  const above = beyond.length === 0 ? ''
    : `Above the scale: ${beyond.map((m) => `${digits(m.factor)}x in ${formatSize(m.peak)}`).slice(0, 3).join(', ')}${beyond.length > 3 ? ' and more' : ''}.`;
  const leftOut = data.model === null || data.model.leftOut === 0 ? ''
    : `${grouped(data.model.leftOut)} choices between these are in the plan and not on this page.`;
  byId('frontier-note').textContent = [above, leftOut].filter(Boolean).join(' ');
  byId('marks').replaceChildren(...marks.map((mark, k) => {
    const icon = draw('svg', { viewBox: '0 0 16 16', width: 16, height: 16, 'aria-hidden': 'true' },
      draw('path', { d: shapeOf(mark.kind, 8, 8), class: `mark ${mark.kind}` }));
    return make('li', {}, make('span', { class: 'number' }, String(k + 1)), icon, named('b', mark.name, 60),
      make('span', { class: 'figures' }, formatSize(mark.peak) + (mark.isTimed ? ` · ${formatNumber(mark.factor)}x` : '')),
      mark.note ? named('span', mark.note, 120, { class: 'muted' }) : null);
  }));
}

// Where bytes and time factors lie in the chart. `place` finds a point, a view or a mark; neither scale has a zero.
function frontierMap(data, marks, width) {
  const height = width < 560 ? 320 : 400;
  const box = { left: 52, right: width - 16, top: 24, bottom: height - 46 };
  // Plans on the frontier whose pictures would be too much to draw are points of the line, but no views.
  const points = [...data.frontier, ...marks];
  const memories = [data.least, ...points.map((m) => m.peak)].filter((m) => m > 0);
  const factors = [1, ...points.map((m) => m.factor)].filter((f) => f > 0);
  const wide = Math.max(...memories) / Math.min(...memories);
  const low = Math.min(...memories) / Math.max(1.25, wide ** 0.12);
  const high = Math.max(...memories) * Math.max(1.15, wide ** 0.08);
  // A plan in the very least memory may take a thousand times as long: such dots go to the upper edge, with an arrow.
  const cap = 3 * Math.max(4, data.views[data.chosen].factor, ...marks.map((m) => m.factor));
  const most = Math.min(cap, Math.max(...factors));
  const least = Math.min(...factors);
  const isLog = most > 5 * least;
  const spread = most - least || 0.2;
  const [floor, ceiling] = isLog ? [least * 0.88, most * 1.3] : [least - 0.12 * spread, most + 0.15 * spread];
  const x = logarithmic(low, high, box.left, box.right);
  const y = (isLog ? logarithmic : linear)(floor, ceiling, box.bottom, box.top);
  return {
    width, height, box, x, y, low, high, floor, ceiling, isLog,
    beyond: data.frontier.filter((m) => m.factor > ceiling),
    stairs: stairsOf(data.frontier).map((m) => [x(Math.max(m.peak, low)), y(Math.max(m.factor, floor))]),
    place: ({ peak, factor }) => [x(Math.max(peak, low)), within(y(Math.max(factor, floor)), box.top + 8, box.bottom)],
  };
}

// The plans that no smaller one beats. Each holds until the next: between two dots nothing new is bought.
function stairsOf(line) {
  let best = Infinity;
  return line.filter(({ factor }) => {
    const isBetter = factor < best;
    best = Math.min(best, factor);
    return isBetter;
  });
}

// Along the stairs: to the right, then down; the last step goes on to the edge.
const trace = (stairs, right) =>
  `${stairs.map(([x, y], k) => (k ? `H${x.toFixed(1)}V${y.toFixed(1)}` : `M${x.toFixed(1)} ${y.toFixed(1)}`)).join('')}H${right}`;

// What lies under the line, and the axes.
function drawSea(svg, data, { width, box, x, y, low, high, floor, ceiling, isLog, stairs }) {
  const frame = { x: box.left, y: box.top, width: box.right - box.left, height: box.bottom - box.top };
  svg.append(draw('defs', {},
    draw('clipPath', { id: 'inside' }, draw('rect', frame)),
    draw('pattern', { id: 'hatch', width: 7, height: 7, patternUnits: 'userSpaceOnUse', patternTransform: 'rotate(45)' },
      draw('line', { x1: 0, y1: 0, x2: 0, y2: 7, class: 'hatch' })),
    draw('linearGradient', { id: 'sea', x1: 0, y1: 0, x2: 0, y2: 1 },
      draw('stop', { offset: '0', class: 'sea-top' }), draw('stop', { offset: '1', class: 'sea-floor' }))));
  svg.append(draw('path', { d: `${trace(stairs, box.right)}V${box.bottom}H${stairs[0][0]}Z`, fill: 'url(#sea)', 'clip-path': 'url(#inside)' }));
  const sizes = sizeTicks(low, high, width / 95);
  svg.append(axes(box, {
    x, y,
    xTicks: sizes.ticks, yTicks: factorTicks(floor, ceiling, 5, isLog),
    xText: sizes.text, yText: (tick) => `${tick < 1e5 ? digits(tick) : power(tick)}x`,
    xTitle: 'peak memory (log scale)', yTitle: `time, as a multiple of the ${data.plain.name}${isLog ? ' (log scale)' : ''}`,
  }));
}

// Below the least budget nothing works; the budget shown is a line. The least is 0 where no other budget was planned.
function drawLimits(svg, data, view, { box, x, high }) {
  if (data.least > 0) {
    const edge = x(data.least);
    svg.append(draw('rect', { x: box.left, y: box.top, width: Math.max(0, edge - box.left), height: box.bottom - box.top, fill: 'url(#hatch)' }));
    svg.append(draw('line', { x1: edge, x2: edge, y1: box.top, y2: box.bottom, class: 'least' }));
    svg.append(draw('text', edge - box.left < 150
      ? { class: 'least-text', transform: `translate(${edge - 7} ${box.bottom - 8}) rotate(-90)` }
      : { class: 'least-text', x: edge - 8, y: box.bottom - 10, 'text-anchor': 'end' }, `no plan works below ${formatSize(data.least)}`));
  }
  if (view.budget === null) return;
  const isBeyond = view.budget > high;
  const place = Math.min(box.right, x(view.budget));
  if (!isBeyond) svg.append(draw('line', { x1: place, x2: place, y1: box.top, y2: box.bottom, class: 'budget' }));
  svg.append(draw('text', place > (box.left + box.right) / 2
    ? { x: place - 6, y: box.top + 10, 'text-anchor': 'end', class: 'budget-text' }
    : { x: place + 6, y: box.top + 10, class: 'budget-text' }, `${data.limit.label} ${view.text.budget}${isBeyond ? ' →' : ''}`));
}

function drawLine(svg, data, index, { box, x, beyond, stairs, place }) {
  svg.append(draw('path', { d: trace(stairs, box.right), class: 'frontier-line', 'clip-path': 'url(#inside)', 'data-test': 'frontier-line' }));
  const circle = (point, r, kind) => {
    const [cx, cy] = place(point);
    svg.append(draw('circle', { cx, cy, r, class: kind }));
  };
  // Thousands of dots would be a smear, and slow.
  const few = data.views.length <= MOST_DOTS;
  if (few) for (const point of data.frontier) circle(point, 2.5, 'bead');
  data.views.forEach((view, k) => {
    if (few || view.own || k === index) circle(view, k === index ? 7 : 4, `dot${k === index ? ' chosen' : ''}${view.own ? ' own' : ''}`);
  });
  for (const point of beyond) svg.append(draw('text', { x: x(point.peak) + 7, y: box.top + 13, class: 'label' }, '↑'));
  circle(data.views[data.chosen], 11, 'own-ring');
}

// The marks and their labels, which keep off the dots, the line, each other and the words at the limits.
function drawMarks(svg, data, marks, index, { width, box, x, stairs, place }) {
  const dots = data.views.length <= MOST_DOTS ? data.views : [data.views[data.chosen], data.views[index]];
  const points = [...dots, ...marks].map(place);
  const taken = points.map((point, k) => around(point, k < dots.length ? 7 : 8));
  stairs.forEach(([left, top], k) => {
    const [right, bottom] = stairs[k + 1] ?? [box.right, top];
    taken.push([left, top - 3, right, top + 3], [right - 3, top, right + 3, bottom]);
  });
  if (data.least > 0) taken.push([x(data.least) - 22, box.bottom - 210, x(data.least), box.bottom]);
  const { budget } = data.views[index];
  if (budget !== null) taken.push([x(budget) - 160, box.top - 4, x(budget) + 160, box.top + 14], [x(budget) - 2, box.top, x(budget) + 2, box.bottom]);
  const scene = { box, taken, points };
  placeLabel(svg, scene, place(data.views[data.chosen]), ['the plan'], 'label own');
  marks.forEach((mark, k) => {
    const here = place(mark);
    const isCrowded = marks.filter((other) => distance(place(other), around(here, 0)) < 30).length > 3;
    const texts = width < 560 || isCrowded ? [String(k + 1)] : [`${k + 1} · ${cut(mark.name, 26)}`, String(k + 1)];
    placeLabel(svg, scene, here, texts, `label ${mark.kind}`);
  });
  for (const mark of marks) svg.append(draw('path', { d: shapeOf(mark.kind, ...place(mark)), class: `mark ${mark.kind}` }));
}

// What is near the pointer is told; a view that is clicked is shown.
function followPointer(svg, data, marks, { place }, select) {
  const points = [...data.views, ...marks].map(place);
  const nearest = (event) => {
    const [px, py] = placeIn(svg, event);
    const far = (point) => Math.hypot(point[0] - px, point[1] - py);
    const best = points.reduce((found, point, k) => (far(point) < far(points[found]) ? k : found), 0);
    return far(points[best]) < 26 ? best : null;
  };
  const isView = (found) => found !== null && found < data.views.length;
  svg.addEventListener('pointermove', (event) => {
    const found = nearest(event);
    svg.classList.toggle('pointing', isView(found));
    if (found === null) return hush();
    const view = data.views[found];
    const mark = marks[found - data.views.length];
    return tell(isView(found)
      ? [view.name + (view.own ? ' (the plan)' : ''), ...(view.brief ?? [`peak ${view.text.peak}, time ${view.text.factor}`, `${view.text.runsPerStep} runs per step`])]
      : [mark.name, formatSize(mark.peak) + (mark.isTimed ? `, ${formatNumber(mark.factor)}x the ${data.plain.name} time` : ''), mark.note].filter(Boolean),
    event.clientX, event.clientY);
  });
  svg.addEventListener('pointerleave', hush);
  svg.addEventListener('click', (event) => {
    const found = nearest(event);
    if (isView(found)) select(found);
  });
}

const shapeOf = (kind, x, y) => (kind === 'peer'
  ? `M${x} ${y - 6}L${x + 6} ${y}L${x} ${y + 6}L${x - 6} ${y}Z`
  : `M${x - 5} ${y - 5}L${x + 5} ${y + 5}M${x + 5} ${y - 5}L${x - 5} ${y + 5}`);

// Writes the label where it hides nothing: the first text that has room, further out if need be. A thin line leads to its
// mark where the label is far from it, or as near to another.
function placeLabel(svg, { box, taken, points }, here, texts, kind) {
  const others = points.filter(([x, y]) => x !== here[0] || y !== here[1]);
  const isFree = (spot) => spot[0] >= box.left && spot[2] <= box.right + 12 && spot[1] >= box.top - 4 && spot[3] <= box.bottom - 1
    && !taken.some((other) => overlap(spot, other));
  const looking = (mayCross) => ([written, found, isNear]) => {
    if (!isFree(found)) return null;
    const end = nearestIn(found, here);
    const own = Math.hypot(end[0] - here[0], end[1] - here[1]);
    if (isNear && others.every((point) => distance(point, found) > 1.3 * own)) return [written, found, []];
    const line = beads(here, end);
    const isCrossing = line.some((bead) => taken.some((other) => other.isLabel && overlap(bead, other)));
    return own < 14 || (isCrossing && !mayCross) ? null : [written, found, line];
  };
  const best = firstThat(spots(here, texts), looking(false)) ?? firstThat(spots(here, texts), looking(true));
  if (best === null) return;
  const [text, spot, leader] = best;
  if (leader.length > 0) {
    const [x2, y2] = nearestIn(spot, here);
    svg.append(draw('line', { x1: here[0], y1: here[1], x2, y2, class: 'leader' }));
  }
  svg.append(draw('text', { x: (spot[0] + spot[2]) / 2, y: spot[3] - 3, 'text-anchor': 'middle', class: kind }, text));
  taken.push(...leader, Object.assign(spot, { isLabel: true }));
}

// Where a label may go, the best place first, and whether that is near; only the last text goes far out.
function* spots([x, y], texts) {
  for (const text of texts) {
    const [w, h] = [textWidth(text) + 4, 14];
    for (const away of text === texts.at(-1) ? AWAY : AWAY.slice(0, 3)) {
      for (const [dx, dy] of away > 30 ? [...TOWARDS, ...BETWEEN] : TOWARDS) {
        const [left, top] = [x + dx * away + ((Math.sign(dx) - 1) * w) / 2, y + dy * (away + 3) - h / 2];
        yield [text, [left, top, left + w, top + h], away < 30];
      }
    }
  }
}

function firstThat(places, look) {
  for (const place of places) {
    const found = look(place);
    if (found !== null) return found;
  }
  return null;
}

const AWAY = [11, 22, 36, 54, 74, 96, 120, 150, 190];
const TOWARDS = [[1, -0.5], [-1, -0.5], [1, 0.9], [-1, 0.9], [0, -1], [0, 1], [1, 0], [-1, 0], [0.5, -1.4], [-0.5, -1.4], [0.5, 1.4], [-0.5, 1.4]];
const BETWEEN = [[0.25, -1.2], [-0.25, -1.2], [0.8, -1.1], [-0.8, -1.1], [1.2, -0.8], [-1.2, -0.8], [1.4, -0.25], [-1.4, -0.25]];
const around = ([x, y], by) => [x - by, y - by, x + by, y + by];
const overlap = (one, other) => one[0] < other[2] && one[2] > other[0] && one[1] < other[3] && one[3] > other[1];
const nearestIn = ([left, top, right, bottom], [x, y]) => [within(x, left, right), within(y, top, bottom)];
const distance = ([x, y], area) => Math.hypot(x - nearestIn(area, [x, y])[0], y - nearestIn(area, [x, y])[1]);

// Small squares along a line, for what has to keep off it.
function beads([x0, y0], [x1, y1]) {
  const count = Math.ceil(Math.hypot(x1 - x0, y1 - y0) / 4);
  return Array.from({ length: count }, (_, k) => around([x0 + ((x1 - x0) * k) / count, y0 + ((y1 - y0) * k) / count], 2));
}
