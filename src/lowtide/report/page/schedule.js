// The schedule: which step runs when, of what kind, and which states are stored meanwhile.
// Step 0 is at the bottom. A few thousand runs are drawn one by one; more come as a raster of time columns and step rows.

const KINDS = [
  ['forward', 'forward, nothing kept'],
  ['forward-taped', 'forward, tape kept'],
  ['rerun', 'rerun, nothing kept'],
  ['rerun-taped', 'rerun, tape kept'],
  ['backward', 'backward'],
];
const MOST_NAMES = 40;

function showSchedule(data, view) {
  const { timeline } = view;
  const host = byId('schedule');
  const width = host.clientWidth;
  const steps = data.chain.length;
  const names = stepNames(data, view);
  const isNamed = names !== null && steps <= MOST_NAMES;
  const longest = isNamed ? Math.max(...names.map((name) => textWidth(cut(name, 24)))) : textWidth(grouped(steps));
  const left = Math.ceil(Math.min(longest, width * 0.28, 150)) + 18;
  const top = isNamed ? 10 : 24;
  const height = steps <= MOST_NAMES ? top + 46 + within(steps * 19, 60, 760) : width < 560 ? 340 : 420;
  const box = { left, right: width - 14, top, bottom: height - 46 };
  const x = linear(0, timeline.ticks, box.left, box.right);
  const time = timeOf(data, timeline);
  const y = linear(0, steps, box.bottom, box.top);

  const told = data.model !== null ? view.kinds : `${view.text.runs} plain runs, ${view.text.snapshots} snapshots at most at once`;
  const svg = chart(width, height, `Schedule of ${grouped(steps)} steps over ${time.total}: ${told}. Arrow keys walk through it.`,
    { class: 'schedule', tabindex: 0 });
  svg.append(draw('rect', { x: box.left, y: box.top, width: box.right - box.left, height: box.bottom - box.top, class: 'field' }));
  svg.append(axes(box, {
    x: linear(0, time.whole, box.left, box.right), y: (tick) => y(tick + (isNamed ? 0.5 : 0)),
    xTicks: roundTicks(0, time.whole, width / 110), yTicks: isNamed || steps === 1 ? [] : roundTicks(0, steps, 6).filter(Number.isInteger),
    xText: time.text, yText: grouped, xTitle: time.title, yTitle: isNamed ? null : 'step',
  }));
  if (isNamed) {
    const label = (name, k) => draw('text', { x: left - 8, y: y(k + 0.5) + 4, 'text-anchor': 'end', class: 'step-name' },
      draw('title', {}, name), nameToWidth(name, left - 14));
    svg.append(draw('g', { 'data-test': 'step-names' }, ...names.map(label)));
  }
  const pointer = draw('rect', { class: 'pointer', visibility: 'hidden' });
  const look = timeline.raster === null ? drawRuns(svg, timeline, x, y) : drawRaster(svg, timeline, steps, box);
  svg.append(pointer);
  const nameOf = (step) => `step ${grouped(step)}${names === null ? '' : `, ${cut(names[step], 64)}`}`;
  const describe = (key) => {
    const found = look.describe(key, nameOf, time);
    const [x0, y0, x1, y1] = found.area;
    return { key, x: (x0 + x1) / 2, y: y0, ...found };
  };
  probe(svg, {
    at: (px, py) => (px < box.left || px > box.right || py < box.top || py > box.bottom ? null : describe(look.find(px, py, x))),
    walk: (key, by) => describe(key === null ? look.first : look.move(key, by)),
    mark: (place) => {
      if (place === null) return pointer.setAttribute('visibility', 'hidden');
      const [x0, y0, x1, y1] = place.area;
      fill(pointer, { visibility: 'visible', x: x0 - 1.5, y: y0 - 1.5, width: x1 - x0 + 3, height: y1 - y0 + 3 }, []);
    },
  });
  host.replaceChildren(svg);

  const cell = look.cell;
  byId('schedule-lead').textContent = data.model !== null
    ? 'Time runs to the right, steps go up. Every block is run and pulled back once; what it makes again comes right before its backward.'
    : cell
    ? 'Time runs to the right, steps go up. The stronger the colour, the more of the time is spent there.'
    : 'Time runs to the right, steps go up. Every mark is one run of a step; thin bars are snapshots, from storing to dropping.';
  refill(byId('schedule-legend'),
    ...KINDS.filter((_, kind) => look.has(kind)).map(([name, label]) => make('li', {}, swatch(name), label)),
    ...[['stored-memory', 'snapshot in memory', 5], ['stored-disk', 'snapshot on disk', 6]].filter(([, , kind]) => look.has(kind))
      .map(([name, label]) => make('li', {}, swatch(`${name} thin`), label)),
    cell ? make('li', { 'data-test': 'cell' }, `each cell is ${cell.steps} steps high and ${time.text(time.at(cell.ticks))} wide`) : null);
}

