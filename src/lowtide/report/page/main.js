// Reads the data, makes the panels, and keeps all of them on the same view.

async function readData() {
  const text = byId('data')?.textContent.trim();
  if (!text) return null;
  const packed = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream('deflate'));
  return new Response(stream).json();
}

function start(data) {
  byId('title').append(named('span', data.title, 120));
  byId('subtitle').textContent = `knob: ${data.knob}`;
  byId('made').textContent = `Written by Lowtide ${data.lowtide} on ${data.written}.`;
  byId('main').hidden = false;
  if (data.model !== null) {
    nameForModel();
    data.views = modelViews(data);
    data.frontier = data.views;
  }

  let index = data.chosen;
  const showRows = makeTable(data);
  const showCode = makeCode(data);
  const charts = () => {
    const view = data.views[index];
    hush();
    showFrontier(data, index, select);
    showSchedule(data, view);
    showMemory(data, view);
  };
  const select = (next) => {
    index = within(next, 0, data.views.length - 1);
    const view = data.views[index];
    showControls(data, index);
    showVerdict(data, view);
    charts();
    showRows(view);
    showCode(view);
  };
  makeControls(data, () => index, select);
  select(index);
  redrawWith(charts);
}

// ------------------------------------------------------------------ the budget's controls

function makeControls(data, where, select) {
  const slider = byId('slider');
  const last = data.views.length - 1;
  slider.max = last;
  slider.disabled = last === 0;
  const say = (text) => { byId('have-answer').textContent = text; };
  const go = (index) => {
    say('');
    select(index);
  };
  slider.addEventListener('input', () => go(Number(slider.value)));
  byId('prev').addEventListener('click', () => go(where() - 1));
  byId('next').addEventListener('click', () => go(where() + 1));
  byId('back').addEventListener('click', () => go(data.chosen));
  byId('have').addEventListener('submit', (event) => {
    event.preventDefault();
    const { bytes, why } = parseSize(byId('have-size').value, data.plain.memory);
    if (why) return say(why);
    const least = Math.min(...data.views.map(budgetOf));
    const fitting = data.views.findLastIndex((view) => budgetOf(view) <= bytes);
    if (fitting >= 0) {
      select(fitting);
      const { budget, name, text } = data.views[fitting];
      return say(`With ${formatSize(bytes)}: the plan for ${budget === null ? name : text.budget}, the largest on this page that fits.`);
    }
    return say(bytes < data.least || data.model !== null
      ? `Nothing fits in ${formatSize(bytes)}: the least is ${data.model === null ? formatSize(data.least) : data.views[0].text.budget}.`
      : `No plan on this page fits in ${formatSize(bytes)}: its least is ${formatSize(least)}.`);
  });
}

const budgetOf = (view) => view.needs ?? view.budget ?? view.peak;

function showControls(data, index) {
  const view = data.views[index];
  const slider = byId('slider');
  const last = data.views.length - 1;
  slider.value = index;
  slider.style.setProperty('--filled', `${last === 0 ? 0 : (100 * index) / last}%`);
  slider.setAttribute('aria-valuetext', `${view.name}, peak ${view.text.peak}, time ${view.text.factor}`);
  byId('bar-name').replaceChildren(named('span', view.budget === null ? `none, ${view.text.peak}` : view.text.budget, 40));
  byId('bar-place').textContent = `${view.own ? 'the plan, ' : ''}${index + 1} of ${last + 1}`;
  byId('prev').disabled = index === 0;
  byId('next').disabled = index === last;
  byId('back').disabled = index === data.chosen;
}

// ------------------------------------------------------------------ the code to paste

function makeCode(data) {
  let tab = 0;
  let shown = data.views[data.chosen];
  const tabs = shown.code.map(([name], k) => {
    const button = make('button', { type: 'button', role: 'tab', id: `tab-${k}`, 'aria-controls': 'code' }, cut(name, 30));
    button.addEventListener('click', () => turn(k));
    button.addEventListener('keydown', (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (by === undefined) return;
      turn((k + by + tabs.length) % tabs.length);
      tabs[tab].focus();
    });
    return button;
  });
  byId('tabs').replaceChildren(...tabs);
  const turn = (next) => {
    tab = next;
    tabs.forEach((button, k) => fill(button, { 'aria-selected': String(k === tab), tabindex: k === tab ? 0 : -1 }, []));
    byId('code').setAttribute('aria-labelledby', `tab-${tab}`);
    // A file holds the plan itself, so plans for other budgets have no code for that tab.
    byId('code').replaceChildren(make('code', {}, shown.code[tab]?.[1] ?? '# The file holds the plan itself: go back to the plan.'));
    byId('copied').textContent = '';
  };
  byId('copy').addEventListener('click', async () => {
    byId('copied').textContent = (await copy(byId('code'))) ? 'Copied.' : 'Selected: press Ctrl+C.';
  });
  return (view) => {
    shown = view;
    turn(tab);
  };
}

async function copy(node) {
  try {
    await navigator.clipboard.writeText(node.textContent);
    return true;
  } catch {
    // Without permission to write, the old way: select it, and ask for a copy.
    getSelection().selectAllChildren(node);
    return document.execCommand('copy');
  }
}

// ------------------------------------------------------------------ theme, width, paper

const darkness = matchMedia('(prefers-color-scheme: dark)');
const root = document.documentElement;
const isDark = () => (root.dataset.theme ? root.dataset.theme === 'dark' : darkness.matches);

function makeTheme() {
  const button = byId('theme');
  const name = () => {
    button.textContent = isDark() ? 'Light' : 'Dark';
    button.setAttribute('aria-label', `Switch to the ${isDark() ? 'light' : 'dark'} theme`);
  };
  button.addEventListener('click', () => {
    root.dataset.theme = isDark() ? 'light' : 'dark';
    name();
    root.dispatchEvent(new Event('theme'));
  });
  darkness.addEventListener('change', name);
  name();
}

// Charts are drawn for the width they have; the raster is painted in the colours of the theme.
function redrawWith(charts) {
  root.addEventListener('theme', charts);
  darkness.addEventListener('change', charts);
  matchMedia('print').addEventListener('change', charts);
  const host = byId('frontier');
  let width = host.clientWidth;
  new ResizeObserver(() => {
    if (host.clientWidth === width || host.clientWidth === 0) return;
    width = host.clientWidth;
    charts();
  }).observe(host);
}

function refuse(text) {
  byId('notice').textContent = text;
  byId('notice').hidden = false;
}

makeTheme();
window.lowtide = {
  ready: readData().then((data) => {
    if (data === null) refuse('This page holds no data.');
    else start(data);
    window.lowtide.readyAt = performance.now();
  }).catch((error) => {
    refuse(`This page cannot be shown: ${error.message}`);
    throw error;
  }),
};
