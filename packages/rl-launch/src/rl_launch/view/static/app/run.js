'use strict';
// One run: metrics, timeline, advice, config, logs and checkpoints.
(() => {
  const { html, useState, useEffect, useRef, useMemo } = RlView;
  const TABS = ['metrics', 'rollouts', 'timeline', 'advice', 'config', 'logs', 'checkpoints'];

  RlView.RunPage = ({ id, tab, query, theme }) => {
    const live = RlView.useLive();
    const version = live.of(id);
    const runs = RlView.useAnswer('runs', {}, live.list);
    const entry = runs.answer?.runs.find((run) => run.id === id);
    const other = runs.answer?.others.find((each) => each.id === id);
    const { answer: run, problem } = RlView.useAnswer('run', entry ? { id } : null, version);
    if (runs.answer && !entry && !other) return html`<${RlView.Problem} text=${`There is no run or evaluation ${id} in the folders of this page.`} link=${{ href: '#/runs', text: 'All runs' }} />`;
    if (problem && !run) return html`<${RlView.Problem} text=${problem} />`;
    if (!runs.answer || (entry && !run)) return html`<${RlView.Empty}>Reading ${id}…</${RlView.Empty}>`;
    const tabs = entry ? TABS : other ? ['rollouts', ...(other.sort === 'evaluation' ? ['logs'] : [])] : [tab];
    const current = tabs.includes(tab) ? tab : tabs[0];
    const shown = run ?? entry;
    return html`
      <header class="title">
        <h1>${shown?.labels?.name || id}</h1>
        ${shown && html`<${RlView.Status} status=${shown.status} reason=${shown.reason} />
          <span>step <b>${shown.step}</b>${shown.max_steps ? ` of ${shown.max_steps}` : ''}</span>
          ${shown.best && html`<span>best ${shown.best.metric} <b>${RlView.number(shown.best.value)}</b> at step ${shown.best.step}</span>`}
          <span class="muted">${shown.algorithm} · ${RlView.shortModel(shown.model)} · <time title=${shown.changed}>${RlView.age(shown.changed)}</time></span>`}
      </header>
      ${shown?.reason && shown.status !== 'finished' && html`<p class="note">${shown.status}: ${shown.reason}${shown.resume && html`. To resume: <code>${shown.resume}</code>`}</p>`}
      <nav class="tabs" aria-label="views of this run">${tabs.map((each) => html`<a href=${RlView.address(['run', id, each])} ref=${each === current ? RlView.intoView : undefined} aria-current=${each === current ? 'page' : undefined}>${each}</a>`)}</nav>
      <${PAGES[current]} id=${id} run=${run} query=${query} theme=${theme} version=${version} />`;
  };

  const Metrics = ({ id, run, query, theme }) => {
    const runs = useMemo(() => [{ id, color: RlView.COLORS[0] }], [id]);
    if (!run) return html`<${RlView.Empty}>Reading metrics…</${RlView.Empty}>`;
    if (!run.metrics.length) return html`<${RlView.Empty}>No steps are recorded yet. See the logs for the progress of the run.</${RlView.Empty}>`;
    const columns = [
      { name: 'name', title: 'metric', className: 'name', cell: (each) => each.name },
      { name: 'first', title: 'first', isNumber: true, cell: (each) => RlView.number(each.first), value: (each) => each.first },
      { name: 'best', title: 'best', isNumber: true, cell: (each) => (each.best === null ? '' : html`<b>${RlView.number(each.best)}</b>`), value: (each) => each.best },
      { name: 'best_step', title: 'at step', isNumber: true, cell: (each) => each.best_step, value: (each) => each.best_step },
      { name: 'last', title: 'last', isNumber: true, cell: (each) => RlView.number(each.last), value: (each) => each.last },
    ];
    const sort = query.get('msort') ?? '';
    const search = (query.get('metric') ?? '').toLowerCase();
    return html`<${RlView.Charts} runs=${runs} names=${run.metrics.map((each) => each.name)} headlines=${run.headlines.slice(0, 6)} query=${query} theme=${theme} />
      <details class="panel"><summary>All values <span class="muted">${run.metrics.length} metrics, ${run.num_steps} steps</span></summary>
        <${RlView.Table} label="metrics" columns=${columns} rows=${RlView.sorted(run.metrics.filter((each) => each.name.toLowerCase().includes(search)), columns, sort)} sort=${sort} onSort=${(next) => RlView.setQuery({ msort: next })} keyOf=${(each) => each.name} />
      </details>`;
  };

  // Phases in the order in which their columns were first written, which is that in which they began.
  const PHASE_COLORS = RlView.PHASE_COLORS = { generation: '#2f6fde', logprobs: '#1d9aaa', values: '#7aa11f', training: '#d9822b', critic_training: '#b0892a', weight_sync: '#8257c9', validation: '#2a9d63', evaluation: '#7aa11f', data: '#5f7383', recording: '#d0569e', callbacks: '#c23b52' };
  const phaseColor = (name, index) => PHASE_COLORS[name] ?? RlView.COLORS[index % RlView.COLORS.length];

  const Timeline = ({ id, query, version }) => {
    const first = query.get('first') ?? '';
    const last = query.get('last') ?? '';
    const { answer, problem } = RlView.useAnswer('timeline', { id, first, last }, version);
    const [chosen, setChosen] = useState(null);
    if (problem && !answer) return html`<${RlView.Problem} text=${problem} />`;
    if (!answer) return html`<${RlView.Empty}>Reading times…</${RlView.Empty}>`;
    const { steps, columns, events } = answer;
    if (!steps.length) return html`<${RlView.Empty}>No steps are recorded yet.</${RlView.Empty}><${Events} events=${events} />`;
    const phases = Object.keys(columns).filter((name) => name.startsWith('time/') && !['time/step', 'time/callbacks'].includes(name));
    const at = chosen === null || chosen >= steps.length ? steps.length - 1 : chosen;
    const totals = steps.map((_, index) => Math.max(columns['time/step']?.[index] ?? 0, phases.reduce((sum, name) => sum + (columns[name][index] ?? 0), 0)));
    const highest = Math.max(...totals, 1e-9);
    const whole = totals.reduce((sum, value) => sum + value, 0);
    const width = 1000 / steps.length;
    const key = (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (step) { event.preventDefault(); setChosen(Math.min(steps.length - 1, Math.max(0, at + step))); }
    };
    const label = (index) => (steps[index][0] === steps[index][1] ? `step ${steps[index][0]}` : `steps ${steps[index][0]} to ${steps[index][1]}, mean`);
    let below;
    return html`<section class="panel">
      <div class="bar"><${RlView.TextField} label="first step" name="first" type="number" query=${query} /><${RlView.TextField} label="last step" name="last" type="number" query=${query} />
        <ul class="legend">${phases.map((name, index) => html`<li><i style=${{ background: phaseColor(name.slice(5), index) }}></i>${name.slice(5).replaceAll('_', ' ')} <span class="muted">${Math.round((100 * columns[name].reduce((sum, value) => sum + (value ?? 0), 0)) / whole)}%</span></li>`)}</ul></div>
      <h2>Run <span class="muted">time of each step by phase</span></h2>
      <svg class="timeline" viewBox="0 0 1000 200" preserveAspectRatio="none" role="slider" tabindex="0" aria-label="step" aria-valuemin="0" aria-valuemax=${steps.length - 1} aria-valuenow=${at} aria-valuetext=${label(at)} onKeyDown=${key}
        onClick=${(event) => { const box = event.currentTarget.getBoundingClientRect(); setChosen(Math.min(steps.length - 1, Math.floor(((event.clientX - box.left) / box.width) * steps.length))); }}>
        ${steps.map((_, index) => { below = 200; return html`<g class=${index === at ? 'chosen' : ''}><title>${label(index)}: ${RlView.duration(totals[index])}</title><rect x=${index * width} y="0" width=${width} height="200" class="hit" />
          ${phases.map((name, number) => { const size = (200 * (columns[name][index] ?? 0)) / highest; below -= size; return size > 0 && html`<rect x=${index * width} y=${below} width=${width > 3 ? width - 1 : width} height=${size} fill=${phaseColor(name.slice(5), number)} />`; })}</g>`; })}
        ${marks(events, steps).map(([index, level, text]) => html`<rect class=${`event level-${level}`} x=${(index + 0.5) * width - 2} y="0" width="4" height="10"><title>${text}</title></rect>`)}
      </svg>
      <div class="scale"><span>${label(0)}</span><span>${RlView.duration(highest)} high</span><span>${label(steps.length - 1)}</span></div>
      <h2>${label(at)} <span class="muted">${RlView.duration(totals[at])}</span></h2>
      <${Step} columns=${columns} phases=${phases} at=${at} total=${totals[at]} />
      <p class="muted">Phases are drawn one after another in the order in which they first began, with their durations in the driver. Below they are where they were.</p>
    </section>
    <${RlView.Processes} id=${id} query=${query} version=${version} />
    <${Lanes} steps=${steps} columns=${columns} />
    <${Events} events=${events} />`;
  };
  // Warnings, errors and restarts, over the step in which they were written.
  const marks = (events, steps) => events.filter((event) => event.step !== null && (event.level !== 'info' || /restart|resum|lost|died/i.test(event.text))).map((event) => [steps.findIndex(([first, last]) => event.step >= first && event.step <= last), event.level, `${event.at}: ${event.text}`]).filter(([index]) => index >= 0);
  const Step = ({ columns, phases, at, total }) => {
    let start = 0;
    return html`<table class="phases"><thead class="visually-hidden"><tr><th>phase</th><th>share</th><th>time</th></tr></thead><tbody>${phases.map((name, index) => {
      const seconds = columns[name][at] ?? 0;
      const left = start;
      start += seconds;
      return seconds > 0 && html`<tr><th scope="row">${name.slice(5).replaceAll('_', ' ')}</th><td class="track"><div style=${{ marginLeft: `${(100 * left) / total}%`, width: `${Math.max(0.2, (100 * seconds) / total)}%`, background: phaseColor(name.slice(5), index) }}></div></td><td class="number">${RlView.duration(seconds)}</td><td class="number muted">${Math.round((100 * seconds) / total)}%</td></tr>`;
    })}</tbody></table>`;
  };
  const LANES = { 'idle/trainer': 'trainer idle', 'idle/generators': 'generators idle', 'generation/replicas': 'replicas', 'staleness/mean': 'staleness', 'queue/finished': 'groups waiting', 'rollout/failed': 'failed rollouts' };
  const Lanes = ({ steps, columns }) => {
    const names = Object.keys(LANES).filter((name) => columns[name]?.some((value) => value !== null));
    if (!names.length) return null;
    return html`<section class="panel"><h2>Idle shares, replicas, staleness</h2><table class="lanes"><tbody>${names.map((name) => {
      const values = columns[name];
      const most = Math.max(...values.map((value) => value ?? 0), name.startsWith('idle/') ? 1 : 1e-9);
      return html`<tr><th scope="row" title=${name}>${LANES[name]}</th><td class="track"><svg viewBox=${`0 0 ${steps.length} 20`} preserveAspectRatio="none" role="img" aria-label=${`${LANES[name]} by step`}>${values.map((value, index) => value > 0 && html`<rect x=${index} width="0.9" y=${20 - (20 * value) / most} height=${(20 * value) / most}><title>step ${steps[index][0]}: ${RlView.number(value)}</title></rect>`)}</svg></td><td class="number">${RlView.number(values.findLast((value) => value !== null))}</td></tr>`;
    })}</tbody></table></section>`;
  };
  const Events = ({ events }) => html`<section class="panel"><h2>Events <span class="muted">restarts, replicas, weights, checkpoints, warnings and errors in the driver's log</span></h2>
    ${events.length ? html`<ol class="events">${[...events].reverse().map((event) => html`<li class=${`level-${event.level}`}><time>${event.at}</time><span class="level">${event.level}</span><span class="muted step">${event.step === null ? '' : `step ${event.step}`}</span><${RlView.Untrusted} text=${event.text} /></li>`)}</ol>` : html`<${RlView.Empty}>none</${RlView.Empty}>`}</section>`;

  const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1);
  const Advice = ({ id, query, theme, version }) => {
    const { answer, problem } = RlView.useAnswer('report', { id }, version);
    const runs = useMemo(() => [{ id, color: RlView.COLORS[0] }], [id]);
    if (problem && !answer) return html`<${RlView.Problem} text=${problem} />`;
    if (!answer) return html`<${RlView.Empty}>Reading the run…</${RlView.Empty}>`;
    if (!answer.advice.length) return html`<section class="panel"><${RlView.Empty}>No problems found.</${RlView.Empty}></section>`;
    return html`${answer.advice.map((each) => html`<section class="panel advice"><h2>${sentence(each.found)}</h2><p>${sentence(each.remedy)}.</p>
      ${answer.last_step !== null && html`<p><a class="button" href=${RlView.address(['run', id, 'rollouts'], { first: Math.max(0, answer.last_step - 20), last: answer.last_step, where: each.where })}>${each.where.length ? 'these rollouts' : 'rollouts'}</a></p>`}
      <div class="charts">${each.metrics.map((name) => html`<${RlView.Chart} key=${name} name=${name} runs=${runs} query=${query} theme=${theme} height=${150} />`)}</div></section>`)}`;
  };

  const Config = ({ id, query, version }) => {
    const other = query.get('other') ?? '';
    const runs = RlView.useAnswer('runs', {});
    const { answer, problem } = RlView.useAnswer('config', { id, other }, version);
    if (problem && !answer) return html`<${RlView.Problem} text=${problem} />`;
    if (!answer) return html`<${RlView.Empty}>Reading the config…</${RlView.Empty}>`;
    const search = (query.get('key') ?? '').toLowerCase();
    const isSet = (each) => each.origin !== 'default';
    // what is searched for is searched in all keys
    const hasDefaults = search || query.get('defaults') === '1' || !answer.values.some(isSet);
    const differs = (each) => other && JSON.stringify(each.value) !== JSON.stringify(each.other ?? null);
    const rows = answer.values.filter((each) => `${each.key} ${RlView.shown(each.value)}`.toLowerCase().includes(search) && (other ? query.get('same') === '1' || differs(each) : hasDefaults || isSet(each)));
    const columns = [
      { name: 'key', title: 'key', className: 'code name', cell: (each) => each.key },
      { name: 'value', title: 'value', className: 'code wrap', cell: (each) => html`<${RlView.Untrusted} text=${each.value === null ? 'null' : RlView.shown(each.value)} />`, value: (each) => each.value },
      ...(other ? [{ name: 'other', title: other, className: 'code wrap', cell: (each) => html`<${RlView.Untrusted} text=${each.other === null || each.other === undefined ? 'null' : RlView.shown(each.other)} />`, value: (each) => each.other }] : []),
      { name: 'origin', title: 'comes from', className: 'muted', cell: (each) => each.origin },
    ];
    const sort = query.get('sort') ?? '';
    return html`<section class="panel"><div class="bar">
        <${RlView.TextField} label="find" name="key" query=${query} wide placeholder="key or value" />
        ${!other && html`<${RlView.Toggle} label="defaults too" name="defaults" query=${query} />`}
        ${!RlView.isExport && html`<${RlView.Choice} label="compare with" name="other" query=${query} all="no other run" options=${(runs.answer?.runs ?? []).map((run) => run.id).filter((each) => each !== id)} />`}
        ${other && html`<${RlView.Toggle} label="equal values too" name="same" query=${query} />`}
        <span class="muted count">${rows.length} of ${answer.values.length} keys</span></div>
      <${RlView.Table} label="config" columns=${columns} rows=${RlView.sorted(rows, columns, sort)} sort=${sort} onSort=${(next) => RlView.setQuery({ sort: next })} keyOf=${(each) => each.key} /></section>`;
  };

  const LOG_POLL_MS = 1000;
  const MOST_LOG = 2_000_000;
  const Logs = ({ id, query, version }) => {
    const { answer, problem } = RlView.useAnswer('logs', { id }, version);
    const logs = answer?.logs ?? [];
    const name = query.get('log') ?? logs.find((each) => each.name === 'driver.log')?.name ?? logs[0]?.name ?? '';
    if (problem && !answer) return html`<${RlView.Problem} text=${problem} />`;
    if (answer && !logs.length) return html`<${RlView.Empty}>There are no logs.</${RlView.Empty}>`;
    return html`<section class="panel logs"><nav class="files" aria-label="logs">${logs.map((each) => html`<a href=${RlView.address(['run', id, 'logs'], { log: each.name })} ref=${each.name === name ? RlView.intoView : undefined} aria-current=${each.name === name ? 'page' : undefined}>${each.name}<span class="muted">${RlView.bytes(each.size)}</span></a>`)}</nav>
      ${name && html`<${Log} key=${name} id=${id} name=${name} query=${query} />`}</section>`;
  };
  // A log is followed by its position: only what was added is sent. One that has started over is shown from its beginning.
  const Log = ({ id, name, query }) => {
    const [log, setLog] = useState({ text: '', start: 0, end: null });
    const [problem, setProblem] = useState(null);
    const [isFollowed, setFollowed] = useState(true);
    const frame = useRef(null);
    const search = query.get('find') ?? '';
    useEffect(() => {
      let end = null;
      let isOver = false;
      let timer = 0;
      const next = async () => {
        try {
          const part = await RlView.ask('log', end === null ? { id, name } : { id, name, start: end });
          if (isOver) return;
          const isFirst = end === null || part.has_started_over;
          end = part.end;
          if (isFirst || part.text) setLog((last) => ({ text: (isFirst ? part.text : last.text + part.text).slice(-MOST_LOG), start: isFirst ? part.start : last.start, end }));
          setProblem(null);
          if (!RlView.isExport) timer = setTimeout(next, part.end < part.size && part.text ? 0 : LOG_POLL_MS);
        } catch (error) {
          if (isOver) return;
          setProblem(error.message);
          timer = setTimeout(next, 5 * LOG_POLL_MS);
        }
      };
      next();
      return () => { isOver = true; clearTimeout(timer); };
    }, [id, name]);
    useEffect(() => { if (isFollowed && frame.current) frame.current.scrollTop = frame.current.scrollHeight; }, [log.text, isFollowed, search]);
    const lines = useMemo(() => {
      const all = log.text.split('\n');
      const found = search ? all.filter((line) => line.toLowerCase().includes(search.toLowerCase())) : all;
      return found.slice(-3000);
    }, [log.text, search]);
    const level = (line) => (/\b(ERROR|CRITICAL|Traceback)\b|error:/.test(line) ? 'level-error' : /\bWARNING\b|warning:/.test(line) ? 'level-warning' : '');
    return html`<div class="log"><div class="bar"><${RlView.TextField} label="lines with" name="find" query=${query} wide /><label class="toggle"><input type="checkbox" checked=${isFollowed} onChange=${(event) => setFollowed(event.currentTarget.checked)} />follow</label></div>
      ${problem && html`<${RlView.Problem} text=${problem} />`}
      <div class="lines" ref=${frame} tabindex="0" role="log" aria-live="off" aria-label=${name} onScroll=${(event) => { const box = event.currentTarget; setFollowed(box.scrollHeight - box.scrollTop - box.clientHeight < 40); }}>
        ${log.start > 0 && html`<p class="muted">the beginning is not shown</p>`}
        ${lines.map((line) => html`<div class=${level(line)}>${RlView.marked(line.replace(/\u001b\[[0-9;]*m/g, '').slice(0, 5000))}</div>`)}</div></div>`;
  };

  const Checkpoints = ({ id, query, version }) => {
    const { answer, problem } = RlView.useAnswer('checkpoints', { id }, version);
    if (problem && !answer) return html`<${RlView.Problem} text=${problem} />`;
    if (!answer) return html`<${RlView.Empty}>Reading checkpoints…</${RlView.Empty}>`;
    if (!answer.checkpoints.length) return html`<section class="panel"><${RlView.Empty}>There are no checkpoints.</${RlView.Empty}></section>`;
    const names = [...new Set(answer.checkpoints.flatMap((each) => Object.keys(each.metrics)))].filter((name) => /^(val\/|reward\/mean|train\/loss)/.test(name)).slice(0, 6);
    const columns = [
      { name: 'step', title: 'step', isNumber: true, value: (each) => each.step, cell: (each) => html`<b>${each.step}</b>${each.is_best && html` <span class="tag">best</span>`}` },
      ...names.map((name) => ({ name, title: name, isNumber: true, value: (each) => each.metrics[name], cell: (each) => RlView.number(each.metrics[name]) })),
      { name: 'exports', title: 'folders', value: (each) => each.exports.join(), cell: (each) => each.exports.join(', ') },
      { name: 'changed', title: 'saved', isNumber: true, value: (each) => each.changed, cell: (each) => html`<time title=${new Date(each.changed * 1000).toISOString()}>${RlView.age(each.changed * 1000)}</time>` },
      { name: 'path', title: 'path', className: 'code wrap', cell: (each) => each.path },
    ];
    const sort = query.get('sort') ?? '-step';
    return html`<section class="panel"><${RlView.Table} label="checkpoints" columns=${columns} rows=${RlView.sorted(answer.checkpoints, columns, sort)} sort=${sort} onSort=${(next) => RlView.setQuery({ sort: next })} keyOf=${(each) => each.step} /></section>`;
  };

  const PAGES = { metrics: Metrics, timeline: Timeline, advice: Advice, config: Config, logs: Logs, checkpoints: Checkpoints, rollouts: (props) => html`<${RlView.Rollouts} ...${props} />` };
})();
