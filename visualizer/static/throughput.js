// Throughput by mode: one Plotly chart, made once and then only updated.

import { el, figure, heading } from './dom.js';
import { MODES, inks, onThemeChange } from './theme.js';

const HEIGHT = 232;

export function mountThroughput(root, store, links) {
  const { head, figure: note } = heading('Throughput',
    'Output tokens a second. Dashed: each mode\'s mean while it had several requests to serve.');
  const plot = el('div', { class: 'glass-plot', role: 'img', 'aria-label': 'Throughput by mode' });
  const empty = el('p', { class: 'glass-empty' }, 'The curve begins with the first half second of work.');
  root.append(...head, el('div', { class: 'glass-plot-frame' }, plot, empty));
  let plotly = null;
  let drawn = -1;
  let visible = false;

  new IntersectionObserver((entries) => {
    visible = entries.some((entry) => entry.isIntersecting);
    if (visible) draw();
  }).observe(root);
  onThemeChange(() => { drawn = -1; draw(); });
  new ResizeObserver(() => { drawn = -1; draw(); }).observe(root);

  let loading = null;
  function load() {
    loading ??= new Promise((resolve, reject) => {
      const script = el('script', { src: links.plotly, async: '' });
      script.onload = () => resolve(window.Plotly);
      script.onerror = () => { loading = null; script.remove(); reject(new Error('Plotly did not load')); };
      document.head.append(script);
    });
    return loading;
  }

  async function draw() {
    if (!visible || !store.strip || !root.clientWidth) return;
    empty.hidden = store.bins.length > 0;
    if (!store.bins.length) return;
    const stamp = store.bins[store.bins.length - 1][0] + store.bins.length / 1e4;
    if (stamp === drawn) return;
    try {
      plotly ??= await load();
    } catch {
      return;
    }
    drawn = stamp;
    plotly.react(plot, traces(), layout(), { displayModeBar: false, responsive: false, staticPlot: false, displaylogo: false });
    showMeans();
    plot.setAttribute('aria-label', `Throughput, mean output tokens per second with several requests: ${[...note.children].map((key) => key.textContent).join(', ')}`);
  }

  /** The means in words, each in its curve's colour: on the chart they would lie on other curves. */
  function showMeans() {
    const means = MODES.filter((mode) => store.strip.means[mode])
      .map((mode) => [mode, `${mode} ${figure(store.strip.means[mode][0])}`]);
    if (note.textContent === means.map(([, words]) => words).join('')) return;
    note.replaceChildren(...means.map(([mode, words]) => el('span', { class: 'glass-key', 'data-mode': mode }, words)));
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
        x, y, name: mode, mode: 'lines+markers', connectgaps: false, line: { color: ink[mode], width: 2 },
        marker: { color: ink[mode], size: 3 }, hovertemplate: `${mode}: %{y:.0f} tok/s<extra></extra>`,
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
      shapes.push({ type: 'line', x0: from, x1: to, y0: mean, y1: mean, line: { color: ink[mode], width: 1, dash: 'dash' } });
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

  store.onChange(draw);
}
