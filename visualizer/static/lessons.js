// Lessons: predict, see, understand. Space goes on, digits choose, Escape leaves; nothing needs a mouse.

import { openDialog } from './dialog.js';
import { el } from './dom.js';
import { mountPlayback } from './playback.js';

const NAMES = {
  'chunks-512': 'at most 512 tokens a step', 'chunks-64': 'at most 64 tokens a step', 'memory-reserving': 'reserving the maximum',
  'memory-paging': 'paging', 'sharing-off': 'nothing shared', 'sharing-on': 'beginnings shared', preemption: 'continuous', forks: 'one prompt, four answers',
};

/** Open a lesson, counted from 1; anything else opens the first. */
export async function openLessons(feed, wanted = 1) {
  let playback = null;
  const { dialog, body } = openDialog('Lessons', () => {
    playback?.close();
    document.removeEventListener('keydown', onKey, true);
    address(null);
  });
  const tabs = el('div', { class: 'glass-tabs', role: 'tablist', 'aria-label': 'Lessons' });
  const stage = el('div', { class: 'glass-stage' });
  const card = el('div', { class: 'glass-lesson', 'aria-live': 'polite', tabindex: '-1' });
  body.append(tabs, el('div', { class: 'glass-lesson-body' }, card, stage));
  let all = [];
  try {
    all = (await feed.get('lessons')).lessons;
  } catch (error) {
    card.append(el('p', {}, error.message));
  }
  if (!all.length || !dialog.open) return;
  const buttons = all.map((lesson, i) => {
    const tab = el('button', { type: 'button', role: 'tab' }, `${i + 1}  ${lesson.title}`);
    tab.addEventListener('click', () => open(i));
    return tab;
  });
  tabs.append(...buttons);
  const kept = new Map(); // recordings, by name
  let lesson = 0;
  let page = 0; // 0: the introduction; then two for each scene, asked and revealed; at last the question
  let chosen = null;
  let shown = null; // the scene that the playback shows
  let attempts = 0; // to show one: of those that wait for a recording, the last counts
  document.addEventListener('keydown', onKey, true);
  await open(Number.isInteger(wanted) && wanted >= 1 && wanted <= all.length ? wanted - 1 : 0);

  async function open(number) {
    lesson = number;
    buttons.forEach((tab, i) => tab.setAttribute('aria-selected', `${i === number}`));
    address(number + 1);
    await turn(0);
  }

  function pages() {
    return 2 * all[lesson].scenes.length + 2;
  }

  async function turn(to) {
    if (to >= pages()) {
      if (lesson + 1 < all.length) await open(lesson + 1);
      return;
    }
    page = Math.max(0, to);
    const { scenes } = all[lesson];
    const scene = page > 0 && page < pages() - 1 ? scenes[(page - 1) >> 1] : null;
    const revealed = scene && page % 2 === 0;
    if (!revealed) chosen = null;
    card.replaceChildren(el('p', { class: 'glass-sentence' }, `Lesson ${lesson + 1} of ${all.length}: ${all[lesson].title}`));
    if (page === 0) intro();
    else if (!scene) ending();
    else if (revealed) reveal(scene);
    else ask(scene);
    card.append(footer());
    card.focus();
    await show(scene, revealed);
  }

  function intro() {
    card.append(el('p', { class: 'glass-big' }, all[lesson].intro));
  }

  function ask(scene) {
    card.append(el('p', { class: 'glass-big' }, scene.ask), el('p', { class: 'glass-sentence' }, 'Your prediction, before you see it:'));
    const list = el('div', { class: 'glass-choices', role: 'group', 'aria-label': 'Your prediction' });
    scene.choices.forEach((words, i) => {
      const choice = el('button', { type: 'button', 'aria-pressed': 'false' }, el('kbd', {}, `${i + 1}`), ` ${words}`);
      choice.addEventListener('click', () => choose(i));
      list.append(choice);
    });
    card.append(list);
  }

  function choose(i) {
    const scene = all[lesson].scenes[(page - 1) >> 1];
    if (page % 2 === 0 || page === pages() - 1 || !scene?.choices[i]) return;
    chosen = i;
    turn(page + 1);
  }

  function reveal(scene) {
    const right = chosen === scene.answer;
    const verdict = chosen === null ? `It is: ${scene.choices[scene.answer]}.`
      : right ? `Right: ${scene.choices[scene.answer]}.` : `You said “${scene.choices[chosen]}”. It is: ${scene.choices[scene.answer]}.`;
    card.append(el('p', { class: 'glass-verdict', 'data-right': `${right}` }, verdict), el('p', { class: 'glass-big' }, scene.reveal));
  }

  function ending() {
    const { question, solution, code, chapter } = all[lesson];
    const answer = el('details', {}, el('summary', {}, 'The answer'), el('p', {}, solution));
    card.append(el('p', { class: 'glass-big' }, question), answer, el('h3', {}, 'Where it happens'),
      el('ul', { class: 'glass-code' }, ...code.map(([file, name, words]) => el('li', {}, el('code', {}, `${file}: ${name}`), ` – ${words}`))),
      el('p', { class: 'glass-sentence' }, `More, with an exercise: ${chapter}`));
  }

  function footer() {
    const back = el('button', { type: 'button' }, 'Back');
    const on = el('button', { type: 'button', class: 'glass-primary' }, page === pages() - 1 ? (lesson + 1 < all.length ? 'Next lesson' : 'The end') : 'Go on');
    back.disabled = page === 0;
    on.disabled = page === pages() - 1 && lesson + 1 === all.length;
    back.addEventListener('click', () => turn(page - 1));
    on.addEventListener('click', () => turn(page + 1));
    return el('div', { class: 'glass-lesson-foot' }, back, on, el('span', { class: 'glass-sentence' }, 'Space: go on. Backspace: back. 1 to 3: predict.'));
  }

  function onKey(event) {
    if (!dialog.open || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.closest?.('input, select, summary, .glass-playback') || (event.target.tagName === 'BUTTON' && event.key === ' ')) return;
    const digit = '123456789'.indexOf(event.key);
    const act = { ' ': () => turn(page + 1), Backspace: () => turn(page - 1) }[event.key] ?? (digit >= 0 && (() => choose(digit)));
    if (!act) return;
    event.preventDefault();
    event.stopPropagation();
    act();
  }

  /** The recording of a scene, at its start until the prediction is made; then it plays. */
  async function show(scene, revealed) {
    attempts += 1;
    const attempt = attempts;
    stage.classList.toggle('glass-asking', !revealed && scene !== null); // the curve would tell
    if (page > 0 && scene === null) return; // at the end, what was shown last stays
    if (scene !== shown || scene === null) {
      playback?.close();
      playback = shown = null;
      stage.replaceChildren();
    }
    if (scene === null) return;
    try {
      const arms = shown ? null : await Promise.all(scene.traces.map(fetchArm));
      if (attempt !== attempts || !dialog.open) return;
      if (arms) playback = mountPlayback(stage, arms);
      shown = scene;
    } catch (error) {
      if (attempt === attempts) stage.replaceChildren(el('p', {}, error.message));
      return;
    }
    mark(revealed ? scene.highlight : null);
    playback.rewind();
    if (revealed) playback.begin();
  }

  async function fetchArm(name) {
    if (!kept.has(name)) kept.set(name, await feed.get(`lessons/trace/${name}`));
    const { mode, frames } = kept.get(name);
    return { title: NAMES[name] ?? mode, mode, frames };
  }

  function mark(panel) {
    for (const node of stage.querySelectorAll('[data-panel]')) node.classList.toggle('glass-marked', node.dataset.panel === panel);
  }
}

/** Have the page's address name a lesson, so that it can be passed on; or none (null). */
function address(number) {
  const next = new URL(location.href);
  if (number === null) next.searchParams.delete('lesson');
  else next.searchParams.set('lesson', `${number}`);
  history.replaceState(history.state, '', next);
}
