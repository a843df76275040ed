// The table of rows: sorted by any column, filtered by text, saved as CSV.

const MOST_ROWS = 200;

function makeTable(data) {
  const order = { column: null, down: false };
  let shown = MOST_ROWS;
  let rows = [];
  const { columns } = data;
  const heads = columns.map(({ label, kind }, column) => {
    const button = make('button', { type: 'button' }, label, make('i', { class: 'arrow', 'aria-hidden': 'true' }));
    button.addEventListener('click', () => {
      // A first click sorts upwards, a second downwards, a third restores the chain's order.
      const turn = order.column !== column ? { column, down: false } : order.down ? { column: null, down: false } : { column, down: true };
      Object.assign(order, turn);
      render();
    });
    return make('th', { scope: 'col', class: kind, 'aria-sort': 'none' }, button);
  });
  document.querySelector('#table thead').replaceChildren(make('tr', {}, ...heads));

  const collate = new Intl.Collator('en', { numeric: true }).compare;
  const compare = (a, b) => {
    if (a === null || b === null) return (a === null) - (b === null);
    const sign = order.down ? -1 : 1;
    return columns[order.column].kind === 'text' ? sign * collate(a, b) : sign * (a - b);
  };
  const matching = () => {
    const wanted = byId('filter').value.trim().toLowerCase();
    const texts = (row) => row.some((cell, k) => cell !== null && cellText(cell, columns[k]).toLowerCase().includes(wanted));
    const found = wanted === '' ? rows.slice() : rows.filter(texts);
    return order.column === null ? found : found.sort((a, b) => compare(a[order.column], b[order.column]));
  };
  const render = () => {
    heads.forEach((head, k) => head.setAttribute('aria-sort', k !== order.column ? 'none' : order.down ? 'descending' : 'ascending'));
    const found = matching();
    const lines = found.slice(0, shown).map((row) => make('tr', {}, ...row.map((cell, k) => tableCell(cell, columns[k]))));
    document.querySelector('#table tbody').replaceChildren(...lines);
    byId('table-count').textContent = lines.length < found.length
      ? `${grouped(lines.length)} of ${grouped(found.length)} rows.`
      : `${grouped(found.length)} ${found.length === 1 ? 'row' : 'rows'}${found.length < rows.length ? ` of ${grouped(rows.length)}` : ''}.`;
    byId('table-all').hidden = lines.length === found.length;
  };
  byId('filter').addEventListener('input', render);
  byId('table-all').addEventListener('click', () => {
    shown = Infinity;
    render();
  });
  byId('csv').addEventListener('click', () => {
    const text = [columns.map(({ label }) => label), ...matching()]
      .map((row, k) => row.map((cell, c) => csvCell(cell, k === 0 ? 'text' : columns[c].kind)).join(',')).join('\r\n');
    const address = URL.createObjectURL(new Blob([text, '\r\n'], { type: 'text/csv;charset=utf-8' }));
    make('a', { href: address, download: `${fileName(data.title)}.csv` }).click();
    setTimeout(() => URL.revokeObjectURL(address), 10000);
  });
  return (view) => {
    rows = view.rows;
    render();
  };
}

function cellText(cell, { kind, unit }) {
  if (kind === 'bytes') return formatSize(cell);
  if (kind === 'time') return formatTime(cell, unit);
  return kind === 'number' ? formatNumber(cell) : String(cell);
}

function tableCell(cell, column) {
  const { key, kind } = column;
  if (cell === null) return make('td', { class: kind });
  if (kind === 'text') {
    const look = { why: cell.length < 40 ? 'why brief' : 'why', decision: cell === 'keep' ? 'keep' : 'again' }[key] ?? '';
    // The style sheet cuts it to the width there is; the title has all of it.
    return make('td', { class: `text ${look}`, title: cell }, make('bdi', {}, cut(cell, 240)));
  }
  return make('td', { class: kind, title: kind === 'bytes' ? `${grouped(cell)} B` : null }, cellText(cell, column));
}

// RFC 4180. Text that a spreadsheet would take for a formula gets an apostrophe in front.
function csvCell(cell, kind) {
  if (cell === null) return '';
  let text = String(cell);
  if (kind === 'text' && /^[=+\-@\t\r]/u.test(text)) text = `'${text}`;
  return /[",\r\n]/u.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

function fileName(title) {
  return cut(title.replace(/[^\p{L}\p{N}._-]+/gu, '-'), 60).replace(/^[-.…]+|[-.…]+$/gu, '') || 'lowtide';
}
