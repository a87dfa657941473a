'use strict';
// The table of rollouts: filters by what the index has, by text and by conditions, in pages.
(() => {
  const { html, useState, useEffect } = RlView;
  const PAGE = 64;
  const FILTERS = ['task', 'dataset', 'environment', 'status', 'stop_reason', 'prompt_id', 'min_reward', 'max_reward', 'min_num_tokens', 'max_num_tokens', 'text', 'sort'];
  const KINDS = { step: 'training', val: 'validation', evaluation: 'evaluation', file: 'file' };

  RlView.Rollouts = ({ id, run, query, theme, version }) => {
    const kinds = run ? Object.keys(run.kinds) : [];
    const kind = query.get('kind') ?? kinds[0] ?? 'step';
    const range = run?.kinds[kind];
    if (run && !kinds.length) return html`<${RlView.Empty}>No rollouts were written. Runs that learn from given rows have none; logger.rollout_period says how often others write them.</${RlView.Empty}>`;
    const newest = range?.last ?? 0;
    const given = { id, kind, limit: RlView.isExport ? globalThis.RlViewExport.limit : PAGE, first: query.get('first') ?? newest, last: query.get('last') ?? query.get('first') ?? newest };
    if (RlView.isExport) given.last = given.first;
    for (const name of [...FILTERS, 'offset']) if (query.get(name)) given[name] = query.get(name);
    if (query.getAll('where').length) given.where = query.getAll('where');
    const open = query.get('open');
    return html`<div class=${open ? 'with-rollout' : ''}><section class="panel"><${Filters} query=${query} kinds=${kinds} kind=${kind} range=${range} given=${given} id=${id} version=${version} /></section>
      ${open && html`<${RlView.Rollout} key=${`${kind} ${open}`} id=${id} kind=${kind} at=${open} query=${query} version=${version} />`}</div>`;
  };

  const Filters = ({ query, kinds, kind, range, given, id, version }) => {
    const [round, setRound] = useState(0);
    const { answer, problem, isStale } = RlView.useAnswer('rollouts', given, `${version} ${round}`);
    const { first, last } = given;
    // the index grows by the steps that one request has time for, until it has the whole range
    useEffect(() => { if (answer?.pending && !isStale) setRound((count) => count + 1); }, [answer]);
    const isOne = String(first) === String(last);
    const go = (step) => RlView.setQuery({ first: step, last: '', offset: '', open: '' });
    const choices = answer?.choices ?? {};
    const rewards = choices.rewards ?? [];
    const has = (name) => (choices[name] ?? []).length > 1 || query.get(name);
    return html`<div class="bar filters">
        ${kinds.length > 1 && html`<${RlView.Choice} label="rollouts of" name="kind" query=${query} fallback=${kinds[0]} options=${kinds.map((each) => [each, KINDS[each]])} />`}
        ${range && RlView.isExport && html`<${RlView.Choice} label="step" name="first" query=${query} fallback=${String(range.last)} options=${(globalThis.RlViewExport.steps[id]?.[kind] ?? []).map(String)} />`}
        ${range && !RlView.isExport && html`<div class="steps" role="group" aria-label="steps">
          <button aria-label="earlier step" disabled=${!isOne || Number(first) <= range.first} onClick=${() => go(Number(first) - 1)}>‹</button>
          <${RlView.TextField} label="step" name="first" type="number" query=${query} placeholder=${String(range.last)} />
          <${RlView.TextField} label="to step" name="last" type="number" query=${query} placeholder=${String(first ?? '')} />
          <button aria-label="later step" disabled=${!isOne || Number(first) >= range.last} onClick=${() => go(Number(first) + 1)}>›</button>
          ${query.get('first') !== null && html`<button class="quiet" onClick=${() => RlView.setQuery({ first: '', last: '', offset: '' })}>newest</button>`}
        </div>`}
        ${!RlView.isExport && html`
          <${RlView.TextField} label="text" name="text" query=${query} placeholder="in prompt or response" />
          <${RlView.TextField} label="condition" name="where" query=${query} placeholder="rewards.format>0" />
          <${RlView.TextField} label="reward from" name="min_reward" type="number" query=${query} /><${RlView.TextField} label="to" name="max_reward" type="number" query=${query} />
          <${RlView.TextField} label="tokens from" name="min_num_tokens" type="number" query=${query} /><${RlView.TextField} label="to" name="max_num_tokens" type="number" query=${query} />
          ${['task', 'dataset', 'environment', 'status', 'stop_reason'].filter(has).map((name) => html`<${RlView.Choice} label=${name.replace('_', ' ')} name=${name} query=${query} all="all" options=${choices[name] ?? []} />`)}
          <${RlView.Choice} label="order" name="sort" query=${query} options=${[['', 'as in the file'], ['-reward', 'highest reward'], ['reward', 'lowest reward'], ['-advantage', 'highest advantage'], ['-num_tokens', 'longest'], ['num_tokens', 'shortest'], ['-num_turns', 'most turns'], ...rewards.filter((name) => name !== 'reward').map((name) => [`-rewards.${name}`, `highest ${name}`])]} />`}
        ${query.get('prompt_id') && html`<span class="tag">prompt ${query.get('prompt_id')} <button class="quiet" aria-label="all prompts" onClick=${() => RlView.setQuery({ prompt_id: '' })}>×</button></span>`}
      </div>
      ${problem && html`<${RlView.Problem} text=${problem} />`}
      ${answer?.pending > 0 && html`<p class="note" role="status">Indexing: ${answer.steps - answer.pending} of ${answer.steps} steps. <progress max=${answer.steps} value=${answer.steps - answer.pending}></progress></p>`}
      ${answer && html`<${Rows} id=${id} kind=${kind} answer=${answer} query=${query} rewards=${rewards} isStale=${isStale} />`}`;
  };

  const Rows = ({ kind, answer, query, rewards, isStale }) => {
    const sort = query.get('sort') ?? '';
    const hasSeveral = new Set(answer.rows.map((row) => row.step)).size > 1;
    const others = rewards.filter((name) => name !== 'reward').slice(0, 4);
    const clickable = !RlView.isExport;
    const columns = [
      ...(hasSeveral ? [{ name: 'step', title: 'step', isNumber: true, canSort: clickable, cell: (row) => row.step }] : []),
      ...(answer.rows.some((row) => row.task) ? [{ name: 'task', title: 'task', canSort: false, cell: (row) => row.task }] : []),
      { name: 'prompt_id', title: 'prompt', canSort: false, className: 'muted id', cell: (row) => html`<span title=${row.prompt_id}>${row.prompt_id.length > 16 ? `…${row.prompt_id.slice(-15)}` : row.prompt_id}</span>${row.position !== null && html`<span class="position">·${row.position}</span>`}` },
      { name: 'reward', title: 'reward', isNumber: true, canSort: clickable, cell: (row) => (row.status === 'failed' ? html`<${RlView.Status} status="failed" reason=${row.failure} />` : html`<b>${RlView.number(row.reward)}</b>`) },
      ...others.map((name) => ({ name: `rewards.${name}`, title: name, isNumber: true, canSort: clickable, cell: (row) => RlView.number(row.rewards[name]) })),
      ...(answer.rows.some((row) => row.advantage !== null) ? [{ name: 'advantage', title: 'advantage', isNumber: true, canSort: clickable, cell: (row) => html`<span class=${row.advantage > 0 ? 'up' : row.advantage < 0 ? 'down' : 'muted'}>${RlView.number(row.advantage)}</span>` }] : []),
      { name: 'num_tokens', title: 'tokens', isNumber: true, canSort: clickable, cell: (row) => row.num_tokens },
      ...(answer.rows.some((row) => row.num_turns > 1) ? [{ name: 'num_turns', title: 'turns', isNumber: true, canSort: clickable, cell: (row) => row.num_turns }] : []),
      { name: 'stop', title: 'end', canSort: false, cell: (row) => html`<span class=${row.stop_reason === 'length' ? 'warn' : 'muted'}>${row.stop_reason}</span>` },
      { name: 'prompt', title: 'prompt', canSort: false, className: 'preview', cell: (row) => RlView.marked(row.prompt) },
      { name: 'response', title: 'response', canSort: false, className: 'preview', cell: (row) => RlView.marked(row.response) },
    ];
    const offset = Number(query.get('offset') ?? 0);
    const key = (row) => `${row.step}:${row.row}`;
    return html`<p class="muted count" role="status">${answer.count === null ? `${answer.rows.length} found${answer.next === null ? '' : ' so far'}` : `${answer.count.toLocaleString('en')} rollouts`}${answer.count > answer.rows.length ? `, ${offset + 1} to ${offset + answer.rows.length} shown` : ''}</p>
      ${answer.rows.length > 0 && html`<div class=${isStale ? 'stale' : ''}><${RlView.Table} label="rollouts" columns=${columns} rows=${answer.rows} sort=${sort} onSort=${(next) => RlView.setQuery({ sort: next, offset: '' })} keyOf=${key} isCurrent=${(row) => query.get('open') === key(row)} onOpen=${(row) => { RlView.setQuery({ open: key(row), kind }, { push: true }); }} /></div>`}
      <div class="pages">${offset > 0 && html`<button onClick=${() => history.back()}>previous</button>`}
        ${answer.next !== null && !RlView.isExport && html`<button onClick=${() => RlView.setQuery({ offset: answer.next }, { push: true })}>${answer.rows.length ? 'next' : 'search further'}</button>`}</div>`;
  };
})();
