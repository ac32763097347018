// Throughput by mode: one Plotly chart, made once and then only updated, and a table that says the same in figures.

import { el, figure, heading, setText } from './dom.js';
import { MODES, MODE_DASHES, MODE_SYMBOLS, inks, onThemeChange } from './theme.js';

const HEIGHT = 232;
const RETRY = 10000; // milliseconds after which Plotly is asked for again

export function mountThroughput(root, store, links) {
  const { head } = heading('Throughput',
    'Output tokens a second. Thin: each mode\'s mean while it had several requests to serve.');
  const plot = el('div', { class: 'glass-plot', role: 'img', 'aria-label': 'Output tokens a second over time; the table below has the figures' });
  const empty = el('p', { class: 'glass-empty' }, 'The curve begins with the first half second of work.');
  const table = makeTable();
  root.append(...head, el('div', { class: 'glass-plot-frame' }, plot, empty), table.root);
  let plotly = null;
  let drawn = -1;
  let visible = false;

  new IntersectionObserver((entries) => {
    visible = entries.at(-1).isIntersecting;
    if (visible) show();
  }).observe(root);
  onThemeChange(() => { drawn = -1; draw(); });
  new ResizeObserver(() => { drawn = -1; draw(); }).observe(root);

  let loading = null;
  function load() {
    loading ??= new Promise((resolve, reject) => {
      const script = el('script', { src: links.plotly, async: '' });
      script.onload = () => resolve(window.Plotly);
      script.onerror = () => {
        script.remove();
        setTimeout(() => { loading = null; }, RETRY);
        reject(new Error('Plotly did not load'));
      };
      document.head.append(script);
    });
    return loading;
  }

  async function draw() {
    if (!visible || !store.strip || !root.clientWidth) return;
    empty.hidden = store.bins.length > 0;
    plot.hidden = !empty.hidden; // it may show another engine's curve
    if (plot.hidden) {
      drawn = -1;
      return;
    }
    const stamp = store.bins[store.bins.length - 1][0] + store.bins.length / 1e4;
    if (stamp === drawn) return;
    try {
      plotly ??= await load();
    } catch {
      return;
    }
    drawn = stamp;
    plotly.react(plot, traces(), layout(), { displayModeBar: false, responsive: false, staticPlot: false, displaylogo: false });
  }

  /** Runs of bins of one mode: [mode, bins]. */
  function runs() {
    const list = [];
    for (const bin of store.bins) {
      const last = list[list.length - 1];
      if (last && last[0] === bin[2]) last[1].push(bin);
      else list.push([bin[2], [bin]]);
    }
    return list;
  }

  function traces() {
    const ink = inks();
    return MODES.map((mode) => {
      const x = [];
      const y = [];
      for (const [name, bins] of runs()) {
        if (name !== mode) continue;
        for (const [time, rate] of bins) {
          x.push(time);
          y.push(rate);
        }
        x.push(null);
        y.push(null);
      }
      return {
        x, y, name: mode, mode: 'lines+markers', connectgaps: false, line: { color: ink[mode], width: 2, dash: MODE_DASHES[mode].map((px) => `${px}px`).join() || 'solid' },
        marker: { color: ink[mode], size: 6, symbol: MODE_SYMBOLS[mode] }, hovertemplate: `${mode}: %{y:.0f} tok/s<extra></extra>`,
      };
    });
  }

  function layout() {
    const ink = inks();
    const shapes = [];
    for (const [mode, bins] of runs()) {
      const mean = store.strip.means[mode]?.[0];
      if (mean === undefined) continue;
      const [from, to] = [bins[0][0], bins[bins.length - 1][0]];
      shapes.push({ type: 'line', x0: from, x1: to, y0: mean, y1: mean, line: { color: ink[mode], width: 1 } });
    }
    const axis = { color: ink.muted, gridcolor: ink.line, zeroline: false, fixedrange: true, tickfont: { size: 10.5 } };
    return {
      height: HEIGHT, width: root.querySelector('.glass-plot-frame').clientWidth, margin: { l: 40, r: 12, t: 20, b: 34 },
      paper_bgcolor: 'rgba(0,0,0,0)', plot_bgcolor: 'rgba(0,0,0,0)', showlegend: false, shapes,
      font: { family: ink.font, color: ink.muted, size: 11 }, hovermode: 'closest', uirevision: 'glass',
      xaxis: { ...axis, showgrid: false, title: { text: 'seconds of work', standoff: 4, font: { size: 10.5 } } },
      yaxis: { ...axis, rangemode: 'tozero', nticks: 5 },
    };
  }

  function show() {
    draw();
    if (visible) table.show(store.strip);
  }

  store.onChange(show);
}

/** A row for each mode that has run: {root, show(strip)}. */
function makeTable() {
  const columns = [
    ['mode', ''],
    ['tok/s', 'Mean of output tokens a second while there were two requests or more to serve'],
    ['× naive', 'That mean, over naive mode\'s'],
    ['TTFT s', 'Time to first token, median and 95th percentile of the mode\'s last 64 requests'],
    ['gap ms', 'Inter-token latency: time from a token of a request to its next, median and 95th percentile of the mode\'s last 512'],
  ];
  const rows = new Map(MODES.map((mode) => {
    const cells = columns.slice(1).map(() => el('td', {}, '–'));
    const row = el('tr', { hidden: '' }, el('th', { scope: 'row' }, el('span', { class: 'glass-key', 'data-mode': mode }, mode)), ...cells);
    return [mode, { row, cells }];
  }));
  const root = el('table', { class: 'glass-table', hidden: '' },
    el('caption', { class: 'glass-unseen' }, 'Throughput and latency by mode, measured here'),
    el('thead', {}, el('tr', {}, ...columns.map(([words, tip]) => el('th', { scope: 'col', title: tip }, words)))),
    el('tbody', {}, ...[...rows.values()].map(({ row }) => row)));

  function show(strip) {
    if (!strip) return;
    root.hidden = !Object.keys(strip.latency).length;
    for (const [mode, { row, cells }] of rows) {
      const latency = strip.latency[mode];
      row.hidden = !latency;
      if (!latency) continue;
      const [mean, tokens] = strip.means[mode] || [0, 0];
      const [naive, enough] = strip.means.naive || [0, 0];
      const known = mode !== 'naive' && tokens >= strip.least && enough >= strip.least;
      const [ttft, ttft95, gap, gap95] = latency;
      [mean ? figure(mean) : '–', known ? figure(mean / naive) : '–', pair(ttft, ttft95, 1), pair(gap, gap95, 1000)]
        .forEach((words, place) => setText(cells[place], words));
    }
  }
  return { root, show };
}

/** 0.31 / 1.2: a median and a 95th percentile. */
function pair(middle, high, times) {
  return middle === null || middle === undefined ? '–' : `${figure(times * middle)} / ${figure(times * high)}`;
}
