// What is beside the live engine: lessons, races, traces to take home or to bring, and a sandbox of one's own.

import { openDialog } from './dialog.js';
import { button, count, el, figure, setText } from './dom.js';
import { openLessons } from './lessons.js';
import { mountPlayback } from './playback.js';
import { MODES } from './theme.js';

const WATCH = 400; // milliseconds between two looks at a race that runs

export function mountLab(root, sandboxRoot, store, feed) {
  const learn = button('Lessons', 'Five short experiments: predict, see, understand', () => openLessons(feed));
  const race = button('Race', 'Run the same requests in two modes and watch them side by side', () => openRace(feed));
  const trace = button('Trace', 'Save what just happened, or load a recording', () => openTrace(store, feed));
  const box = button('Sandbox', 'An engine of your own, to pause and step', () => sandbox.toggle());
  const sandbox = mountSandbox(store, feed, box);
  root.append(el('div', { class: 'glass-lab' }, learn, race, trace, box));
  sandboxRoot.append(sandbox.root);
  const lesson = new URLSearchParams(location.search).get('lesson');
  if (lesson) openLessons(feed, Number(lesson));
}

// -- race ---------------------------------------------------------------------------------------------

async function openRace(feed) {
  let playback = null;
  const { dialog, body } = openDialog('Race: the same requests in two modes', () => playback?.close());
  const choice = (label, values, value) => {
    const select = el('select', {}, ...values.map((one) => el('option', { value: `${one}` }, `${one}`)));
    select.value = `${value}`;
    return [select, el('label', {}, `${label} `, select)];
  };
  const [first, firstLabel] = choice('Left', MODES, 'naive');
  const [second, secondLabel] = choice('Right', MODES, 'continuous');
  const [size, sizeLabel] = choice('Requests', [8, 16, 32], 16);
  const start = el('button', { type: 'submit', class: 'glass-primary' }, 'Start the race');
  const bar = el('progress', { max: '1', value: '0', hidden: '' });
  const words = el('span', { role: 'status' }, 'Each mode serves the same requests, drawn from a seed, alone on an engine '
    + 'of its own with the same weights. Then both are played on one clock.');
  const progress = el('span'); // apart, or each of its figures would be read out
  const verdict = el('p', { class: 'glass-verdict', role: 'status' });
  const form = el('form', { class: 'glass-race-form' }, firstLabel, secondLabel, sizeLabel, start, bar);
  const stage = el('div');
  body.append(form, el('p', { class: 'glass-sentence' }, words, progress), verdict, stage);

  form.addEventListener('submit', async (event) => {
    event.preventDefault();
    if (start.ariaDisabled) return; // disabled for real, it would lose the focus to nowhere
    start.ariaDisabled = 'true';
    playback?.close();
    playback = null;
    setText(verdict, '');
    try {
      const answer = await feed.post('race', { modes: [first.value, second.value], size: Number(size.value) });
      await follow(answer.race);
    } catch (error) {
      setText(words, error.message);
    }
    setText(progress, '');
    bar.hidden = true;
    start.ariaDisabled = null;
  });

  async function follow(status) {
    bar.hidden = false;
    let race = status;
    while (race.state === 'running') {
      bar.value = race.total ? race.done / race.total : 0;
      setText(words, `${race.modes[race.arm]} is running`);
      setText(progress, `: ${count(race.done)} of ${count(race.total)} output tokens of both together, ${Math.round(race.seconds)} s`);
      await new Promise((resolve) => { setTimeout(resolve, WATCH); });
      await untilSeen();
      if (!dialog.isConnected) return;
      ({ race } = await feed.get(`race?id=${encodeURIComponent(race.id)}`));
      if (!race) throw new Error('The server was started anew. Please start the race again.');
    }
    if (race.state === 'failed') throw new Error(race.error);
    const result = await feed.get(`race/${encodeURIComponent(race.id)}/result`);
    if (dialog.isConnected) show(result);
  }

  function show(result) {
    setText(words, `${result.size} requests, ${count(result.requests.reduce((sum, one) => sum + one[2], 0))} output tokens, seed ${result.seed}.`);
    setText(verdict, result.speedup === null ? `No speed-up is given: ${result.refused}.`
      : `${result.winner} is ${figure(result.speedup)} times faster.`);
    playback = mountPlayback(stage, result.arms.map((arm) => ({ title: arm.mode, mode: arm.mode, frames: arm.frames })));
    playback.view.focus({ preventScroll: true });
    playback.begin();
  }
}

/** Unseen, a page asks for nothing. */
function untilSeen() {
  return document.hidden ? new Promise((resolve) => { document.addEventListener('visibilitychange', resolve, { once: true }); }) : null;
}

