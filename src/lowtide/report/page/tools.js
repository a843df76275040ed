// Small things that every panel uses: elements, numbers as text, scales, the tooltip.
// Names come from elsewhere and are never trusted: text reaches the page through text nodes and attributes only.

const byId = (id) => document.getElementById(id);

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    node.setAttribute(name, value === true ? '' : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

// The children take the place of what the node held.
function refill(node, ...children) {
  node.replaceChildren();
  fill(node, {}, children);
}

const make = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);

const draw = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS('http://www.w3.org/2000/svg', tag), attributes, children);

// At most `most` characters on one line, with an ellipsis where something is missing. What would turn the direction of
// the text around, or print nothing, goes.
function cut(text, most) {
  const line = String(text).slice(0, 4 * most).replace(/[\p{Cc}\u202a-\u202e\u2066-\u2069]/gu, ' ').replace(/\s+/gu, ' ').trim();
  const characters = Array.from(line);
  return characters.length > most ? characters.slice(0, most - 1).join('') + '…' : characters.join('');
}

// An element with the text cut to `most` characters; the whole of it is in the title.
function named(tag, text, most, attributes = {}) {
  const short = cut(text, most);
  return make(tag, { ...attributes, title: short === text ? null : text }, make('bdi', {}, short));
}

// ------------------------------------------------------------------ numbers

const UNITS = [['TiB', 2 ** 40], ['GiB', 2 ** 30], ['MiB', 2 ** 20], ['KiB', 2 ** 10]];
// Made once: toLocaleString would make them anew for every number.
const WHOLE = new Intl.NumberFormat('en-US', { maximumFractionDigits: 0 });
const EXACT = new Intl.NumberFormat('en-US', { maximumFractionDigits: 12 });
const grouped = (value) => WHOLE.format(value);

// As lowtide.sizes.format_size writes it: the largest binary unit that leaves at least 1, to four digits.
function formatSize(bytes) {
  for (const [unit, factor] of UNITS) {
    if (bytes >= factor) return `${formatNumber(bytes / factor)} ${unit}`;
  }
  return `${grouped(bytes)} B`;
}

// Larger numbers are written as powers of ten: nobody reads that many digits.
const LONGEST = 1e12;
const power = (value) => value.toExponential(2).replace(/\.?0*e\+?/u, 'e');

// Rounded as Python rounds: an exact half goes to the even digit.
function rounded(value, places) {
  const isHalf = Number.isInteger(value * 2 ** (places + 1)) && Math.abs((value * 10 ** places) % 1) === 0.5;
  if (!isHalf) return Number(value.toFixed(places));
  const below = Math.floor(value * 10 ** places);
  return (below + Math.abs(below % 2)) / 10 ** places;
}

// So many digits of a number that is at least 1 or so, without noughts at the end.
const toDigits = (value, count) => String(rounded(value, Math.max(0, count - String(Math.floor(Math.abs(value))).length)));

// Four digits, or as many as a whole number has.
function formatNumber(value) {
  if (Math.abs(value) >= LONGEST) return power(value);
  if (Number.isInteger(value) || Math.abs(value) >= 1000) return grouped(rounded(value, 0));
  return Math.abs(value) < 1 ? String(Number(value.toPrecision(4))) : toDigits(value, 4);
}

// Three digits.
const digits = (value) => (Math.abs(value) >= LONGEST ? power(value) : EXACT.format(Number(value.toPrecision(3))));

// How a plan's time is told. A chain's seconds may be in any unit, so it is a multiple of the plain one; where that
// takes no time, a share of the whole. `at` is the time of a tick, `span` two times with digits enough to differ.
function timeOf(data, timeline) {
  const { seconds: plain, name } = data.plain;
  const [whole, unit] = plain > 0 ? [timeline.seconds / plain, 'x'] : [100, '%'];
  const text = (time) => `${digits(time)}${unit}`;
  const span = (from, to) => {
    const places = within(Math.ceil(1 - Math.log10(to - from || 1)), 0, 12);
    return [from, to].map((time) => `${EXACT.format(Number(time.toFixed(places)))}${unit}`).join(' to ');
  };
  return {
    whole, text, span,
    total: plain > 0 ? `${text(whole)} the ${name} time` : 'the whole time',
    at: (tick) => (tick / timeline.ticks) * whole,
    title: plain > 0 ? `predicted time, as a multiple of the ${name}` : 'predicted time, as a share of the whole',
  };
}

const PREFIXES = [['', 1], ['m', 1e-3], ['u', 1e-6], ['n', 1e-9]];
const PREFIXES_OF_COUNTS = [['P', 1e15], ['T', 1e12], ['G', 1e9], ['M', 1e6], ['K', 1e3], ['', 1]];

