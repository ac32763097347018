// The header and the metric strip.

import { count, el, figure, setText } from './dom.js';
import { reasonWords } from './timeline.js';

export function mountHeader(root, store) {
  const model = el('span', { class: 'glass-model' });
  let hardware = '';
  root.append(el('h1', {}, 'Glass Engine'), model);
  store.onChange(() => {
    const info = store.info;
    if (!info) return;
    const name = info.model.split('/').filter(Boolean).pop();
    hardware = store.link.hardware || hardware || info.device;
    setText(model, `${name} · ${info.dtype} · ${hardware}`);
    model.title = `Context limit ${info.context_limit} tokens, at most ${info.max_num_batched_tokens} tokens a step`;
  });
}

/** The pill that says whether what one sees is live. */
export function mountLive(root, store, feed) {
  const words = el('span', { role: 'status' }); // the state alone: a reader who hears each step hears nothing else
  const step = el('span');
  const pill = el('div', { class: 'glass-pill' }, el('i', { 'aria-hidden': 'true' }), words, step);
  root.append(pill);
  const say = {
    connecting: () => 'connecting', loading: () => 'loading', failed: () => 'failed', lost: () => 'reconnecting',
    ready: () => (feed.source === 'sandbox' ? 'SANDBOX' : 'LIVE'), past: () => 'PAUSED',
  };
  store.onChange(() => {
    const state = store.link.state === 'ready' && !store.player.live ? 'past' : store.link.state;
    pill.dataset.state = state;
    setText(words, say[state]());
    setText(step, store.strip && (state === 'ready' || state === 'past') ? `· step ${count(store.picture.step)}` : '');
  });
}

export function mountStrip(root, store) {
  const list = el('dl', { class: 'glass-strip' });
  const cell = (tip) => {
    const value = el('b');
    const unit = el('span');
    const words = el('dt');
    const box = el('div', { title: tip }, el('dd', {}, value, unit), words);
    list.append(box);
    return (number, suffix, label) => {
      setText(value, number);
      setText(unit, suffix);
      setText(words, label);
    };
  };
  const running = cell('Requests that have a slot');
  const waiting = cell('Requests in the queue, and what keeps the first of them out');
  const memory = cell('Blocks of the pool that requests hold. Cached blocks count as free: they are given up when needed');
  const rate = cell('Output tokens per second of all requests together, over the last two seconds of work');
  const ttft = cell('Time to first token: from sending to the first token, median of the last 64 requests in this mode');
  const step = cell('One pass of the model over everything in the batch: mean of the last 20 steps');
  const fast = cell('Mean output tokens per second in this mode while it had several requests to serve, divided by the same in naive mode, both measured '
    + 'here since the start. It depends on how many requests ran at once');
  fast('–', '', '');
  list.lastChild.classList.add('glass-speedup');
  root.append(list);

  store.onChange(() => {
    const { strip, info } = store;
    if (!strip) {
      for (const [set, label] of [[running, 'running'], [waiting, 'waiting'], [memory, 'KV blocks held'], [rate, 'tokens / s now'],
        [ttft, 'TTFT, median'], [step, 'per step'], [fast, 'speed-up over naive']]) set('–', '', label);
      return;
    }
    running(`${strip.running}`, `/ ${info.max_num_seqs}`, 'running');
    const reason = reasonWords(strip.reason, strip.mode);
    waiting(`${strip.waiting}`, '', strip.waiting && reason ? `waiting · ${reason}` : 'waiting');
    memory(`${Math.round((100 * strip.held) / info.num_blocks)}`, '%', 'KV blocks held');
    rate(figure0(strip.rate), '', 'tokens / s now');
    if (strip.ttft === null) ttft('–', '', 'TTFT, median');
    else ttft(figure(strip.ttft), 's', 'TTFT, median');
    if (strip.step_ms === null) step('–', '', 'per step');
    else step(figure(strip.step_ms), 'ms', 'per step');
    speedup(strip);
  });

  function speedup(strip) {
    if (strip.speedup) {
      const [mode, times] = strip.speedup;
      fast(`${figure(times)}×`, '', strip.mode === 'naive' ? `${mode}, over naive` : 'over naive, measured here');
    } else {
      const naive = (strip.means.naive?.[1] || 0) >= strip.least;
      const here = (strip.mode === 'naive') !== naive; // this mode is the one that is missing
      const missing = naive ? 'another mode' : 'naive';
      const begun = !naive && strip.means.naive; // some, but too little for a figure
      fast('–', '', here ? 'speed-up: measuring' : `speed-up: run ${begun ? 'more ' : ''}${missing}${begun ? '' : ' too'}`);
    }
  }
}

const figure0 = (number) => (number ? figure(number) : '0');
