'use strict';
// The table of runs, and the plots of those that are selected.
(() => {
  const { html, useState, useEffect, useMemo } = RlView;
  const MOST_SELECTED = 10;
  const DEFAULT_SELECTED = 4;

  RlView.RunsPage = ({ query, theme }) => {
    const live = RlView.useLive();
    const { answer, problem } = RlView.useAnswer('runs', {}, live.list);
    if (problem && !answer) return html`<${RlView.Problem} text=${problem} />`;
    if (!answer) return html`<${RlView.Empty}>Reading runs…</${RlView.Empty}>`;
    return html`<${Runs} answer=${answer} query=${query} theme=${theme} />`;
  };

  const Runs = ({ answer, query, theme }) => {
    const filter = (query.get('filter') ?? '').toLowerCase();
    const status = query.get('status') ?? '';
    const sort = query.get('sort') ?? '-changed';
    const given = query.get('select');
    const short = RlView.headings(answer.keys);
    const words = filter.split(/\s+/).filter(Boolean);
    const text = (run) => [run.id, run.status, run.algorithm, run.model, run.labels.name, run.labels.group, ...(run.labels.tags ?? []), run.labels.notes, ...Object.entries(run.values).map(([key, value]) => `${key}=${RlView.shown(value)}`)].join(' ').toLowerCase();
    const rows = answer.runs.filter((run) => (!status || run.status === status) && words.every((word) => text(run).includes(word)));
    const selected = useMemo(() => {
      if (given !== null) return given.split('\n').filter((id) => answer.runs.some((run) => run.id === id));
      return [...rows].sort((one, other) => other.changed.localeCompare(one.changed)).slice(0, DEFAULT_SELECTED).map((run) => run.id);
    }, [given, rows.map((run) => run.id).join('\n')]);
    const colorOf = (id) => RlView.COLORS[selected.indexOf(id) % RlView.COLORS.length];
    const select = (id) => {
      const next = selected.includes(id) ? selected.filter((each) => each !== id) : [...selected, id].slice(-MOST_SELECTED);
      RlView.setQuery({ select: next.length ? next.join('\n') : '\n' });
    };
    const best = (run) => run.best?.value ?? null;
    const columns = [
      { name: 'show', title: '', canSort: false, cell: (run) => html`<input type="checkbox" aria-label=${`plot ${run.id}`} checked=${selected.includes(run.id)} onChange=${() => select(run.id)} style=${selected.includes(run.id) ? { accentColor: colorOf(run.id) } : {}} />` },
      { name: 'run', title: 'run', value: (run) => run.id, className: 'name', cell: (run) => html`<a href=${RlView.address(['run', run.id])}>${run.labels.name || run.id}</a>${run.labels.name && html` <span class="muted">${run.id}</span>`}${(run.labels.tags ?? []).map((tag) => html` <span class="tag">${tag}</span>`)}` },
      { name: 'state', title: 'state', value: (run) => run.status, cell: (run) => html`<${RlView.Status} status=${run.status} reason=${run.reason} />` },
      { name: 'step', title: 'step', isNumber: true, value: (run) => run.step, cell: (run) => html`<span class="progress"><span>${run.step}${run.max_steps ? html`<span class="muted">/${run.max_steps}</span>` : ''}</span>${run.max_steps > 0 && html`<meter min="0" max=${run.max_steps} value=${run.step} aria-label=${`step ${run.step} of ${run.max_steps}`}></meter>`}</span>` },
      { name: 'best', title: 'best', isNumber: true, value: best, cell: (run) => (run.best ? html`<b>${RlView.number(run.best.value)}</b> <span class="muted">${run.best.metric} @${run.best.step}</span>` : '') },
      { name: 'changed', title: 'changed', isNumber: true, value: (run) => new Date(run.changed).getTime(), cell: (run) => html`<time datetime=${run.changed} title=${run.changed}>${RlView.age(run.changed)}</time>` },
      { name: 'algorithm', title: 'algorithm', value: (run) => run.algorithm, cell: (run) => run.algorithm },
      { name: 'model', title: 'model', value: (run) => run.model, className: 'model', cell: (run) => html`<span title=${run.model}>${RlView.shortModel(run.model)}</span>` },
      ...answer.keys.filter((key) => key !== 'algorithm' && key !== 'policy.model_name').slice(0, 12).map((key) => ({ name: key, title: html`<span title=${key}>${short[answer.keys.indexOf(key)]}</span>`, value: (run) => run.values[key], isNumber: answer.runs.every((run) => run.values[key] === null || typeof run.values[key] === 'number'), className: 'value', cell: (run) => html`<span title=${RlView.shown(run.values[key])}>${RlView.shown(run.values[key]).slice(0, 40)}</span>` })),
    ];
    const shown = RlView.sorted(rows, columns, sort);
    const plotted = answer.runs.filter((run) => selected.includes(run.id)).map((run) => ({ id: run.id, label: run.labels.name || run.id, color: colorOf(run.id) }));
    return html`
      <section class="panel">
        <div class="bar">
          <${RlView.TextField} label="filter" name="filter" query=${query} wide placeholder="words in names, tags, models, config values: lr=0.001" />
          <${RlView.Choice} label="state" name="status" query=${query} all="all" options=${['running', 'finished', 'interrupted', 'failed']} />
          <span class="muted count">${rows.length} of ${answer.runs.length} runs</span>
        </div>
        ${answer.runs.length ? html`<${RlView.Table} label="runs" columns=${columns} rows=${shown} sort=${sort} onSort=${(next) => RlView.setQuery({ sort: next })} keyOf=${(run) => run.id} onOpen=${(run) => { location.hash = RlView.address(['run', run.id]); }} isCurrent=${() => false} />` : html`<${RlView.Empty}>There are no runs in this folder yet. A new one appears here by itself.</${RlView.Empty}>`}
        ${answer.others.some((each) => each.sort === 'file') && html`<p class="others">Files of rollouts: ${answer.others.filter((each) => each.sort === 'file').map((each) => html`<a href=${RlView.address(['run', each.id, 'rollouts'], { kind: 'file' })}>${each.id}</a> `)}</p>`}
      </section>
      ${plotted.length > 0 && html`<${SelectedCharts} runs=${plotted} query=${query} theme=${theme} />`}`;
  };

  const SelectedCharts = ({ runs, query, theme }) => {
    const summaries = useSummaries(runs.map((run) => run.id));
    const names = [...new Set(summaries.flatMap((summary) => summary?.metrics.map((each) => each.name) ?? []))];
    const headlines = [...new Set(summaries.flatMap((summary) => summary?.headlines ?? []))].slice(0, 6);
    // a run is asked for the metrics that it has
    const known = useMemo(() => runs.map((run, index) => ({ ...run, names: new Set(summaries[index]?.metrics.map((each) => each.name)) })), [JSON.stringify([runs, summaries.map((summary) => summary?.metrics.length)])]);
    return html`<${RlView.Charts} runs=${known} names=${names} headlines=${headlines} query=${query} theme=${theme} />`;
  };

  const useSummaries = (ids) => {
    const live = RlView.useLive();
    const [found, setFound] = useState({});
    const wanted = ids.map((id) => `${id}=${live.of(id)}`).join('\n');
    useEffect(() => {
      const stop = new AbortController();
      for (const id of ids) {
        RlView.ask('run', { id }, stop.signal).then((answer) => { if (!stop.signal.aborted) setFound((all) => ({ ...all, [id]: answer })); }, () => {});
      }
      return () => stop.abort();
    }, [wanted]);
    return ids.map((id) => found[id]);
  };

  // The last names of each key that tell it from the others.
  RlView.headings = (keys) => keys.map((key) => {
    const names = key.split('.');
    for (let count = 1; count < names.length; count += 1) {
      const short = names.slice(-count).join('.');
      if (keys.filter((other) => other === short || other.endsWith(`.${short}`)).length === 1) return short;
    }
    return key;
  });
})();