// A model's time as lowtide writes it: three digits, with the largest prefix that leaves at least 1.
function formatTime(time, unit) {
  for (const [prefix, factor] of unit === 's' ? PREFIXES : PREFIXES_OF_COUNTS) {
    const number = time / factor;
    if (number >= 0.9995) return `${number >= 999.5 ? grouped(rounded(number, 0)) : toDigits(number, 3)} ${prefix}${unit}`;
  }
  return `0 ${unit}`;
}

const SPELLED = { '': 1, b: 1, kb: 1e3, mb: 1e6, gb: 1e9, tb: 1e12, kib: 2 ** 10, mib: 2 ** 20, gib: 2 ** 30, tib: 2 ** 40 };

// Bytes of "64 MiB", "1.5 GB" or "25%" (of `whole`), exact and rounded down, as lowtide.sizes reads them; or `why` not.
function parseSize(text, whole) {
  const match = /^\s*(\d+|\d{1,3}(?:,\d{3})+|(?=\.\d))(?:\.(\d+))?\s*([a-z]*|%)\s*$/iu.exec(text);
  const unit = match?.[3].toLowerCase();
  if (match === null || !(unit === '%' || Object.hasOwn(SPELLED, unit))) return { why: 'That is not a size. Write it like 64 MiB, 1.5 GB or 25%.' };
  const after = match[2] ?? '';
  const [number, parts] = [BigInt(match[1].replaceAll(',', '') + after), 10n ** BigInt(after.length)];
  if (unit === '%' && number > 100n * parts) return { why: 'A share is at most 100%, which is what the plain run keeps.' };
  if (SPELLED[unit] === 1 && number % parts > 0n) return { why: 'That is not a whole number of bytes. Name a unit, as in 1.5 GB.' };
  const bytes = unit === '%' ? (number * BigInt(whole)) / (100n * parts) : (number * BigInt(SPELLED[unit])) / parts;
  return bytes >= 1n ? { bytes: Number(bytes) } : { why: 'That comes to less than one byte.' };
}

const stepsOf = (start, stop) => (stop - start === 1 ? `step ${grouped(start)}` : `steps [${grouped(start)}, ${grouped(stop)})`);

// ------------------------------------------------------------------ scales and axes

function linear(low, high, from, to) {
  const slope = (to - from) / (high - low || 1);
  const scale = (value) => from + (value - low) * slope;
  scale.invert = (place) => low + (place - from) / slope;
  return scale;
}

function logarithmic(low, high, from, to) {
  const inner = linear(Math.log(low), Math.log(high), from, to);
  return (value) => inner(Math.log(value));
}

// About `count` round values in [low, high].
function roundTicks(low, high, count, unit = 1) {
  const raw = (high - low) / unit / Math.max(1, count) || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].find((times) => times * power >= raw * 0.999) * power * unit;
  const ticks = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high * (1 + 1e-9); k += 1) ticks.push(k === 0 ? 0 : k * step);
  return ticks;
}

// Round multiples of the unit of the largest, and how to write them.
function evenSizes(low, high, count) {
  const [unit, factor] = UNITS.find(([, size]) => high >= size) ?? ['B', 1];
  return { ticks: roundTicks(low, high, count, factor), text: (bytes) => (bytes === 0 ? '0' : `${digits(bytes / factor)} ${unit}`) };
}

// Powers of two where the range is wide, round multiples of a unit where it is narrow.
function sizeTicks(low, high, count) {
  const octaves = Math.log2(high / low);
  if (octaves < 3) return evenSizes(low, high, count);
  const stride = [1, 2, 5, 10].find((size) => octaves / size <= count) ?? 20;
  const ticks = [];
  for (let k = Math.ceil(Math.log2(low) / stride); 2 ** (k * stride) <= high; k += 1) ticks.push(2 ** (k * stride));
  return { ticks, text: formatSize };
}

function factorTicks(low, high, count, isLog) {
  if (!isLog) return roundTicks(low, high, count);
  const ticks = [];
  const stride = Math.max(1, Math.ceil(Math.log10(high / low) / count));
  for (let exponent = Math.floor(Math.log10(low)); exponent <= Math.log10(high); exponent += stride) {
    for (const times of high / low > 100 ? [1] : high / low > 20 ? [1, 3] : [1, 1.5, 2, 3, 5, 7]) ticks.push(times * 10 ** exponent);
  }
  return ticks.filter((tick) => tick >= low * 0.999 && tick <= high * 1.001);
}