// A name cut to a width. Of a path it keeps the end, which is what differs: "transformer.h.11" becomes "…h.11".
function nameToWidth(name, width) {
  const parts = cut(name, 200).split('.');
  const ends = parts.map((_, k) => `${k ? '…' : ''}${parts.slice(k).join('.')}`);
  return ends.find((end) => textWidth(end) <= width) ?? cutToWidth(name, width);
}

// The name of each step, where the table has a row for each.
function stepNames(data, view) {
  if (data.model !== null) return data.model.steps.map(({ name }) => name);
  const column = data.columns.findIndex(({ key }) => key === 'name');
  return column < 0 || view.rows.length !== data.chain.length ? null : view.rows.map((row) => String(row[column]));
}

function drawRuns(svg, timeline, x, y) {
  const { runs, stored } = timeline;
  const count = runs.kind.length;
  const row = y(0) - y(1);
  const gap = row >= 6 ? 1 : 0;
  const areaOf = (i) => {
    const [x0, y0] = [x(runs.start[i]), y(runs.step[i] + 1) + gap];
    return [x0, y0, Math.max(x(runs.stop[i]), x0 + 1.5), y0 + Math.max(row - 2 * gap, 2.4)];
  };
  const bars = [0, 1].map((disk) => {
    const lines = [];
    stored.step.forEach((step, i) => {
      if (stored.disk[i] !== disk) return;
      const place = y(step) - (row >= 6 ? row * (disk ? 0.32 : 0.5) : 0);
      lines.push(`M${x(stored.start[i]).toFixed(1)} ${place.toFixed(1)}H${x(stored.stop[i]).toFixed(1)}`);
    });
    svg.append(draw('path', { d: lines.join(''), class: disk ? 'stored-disk' : 'stored-memory', 'stroke-width': row >= 6 ? 3 : within(row, 1, 2) }));
    return lines.length;
  });
  const paths = KINDS.map(() => []);
  for (let i = 0; i < count; i += 1) {
    const [x0, y0, x1, y1] = areaOf(i);
    paths[runs.kind[i]].push(`M${x0.toFixed(2)} ${y0.toFixed(2)}H${x1.toFixed(2)}V${y1.toFixed(2)}H${x0.toFixed(2)}Z`);
  }
  paths.forEach((marks, kind) => svg.append(draw('path', { d: marks.join(''), class: KINDS[kind][0], 'data-test': `runs-${KINDS[kind][0]}` })));
  return {
    cell: null,
    first: 0,
    has: (kind) => (kind < 5 ? paths[kind].length : bars[kind - 5]) > 0,
    find: (px) => lastUpTo(runs.start, x.invert(px)),
    move: (i, by) => within(i + by, 0, count - 1),
    describe: (i, nameOf, time) => {
      const held = stored.step.findIndex((step, k) => step === runs.step[i] && stored.start[k] <= runs.start[i] && stored.stop[k] > runs.start[i]);
      return {
        area: areaOf(i),
        lines: [nameOf(runs.step[i]), KINDS[runs.kind[i]][1], time.span(time.at(runs.start[i]), time.at(runs.stop[i])),
          ...(held < 0 ? [] : [`its state is stored ${stored.disk[held] ? 'on disk' : 'in memory'}`])],
      };
    },
  };
}

