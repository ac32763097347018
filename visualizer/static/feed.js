// The poll: one request in flight, often while the engine works, seldom while it rests, never unseen.

import { el } from './dom.js';

const ACTIVE = 200; // milliseconds between polls while something runs, until the server names its pace
const IDLE = 1000;
const FIRST_RETRY = 500;
const LAST_RETRY = 8000;
const TIMEOUT = 10000;

export class Feed {
  constructor(store, links, root) {
    this.store = store;
    this.links = links;
    this.root = root;
    this.cursor = null;
    this.token = '';
    this.failures = 0;
    this.active = ACTIVE;
    this.timer = 0;
    this.inFlight = false;
    this.renewed = 0;
    this.source = 'live'; // or 'sandbox': whose frames the poll brings
    this.sandbox = null; // its status
    document.addEventListener('visibilitychange', () => (document.hidden ? this.sayAway() : this.soon()));
  }

  /** Poll now, or right after the poll in flight. */
  soon() {
    clearTimeout(this.timer);
    this.again = this.inFlight;
    if (!this.inFlight) this.poll();
  }

  /** Unseen, the page polls nothing; told so, the server keeps its requests running. */
  sayAway() {
    if (this.token) navigator.sendBeacon(`${this.links.base}away`, JSON.stringify({ token: this.token }));
  }

  setToken(token) {
    if (!token || token === this.token) return;
    this.token = token;
    this.store.keepAsPast();
    this.soon();
  }

  async post(path, body) {
    return (await this.ask(path, body)).json();
  }

  async ask(path, body) {
    return checked(await fetch(this.links.base + path, {
      method: 'POST',
      headers: { 'Content-Type': 'application/json' },
      body: JSON.stringify(body),
      signal: AbortSignal.timeout(TIMEOUT),
    }));
  }

  /** Have the browser save what a post answers with, for what belongs in no address. */
  async save(path, body) {
    const response = await this.ask(path, body);
    const [, name] = response.headers.get('Content-Disposition').match(/"(.+)"/);
    const href = URL.createObjectURL(await response.blob());
    el('a', { href, download: name }).click();
    setTimeout(() => URL.revokeObjectURL(href), 60000);
  }

  async get(path) {
    return (await checked(await fetch(this.links.base + path, { signal: AbortSignal.timeout(TIMEOUT) }))).json();
  }

  /** Send a file; the answer, or an error with the server's own words. */
  async upload(path, file) {
    return (await checked(await fetch(this.links.base + path, { method: 'POST', body: file }))).json();
  }

  /** Show the frames of another engine from now on. */
  setSource(source, sandbox = null) {
    this.sandbox = sandbox;
    if (source === this.source) return;
    this.source = source;
    this.cursor = null;
    this.store.startOver();
    this.soon();
  }

  async stop(card) {
    try {
      await this.post('stop', { token: this.token, card });
    } finally {
      this.soon();
    }
  }

  async poll() {
    if (document.hidden || !this.root.isConnected) return;
    this.inFlight = true;
    const { token, source } = this;
    try {
      const answer = await this.post('poll', { cursor: this.cursor, source: this.source, token, have: this.store.have() });
      this.failures = 0;
      this.take(answer, token, source);
    } catch {
      this.failures += 1;
      if (this.failures > 1) this.store.link = { state: 'lost' };
    }
    this.inFlight = false;
    this.store.changed();
    if (this.again) {
      this.again = false;
      this.poll();
    } else {
      this.timer = setTimeout(() => this.poll(), this.pause());
    }
  }

  take(answer, token, source) {
    this.store.link = answer.status;
    this.active = 1000 * answer.pace || ACTIVE; // slower, the more pages there are
    if (!answer.frames) return; // there is no engine yet; one that broke still says how all requests ended
    if (answer.own && answer.own.sandbox !== undefined) this.sandbox = answer.own.sandbox;
    if (source !== this.source) return; // it changed meanwhile: these are frames of the other engine
    if (answer.source !== this.source) { // the sandbox was closed, for lack of use or with its server
      this.setSource(answer.source);
      return;
    }
    for (const frame of answer.frames) this.store.applyFrame(frame);
    this.cursor = answer.cursor;
    if (token !== this.token) return; // it changed meanwhile: these are not our cards any more
    if (answer.own) this.store.applyOwn(answer.own);
    else this.renew(); // no token yet, or the server was started anew and does not know it
  }

  /** Ask Python for a token, at most every three seconds. */
  renew() {
    const now = performance.now();
    if (this.renewed && now - this.renewed < 3000) return;
    this.renewed = now;
    this.links.renew();
  }

  pause() {
    if (this.failures) {
      return Math.min(LAST_RETRY, FIRST_RETRY * 2 ** (this.failures - 1)) * (0.8 + 0.4 * Math.random());
    }
    const waiting = [...this.store.cards.values()].some((card) => card.state !== 'finished');
    if (this.store.link.state === 'loading') return 400;
    return this.store.busy || waiting ? this.active : Math.max(IDLE, this.active);
  }
}

/** An answer that is none of an error. Raises that in the server's own words, where it has some. */
async function checked(response) {
  if (response.ok) return response;
  let words = '';
  try {
    words = (await response.json()).error;
  } catch { /* no JSON, so no words */ }
  throw new Error(words || `The server answered with an error (HTTP ${response.status}).`);
}