// The frame of a chart: grid lines, tick labels and the titles of both axes.
function axes(box, { x, y, xTicks, yTicks, xText, yText, xTitle, yTitle }) {
  const { left, right, top, bottom } = box;
  const group = draw('g', { class: 'axes', 'aria-hidden': 'true' });
  for (const tick of yTicks) {
    group.append(draw('line', { x1: left, x2: right, y1: y(tick), y2: y(tick), class: 'grid' }));
    group.append(draw('text', { x: left - 8, y: y(tick) + 4, 'text-anchor': 'end' }, yText(tick)));
  }
  let reach = -Infinity;
  for (const tick of xTicks) {
    const place = x(tick);
    const text = xText(tick);
    const half = textWidth(text) / 2;
    group.append(draw('line', { x1: place, x2: place, y1: bottom, y2: bottom + 5, class: 'tick' }));
    if (place - half < reach + 6 || place + half > right + 14) continue;
    reach = place + half;
    group.append(draw('text', { x: place, y: bottom + 19, 'text-anchor': 'middle' }, text));
  }
  group.append(draw('line', { x1: left, x2: right, y1: bottom, y2: bottom, class: 'tick' }));
  group.append(draw('text', { x: right, y: bottom + 37, 'text-anchor': 'end', class: 'axis-title' }, xTitle));
  if (yTitle) group.append(draw('text', { x: 2, y: 12, class: 'axis-title' }, yTitle));
  return group;
}

const measuring = document.createElement('canvas').getContext('2d');

function textWidth(text) {
  measuring.font = '12px system-ui, sans-serif';
  return measuring.measureText(text).width;
}

// The text cut until it is at most `width` pixels wide.
function cutToWidth(text, width) {
  let most = 60;
  while (most > 2 && textWidth(cut(text, most)) > width) most -= most > 24 ? 4 : 1;
  return cut(text, most);
}

const chart = (width, height, label, attributes = {}) =>
  draw('svg', { viewBox: `0 0 ${width} ${height}`, width, height, role: 'img', 'aria-label': label, ...attributes });

// ------------------------------------------------------------------ legends, tooltip

const swatch = (name) => make('i', { class: `swatch ${name}`, 'aria-hidden': 'true' });

function tell(lines, clientX, clientY) {
  const tip = byId('tip');
  tip.replaceChildren(...lines.map((line, k) => make(k ? 'span' : 'strong', {}, cut(line, 80))));
  tip.hidden = false;
  const { offsetWidth: width, offsetHeight: height } = tip;
  const room = document.documentElement.clientWidth;
  tip.style.left = `${Math.max(8, Math.min(room - width - 8, clientX + 14))}px`;
  tip.style.top = `${clientY - height - 14 < 8 ? clientY + 18 : clientY - height - 14}px`;
}

const hush = () => { byId('tip').hidden = true; };

// Where the pointer is, in the chart's own units.
function placeIn(svg, event) {
  const corner = svg.getBoundingClientRect();
  const scale = corner.width / svg.viewBox.baseVal.width;
  return [(event.clientX - corner.left) / scale, (event.clientY - corner.top) / scale];
}

// Lets pointer and arrow keys look into a chart. `look.at(x, y)` and `look.walk(from, by)` find a place in it,
// which is {key, x, y, lines}; `look.mark(place)` shows where that is.
function probe(svg, look) {
  let place = null;
  const show = (found, clientX, clientY) => {
    place = found;
    look.mark(found);
    if (found === null) hush();
    else tell(found.lines, clientX, clientY);
  };
  const follow = (event) => show(look.at(...placeIn(svg, event)), event.clientX, event.clientY);
  svg.addEventListener('pointermove', follow);
  svg.addEventListener('pointerdown', follow);
  svg.addEventListener('pointerleave', () => show(null));
  svg.addEventListener('blur', () => show(null));
  svg.addEventListener('keydown', (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20, Home: -Infinity, End: Infinity }[event.key];
    if (event.key === 'Escape') show(null);
    if (by === undefined) return;
    event.preventDefault();
    const corner = svg.getBoundingClientRect();
    const scale = corner.width / svg.viewBox.baseVal.width;
    const found = look.walk(place === null ? null : place.key, by);
    show(found, corner.left + found.x * scale, corner.top + found.y * scale);
    byId('say').textContent = found.lines.join(', ');
  });
}

const within = (value, low, high) => Math.max(low, Math.min(high, value));

// The last place in a rising list whose value is at most `value`.
function lastUpTo(list, value) {
  let low = 0;
  let high = list.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (list[middle] <= value) low = middle;
    else high = middle - 1;
  }
  return low;
}