// -- trace --------------------------------------------------------------------------------------------

function openTrace(store, feed) {
  let playback = null;
  const { dialog, body } = openDialog('Trace', () => playback?.close());
  const save = (format, label) => {
    const link = el('a', { href: `${feed.links.base}trace?format=${format}`, download: '', class: 'glass-primary' }, label);
    link.addEventListener('click', async (event) => {
      if (feed.source !== 'sandbox') return;
      event.preventDefault(); // a sandbox is its visitor's own, and the token that says so belongs in no address
      try {
        await feed.save('sandbox/trace', { token: feed.token, format });
      } catch (error) {
        setText(words, error.message);
      }
    });
    return link;
  };
  const file = el('input', { type: 'file', accept: '.jsonl,.json,.txt,application/x-ndjson' });
  const words = el('p', { class: 'glass-sentence', role: 'status' }, 'A recording holds ids, slots, lengths and block numbers, and no word of anybody\'s text. '
    + 'Loading one needs no model.');
  const stage = el('div');
  body.append(el('div', { class: 'glass-race-form' }, save('jsonl', 'Save the last steps (JSONL)'), save('chrome', 'Save for Perfetto (Chrome trace)'),
    el('label', {}, 'Load a recording ', file)), words, stage);
  file.addEventListener('change', async () => {
    const [chosen] = file.files;
    if (!chosen) return;
    playback?.close();
    playback = null;
    setText(words, `Reading ${chosen.name} …`);
    try {
      const { summary, frames } = await feed.upload('replay', chosen);
      if (!dialog.isConnected) return;
      if (frames.length < 2) throw new Error('This recording holds no steps.');
      setText(words, `${chosen.name}: ${count(summary.steps)} steps, ${count(summary.output_tokens)} output tokens in ${figure(summary.seconds)} s.`);
      playback = mountPlayback(stage, [{ title: chosen.name, mode: summary.modes?.[0], frames }]);
      playback.view.focus({ preventScroll: true });
    } catch (error) {
      setText(words, error.message);
    }
    file.value = '';
  });
}

// -- sandbox ------------------------------------------------------------------------------------------

/** While it is open, all panels show one's own engine, and prompts go there. */
function mountSandbox(store, feed, opener) {
  const words = el('span', { role: 'status' });
  const countdown = el('span');
  const run = button('Run', 'Let the sandbox run, or pause it', () => tell(feed.sandbox?.paused ? 'resume' : 'pause'));
  const one = button('1 step', 'Take one step of the sandbox', () => tell('step', 1));
  const eight = button('8 steps', 'Take eight steps of the sandbox', () => tell('step', 8));
  const mode = el('select', { 'aria-label': 'Mode of the sandbox' }, ...MODES.map((name) => el('option', {}, name)));
  mode.addEventListener('change', () => tell('mode', mode.value));
  const root = el('div', { class: 'glass-sandbox', role: 'group', 'aria-label': 'Sandbox', hidden: '' },
    el('strong', {}, 'Your sandbox'), run, one, eight, mode, el('span', { class: 'glass-when' }, words, countdown),
    button('Close', 'Back to the engine that everybody shares', () => tell('close')));
  let note = '';
  let last = Promise.resolve();

  /** Commands are sent one after the other: the sandbox refuses one while another is carried out. */
  function tell(action, value) {
    last = last.then(() => send(action, value));
  }

  async function send(action, value) {
    note = '';
    try {
      const { sandbox } = await feed.post('sandbox', { token: feed.token, do: action, value });
      feed.setSource(sandbox ? 'sandbox' : 'live', sandbox);
    } catch (error) {
      note = error.message;
      if (feed.source === 'live') say(error.message);
    }
    store.changed();
    feed.soon();
  }

  function say(message) {
    setText(document.getElementById('glass-notice'), message);
  }

  store.onChange(() => {
    const status = feed.sandbox;
    const open = feed.source === 'sandbox';
    root.hidden = !open;
    opener.setAttribute('aria-pressed', `${open}`);
    document.getElementById('glass-mode').inert = open; // it is the shared engine's
    if (!open || !status) return;
    setText(run, status.paused ? 'Run' : 'Pause');
    if (document.activeElement !== mode) mode.value = status.mode;
    setText(words, note || (status.paused ? (status.running + status.waiting ? 'paused: take a step' : 'paused, and nothing to do: send it a prompt') : 'running'));
    setText(countdown, status.closes_in < 60 ? ` · closes in ${status.closes_in} s if unused` : '');
  });
  return { root, toggle: () => tell(feed.source === 'sandbox' ? 'close' : 'open') };
}
