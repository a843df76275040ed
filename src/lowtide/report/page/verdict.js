// The verdict: does it fit, and what does it cost. The texts were written in Python and are shown as they are.

function showVerdict(data, view) {
  const { text } = view;
  const budget = view.budget;
  const measured = measuredPeak(data);
  const fits = view.own ? data.fits : budget === null || view.peak <= budget;
  const word = budget === null ? `Takes ${text.peak}` : fits ? 'Fits' : 'Does not fit';
  const tested = (tag, name, shown, attributes = {}) => make(tag, { 'data-test': name, ...attributes }, shown);

  const head = make('div', { class: 'headline' },
    make('p', { class: 'eyebrow' }, view.own ? 'The plan' : `Another ${data.limit.name}, not the plan`),
    tested('h2', 'verdict', word, { id: 'verdict-word', class: `${fits ? 'fits' : 'fails'}${word.length > 6 ? ' words' : ''}` }),
    make('p', { class: 'sum' },
      'Peak ', tested('b', 'peak', text.peak), ' of memory, ', tested('b', 'share', text.share), '. ',
      ...asked(view, tested)));

  const bar = gauge(data, view, measured);
  const tile = (name, label, shown, note) => make('div', { class: 'tile' },
    make('dt', {}, label), tested('dd', name, shown, { class: shown.length > 14 ? 'words' : 'figure' }), make('dd', { class: 'muted' }, note));
  const tiles = make('dl', { class: 'tiles' }, ...(view.tiles ?? tilesOf(view, data.plain.name)).map((entries) => tile(...entries)));

  const table = (title, lines) => make('div', { class: 'bill' }, make('h3', {}, title),
    make('dl', {}, ...lines.map(([label, line]) => make('div', {}, make('dt', {}, label), named('dd', line, 240)))));
  const bills = make('div', { class: data.receipt === null || view.lines.length === 0 ? 'bills alone' : 'bills' },
    view.lines.length === 0 ? null : table('The bill, predicted', view.lines),
    data.receipt === null ? null : table(view.own ? 'The receipt, measured' : "The receipt of the plan's own run", data.receipt.lines));
  const versions = data.versions.map(([name, version]) => `${name} ${version}`).join(' · ');
  byId('verdict').replaceChildren(head, bar, tiles, ...(bills.childElementCount > 0 ? [bills] : []),
    make('p', { class: 'note', 'data-test': 'versions' }, `Planner ${view.planner}. Lowtide ${data.lowtide}${versions && ' · '}${versions}`));
}

// What the plan was asked to keep. A model's plan aims a little below it.
function asked({ margin, text }, tested) {
  if (margin === undefined) return ['Budget ', tested('b', 'budget', text.budget), '.'];
  const less = margin > 0 ? `, less a margin of ${formatSize(margin)}` : '';
  return ['Asked for: ', tested('b', 'budget', text.budget), `${less}.`];
}

// Name, label, figure and note of each tile.
function tilesOf({ text, disk }, plain) {
  return [
    ['factor', 'time', text.factor, `the ${plain}, predicted`],
    ['runs-per-step', 'runs per step', text.runsPerStep, 'forward; the plain loop makes 1'],
    ['snapshots', 'snapshots', text.snapshots, 'at most at once'],
    ['runs', 'forward runs', text.runs, 'plain ones keep no tape'],
    ...(disk > 0 ? [['disk', 'disk', text.disk, 'of snapshots at most']] : []),
  ];
}

// What was measured, counted as the plan's budget or peak counts it; null if nothing was.
const measuredPeak = ({ receipt }) => (receipt === null ? null : receipt.measured);

// Predicted and measured peak as bars against the budget.
function gauge(data, view, measured) {
  const most = Math.max(view.peak, view.budget ?? 0, view.own ? measured ?? 0 : 0) * 1.04;
  const share = (bytes) => `${within((100 * bytes) / most, 0, 100)}%`;
  const row = (label, bytes, shown, kind) => {
    const level = make('i', { class: `level ${kind}` });
    level.style.width = share(bytes);
    return make('div', { class: `row ${kind}` }, make('span', { class: 'what' }, label), make('span', { class: 'track' }, level),
      make('b', kind.startsWith('measured') ? { 'data-test': 'measured' } : {}, shown));
  };
  const rows = [row('predicted', view.peak, view.text.peak, view.budget !== null && view.peak > view.budget ? 'predicted over' : 'predicted')];
  if (measured !== null) {
    const over = isAboveBudget(view, measured);
    rows.push(row('measured', measured, data.receipt.text, `measured${over ? ' above' : ''}${view.own ? '' : ' dim'}`));
  }
  const bars = make('div', { class: 'bars' }, ...rows);
  if (view.budget !== null) {
    const line = make('i', { class: 'limit' }, make('span', {}, `${data.limit.label} ${view.text.budget}`));
    line.style.left = share(view.budget);
    line.classList.toggle('early', view.budget < 0.4 * most);
    bars.append(make('div', { class: 'over-tracks', 'aria-hidden': 'true' }, line));
  }
  const told = measured === null
    ? (data.receipt === null ? 'No receipt was handed over: predicted figures only.' : 'The receipt counts runs; it holds no bytes.')
    : `${data.receipt.measuring}${view.own ? '' : ` It belongs to the plan, not to the ${data.limit.name} shown.`}`;
  const note = isAboveBudget(view, measured)
    ? make('p', { class: 'note warning', 'data-test': 'warning' }, make('b', {}, 'Note'), ' ', told)
    : make('p', { class: 'note' }, told);
  return make('div', { class: 'gauge', role: 'group', 'aria-label': `Peak against the ${data.limit.name === 'peak' ? 'one asked for' : 'budget'}` }, bars, note);
}

// The headline is about the plan. A measurement above its budget is worth a warning, for other code is measured too.
const isAboveBudget = (view, measured) => view.own && view.budget !== null && measured !== null && measured > view.budget;