function drawRaster(svg, timeline, steps, box) {
  const { columns, rows } = timeline.raster;
  const bytes = (text) => Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const share = timeline.raster.share.map(bytes);
  const stored = [bytes(timeline.raster.memory), bytes(timeline.raster.disk)];
  const picture = paintRaster(columns, rows, share, stored);
  svg.append(draw('image', { href: picture, x: box.left, y: box.top, width: box.right - box.left, height: box.bottom - box.top,
    preserveAspectRatio: 'none', class: 'raster', 'data-test': 'raster' }));
  const [w, h] = [(box.right - box.left) / columns, (box.bottom - box.top) / rows];
  const topOf = (row) => box.bottom - (row + 1) * h;
  const firstOf = (row) => Math.floor((row * steps) / rows);
  return {
    cell: { steps: formatNumber(Number((steps / rows).toPrecision(3))), ticks: timeline.ticks / columns },
    first: 0,
    has: (kind) => (kind < 5 ? share[kind] : stored[kind - 5]).some((value) => value > 0),
    find: (px, py) => within(Math.floor((px - box.left) / w), 0, columns - 1) * rows + within(Math.floor((box.bottom - py) / h), 0, rows - 1),
    // Arrow keys follow the work: to the row where most of the next column's time is spent.
    move: (cell, by) => {
      const column = within(Math.floor(cell / rows) + by, 0, columns - 1);
      let best = column * rows;
      const work = (place) => share.reduce((sum, kind) => sum + kind[place], 0);
      for (let place = best; place < (column + 1) * rows; place += 1) if (work(place) > work(best)) best = place;
      return best;
    },
    describe: (cell, _nameOf, time) => {
      const [column, row] = [Math.floor(cell / rows), cell % rows];
      const spent = KINDS.map(([, label], kind) => [label, share[kind][cell]]).filter(([, value]) => value > 0);
      const tick = timeline.ticks / columns;
      const percent = (value) => (value < 3 ? 'under 1%' : `${digits((100 * value) / 255)}%`);
      const [x0, y0] = [box.left + column * w, topOf(row)];
      return {
        area: [x0, y0, x0 + w, y0 + h],
        lines: [stepsOf(firstOf(row), firstOf(row + 1)), time.span(time.at(column * tick), time.at((column + 1) * tick)),
          ...(spent.length ? spent.map(([label, value]) => `${label}: ${percent(value)} of this time`) : ['no run here at this time']),
          ...[['in memory', 0], ['on disk', 1]].filter(([, tier]) => stored[tier][cell] > 0).map(([name, tier]) => `${percent(stored[tier][cell])} of its states stored ${name}`)],
      };
    },
  };
}

// A PNG with one pixel for each cell, step 0 at the bottom: stored states as a tint, runs over it in the mixture of their colours.
function paintRaster(columns, rows, share, stored) {
  const canvas = make('canvas', { width: columns, height: rows });
  const context = canvas.getContext('2d');
  const pixels = context.createImageData(columns, rows);
  const kinds = KINDS.map(([name]) => colourOf(name));
  const tiers = [colourOf('stored-memory'), colourOf('stored-disk')];
  const field = colourOf('field');
  for (let column = 0; column < columns; column += 1) {
    for (let row = 0; row < rows; row += 1) {
      const cell = column * rows + row;
      let colour = field;
      for (const tier of [0, 1]) {
        const held = stored[tier][cell] / 255;
        if (held > 0) colour = blend(colour, tiers[tier], 0.2 + 0.5 * held ** 0.4);
      }
      const work = share.reduce((sum, kind) => sum + kind[cell], 0);
      if (work > 0) {
        const mixed = [0, 1, 2].map((c) => kinds.reduce((sum, kind, k) => sum + kind[c] * share[k][cell], 0) / work);
        colour = blend(colour, mixed, Math.min(1, 0.3 + 0.7 * (work / 255) ** 0.35));
      }
      pixels.data.set([...colour, 255], 4 * ((rows - 1 - row) * columns + column));
    }
  }
  context.putImageData(pixels, 0, 0);
  return canvas.toDataURL();
}

const blend = (under, over, share) => under.map((value, c) => value + (over[c] - value) * share);

// The red, green and blue that the style sheet defines for this name in the present theme.
function colourOf(name) {
  const sample = document.body.appendChild(swatch(name));
  const colour = getComputedStyle(sample).backgroundColor.match(/[\d.]+/gu).slice(0, 3).map(Number);
  sample.remove();
  return colour;
}
