'use strict';
// The tokens of a rollout, coloured by one of their values, with all values of the token under the pointer or the keys.
(() => {
  const { html, useState, useRef, useMemo } = RlView;

  const LEVELS = 6;
  const SIDES = 4;
  const GROUPS = 6;
  const COLUMNS = {
    logprob: "trainer's logprob",
    generation_logprob: "generator's logprob",
    difference: 'difference (trainer − generator)',
    advantage: 'advantage',
    entropy: 'entropy',
    loss_mask: 'trained on',
    weight_version: 'weight version',
  };
  const MEASURED = ['logprob', 'generation_logprob', 'difference', 'advantage', 'entropy'];
  const isOneSided = (name) => name !== 'difference' && name !== 'advantage';
  const share = (value, span) => Math.min(1, Math.abs(value) / span);
  // The value at which the colour is strongest; logprobs and entropies begin at 0, the others have two sides.
  const spanOf = (range) => Math.max(Math.abs(range[0]), Math.abs(range[1]), 1e-9);
  const isSampled = (columns, at) => columns.generation_logprob[at] !== null || columns.weight_version[at] !== null;
  const tone = (answer, name, at) => {
    const { columns, ranges, versions } = answer;
    const value = columns[name][at];
    if (name === 'loss_mask') return value ? 'tone-group0' : '';
    if (value === null || !isSampled(columns, at)) return '';
    if (name === 'weight_version') return `tone-group${versions.indexOf(value) % GROUPS}`;
    const span = spanOf(ranges[name]);
    if (isOneSided(name)) return `tone-level${Math.round(LEVELS * share(value, span))}`;
    const level = Math.round(SIDES * share(value, span));
    return level === 0 ? '' : `tone-${value < 0 ? 'below' : 'above'}${level}`;
  };

  RlView.Tokens = ({ id, kind, step, row, query, version }) => {
    const offset = Number(query.get('token') ?? 0);
    // tokens arrive after their rollout; once they are there they do not change
    const asked = useRef(version);
    const last = useRef(null);
    if (!last.current?.count) asked.current = version;
    const { answer, problem } = RlView.useAnswer('tokens', { id, kind, step, row, offset: offset || '' }, asked.current);
    last.current = answer;
    if (problem && !answer && RlView.isExport) return html`<p class="note">This export has no tokens of this rollout. It has the first tokens of at most ${globalThis.RlViewExport.tokens} recorded rollouts of a step; open the run with rl view to see the others.</p>`;
    if (problem && !answer) return html`<${RlView.Problem} text=${problem} />`;
    if (!answer) return html`<${RlView.Empty}>Reading tokens…</${RlView.Empty}>`;
    if (!answer.count) {
      return html`<p class="note">${answer.reason}</p>
        ${answer.others.length > 0 && html`<p>Recorded in this step: ${answer.others.slice(0, 32).map((other, index) => html`${index ? ', ' : ''}<a href=${to({ open: `${step}:${other}` })}>rollout ${other}</a>`)}${answer.others.length > 32 ? ', …' : ''}</p>`}`;
    }
    return html`<${Shown} answer=${answer} query=${query} />`;
  };
  const to = (changes) => {
    const { parts, query } = RlView.readRoute();
    query.delete('token');
    for (const [name, value] of Object.entries(changes)) query.set(name, value);
    return `#/${parts.map(encodeURIComponent).join('/')}?${query}`;
  };

  const Shown = ({ answer, query }) => {
    const names = [...MEASURED.filter((name) => answer.ranges[name]), 'loss_mask', 'weight_version'];
    const missing = MEASURED.filter((name) => !answer.ranges[name]);
    const given = query.get('color');
    const name = names.includes(given) ? given : names[0];
    const { count, offset, columns } = answer;
    const end = offset + columns.text.length;
    return html`<div class="bar token-bar">
        <${RlView.Choice} label="colour" name="color" query=${query} fallback=${names[0]} options=${names.map((each) => [each, COLUMNS[each]])} />
        <${Legend} answer=${answer} name=${name} />
        <span class="muted count" role="status">${count > columns.text.length ? `tokens ${offset + 1} to ${end} of ${count.toLocaleString('en')}` : `${count.toLocaleString('en')} tokens`}</span></div>
      ${missing.length > 0 && html`<p class="muted">Not computed by the algorithm in this step: ${missing.map((each) => COLUMNS[each]).join(', ')}.</p>`}
      <${Text} answer=${answer} name=${name} />
      ${RlView.isExport ? end < count && html`<p class="note">The export has the first ${end.toLocaleString('en')} of ${count.toLocaleString('en')} tokens. Open the run with rl view to see the others.</p>`
        : html`<div class="pages">${offset > 0 && html`<button onClick=${() => RlView.setQuery({ token: Math.max(0, offset - columns.text.length) || '' })}>previous tokens</button>`}
        ${end < count && html`<button onClick=${() => RlView.setQuery({ token: end })}>next tokens</button>`}</div>`}`;
  };

  const Swatches = ({ tones }) => html`<span class="swatches">${tones.map((each) => html`<i class=${`swatch ${each}`}></i>`)}</span>`;
  const Legend = ({ answer, name }) => {
    const range = (count, prefix) => Array.from({ length: count }, (_, index) => `${prefix}${index + 1}`);
    const span = answer.ranges[name] ? spanOf(answer.ranges[name]) : 0;
    const scale = name === 'loss_mask' ? html`<li><${Swatches} tones=${['tone-group0']} />trained on</li>`
      : name === 'weight_version' ? answer.versions.slice(0, 2 * GROUPS).map((each, index) => html`<li><${Swatches} tones=${[`tone-group${index % GROUPS}`]} />${each}</li>`)
      : isOneSided(name) ? html`<li>0<${Swatches} tones=${range(LEVELS, 'tone-level')} />${RlView.number(name === 'entropy' ? span : -span)}</li>`
      : html`<li>${RlView.number(-span)}<${Swatches} tones=${[...range(SIDES, 'tone-below').reverse(), '', ...range(SIDES, 'tone-above')]} />${RlView.number(span)}</li>`;
    return html`<ul class="legend" aria-label=${`scale of ${COLUMNS[name]}`}>${scale}<li><span class="token untrained">dotted</span> not trained on</li><li><span class="token special">${'<s>'}</span> special token</li></ul>`;
  };

  // Tokens are text nodes. The one under the pointer or the keys is marked without drawing the others again.
  const Text = ({ answer, name }) => {
    const frame = useRef(null);
    const marked = useRef(null);
    const [card, setCard] = useState(null);
    const tokens = useMemo(() => drawn(answer, name), [answer, name]);
    const show = (element, keepsInView) => {
      marked.current?.classList.remove('current');
      marked.current = element;
      if (!element) { setCard(null); return; }
      element.classList.add('current');
      if (keepsInView) element.scrollIntoView({ block: 'nearest' });
      const box = element.getBoundingClientRect();
      setCard({ at: Number(element.dataset.at), left: box.left, top: box.top, bottom: box.bottom });
    };
    const all = () => frame.current.querySelectorAll('[data-at]');
    const key = (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const at = marked.current ? Number(marked.current.dataset.at) : -1;
      const elements = all();
      const next = { ArrowRight: () => at + 1, ArrowLeft: () => at - 1, Home: () => 0, End: () => elements.length - 1, ArrowDown: () => beside(elements, at, 1), ArrowUp: () => beside(elements, at, -1) }[event.key]?.();
      if (event.key === 'Escape' && card) { event.stopPropagation(); show(null); }
      if (next === undefined) return;
      event.preventDefault();
      show(elements[Math.min(elements.length - 1, Math.max(0, next))], true);
    };
    return html`<div class="tokens untrusted" ref=${frame} tabindex="0" role="group" aria-label="tokens: arrow keys show the values of one" dir="auto" onKeyDown=${key}
        onMouseOver=${(event) => show(event.target.closest('[data-at]') ?? null)} onMouseLeave=${() => show(null)} onFocus=${() => !marked.current && show(all()[0])} onBlur=${() => show(null)}>${tokens}</div>
      ${card && card.at < answer.columns.text.length && html`<${Card} answer=${answer} card=${card} />`}`;
  };
  // The token of the next or previous line that is nearest to one.
  const beside = (elements, from, step) => {
    const box = elements[Math.max(0, from)].getBoundingClientRect();
    let found = Math.max(0, from);
    let line = null;
    for (let at = found + step; at >= 0 && at < elements.length; at += step) {
      const other = elements[at].getBoundingClientRect();
      if (Math.abs(other.top - box.top) < 4) continue;
      if (line === null) line = other.top;
      if (Math.abs(other.top - line) >= 4) break;
      const isNearer = Math.abs(other.left - box.left) <= Math.abs(elements[found].getBoundingClientRect().left - box.left);
      if (found === from || isNearer) found = at;
    }
    return found;
  };

  const drawn = (answer, name) => {
    const { columns } = answer;
    const found = [];
    columns.text.forEach((text, at) => {
      const isFirst = at > 0 ? columns.segment[at] !== columns.segment[at - 1] : columns.position[at] === 0;
      if (answer.num_segments > 1 && isFirst) found.push(html`<div class="segment">segment ${columns.segment[at] + 1} of ${answer.num_segments}</div>`);
      const classes = ['token', tone(answer, name, at), columns.is_special[at] ? 'special' : '', columns.loss_mask[at] ? '' : 'untrained'];
      found.push(html`<span class=${classes.filter(Boolean).join(' ')} data-at=${at}>${pieces(columns, at)}</span>`);
    });
    return found;
  };
  const pieces = (columns, at) => {
    const text = columns.text[at];
    if (text === null) return html`<span class="hidden-character">id ${columns.token_id[at]}</span>`;
    if (columns.part[at]) return html`<span class="hidden-character">${columns.part[at]}</span>`;
    const lines = text.split('\n');
    return lines.map((line, index) => html`${RlView.marked(line)}${index < lines.length - 1 && html`<i class="newline" aria-hidden="true">↵</i>${'\n'}`}`);
  };

  const WIDTH = 290;
  const HEIGHT = 230;
  const Card = ({ answer, card }) => {
    const { columns } = answer;
    const { at } = card;
    const text = columns.text[at];
    const probability = (value) => (value === null ? '' : ` (${RlView.number(Math.exp(value))})`);
    const rows = [
      ['token', `${columns.token_id[at]} at ${columns.position[at]}${answer.num_segments > 1 ? `, segment ${columns.segment[at] + 1}` : ''}${columns.is_special[at] ? ', special' : ''}`],
      ...MEASURED.map((name) => [COLUMNS[name], columns[name][at] === null ? '' : `${RlView.number(columns[name][at])}${name.endsWith('logprob') ? probability(columns[name][at]) : ''}`]),
      ['trained on', columns.loss_mask[at] ? 'yes' : isSampled(columns, at) ? 'no' : 'no: not sampled by the policy'],
      ['weight version', columns.weight_version[at] ?? ''],
    ].filter(([, value]) => value !== '');
    const place = card.bottom + HEIGHT < innerHeight || card.top < HEIGHT ? { top: `${card.bottom + 6}px` } : { bottom: `${innerHeight - card.top + 6}px` };
    return html`<div class="token-card panel" role="status" style=${{ left: `${Math.max(4, Math.min(card.left, innerWidth - WIDTH - 8))}px`, ...place }}>
      <b class="untrusted">${text === null ? 'no text' : RlView.marked(JSON.stringify(columns.part[at] || text))}</b>
      <dl>${rows.map(([label, value]) => html`<div><dt>${label}</dt><dd>${value}</dd></div>`)}</dl></div>`;
  };
})();
