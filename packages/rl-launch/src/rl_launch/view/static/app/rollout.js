'use strict';
// One rollout: turns, rewards, its group side by side, and the difference from another one.
(() => {
  const { html, useState, useEffect, useRef, useMemo } = RlView;

  RlView.closeRollout = () => RlView.setQuery({ open: '', as: '', with: '', token: '' });
  const useRollout = (id, kind, at, version) => {
    const [step, row] = at.split(':').map(Number);
    return RlView.useAnswer('rollout', { id, kind, step, row }, version);
  };
  const content = (message) => (Array.isArray(message.content) ? message.content.map((part) => (part && typeof part === 'object' ? part.text ?? JSON.stringify(part) : String(part))).join('\n') : message.content ?? '');
  // the conversations of an agent; older runs have numbers of tokens there
  const segmentsOf = (record) => (record.turns.length ? [] : (record.segments ?? []).filter((segment) => segment?.turns));
  const turnsOf = (record) => (record.turns.length ? record.turns : segmentsOf(record).flatMap((segment) => segment.turns));
  const whole = (record) => turnsOf(record).map((turn) => [turn.text ?? '', observed(turn.observation)].filter(Boolean).join('\n')).join('\n');
  const observed = (value) => (value === null || value === undefined ? '' : typeof value === 'string' ? value : Array.isArray(value) ? value.map((each) => (each && typeof each === 'object' ? `${each.role ? `${each.role}: ` : ''}${content(each)}` : String(each))).join('\n') : JSON.stringify(value, null, 1));
  const keyOf = (row) => `${row.step}:${row.row}`;

  RlView.Rollout = ({ id, kind, at, query, version }) => {
    const { answer, problem } = useRollout(id, kind, at, 0);
    const frame = useRef(null);
    const view = query.get('as') ?? 'turns';
    useEffect(() => { frame.current?.focus({ preventScroll: true }); frame.current?.scrollIntoView({ block: 'nearest' }); }, [answer?.row]);
    const close = RlView.closeRollout;
    if (problem && !answer) return html`<section class="panel rollout"><${RlView.Problem} text=${problem} /><button onClick=${close}>close</button></section>`;
    if (!answer) return html`<section class="panel rollout"><${RlView.Empty}>Reading…</${RlView.Empty}></section>`;
    const { record, group } = answer;
    const others = answer.same_prompt.filter((each) => each.step !== answer.step);
    const views = [['turns', 'turns'], ...(group.length > 1 ? [['group', `group of ${group.length}`]] : []), ['tokens', 'tokens'], ['diff', 'diff'], ['record', 'record']];
    return html`<section class="panel rollout" ref=${frame} tabindex="-1" aria-label="rollout">
      <header class="title"><h2>Rollout ${record.index ?? answer.row} <span class="muted">of ${record.prompt_id ?? 'a prompt'}, step ${answer.step}</span></h2>
        <button class="quiet close" onClick=${close} aria-label="close the rollout">×</button></header>
      <${Facts} record=${record} />
      ${group.length > 1 && html`<div class="members" role="group" aria-label="group">${group.map((member) => html`<a href=${link({ open: keyOf(member), token: '' })} aria-current=${member.row === answer.row ? 'true' : undefined} class=${member.status === 'failed' ? 'failed' : ''} title=${`rollout ${member.position ?? member.row}`}>${member.status === 'failed' ? '×' : RlView.number(member.reward)}</a>`)}</div>`}
      <nav class="tabs small" aria-label="views of the rollout">${views.map(([name, title]) => html`<a href=${link({ as: name === 'turns' ? '' : name, token: '' })} ref=${view === name ? RlView.intoView : undefined} aria-current=${view === name ? 'page' : undefined}>${title}</a>`)}
        ${!RlView.isExport && html`<a href=${`api/raw?${new URLSearchParams({ id, kind, step: answer.step, row: answer.row })}`} download>raw line, ${RlView.bytes(answer.bytes)}</a>`}</nav>
      ${view === 'group' ? html`<${Group} id=${id} kind=${kind} group=${group} current=${answer.row} />`
        : view === 'tokens' ? html`<${RlView.Tokens} id=${id} kind=${kind} step=${answer.step} row=${answer.row} query=${query} version=${version} />`
        : view === 'diff' ? html`<${Diff} id=${id} kind=${kind} answer=${answer} query=${query} />`
        : view === 'record' ? html`<pre class="record"><${RlView.Untrusted} text=${JSON.stringify(record, null, 1)} /></pre>`
        : html`<${Turns} record=${record} search=${query.get('text') ?? ''} />`}
      ${others.length > 0 && html`<p class="muted">The same prompt at ${others.slice(0, 12).map((each, index) => html`${index ? ', ' : ''}<a href=${RlView.address(['run', id, 'rollouts'], { kind, first: each.step, last: each.step, prompt_id: record.prompt_id })}>step ${each.step}</a> (${RlView.number(each.reward)})`)}</p>`}
    </section>`;
  };
  // The current address with other values, so that every view of a rollout is a link.
  const link = (changes) => {
    const { parts, query } = RlView.readRoute();
    for (const [name, value] of Object.entries(changes)) {
      query.delete(name);
      if (value !== '') query.append(name, value);
    }
    return `#/${parts.map(encodeURIComponent).join('/')}?${query}`;
  };

  const Facts = ({ record }) => {
    const rewards = Object.entries(record.rewards);
    const versions = record.weight_versions ?? [];
    const facts = [
      ...rewards.map(([name, value]) => [name, RlView.number(value), name === 'reward' ? 'strong' : '']),
      ['advantage', RlView.number(record.advantage)],
      ['status', record.status === 'ok' ? '' : record.status],
      ['end', record.stop_reason],
      ['sampled tokens', record.num_sampled],
      ['agent', record.opponent ? `${record.agent} (opponent)` : record.agent],
      ['weights', versions.length ? `version ${versions.join(', ')}` : ''],
      ['environment', record.environment],
      ['dataset', record.dataset],
      ['task', record.task],
    ].filter(([, value]) => value !== '' && value !== null && value !== undefined);
    return html`<dl class="facts">${facts.map(([name, value, strong]) => html`<div class=${strong ?? ''}><dt>${name}</dt><dd>${RlView.marked(String(value))}</dd></div>`)}</dl>
      ${record.failure && html`<div class="problem"><${RlView.Untrusted} text=${record.failure} /></div>`}`;
  };

  const Turn = ({ role, text, note = '', search = '' }) => html`<article class=${`turn role-${['system', 'user', 'assistant', 'tool', 'environment'].includes(role) ? role : 'user'}`}><header><b>${role}</b>${note && html`<span class="muted">${note}</span>`}</header><${RlView.Untrusted} text=${text} query=${search} /></article>`;
  const Messages = ({ messages, search }) => messages.map((message) => html`<${Turn} role=${String(message.role ?? 'user')} text=${content(message)} search=${search} />${message.tool_calls && html`<${Turn} role="tool" text=${JSON.stringify(message.tool_calls, null, 1)} note="calls" search=${search} />`}`);
  const Said = ({ turns, search }) => turns.map((turn, index) => html`<${Turn} role="assistant" text=${turn.text ?? ''} note=${`turn ${index + 1}${Object.entries(turn.rewards ?? {}).map(([name, value]) => `, ${name} ${RlView.number(value)}`).join('')}`} search=${search} />
      ${observed(turn.observation) && html`<${Turn} role="environment" text=${observed(turn.observation)} note="observation" search=${search} />`}`);
  const Segment = ({ segment, count, search }) => html`<section class="conversation"><h3>Segment ${segment.number} <span class="muted">of ${count}${segment.num_tokens ? `, ${segment.num_tokens} tokens` : ''}${segment.shared ? `, begins with ${segment.shared.messages} of the messages of segment ${segment.shared.number}` : ''}</span></h3>
    ${segment.tools.length > 0 && html`<details><summary>tools: ${segment.tools.map((tool) => RlView.marked(String(tool.function?.name ?? '?'))).map((name, index) => html`${index ? ', ' : ''}${name}`)}</summary><pre class="record"><${RlView.Untrusted} text=${JSON.stringify(segment.tools, null, 1)} /></pre></details>`}
    <${Messages} messages=${segment.messages} search=${search} /><${Said} turns=${segment.turns} search=${search} /></section>`;
  const verdictsOf = (record) => (Array.isArray(record.verdicts) ? record.verdicts.filter((each) => each && typeof each === 'object') : []);
  const Turns = ({ record, search }) => html`<div class="turns">
    ${segmentsOf(record).length === 0 ? html`<${Messages} messages=${record.prompt} search=${search} /><${Said} turns=${record.turns} search=${search} />`
      : html`<details><summary>prompt of the row</summary><${Messages} messages=${record.prompt} search=${search} /></details>${segmentsOf(record).map((segment, _, all) => html`<${Segment} key=${segment.number} segment=${segment} count=${all.length} search=${search} />`)}`}
    ${verdictsOf(record).length > 0 && html`<details open><summary>verdicts of judges</summary>${verdictsOf(record).map((verdict) => html`<${Turn} role="user" text=${`${typeof verdict.value === 'string' ? verdict.value : JSON.stringify(verdict.value ?? null)}\n${verdict.answer ?? ''}`} note=${`${String(verdict.judge).slice(0, 100)}${verdict.cached ? ', cached' : ''}`} search=${search} />`)}</details>`}
    ${['row', 'info'].filter((name) => record[name] && Object.keys(record[name]).length).map((name) => html`<details open=${name === 'row'}><summary>${name === 'row' ? 'row given to the environment' : 'info of the environment'}</summary><dl class="row">${Object.entries(record[name]).map(([field, value]) => html`<div><dt>${field}</dt><dd><${RlView.Untrusted} text=${value} /></dd></div>`)}</dl></details>`)}
  </div>`;

  const Group = ({ id, kind, group, current }) => html`<div class="side-by-side" tabindex="0" role="region" aria-label="rollouts of the group">${group.slice(0, 32).map((member) => html`<${Member} key=${keyOf(member)} id=${id} kind=${kind} member=${member} isCurrent=${member.row === current} />`)}</div>`;
  const Member = ({ id, kind, member, isCurrent }) => {
    const { answer, problem } = useRollout(id, kind, keyOf(member), 0);
    return html`<article class=${isCurrent ? 'current' : ''}><header><b>${member.status === 'failed' ? 'failed' : RlView.number(member.reward)}</b><span class="muted">#${member.position ?? member.row} · ${member.num_tokens ?? 0} tokens${member.advantage === null ? '' : ` · advantage ${RlView.number(member.advantage)}`}</span></header>
      ${problem ? html`<${RlView.Problem} text=${problem} />` : answer ? html`<${RlView.Untrusted} text=${whole(answer.record)} />` : '…'}</article>`;
  };

  // The shortest way from one list of words to another, by Myers; beyond a bound whole texts are shown instead.
  const MOST_WORDS = 6000;
  const MOST_EDITS = 1500;
  RlView.difference = (before, after) => {
    const words = (text) => text.match(/\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu) ?? [];
    const [one, other] = [words(before), words(after)];
    if (one.length + other.length > 2 * MOST_WORDS) return null;
    const trace = [];
    const frontier = new Map([[1, 0]]);
    for (let edits = 0; edits <= Math.min(one.length + other.length, MOST_EDITS); edits += 1) {
      trace.push(new Map(frontier));
      for (let diagonal = -edits; diagonal <= edits; diagonal += 2) {
        const isDown = diagonal === -edits || (diagonal !== edits && frontier.get(diagonal - 1) < frontier.get(diagonal + 1));
        let x = isDown ? frontier.get(diagonal + 1) : frontier.get(diagonal - 1) + 1;
        while (x < one.length && x - diagonal < other.length && one[x] === other[x - diagonal]) x += 1;
        frontier.set(diagonal, x);
        if (x >= one.length && x - diagonal >= other.length) return walkBack(trace, one, other);
      }
    }
    return null;
  };
  const walkBack = (trace, one, other) => {
    const found = [];
    let [x, y] = [one.length, other.length];
    const add = (kind, word) => { if (found.length && found.at(-1).kind === kind) found.at(-1).words.push(word); else found.push({ kind, words: [word] }); };
    for (let edits = trace.length - 1; edits >= 0; edits -= 1) {
      const frontier = trace[edits];
      const diagonal = x - y;
      const isDown = diagonal === -edits || (diagonal !== edits && frontier.get(diagonal - 1) < frontier.get(diagonal + 1));
      const before = isDown ? diagonal + 1 : diagonal - 1;
      const startX = edits === 0 ? 0 : frontier.get(before);
      const startY = edits === 0 ? 0 : startX - before;
      while (x > startX && y > startY && x > 0 && y > 0 && one[x - 1] === other[y - 1]) { x -= 1; y -= 1; add('same', one[x]); }
      if (edits > 0) {
        if (isDown) { y -= 1; add('added', other[y]); } else { x -= 1; add('removed', one[x]); }
      }
    }
    return found.reverse().map(({ kind, words }) => ({ kind, text: words.reverse().join('') }));
  };

  const Diff = ({ id, kind, answer, query }) => {
    const chosen = query.get('with') ?? '';
    const candidates = [...answer.group.filter((member) => member.row !== answer.row).map((member) => [keyOf(member), `#${member.position ?? member.row} of this group, ${member.status === 'failed' ? 'failed' : `reward ${RlView.number(member.reward)}`}`]), ...answer.same_prompt.filter((each) => each.step !== answer.step).slice(0, 50).map((each) => [`${each.step}:?`, `same prompt at step ${each.step}, mean reward ${RlView.number(each.reward)}`])];
    return html`<div class="bar"><${RlView.Choice} label="compared with" name="with" query=${query} all="choose a rollout" options=${candidates} /><${RlView.TextField} label="or STEP:LINE" name="with" query=${query} placeholder="12:0" /></div>
      ${/^\d+:(\d+|\?)$/.test(chosen) && html`<${Compared} key=${chosen} id=${id} kind=${kind} answer=${answer} at=${chosen} />`}`;
  };
  const Compared = ({ id, kind, answer, at }) => {
    // of another step, the first rollout of the same prompt
    const [place, setPlace] = useState(at.endsWith('?') ? null : at);
    const [missing, setMissing] = useState(null);
    useEffect(() => {
      if (!at.endsWith('?')) return;
      const step = at.slice(0, -2);
      RlView.ask('rollouts', { id, kind, first: step, last: step, prompt_id: answer.record.prompt_id, limit: 1 }).then((found) => setPlace(found.rows.length ? keyOf(found.rows[0]) : null), (error) => setMissing(error.message));
    }, [at]);
    if (missing) return html`<${RlView.Problem} text=${missing} />`;
    return place && html`<${Both} id=${id} kind=${kind} answer=${answer} at=${place} />`;
  };
  const Both = ({ id, kind, answer, at }) => {
    const other = useRollout(id, kind, at, 0);
    const parts = useMemo(() => (other.answer ? RlView.difference(whole(other.answer.record), whole(answer.record)) : undefined), [other.answer, answer]);
    if (other.problem) return html`<${RlView.Problem} text=${other.problem} />`;
    if (!other.answer) return html`<${RlView.Empty}>Reading…</${RlView.Empty}>`;
    const line = (record) => `reward ${RlView.number(record.rewards.reward)}, ${record.num_sampled ?? 0} tokens`;
    return html`<p><del>step ${other.answer.step}, #${other.answer.record.index ?? other.answer.row}: ${line(other.answer.record)}</del> → <ins>step ${answer.step}, #${answer.record.index ?? answer.row}: ${line(answer.record)}</ins></p>
      ${parts === null ? html`<p class="note">These differ too much to be compared by words.</p><div class="side-by-side"><article><${RlView.Untrusted} text=${whole(other.answer.record)} /></article><article><${RlView.Untrusted} text=${whole(answer.record)} /></article></div>`
        : html`<div class="untrusted difference">${parts.map(({ kind: sort, text }) => (sort === 'same' ? RlView.marked(text) : sort === 'added' ? html`<ins>${RlView.marked(text)}</ins>` : html`<del>${RlView.marked(text)}</del>`))}</div>`}`;
  };
})();
